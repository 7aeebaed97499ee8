"""Names of the backends. A backend is imported only when it is asked for, so an unused one costs nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvd_kernels.ops import Ops


def _reference(num_threads: int | None) -> Ops:
    import torch

    from kvd_kernels.reference import ReferenceOps

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return ReferenceOps()


def _reference_a16(num_threads: int | None) -> Ops:
    from kvd_kernels.reference import ReferenceOps16

    return ReferenceOps16()


def _cpu(num_threads: int | None) -> Ops:
    from kvd_kernels.cpu.start import start

    return start(num_threads)


def _triton(num_threads: int | None) -> Ops:
    from kvd_kernels.triton.start import create_triton_ops

    return create_triton_ops()


_FACTORIES: dict[str, Callable[[int | None], Ops]] = {
    "cpu": _cpu,
    "reference": _reference,
    "reference-a16": _reference_a16,
    "triton": _triton,
}

BACKENDS = tuple(_FACTORIES)


def create_ops(name: str, num_threads: int | None = None) -> Ops:
    """The backend of that name, ready to prepare weights.

    num_threads: None means as many as this process may keep busy. ValueError listing the names for an unknown backend;
    NativeUnavailable (see `kvd_kernels.cpu.library`) where the native kernels cannot run, TritonUnavailable (see
    `kvd_kernels.triton.start`) where the GPU's cannot.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown backend {name!r}; known are: {', '.join(BACKENDS)}")
    return _FACTORIES[name](num_threads)
