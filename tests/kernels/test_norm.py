"""The norm, the gated activation, and the functions that they are made of."""

from __future__ import annotations

import pytest
import torch

from kvd_kernels.ops import Ops
from kvd_kernels.reference.elementary import exp_nonpositive, hadamard, tree_sum
from tests.kernels import cases, oracle
from tests.kernels.builders import EXTRA_ROWS, assert_rest_untouched, generator, make_out, make_rows
from tests.kernels.compare import assert_same_bytes, assert_within


@pytest.mark.parametrize("n", cases.ROW_COUNTS)
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_rms_norm(ops: Ops, n: int, width: int) -> None:
    x = make_rows(n + EXTRA_ROWS, width, ops.activation_dtype).clamp_(-50, 50)
    weight = torch.rand(width, generator=generator(4)) + 0.5
    out = make_out(n, width, ops.activation_dtype)
    ops.rms_norm(n, x, weight, 1e-5, out)
    expected = oracle.rms_norm(x[:n].double().numpy(), weight.double().numpy(), 1e-5)
    assert_within(out[:n], expected, cases.tolerance(cases.NORM, ops))
    assert_rest_untouched(out, n)


def test_rms_norm_of_zeros_is_zero(ops: Ops) -> None:
    out = make_out(1, 64, ops.activation_dtype)
    ops.rms_norm(1, torch.zeros(1, 64, dtype=ops.activation_dtype), torch.ones(64), 1e-5, out)
    assert bool((out[0] == 0).all())


@pytest.mark.parametrize("n", cases.ROW_COUNTS)
@pytest.mark.parametrize("width", [32, 1000])
def test_silu_mul(ops: Ops, n: int, width: int) -> None:
    gate_up = make_rows(n + EXTRA_ROWS, 2 * width, ops.activation_dtype).clamp_(-100, 100)
    out = make_out(n, width, ops.activation_dtype)
    ops.silu_mul(n, gate_up, out)
    expected = oracle.silu_mul(gate_up[:n].double().numpy())
    assert_within(out[:n], expected, cases.tolerance(cases.ACTIVATION, ops))
    assert_rest_untouched(out, n)


def test_exp_is_within_its_ulps_and_exact_at_the_ends() -> None:
    x = -torch.rand(400_000, generator=generator(0)) * 87.3
    x[:200_000] /= 87.3
    exact = x.double().exp()
    _, exponent = torch.frexp(exact.float())
    ulp = torch.ldexp(torch.ones(x.shape, dtype=torch.float64), exponent.double() - 24)
    assert float(((exp_nonpositive(x).double() - exact).abs() / ulp).max()) <= cases.EXP_ULP
    ends = exp_nonpositive(torch.tensor([0.0, -0.0, -torch.inf, -1e30, -89.0, torch.nan]))
    assert ends[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert bool(ends[5].isnan())


@pytest.mark.parametrize("width", [1, 2, 3, 16, 17, 576, 1000])
def test_tree_sum_ignores_zeros_behind_and_other_rows(width: int) -> None:
    x = torch.randn(5, width, generator=generator(0))
    padded = torch.cat((x, torch.zeros(5, 1024 - width)), dim=1)
    assert_same_bytes(tree_sum(padded), tree_sum(x))
    assert_same_bytes(tree_sum(x[3:4]), tree_sum(x)[3:4])
    assert torch.allclose(tree_sum(x).double(), x.double().sum(1), atol=1e-4)


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (80, 16), (96, 32), (4, 4), (12, 4)])
def test_hadamard_is_the_matrix_and_its_own_inverse(head_dim: int, size: int) -> None:
    x = torch.randn(7, 3, head_dim, generator=generator(0))
    expected = torch.from_numpy(x.double().numpy() @ oracle.hadamard_matrix(head_dim, size))
    assert torch.allclose(hadamard(x, size).double(), expected, atol=1e-6)
    assert torch.allclose(hadamard(hadamard(x, size), size), x, atol=1e-6)
