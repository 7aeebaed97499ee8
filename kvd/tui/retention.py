"""How long unused blocks stay, when they are wanted again, and what keeping them longer would bring. Pure functions.

Both histograms are of the time since a block was used last: one when it was found again, one when it was evicted, and
both have the same bounds.
"""

from __future__ import annotations

import math

from kvd.tui.format import age, duration, exact, percent
from kvd.tui.rates import quantile
from kvd.views import Histogram, Snapshot

GAPS = "block_reuse_gap_seconds"
IDLE = "block_idle_before_eviction_seconds"
LIFETIME = "block_lifetime_seconds"


def share_found_later(gaps: Histogram, idle: Histogram, start: float, end: float) -> float | None:
    """The share of the blocks, unused for `start` seconds, that would be found again by `end` seconds if they stayed.

    The life table of actuaries: with f_i blocks found and e_i evicted in bucket i, and n_i that were unused for longer
    than its lower bound, a block that lasts to the bucket is found in it with the probability

        q_i = f_i / (n_i - e_i / 2)

    since those evicted were under observation for half of the bucket on average. The result is one minus the product
    of (1 - q_i) over the buckets between `start` and `end`, a bucket that is partly between them taken to the power of
    that part. None where the pool has not kept a block for so long, so that nothing was observed there.
    """
    if gaps.bounds != idle.bounds or not 0 <= start < end:
        return None
    found_before = evicted_before = 0
    total = gaps.total + idle.total
    survives = 1.0
    lower = 0.0
    for bound, found, evicted in zip(gaps.bounds, gaps.counts, idle.counts, strict=True):
        part = min(end, bound) - max(start, lower)
        if part > 0:
            at_risk = total - found_before - evicted_before
            if at_risk <= 0 or math.isinf(bound):
                return None
            in_view = at_risk - (evicted - evicted_before) / 2
            survives *= (1 - min(1.0, (found - found_before) / in_view)) ** (part / (bound - lower))
        found_before, evicted_before, lower = found, evicted, bound
        if bound >= end:
            break
    return 1 - survives


def verdict(snapshot: Snapshot) -> tuple[str, ...]:
    """What the histograms and the misses say about the size of the cache: sentences, the most useful first.

    Half of the evicted blocks had been unused for T; as the least recently used goes first, a pool of twice the size
    keeps them for about 2 T, and `share_found_later(T, 2 T)` of them would be found. What was wanted again after it was
    evicted is counted by the doctor, and put in relation to all tokens that were looked up.
    """
    gaps, idle = snapshot.cache_histograms.get(GAPS), snapshot.cache_histograms.get(IDLE)
    stays = None if idle is None else quantile(idle, 0.5)
    if idle is None or stays is None:
        if snapshot.counters.num_evicted_blocks:
            return ()
        return ("Nothing had to give way so far: the pool holds all that was cached.",)
    sentences: list[str] = []
    lost = sum(tokens for cause, _, tokens in snapshot.misses if cause == "evicted")
    if lost:
        looked_up = max(lost, snapshot.counters.prefix_query_tokens)
        sentences.append(
            f"{exact(lost)} tokens ({percent(lost, looked_up)} of those looked up) were wanted again after they were "
            "evicted: a larger pool or RAM tier would have had them."
        )
    later = None if gaps is None or stays.value <= 0 else share_found_later(gaps, idle, stays.value, 2 * stays.value)
    if later is not None:
        share = percent(later, 1.0)
        sentences.append(f"Twice the pool, or as much RAM below it, would turn {share} of the evictions into hits.")
    elif snapshot.misses and not lost:  # somebody has looked at what was missed
        sentences.append("Nothing that was evicted was wanted again so far.")
    gap = None if gaps is None else quantile(gaps, 0.5)
    found = "" if gap is None else f"; those found again, for {duration(gap.value)} at the median"
    sentences.append(f"Half of the evicted blocks had been unused for {age(stays.value)} or longer{found}.")
    return tuple(sentences)


def bucket_counts(histogram: Histogram) -> tuple[int, ...]:
    """Observations per bucket, from the cumulative counts."""
    counts = histogram.counts
    return tuple(count - before for count, before in zip(counts, (0, *counts), strict=False))
