"""The implementations that the whole suite runs for. A new backend joins by one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops

IMPLEMENTATIONS = ("reference", "reference-a16")


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return create_ops(request.param)


@pytest.fixture(params=["reference"])
def exact_ops(request: pytest.FixtureRequest) -> Ops:
    """The implementations that promise the same bits in every batch."""
    made = create_ops(request.param)
    assert made.arithmetic == "a8"
    return made


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests of small shapes gain nothing from threads; those about threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
