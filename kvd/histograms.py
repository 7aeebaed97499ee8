"""Cumulative histograms: the buckets of every one that kvd keeps, and counting into them. A leaf.

A builder belongs to one thread; `freeze` hands out an immutable copy that anybody may keep. Invariant: the
counts of a frozen histogram never fall from one bucket to the next, and its last bound is infinite, so that
the last count is the number of observations.

The bounds are those of vLLM's metrics of the same names, so that existing Grafana boards and recording rules read
kvd's series unchanged. Each tuple leaves out the bucket for everything, which `HistogramBuilder` adds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from kvd.views import Histogram

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_REQUEST_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))

BUCKET_BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": _BETWEEN_TOKENS_SECONDS,
    "e2e_request_latency_seconds": _REQUEST_SECONDS,
    "request_queue_time_seconds": _REQUEST_SECONDS,
    "request_prefill_time_seconds": _REQUEST_SECONDS,
    "request_decode_time_seconds": _REQUEST_SECONDS,
    "iteration_tokens_total": _STEP_TOKENS,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
}
"""Histogram name, as in `Snapshot.histograms`, to the upper bounds of its buckets, rising."""

_BLOCK_SECONDS = (
    0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0,
    86400.0,
)  # fmt: skip

CACHE_BUCKET_BOUNDS: dict[str, tuple[float, ...]] = {
    "block_lifetime_seconds": _BLOCK_SECONDS,
    "block_idle_before_eviction_seconds": _BLOCK_SECONDS,
    "block_reuse_gap_seconds": _BLOCK_SECONDS,
}
"""The same for `Snapshot.cache_histograms`: of a block that was evicted, the time since it was filled and since it was
used last; of a block that was found, the time since it was used last. Where gaps are longer than lifetimes, a larger
cache would have been hit. The bounds are kvd's own."""


class HistogramBuilder:
    """Counts observations; the work per observation is one binary search over the bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, finite and strictly rising."""
        assert all(low < high for low, high in pairwise(bounds)), "bounds must rise"
        assert all(math.isfinite(bound) for bound in bounds), "the infinite bucket is added here"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation, or several of one value; a value equal to a bound belongs to that bound's bucket."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def freeze(self) -> Histogram:
        """The observations so far, with cumulative counts and a last bucket for everything."""
        return Histogram((*self._bounds, math.inf), tuple(accumulate(self._counts)), self._sum)
