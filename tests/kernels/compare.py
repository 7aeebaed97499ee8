"""How results are compared: within a stated tolerance, or byte for byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels.cases import Tolerance

Array = npt.NDArray[np.float64]


def assert_within(
    value: torch.Tensor,
    expected: Array,
    tolerance: Tolerance,
    *,
    terms: Array | float = 0.0,
    slack: Array | float = 0.0,
) -> None:
    """Every element within the tolerance; `terms` is Σ|terms|, `slack` a bound that an oracle computed."""
    actual = value.double().numpy()
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not actual.size:
        return
    assert np.isfinite(actual).all(), "a result is not finite"
    allowed = tolerance.absolute + tolerance.relative * np.abs(expected) + tolerance.of_terms * terms + slack
    excess = np.abs(actual - expected) - allowed
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    assert excess[worst] <= 0, (
        f"element {tuple(int(i) for i in worst)} is {actual[worst]!r}, expected {expected[worst]!r} "
        f"within {np.broadcast_to(allowed, excess.shape)[worst]:.3g}"
    )


def assert_same_bytes(value: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Equal shape, type and bits (so that -0 differs from 0, and NaN equals the same NaN)."""
    assert value.shape == expected.shape, f"{what}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    assert value.dtype == expected.dtype
    a = value.contiguous().view(torch.uint8).view(-1, value.element_size())
    b = expected.contiguous().view(torch.uint8).view(-1, value.element_size())
    differs = (a != b).any(1)
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ in their bits, first at {first}: "
            f"{value.flatten()[first].item()!r}, expected {expected.flatten()[first].item()!r}"
        )


def assert_same_numbers(value: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """The same bits, where one NaN is as good as another."""
    assert value.shape == expected.shape, f"{what}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    assert bool((value.isnan() == expected.isnan()).all()), f"{what}: NaN elsewhere than expected"
    assert_same_bytes(value.masked_fill(value.isnan(), 0), expected.masked_fill(expected.isnan(), 0), what)
