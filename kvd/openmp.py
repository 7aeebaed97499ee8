"""How the threads of torch wait for each other. A leaf; to be called before torch is imported."""

from __future__ import annotations

import os

SPIN_ROUNDS = 4000
"""Rounds that a waiting OpenMP thread spins before it sleeps. The default, milliseconds, starves the event loop and
every neighbour: beside two busy processes on two cores hardly a step gets done. No spinning at all costs most of
the prefill rate of a quiet machine. See docs/measurements.md."""


def bound_spinning() -> None:
    """Set the bound for this process and its children, unless the user has decided otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:  # which it would override
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
