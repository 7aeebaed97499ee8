"""The scheduler survives random worlds. A failure names its seed: `Simulation(seed).run(120)` repeats it."""

from __future__ import annotations

from collections import Counter

import pytest

from .simulator import Simulation, simulate

EVENTS = (
    "stop", "length", "abort", "timeout", "error", "preemptions", "swaps", "recomputed", "evicted", "hits", "refused",
    "partial hits", "RAM hits", "disk hits", "restored", "saved", "unsaved", "dropped", "copies", "loads that failed",
    "passed", "pins", "kept blocks", "dropped blocks", "forgot", "forgot and was preempted",
    "worlds that computed once", "scored", "scored and was preempted",
    "plans without somebody", "merged entries", "eviction notes", "timeline: queued", "timeline: waiting",
    "timeline: admitted", "timeline: hit", "timeline: restored", "timeline: chunk", "timeline: first_token",
    "timeline: forgot", "timeline: preempted", "timeline: resumed", "timeline: finished",
    "abort waiting", "abort restoring", "abort swapped", "abort preempted", "abort prefill", "abort decode",
)  # fmt: skip
"""What has to happen: worlds in which nothing does prove nothing."""


def watch_into(seen: Counter[str]):
    def watch(simulation: Simulation) -> None:
        counters = simulation.scheduler.counters()
        seen.update(dict(counters.finished))
        seen.update(simulation.seen)
        seen["preemptions"] += counters.num_preemptions
        seen["swaps"] += counters.num_swaps
        seen["recomputed"] += counters.recomputed_tokens
        seen["evicted"] += counters.num_evicted_blocks
        seen["hits"] += counters.prefix_hit_tokens
        seen["partial hits"] += counters.partial_hit_tokens
        seen["RAM hits"] += counters.ram_hit_tokens
        seen["disk hits"] += counters.disk_hit_tokens
        seen["restored"] += counters.num_restored_blocks
        seen["saved"] += counters.num_saved_blocks
        seen["unsaved"] += counters.num_unsaved_blocks
        seen["dropped"] += counters.num_dropped_tokens
        seen["refused"] += simulation.num_refused
        seen["copies"] += simulation.runner.copies_seen
        if simulation.world.slow is not None:
            seen["loads that failed"] += simulation.world.slow.num_failed_loads

    return watch


def test_random_steps() -> None:
    seen: Counter[str] = Counter()
    assert simulate(0, 20_000, watch=watch_into(seen)) >= 20_000
    for what in EVENTS:
        assert seen[what] > 0, what


@pytest.mark.full
def test_many_random_steps() -> None:
    simulate(10_000, 200_000)


if __name__ == "__main__":
    import sys

    seen: Counter[str] = Counter()
    print(simulate(int(sys.argv[1]), int(sys.argv[2]), watch=watch_into(seen)))
    print(seen)
