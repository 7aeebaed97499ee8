"""The mathematics of `kvd convert`: rounding to AWQ's integers, and activation-aware scaling before it.

Purpose: pure functions on float32 tensors of one block, after AWQ (arXiv 2306.00978, section 3.2): input channels that
carry large activations are enlarged before rounding and what fed them is divided by the same factor, so that the
block computes the same function and loses less of what matters.
Owner thread: the caller's. Invariant: folding changes no function; only rounding does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

GRID_STEPS = 20
MAX_CODE = 15
SMALLEST_SCALE = 2.0**-24  # the smallest positive float16


@dataclass(frozen=True, slots=True)
class AwqCodes:
    """w ≈ scales · (codes − zeros), the three being exactly what an AWQ checkpoint stores.

    codes   uint8 [num_outputs, num_inputs], 0 … 15
    scales  float16 [num_outputs, num_inputs / group_size]
    zeros   uint8, same shape as scales, 0 … 15
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int

    def values(self) -> torch.Tensor:
        """The matrix it stands for, float32 [num_outputs, num_inputs]."""
        num_outputs, num_inputs = self.codes.shape
        grouped = self.codes.view(num_outputs, -1, self.group_size).float() - self.zeros[:, :, None].float()
        return (grouped * self.scales[:, :, None].float()).view(num_outputs, num_inputs)


def round_to_awq(values: torch.Tensor, group_size: int) -> AwqCodes:
    """Min/max rounding to 16 levels per output and group, with an integer zero point.

    values: float32 [num_outputs, num_inputs]; group_size divides num_inputs. The range of a group always holds 0,
    which is what lets a zero point between 0 and 15 exist.
    """
    num_outputs, num_inputs = values.shape
    grouped = values.view(num_outputs, num_inputs // group_size, group_size)
    low = grouped.amin(dim=2).clamp_(max=0)
    high = grouped.amax(dim=2).clamp_(min=0)
    scales = ((high - low) / MAX_CODE).clamp_(min=SMALLEST_SCALE).to(torch.float16)
    step = scales.float()
    zeros = torch.round(-low / step).clamp_(0, MAX_CODE)
    codes = (torch.round(grouped / step[:, :, None]) + zeros[:, :, None]).clamp_(0, MAX_CODE)
    return AwqCodes(codes.to(torch.uint8).view(num_outputs, num_inputs), scales, zeros.to(torch.uint8), group_size)


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What calibration saw at the input of a linear.

    mean_abs  float32 [num_inputs]: mean |x| over all calibration tokens
    rows      float32 [num_samples, num_inputs]: some of those inputs
    """

    mean_abs: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChannelScales:
    """The best factors that the search found. `error` and `plain_error`: mean squared output error with and without."""

    factors: torch.Tensor  # float32 [num_inputs]
    exponent: float
    error: float
    plain_error: float


def search_scales(
    matrix: torch.Tensor,
    inputs: InputStatistics,
    group_size: int,
    share: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> ChannelScales:
    """Grid search of α in [0, 1] for factors mean|x|^α that minimise the error of x Wᵀ.

    matrix: float32 [num_outputs, num_inputs], all linears over this input side by side.
    share: maps [num_inputs] to [num_inputs] with equal values where channels must have one factor.
    α = 0 is plain rounding, so on the calibration rows the result is never worse than that.
    """
    strength = inputs.mean_abs if share is None else share(inputs.mean_abs)
    best: ChannelScales | None = None
    plain_error = 0.0
    for step in range(GRID_STEPS + 1):
        exponent = step / GRID_STEPS
        factors = _factors(strength, exponent)
        deviation = round_to_awq(matrix * factors, group_size).values().div_(factors).sub_(matrix)
        error = (inputs.rows @ deviation.T).square_().mean().item()
        if best is None:
            plain_error = error
        if best is None or error < best.error:
            best = ChannelScales(factors, exponent, error, plain_error)
    assert best is not None
    return best


def _factors(strength: torch.Tensor, exponent: float) -> torch.Tensor:
    """strength^exponent around 1, so that neither norms nor weights leave float16's range; silent channels get 1."""
    silent = strength <= 0
    factors = torch.where(silent, torch.ones_like(strength), strength).double().pow(exponent)
    if bool((~silent).any()):
        audible = factors[~silent]
        factors = factors / (audible.max() * audible.min()).sqrt()
    factors = torch.where(silent, torch.ones_like(factors), factors).clamp_(1e-4, 1e4)
    return factors.float()


@dataclass(slots=True)
class DenseLinear:
    """One matrix in float32 [num_outputs, num_inputs] with its bias, if any; changed in place by folding."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def scale_inputs(self, factors: torch.Tensor) -> None:
        self.weight = self.weight * factors

    def divide_outputs(self, factors: torch.Tensor) -> None:
        self.weight = self.weight / factors[:, None]
        if self.bias is not None:
            self.bias = self.bias / factors


@dataclass(slots=True)
class DenseBlock:
    """One decoder block in float32, owned by whoever converts it."""

    attention_norm: torch.Tensor
    q: DenseLinear
    k: DenseLinear
    v: DenseLinear
    o: DenseLinear
    mlp_norm: torch.Tensor
    gate: DenseLinear
    up: DenseLinear
    down: DenseLinear


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Inputs of the four places where linears read: q/k/v, o, gate/up, down."""

    qkv: InputStatistics
    output: InputStatistics
    gate_up: InputStatistics
    down: InputStatistics


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Place → what was chosen there."""

    places: dict[str, ChannelScales] = field(default_factory=dict)


def scale_block(
    block: DenseBlock,
    statistics: BlockStatistics,
    group_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    after_place: Callable[[], None] = lambda: None,
) -> BlockReport:
    """Find factors for the four inputs of a block and fold them into what feeds these inputs.

    q/k/v ← attention norm; o ← rows of v; gate/up ← MLP norm; down ← rows of up. A channel of v feeds one channel of
    every query head of its group, so those share a factor. `after_place` is called four times, for progress.
    """
    report = BlockReport()

    def share_heads(strength: torch.Tensor) -> torch.Tensor:
        heads_per_group = num_heads // num_kv_heads
        grouped = strength.view(num_kv_heads, heads_per_group, head_dim).mean(dim=1, keepdim=True)
        return grouped.expand(num_kv_heads, heads_per_group, head_dim).reshape(-1)

    found = search_scales(block.o.weight, statistics.output, group_size, share_heads)
    block.o.scale_inputs(found.factors)
    block.v.divide_outputs(found.factors.view(num_kv_heads, -1, head_dim)[:, 0].reshape(-1))
    report.places["output"] = found
    after_place()

    found = search_scales(block.down.weight, statistics.down, group_size)
    block.down.scale_inputs(found.factors)
    block.up.divide_outputs(found.factors)
    report.places["down"] = found
    after_place()

    def fold_into_norm(
        place: str, linears: Sequence[DenseLinear], norm: torch.Tensor, strength: InputStatistics
    ) -> torch.Tensor:
        found = search_scales(torch.cat([linear.weight for linear in linears]), strength, group_size)
        for linear in linears:
            linear.scale_inputs(found.factors)
        report.places[place] = found
        after_place()
        return norm / found.factors

    block.attention_norm = fold_into_norm("qkv", (block.q, block.k, block.v), block.attention_norm, statistics.qkv)
    block.mlp_norm = fold_into_norm("gate_up", (block.gate, block.up), block.mlp_norm, statistics.gate_up)
    return report
