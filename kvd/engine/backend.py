"""Chooses the implementation of the numeric ops, once, at start: what was asked for, or the best that runs here.

A backend that was asked for by name and cannot run is an error; falling back by `auto` is said in one line that
names the cost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from kvd.errors import StartupError
from kvd_kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE, NativeUnavailable
from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops


def open_ops(name: str, num_threads: int | None, log: Callable[[str, str], None]) -> Ops:
    """name: as in the setting `backend`; num_threads: None means as many as this process may keep busy.

    log: receives (level, message). Raises StartupError.
    """
    if name == "reference":
        return create_ops("reference", num_threads)
    try:
        ops = create_ops("cpu", num_threads)
    except NativeUnavailable as reason:
        if name != "auto":
            raise StartupError(f"backend {name}: {reason}") from None
        for variable in (LIBRARY_VARIABLE, ISA_VARIABLE):
            if os.environ.get(variable):
                raise StartupError(f"{variable}={os.environ[variable]}: {reason}") from None
        log("warning", f"running on the reference kernels, many times slower than the native ones: {reason}")
        return create_ops("reference", num_threads)
    for notice in ops.notices:
        log("warning", notice)
    return ops


def log_to_stderr(level: str, message: str) -> None:
    """A `log` for commands without a log of their own."""
    print(f"kvd: {level}: {message}", file=sys.stderr)
