"""Cumulative histograms: counting into fixed buckets, and reading a quantile back out of them.

A builder belongs to one thread; `freeze` hands out an immutable copy that anybody may keep. Invariant: the
counts of a frozen histogram never fall from one bucket to the next, and its last bound is infinite, so that
the last count is the number of observations.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from kvd.core import Histogram


class HistogramBuilder:
    """Counts observations; the work per observation is one binary search over the bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, finite and strictly rising."""
        assert all(low < high for low, high in pairwise(bounds)), "bounds must rise"
        assert all(math.isfinite(bound) for bound in bounds), "the infinite bucket is added here"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a value equal to a bound belongs to that bound's bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def freeze(self) -> Histogram:
        """The observations so far, with cumulative counts and a last bucket for everything."""
        return Histogram((*self._bounds, math.inf), tuple(accumulate(self._counts)), self._sum)


def difference(later: Histogram, earlier: Histogram) -> Histogram:
    """What was observed between two frozen states of one histogram."""
    assert later.bounds == earlier.bounds, "two states of the same histogram"
    counts = tuple(new - old for new, old in zip(later.counts, earlier.counts, strict=True))
    return Histogram(later.bounds, counts, later.sum - earlier.sum)


def estimate_quantile(histogram: Histogram, quantile: float) -> float | None:
    """The value below which a share `quantile` (0 to 1) of the observations lie; None without observations.

    As Prometheus' `histogram_quantile` does: linear within a bucket, the first one beginning at 0, and the
    largest finite bound when the answer lies in the infinite bucket.
    """
    assert 0.0 <= quantile <= 1.0
    if histogram.total == 0:
        return None
    rank = quantile * histogram.total
    previous_bound, previous_count = 0.0, 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count >= rank and count > previous_count:
            if math.isinf(bound):
                return previous_bound
            return previous_bound + (bound - previous_bound) * (rank - previous_count) / (count - previous_count)
        previous_bound, previous_count = bound, count
    return previous_bound
