"""Chooses the implementation of the numeric ops, once, at start: what was asked for, or the best that runs here.

A device or a backend that was asked for by name and cannot run is an error; falling back by `auto` is said in one line
that names the cost. The one place outside of the backends that knows them by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvd.config import Config
from kvd.errors import ConfigError, StartupError
from kvd_kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE, NativeUnavailable
from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops

Log = Callable[[str, str], None]
"""Receives (level, message)."""

_DEVICE_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
"""One of them is there where the driver of an NVIDIA device is: on Linux, and in a Linux under Windows."""
_CPU_BACKENDS = ("cpu", "reference")


def open_ops(config: Config, checkpoint_dtype: str | None, log: Log) -> Ops:
    """The backend that `device`, `backend` and `dtype` of the configuration lead to.

    checkpoint_dtype: as `checkpoint_dtype` gives it. Raises StartupError, and ConfigError for a dtype that the chosen
    device does not have.
    """
    if config.device == "cpu" or config.backend in _CPU_BACKENDS:
        return open_cpu_ops(config.backend, config.cpu_threads, log)
    asked = "backend triton" if config.backend == "triton" else "device cuda" if config.device == "cuda" else ""
    if not asked and not nvidia_device_is_here():
        return open_cpu_ops(config.backend, config.cpu_threads, log)
    from kvd_kernels.triton.start import TritonUnavailable, create_triton_ops

    try:
        ops = create_triton_ops(_activation_dtype(config.dtype, checkpoint_dtype), config.home_path / "kernels")
    except TritonUnavailable as reason:
        if asked:
            raise StartupError(f"{asked}: {reason}") from None
        log("warning", f"computing on the CPU, many times slower than the NVIDIA device that is here: {reason}")
        return open_cpu_ops(config.backend, config.cpu_threads, log)
    return _noticed(ops, log)


def open_cpu_ops(name: str, num_threads: int | None, log: Log) -> Ops:
    """name: "auto", "cpu" or "reference"; num_threads: None means as many as this process may keep busy.

    Raises StartupError.
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
    return _noticed(ops, log)


def _noticed(ops: Ops, log: Log) -> Ops:
    for notice in ops.notices:
        log("warning", notice)
    return ops


def nvidia_device_is_here() -> bool:
    """Whether a driver says that there is one, usable or not."""
    return any(Path(name).exists() for name in _DEVICE_FILES)


def checkpoint_dtype(model_config: dict[str, Any]) -> str | None:
    """The element type that a checkpoint's configuration names, such as "bfloat16"."""
    dtype = model_config.get("dtype") or model_config.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _activation_dtype(asked: str, of_checkpoint: str | None) -> torch.dtype:
    """Of the GPU's activations. A bfloat16 model may exceed float16's range, so its own type is taken."""
    if asked == "float32":
        raise ConfigError(
            "dtype: float32 is refused on the GPU, whose kernels compute with 16-bit activations; "
            "--device cpu computes with 8-bit activations and 32-bit sums"
        )
    name = of_checkpoint if asked == "auto" else asked
    return torch.bfloat16 if name == "bfloat16" else torch.float16


def log_to_stderr(level: str, message: str) -> None:
    """A `log` for commands without a log of their own."""
    print(f"kvd: {level}: {message}", file=sys.stderr)
