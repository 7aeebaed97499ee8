"""The scheduler survives random worlds. A failure names its seed: `Simulation(seed).run(120)` repeats it."""

from __future__ import annotations

from collections import Counter

import pytest

from .simulator import Simulation, simulate


def test_random_steps() -> None:
    seen: Counter[str] = Counter()

    def watch(simulation: Simulation) -> None:
        counters = simulation.scheduler.counters()
        seen.update(dict(counters.finished))
        seen["preemptions"] += counters.num_preemptions
        seen["recomputed"] += counters.recomputed_tokens
        seen["evicted"] += counters.num_evicted_blocks
        seen["hits"] += counters.prefix_hit_tokens
        seen["refused"] += simulation.num_refused

    assert simulate(0, 6000, watch=watch) >= 6000
    # Worlds in which nothing happens prove nothing.
    for what in (
        "stop",
        "length",
        "abort",
        "timeout",
        "error",
        "preemptions",
        "recomputed",
        "evicted",
        "hits",
        "refused",
    ):
        assert seen[what] > 0, what


@pytest.mark.full
def test_many_random_steps() -> None:
    simulate(10_000, 200_000)


if __name__ == "__main__":
    import sys

    simulate(int(sys.argv[1]), int(sys.argv[2]))
