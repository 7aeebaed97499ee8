"""Time as a test wants it, for what measures on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd_kernels.bench_cuda import Run


class FakeMeter:
    """Runs everything once; every run takes as long as `clock` says."""

    def __init__(self, clock: Callable[[], float] = lambda: 1e-3) -> None:
        self.clock = clock
        self.num_runs = 0

    def copies(self, num_bytes: int) -> int:
        assert num_bytes > 0
        return 2

    def seconds(self, runs: Sequence[Run]) -> float:
        for run in runs:
            run()
            self.num_runs += 1
        return self.clock()

    def seconds_with_launch(self, run: Run) -> float:
        return self.seconds([run])

    def copy_bandwidth(self) -> float:
        return 1e9
