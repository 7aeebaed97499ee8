"""Names of the backends. A backend is imported only when it is asked for, so an unused one costs nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvd_kernels.ops import Ops


def _reference() -> Ops:
    from kvd_kernels.reference import ReferenceOps

    return ReferenceOps()


def _reference_a16() -> Ops:
    from kvd_kernels.reference import ReferenceOps16

    return ReferenceOps16()


_FACTORIES: dict[str, Callable[[], Ops]] = {"reference": _reference, "reference-a16": _reference_a16}

BACKENDS = tuple(_FACTORIES)


def create_ops(name: str) -> Ops:
    """The backend of that name, ready to prepare weights; ValueError listing the names for an unknown one."""
    if name not in _FACTORIES:
        raise ValueError(f"unknown backend {name!r}; known are: {', '.join(BACKENDS)}")
    return _FACTORIES[name]()
