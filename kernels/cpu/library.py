"""Finding the native library, choosing an ISA level, and the pools of threads that run it.

Any thread may call in; one pool runs one step at a time. Nothing here needs torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvd_kernels.cpu.structs import ABI_VERSION, BatchStruct, StageStruct

ISA_VARIABLE = "KVD_CPU_ISA"
LIBRARY_VARIABLE = "KVD_NATIVE_LIBRARY"
"""Path of a library to load in place of the installed one: a build with sanitizers, for instance."""
SPIN_MICROSECONDS = 50
"""How long a thread waits awake for the next step. Longer takes the core from the event loop, which on a small machine
shares it; shorter pays a wake-up in every step."""


class NativeUnavailable(RuntimeError):
    """The native kernels cannot run here; the message says why and what to do, in one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library and the levels that it has and this processor runs, lowest first."""

    functions: ctypes.CDLL
    levels: tuple[str, ...]
    path: Path


def open_library(path: Path) -> Library:
    """Load a native library; NativeUnavailable when it cannot be loaded or belongs to another version of kvd."""
    try:
        functions = ctypes.CDLL(str(path))
        version = functions.kvd_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the native kernels cannot be loaded: {error}") from None
    if version != ABI_VERSION:
        raise NativeUnavailable(
            f"the native kernels were built for another version of kvd (interface {version}, expected {ABI_VERSION}): "
            f"install kvd again"
        )
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[type[object] | None, list[type[object]]]] = {
        "kvd_levels": (ctypes.c_char_p, []),
        "kvd_level_usable": (number, [ctypes.c_char_p]),
        "kvd_pool_create": (pointer, [ctypes.c_char_p, number, number]),
        "kvd_pool_destroy": (None, [pointer]),
        "kvd_pool_runs": (wide, [pointer]),
        "kvd_run": (number, [pointer, pointer, wide, pointer]),
        "kvd_packed_bytes": (wide, [number, wide, wide, wide]),
        "kvd_pack_part": (number, [number, *[pointer] * 3, *[wide] * 5, pointer]),
        "kvd_dot_peak_ops": (wide, [ctypes.c_char_p]),
        "kvd_copy_block": (None, [pointer, wide, pointer, wide, wide, wide, wide]),
        "kvd_copy_rows": (None, [pointer, pointer, pointer, pointer, wide, wide]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    names = functions.kvd_levels().decode().split()
    usable = tuple(name for name in names if functions.kvd_level_usable(name.encode()))
    return Library(functions, usable, path)


@cache
def installed_library() -> Library:
    """The library that was built with this package; NativeUnavailable where there is none."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return open_library(Path(named))
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise NativeUnavailable(
            "kvd was installed without its native kernels: install a C++ compiler (Debian: apt-get install g++) and "
            "install kvd again"
        )
    return open_library(found[0])


def choose_level(library: Library, wanted: str | None) -> str:
    """The highest usable level, or the one that is wanted; NativeUnavailable if that one cannot run."""
    if wanted is None:
        return library.levels[-1]
    if wanted not in library.levels:
        raise NativeUnavailable(f"level {wanted}: this processor and build offer {', '.join(library.levels)}")
    return wanted


def available_threads() -> int:
    """Threads worth starting: one per physical core of this process's affinity (but two where there are two logical
    ones), bounded by the CPU quota of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    processors = set(range(os.cpu_count() or 1)) if affinity is None else affinity(0)
    # Siblings of a core share the units that the kernels keep busy.
    cores = {_first_sibling(number) for number in processors}
    count = max(len(cores), min(2, len(processors)))
    quota = cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _first_sibling(processor: int) -> int:
    """The lowest-numbered logical processor of the same core; the processor itself where the kernel does not tell."""
    path = f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    try:
        with open(path) as file:
            return int(re.split("[,-]", file.read())[0])
    except (OSError, ValueError):
        return processor


def cgroup_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Processors' worth of time that the control group grants, None where it sets no bound. Versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, names = root / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folder = base / path.lstrip("/")
        # A bound of any ancestor counts; inside a container the path may not exist below the mounted root.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            quota = _read_quota(place, names)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _read_quota(folder: Path, names: Sequence[str]) -> float | None:
    try:
        words = " ".join((folder / name).read_text() for name in names).split()
        quota, period = words[0], words[1]
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None


class Pool:
    """Threads that run stages together, the calling thread among them. One step at a time.

    They end with `close` or with the object, but not at the interpreter's exit, when another thread may be in a step.
    """

    def __init__(self, library: Library, level: str, num_threads: int) -> None:
        self.library, self.level, self.num_threads = library, level, num_threads
        self._run = library.functions.kvd_run
        self._handle = library.functions.kvd_pool_create(level.encode(), num_threads, SPIN_MICROSECONDS)
        if not self._handle:
            raise NativeUnavailable(f"cannot start {num_threads} threads of native kernels at level {level}")
        self._end = weakref.finalize(self, library.functions.kvd_pool_destroy, self._handle)
        self._end.atexit = False

    def run(self, stages: ctypes.Array[StageStruct], count: int, batch: BatchStruct) -> None:
        """The first `count` stages in one native call, during which the interpreter's lock is free.

        RuntimeError in a forked child and after `close`.
        """
        if not self._end.alive:
            raise RuntimeError("the threads of this pool have ended")
        code = self._run(self._handle, ctypes.addressof(stages), count, ctypes.addressof(batch))
        if code:
            raise RuntimeError(f"native step failed with code {code}")

    @property
    def num_runs(self) -> int:
        """Native calls made since the pool began; RuntimeError after `close`."""
        if not self._end.alive:
            raise RuntimeError("the threads of this pool have ended")
        return int(self.library.functions.kvd_pool_runs(self._handle))

    def close(self) -> None:
        """End the threads; the pool must not run. Closing twice does nothing more."""
        self._end()
