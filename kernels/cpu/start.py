"""Starting the native backend: library, ISA level, proof that the level computes what it should, threads."""

from __future__ import annotations

import os
from functools import cache, partial

from kvd_kernels.cpu.library import ISA_VARIABLE, Library, NativeUnavailable, choose_level, installed_library
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.cpu.self_check import failing_op


@cache
def sound_level(library: Library, forced: str | None) -> tuple[str, tuple[str, ...]]:
    """(level to run, lines to tell the user), after the self-check.

    forced: the level of KVD_CPU_ISA, if it is set. NativeUnavailable where that one cannot run or fails.
    """
    notices: list[str] = []
    wanted = choose_level(library, forced)
    for level in reversed(library.levels[: library.levels.index(wanted) + 1]):
        if level == library.levels[0]:
            break
        failed = failing_op(partial(CpuOps, 1, library=library), level)
        if failed is None:
            return level, tuple(notices)
        message = f"the {level} kernels failed their self-check ({failed}) on this processor"
        if forced is not None:
            raise NativeUnavailable(f"{ISA_VARIABLE}={level}: {message}")
        notices.append(f"{message} and are not used; please report it with the output of lscpu")
    return library.levels[0], tuple(notices)


def start(num_threads: int | None) -> CpuOps:
    """The backend on the best sound level; num_threads: None means as many as this process may keep busy.

    NativeUnavailable where it cannot run.
    """
    library = installed_library()
    level, notices = sound_level(library, os.environ.get(ISA_VARIABLE) or None)
    ops = CpuOps(num_threads, level, library)
    ops.notices = notices
    return ops
