"""What happened lately, from differences of cumulative counters and histograms. Pure functions, any thread.

Invariant: counters only grow while one engine lives. A counter that fell means that the engine was restarted
(`is_restart`), and nothing is ever computed across a restart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.views import Counters, Histogram, Snapshot


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile in the histogram's unit. `is_lower_bound`: it lies beyond the last finite bucket bound."""

    value: float
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """What one poll contributes to the window of recent polls."""

    time: float
    counters: Counters
    histograms: dict[str, Histogram]


def point_of(snapshot: Snapshot) -> Point:
    return Point(snapshot.time, snapshot.counters, snapshot.histograms)


def per_second(earlier: float, later: float, seconds: float) -> float | None:
    """Growth per second; None where no time has passed or where the counter fell."""
    if seconds <= 0 or later < earlier:
        return None
    return (later - earlier) / seconds


def ratio(part: float, whole: float) -> float | None:
    """`part / whole` in 0 … 1, None where there is nothing to divide."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


def is_restart(earlier: Point, later: Point) -> bool:
    """Whether `later` comes from another engine than `earlier`: its clock or a counter went backwards."""
    a, b = earlier.counters, later.counters
    return (
        later.time < earlier.time
        or b.num_steps < a.num_steps
        or b.prompt_tokens < a.prompt_tokens
        or b.generation_tokens < a.generation_tokens
        or b.prefix_query_tokens < a.prefix_query_tokens
    )


def window(points: Iterable[Point], seconds: float) -> tuple[Point, ...]:
    """The newest points that span `seconds`, and one before them where there is one, oldest first.

    The one before is what makes a difference over the whole span possible. `points` are in order of time.
    """
    kept = list(points)
    if not kept:
        return ()
    start = kept[-1].time - seconds
    first = len(kept) - 1
    while first > 0 and kept[first].time > start:
        first -= 1
    return tuple(kept[first:])


def difference(earlier: Histogram | None, later: Histogram) -> Histogram:
    """What was observed between two states of one histogram.

    A histogram with other bounds, or one with more observations than `later`, is of another engine: then all
    of `later` is new.
    """
    if (
        earlier is None
        or earlier.bounds != later.bounds
        or len(earlier.counts) != len(later.counts)
        or any(old > new for old, new in zip(earlier.counts, later.counts, strict=True))
    ):
        return later
    counts = tuple(new - old for old, new in zip(earlier.counts, later.counts, strict=True))
    # A cumulative histogram stays one only if no bucket lost observations to the one before it.
    if any(low > high for low, high in itertools.pairwise(counts)):
        return later
    return Histogram(later.bounds, counts, max(0.0, later.sum - earlier.sum))


def quantile(histogram: Histogram, fraction: float) -> Quantile | None:
    """The quantile with linear interpolation inside a bucket, as Prometheus's `histogram_quantile` has it.

    The first bucket starts at 0 where its bound is positive. A quantile in a bucket without an upper bound is
    that bucket's lower bound, marked as such. None where nothing was observed.
    """
    assert 0.0 <= fraction <= 1.0
    if histogram.total <= 0:
        return None
    rank = fraction * histogram.total
    index = next(i for i, count in enumerate(histogram.counts) if count >= rank and count > 0)
    upper = histogram.bounds[index] if index < len(histogram.bounds) else math.inf
    below = histogram.counts[index - 1] if index else 0
    lower = histogram.bounds[index - 1] if index else min(0.0, upper)
    if math.isinf(upper):
        return Quantile(lower, is_lower_bound=True)
    inside = histogram.counts[index] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return Quantile(lower + (upper - lower) * min(1.0, max(0.0, share)))


def recent_histogram(points: Sequence[Point], name: str) -> Histogram | None:
    """What the named histogram gained over the window; None where the engine does not keep it."""
    if not points:
        return None
    latest = points[-1].histograms.get(name)
    if latest is None:
        return None
    if len(points) == 1:
        return Histogram(latest.bounds, (0,) * len(latest.counts), 0.0)
    return difference(points[0].histograms.get(name), latest)
