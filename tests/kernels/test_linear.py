"""Linear layers against the dequantised matrix, and a8 against its formula byte for byte."""

from __future__ import annotations

import pytest
import torch

from kvd_kernels.ops import Ops
from kvd_kernels.weights import FloatWeight, Int4Weight, Linear, dequantize, quantize_int8
from tests.kernels import oracle
from tests.kernels.builders import generator, make_linear, make_out, make_rows, make_weight
from tests.kernels.cases import LINEAR_CASES, ROW_COUNTS, LinearCase
from tests.kernels.checks import check_linear
from tests.kernels.compare import assert_same_bytes


@pytest.mark.parametrize("n", ROW_COUNTS)
@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_matches_the_dequantised_matrix(ops: Ops, case: LinearCase, n: int) -> None:
    check_linear(ops, case, n)


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("case", [c for c in LINEAR_CASES if c.parts[0][0].startswith("int")], ids=lambda c: c.name)
def test_a8_is_its_formula_byte_for_byte(exact_ops: Ops, case: LinearCase, n: int) -> None:
    layer = make_linear(case)
    x = make_rows(n, case.num_inputs, torch.float32)
    start = 0
    whole = make_out(n, layer.num_outputs, torch.float32)
    exact_ops.linear(n, x, exact_ops.prepare_linear(layer), whole)
    for part in layer.parts:
        if not isinstance(part, FloatWeight):
            expected = torch.from_numpy(oracle.linear_a8(x.numpy(), part))
            if layer.bias is not None:
                expected = expected + layer.bias[start : start + part.num_outputs]
            assert_same_bytes(whole[:n, start : start + part.num_outputs], expected)
        start += part.num_outputs


def test_large_outputs_take_the_other_path_with_the_same_bytes(exact_ops: Ops) -> None:
    """Past a size the groups run one by one; the sizes of the quick cases never get there."""
    layer = Linear((make_weight("int4", 32, 3000, 576, generator(0)),))
    x = make_rows(40, 576, torch.float32)
    out = make_out(40, 3000, torch.float32)
    exact_ops.linear(40, x, exact_ops.prepare_linear(layer), out)
    assert_same_bytes(out[:40], torch.from_numpy(oracle.linear_a8(x.numpy(), layer.parts[0])))


def test_residual_may_be_the_output(ops: Ops) -> None:
    layer = make_linear(LINEAR_CASES[0])
    x = make_rows(5, layer.num_inputs, ops.activation_dtype)
    residual = make_rows(5, layer.num_outputs, ops.activation_dtype, seed=3)
    handle = ops.prepare_linear(layer)
    apart = torch.empty_like(residual)
    ops.linear(5, x, handle, apart, residual)
    ops.linear(5, x, handle, residual, residual)
    assert_same_bytes(residual, apart)


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        return sum(_tensor_bytes(item) for item in value)
    slots = getattr(type(value), "__slots__", ())
    return sum(_tensor_bytes(getattr(value, name)) for name in slots)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_prepared_bytes_are_what_prepare_holds(ops: Ops, case: LinearCase) -> None:
    layer = make_linear(case)
    assert ops.prepared_bytes(layer) == _tensor_bytes(ops.prepare_linear(layer))


def test_a_row_that_is_not_finite_stays_alone(exact_ops: Ops) -> None:
    for case in LINEAR_CASES:
        layer = make_linear(case)
        handle = exact_ops.prepare_linear(layer)
        x = make_rows(4, layer.num_inputs, torch.float32)
        clean, dirty = make_out(4, layer.num_outputs, torch.float32), make_out(4, layer.num_outputs, torch.float32)
        exact_ops.linear(4, x, handle, clean)
        x[2, 3] = torch.nan
        exact_ops.linear(4, x, handle, dirty)
        assert_same_bytes(dirty[[0, 1, 3]], clean[[0, 1, 3]], case.name)
        assert bool(dirty[2].isnan().all()), case.name


@pytest.mark.parametrize("form", ["int4", "int8", "fp16"])
def test_embedding_rows(ops: Ops, form: str) -> None:
    from kvd_kernels.ops import Batch

    weight = make_weight(form, 32 if form != "fp16" else 0, 50, 64, generator(0))
    nothing = torch.zeros(0)
    batch = Batch(torch.tensor([3, 49, 3, 0, 10**6]), nothing, nothing, nothing, (), num_tokens=4)
    out = make_out(4, 64, ops.activation_dtype)
    ops.embed(batch, ops.prepare_embedding(weight), out)
    assert_same_bytes(out[:4], dequantize(weight)[[3, 49, 3, 0]].to(ops.activation_dtype))
    assert bool((out[4:] == -77).all())


def test_gather_takes_live_logit_rows(ops: Ops) -> None:
    from kvd_kernels.ops import Batch

    x = make_rows(6, 8, ops.activation_dtype)
    nothing = torch.zeros(0)
    batch = Batch(nothing, nothing, nothing, torch.tensor([5, 1, 10**6]), (), num_logit_rows=2)
    out = make_out(2, 8, ops.activation_dtype)
    ops.gather(batch, x, out)
    assert_same_bytes(out[:2], x[[5, 1]])
    assert bool((out[2:] == -77).all())


def test_dequantize_and_quantize() -> None:
    weight = make_weight("int4", 32, 8, 64, generator(0))
    assert isinstance(weight, Int4Weight)
    assert torch.allclose(dequantize(weight).double(), torch.from_numpy(oracle.dense(weight)), rtol=1e-6, atol=1e-7)
    values = torch.randn(8, 64, generator=generator(1))
    values[0] = 0
    rounded = quantize_int8(values, 32)
    step = rounded.scales.float().repeat_interleave(32, dim=1)
    assert bool(((dequantize(rounded) - values).abs() <= step * 0.6).all())
