"""Rounding to AWQ's integers, the search for factors, and folding them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvd.model.weights import LayerWeights, ModelWeights
from kvd.tools.awq_scaling import BlockStatistics, DenseBlock, InputStatistics, round_to_awq, scale_block, search_scales
from kvd.tools.convert import dense_block
from kvd.tools.perplexity import build_scorer
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import FloatWeight, Linear
from tests.model.checkpoints import make_qwen2
from tests.tools.conftest import load


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_rounding_stays_within_half_a_step(group_size: int) -> None:
    values = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    codes = round_to_awq(values, group_size)
    assert codes.codes.max() <= 15
    assert codes.zeros.max() <= 15
    assert codes.scales.shape == (24, 256 // group_size)
    steps = codes.scales.float().repeat_interleave(group_size, dim=1)
    # Half a step by rounding a weight, half a step at the ends by rounding the zero point, and float16's rounding.
    error = (codes.values() - values).abs() / steps
    assert error.max() <= 1.02
    assert error.mean() < 0.26


@pytest.mark.parametrize("offset", [5.0, -5.0])
def test_groups_on_one_side_of_zero_keep_their_values(offset: float) -> None:
    values = offset + torch.rand(8, 64, generator=torch.Generator().manual_seed(2))
    codes = round_to_awq(values, 64)
    assert (codes.values() - values).abs().max() <= codes.scales.max().item()


def test_silent_groups_round_to_zero_with_a_scale_that_loaders_accept() -> None:
    codes = round_to_awq(torch.zeros(8, 64), 32)
    assert not codes.values().any()
    assert (codes.scales > 0).all()


def test_search_protects_loud_channels() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(64, 128, generator=generator)
    rows = torch.randn(256, 128, generator=generator)
    rows[:, [5, 70]] *= 30
    rows[:, 9] = 0
    found = search_scales(matrix, InputStatistics(rows.abs().mean(dim=0), rows), 64)
    assert found.exponent > 0
    assert found.error < 0.5 * found.plain_error
    assert found.factors[5] > found.factors[6]
    assert torch.isfinite(found.factors).all()
    assert (found.factors > 0).all()
    # The reported errors are those of the definition.
    deviation = round_to_awq(matrix * found.factors, 64).values() / found.factors - matrix
    assert found.error == pytest.approx((rows @ deviation.T).square().mean().item(), rel=1e-5)


def test_search_never_loses_to_plain_rounding_on_its_rows() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(64, 64, generator=generator)
    found = search_scales(torch.randn(16, 64, generator=generator), InputStatistics(rows.abs().mean(0), rows), 32)
    assert found.error <= found.plain_error


def _layer(block: DenseBlock, layer: LayerWeights) -> LayerWeights:
    def linear(*parts: object) -> Linear:
        biases = [part.bias for part in parts]  # type: ignore[attr-defined]
        bias = None if biases[0] is None else torch.cat(biases)
        return Linear(tuple(FloatWeight(part.weight) for part in parts), bias)  # type: ignore[attr-defined]

    return replace(
        layer,
        attention_norm=block.attention_norm,
        qkv=linear(block.q, block.k, block.v),
        output=linear(block.o),
        mlp_norm=block.mlp_norm,
        gate_up=linear(block.gate, block.up),
        down=linear(block.down),
    )


def _statistics(num_inputs: int, seed: int) -> InputStatistics:
    rows = torch.randn(64, num_inputs, generator=torch.Generator().manual_seed(seed))
    rows[:, ::7] *= 20
    return InputStatistics(rows.abs().mean(dim=0), rows)


def test_folding_changes_no_function(tmp_path: Path, home: Path) -> None:
    """A Qwen2 with biases and grouped heads computes the same logits before and after, up to float32 rounding."""
    _, weights = load(make_qwen2(tmp_path / "model", seed=5), home, head_int8=False)
    spec = weights.spec
    assert spec.num_heads > spec.num_kv_heads
    scaled, exponents = [], []
    for index, layer in enumerate(weights.layers):
        block = dense_block(layer)
        report = scale_block(
            block,
            BlockStatistics(
                _statistics(spec.hidden_size, index), _statistics(spec.num_heads * spec.head_dim, index + 10),
                _statistics(spec.hidden_size, index + 20), _statistics(spec.intermediate_size, index + 30),
            ),
            64,
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        )  # fmt: skip
        exponents += [place.exponent for place in report.places.values()]
        scaled.append(_layer(block, layer))
        assert not torch.allclose(block.attention_norm, layer.attention_norm, rtol=0.1)
    assert len(exponents) == 8
    assert min(exponents) > 0, "a place that was not scaled proves nothing"
    folded = replace(weights, layers=tuple(scaled))

    def logits(model: ModelWeights) -> torch.Tensor:
        scorer = build_scorer(model, create_ops("cpu"), "fp16", window=64, chunk=64)
        return next(iter(scorer.chunks(list(range(3, 67))))).logits.clone()

    expected, actual = logits(weights), logits(folded)
    # The cache rounds V, now divided by its factors, to 16 bits; everything else is float32.
    torch.testing.assert_close(actual, expected, atol=5e-3, rtol=0)
