"""Facts about the host: processors and memory, out of /proc. Linux; what is not to be read is None. Torch-free.

`HostWatch` reads in a thread of its own: on a machine with hundreds of processors a look into /proc takes milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvd.device_facts import HostFacts
from kvd.observe.watch import Watch

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
"""Readings are at least so far apart."""

_GROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of control groups, version 2 and 1."""


class _Times(NamedTuple):
    """Cumulative seconds: on the clock, of all processors, of these not idle, and of this process."""

    clock: float
    total: float
    busy: float
    own: float


class HostReader:
    """Reads the host. One thread.

    available_bytes, resident_bytes: what may still be taken, and what this process has; they may raise OSError or
    ValueError. proc, groups: where the kernel's files lie.
    """

    def __init__(
        self,
        *,
        available_bytes: Callable[[], int],
        resident_bytes: Callable[[], int],
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._available_bytes = available_bytes
        self._resident_bytes = resident_bytes
        self._proc = proc
        self._groups = groups
        self._clock = clock
        self._own_seconds = own_seconds
        self._cpu_name = _ask(self._read_cpu_name)
        self._times = _ask(self._read_times)

    def read(self) -> HostFacts:
        before, now = self._times, _ask(self._read_times)
        self._times = now
        num_cpus = len(os.sched_getaffinity(0))
        utilization = own = None
        if before is not None and now is not None and now.total > before.total and now.clock > before.clock:
            utilization = _share(now.busy - before.busy, now.total - before.total)
            own = _share(now.own - before.own, (now.clock - before.clock) * num_cpus)
        return HostFacts(
            cpu_name=self._cpu_name,
            num_cpus=num_cpus,
            utilization=utilization,
            own_utilization=own,
            memory_total_bytes=_ask(self._read_total_bytes),
            memory_available_bytes=_ask(self._available_bytes),
            memory_own_bytes=_ask(self._resident_bytes),
        )

    def _read_cpu_name(self) -> str | None:
        for line in (self._proc / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware") and value.strip():
                return " ".join(value.split())
        return None

    def _read_times(self) -> _Times:
        # The first line of /proc/stat: cpu user nice system idle iowait irq softirq steal guest guest_nice, in ticks;
        # guests are counted in user and nice already. What is stolen by the hypervisor is not ours to use: busy.
        with (self._proc / "stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        scale = 1.0 / os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        return _Times(self._clock(), sum(ticks) * scale, (sum(ticks) - idle) * scale, self._own_seconds())

    def _read_total_bytes(self) -> int:
        first = (self._proc / "meminfo").read_text().split(maxsplit=2)
        if first[0] != "MemTotal:":
            raise ValueError("/proc/meminfo does not begin with MemTotal")
        limits = [_ask(partial(self._read_limit, name)) for name in _GROUP_LIMITS]
        return min([int(first[1]) * 1024, *(limit for limit in limits if limit is not None)])

    def _read_limit(self, name: str) -> int:
        return int((self._groups / name).read_text())


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _ask(question: Callable[[], T]) -> T | None:
    """The answer; None where the kernel has none, or one in words ("max")."""
    try:
        return question()
    except (OSError, ValueError, IndexError):
        return None


class HostWatch(Watch[HostFacts]):
    """The latest facts about the host. `make_reader` is called once, on the thread that reads."""

    def __init__(self, make_reader: Callable[[], HostReader], *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        super().__init__("kvd-host", lambda: nullcontext(make_reader().read), interval_seconds=interval_seconds)
