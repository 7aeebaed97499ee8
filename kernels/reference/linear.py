"""Linear layers: integer codes prepared once, exact integer sums, a float epilogue in one fixed order (a8).

Int4 and int8 weights follow the formula in the ops contract. Integer sums run as float32 matmuls over codes:
|Σ q_w q_x| ≤ 127 · 127 · 128 < 2^24, so they are exact in any order. 16-bit weights use fixed-point integers, per
row of x and per output of the weight, so wide that float64 just holds their dot product exactly: a float kernel
whose result depends on its own row alone, about as precise as float32.

`prepare` runs on the loading thread, `apply` on the engine thread; prepared parts never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvd_kernels.reference.elementary import row_tiles
from kvd_kernels.reference.quantize import exact_bits, fixed_point, round_to_levels
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear, WeightMatrix, dequantize

ACTIVATION_GROUP = 128
ACTIVATION_LEVELS = 127.0
# Up to here all groups of a row tile go through one batched matmul; beyond, group by group (measured).
BATCHED_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the input channels of a weight fall into activation groups of equal padded length.

    Every weight group is cut into `cuts` activation groups of `length` channels; the last is filled with zeros
    where `cuts · length` exceeds the weight group.
    """

    weight_group: int
    cuts: int
    length: int

    @staticmethod
    def of(weight_group: int) -> GroupLayout:
        length = min(weight_group, ACTIVATION_GROUP)
        return GroupLayout(weight_group, -(-weight_group // length), length)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] → [rows, groups, length], zeros behind the channels of a short group."""
        rows, channels = x.shape
        grouped = x.reshape(rows, channels // self.weight_group, self.weight_group)
        padded = self.cuts * self.length
        if padded != self.weight_group:
            grouped = pad(grouped, (0, padded - self.weight_group))
        return grouped.reshape(rows, -1, self.length)


@dataclass(frozen=True, slots=True)
class IntegerPart:
    """One or several neighbouring matrices of equal form.

    codes    float32 [groups, length, N]
    scales   float32 [groups, N]
    offsets  float32 [groups, N], or None for int8 weights
    """

    layout: GroupLayout
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[2]


@dataclass(frozen=True, slots=True)
class FixedPointPart:
    """A 16-bit matrix as integers: codes float64 [K, N], scales float64 [N]; `bits` of the activations' codes."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class PreparedLinear:
    parts: tuple[IntegerPart | FixedPointPart, ...]
    bias: torch.Tensor | None
    num_inputs: int
    num_outputs: int


def _store_codes(weight: Int4Weight | Int8Weight, out: torch.Tensor) -> None:
    """Write the codes into out, float32 [K, N]. Transposed as bytes: four times less memory to walk across."""
    if isinstance(weight, Int8Weight):
        out.copy_(weight.codes.t().contiguous())
        return
    pairs = weight.codes.t().contiguous()
    out[0::2] = pairs & 15
    out[1::2] = pairs >> 4


def _runs(parts: Sequence[WeightMatrix]) -> list[list[WeightMatrix]]:
    """Neighbours that one matmul can serve: integer weights of equal type and group."""

    def form(part: WeightMatrix) -> tuple[object, ...]:
        return (FloatWeight, id(part)) if isinstance(part, FloatWeight) else (type(part), part.group_size)

    runs: list[list[WeightMatrix]] = []
    for part in parts:
        if runs and form(runs[-1][-1]) == form(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _prepare_integers(weights: Sequence[Int4Weight | Int8Weight]) -> IntegerPart:
    layout = GroupLayout.of(weights[0].group_size)
    num_inputs = weights[0].num_inputs
    assert num_inputs % layout.weight_group == 0, "group size does not divide the input channels"
    num_outputs = sum(weight.num_outputs for weight in weights)
    num_groups = num_inputs // layout.weight_group * layout.cuts
    by_channel = torch.empty(num_inputs, num_outputs)
    scales = torch.empty(num_groups, num_outputs)
    has_offsets = isinstance(weights[0], Int4Weight)
    offsets = torch.empty(num_groups, num_outputs) if has_offsets else None
    start = 0
    for weight in weights:
        columns = slice(start, start + weight.num_outputs)
        _store_codes(weight, by_channel[:, columns])
        scales[:, columns] = weight.scales.float().repeat_interleave(layout.cuts, dim=1).t()
        if offsets is not None and isinstance(weight, Int4Weight):
            offsets[:, columns] = weight.offsets.float().repeat_interleave(layout.cuts, dim=1).t()
        start = columns.stop
    codes = by_channel.view(-1, layout.weight_group, num_outputs)
    if layout.cuts * layout.length != layout.weight_group:
        codes = pad(codes, (0, 0, 0, layout.cuts * layout.length - layout.weight_group))
    codes = codes.reshape(num_groups, layout.length, num_outputs)
    return IntegerPart(layout, codes, scales, offsets)


def _prepare_floats(weight: FloatWeight) -> FixedPointPart:
    activation_bits, weight_bits = exact_bits(weight.num_inputs)
    codes, scales = fixed_point(weight.values.float(), weight_bits)
    return FixedPointPart(codes.t().contiguous().double(), scales.double(), activation_bits)


def prepare(linear: Linear) -> PreparedLinear:
    """Unpack every part for the matmuls below; neighbouring integer parts of equal form become one."""
    parts: list[IntegerPart | FixedPointPart] = []
    for run in _runs(linear.parts):
        if isinstance(run[0], FloatWeight):
            parts.append(_prepare_floats(run[0]))
        else:
            parts.append(_prepare_integers([part for part in run if not isinstance(part, FloatWeight)]))
    bias = None if linear.bias is None else linear.bias.float().contiguous()
    return PreparedLinear(tuple(parts), bias, linear.num_inputs, linear.num_outputs)


def prepared_bytes(linear: Linear) -> int:
    """Bytes of the tensors that `prepare` makes of this layer."""
    total = 0 if linear.bias is None else 4 * linear.num_outputs
    for part in linear.parts:
        if isinstance(part, FloatWeight):
            total += 8 * part.num_outputs * (part.num_inputs + 1)
            continue
        layout = GroupLayout.of(part.group_size)
        num_groups = part.num_inputs // layout.weight_group * layout.cuts
        values_per_group = layout.length + (2 if isinstance(part, Int4Weight) else 1)
        total += 4 * part.num_outputs * num_groups * values_per_group
    return total


def _apply_integers(x: torch.Tensor, part: IntegerPart) -> torch.Tensor:
    """[rows, K] → float32 [rows, N]; every group's term rounded step by step, groups in ascending order."""
    codes, scales = round_to_levels(part.layout.split(x), ACTIVATION_LEVELS)
    code_sums = codes.sum(-1)  # of integers: exact in any order
    num_rows, num_groups, _ = codes.shape
    result = torch.zeros(num_rows, part.num_outputs)
    if num_rows * num_groups * part.num_outputs <= BATCHED_ELEMENTS:
        terms = torch.bmm(codes.transpose(0, 1), part.codes)
        terms *= part.scales[:, None, :]
        if part.offsets is not None:
            terms += code_sums.t()[:, :, None] * part.offsets[:, None, :]
        terms *= scales.t()[:, :, None]
        for term in terms.unbind():
            result += term
        return result
    term = torch.empty_like(result)
    offset_term = torch.empty_like(result)
    for group in range(num_groups):
        torch.mm(codes[:, group], part.codes[group], out=term)
        term *= part.scales[group]
        if part.offsets is not None:
            torch.mul(code_sums[:, group, None], part.offsets[group], out=offset_term)
            term += offset_term
        term *= scales[:, group, None]
        result += term
    return result


def _apply_fixed_point(x: torch.Tensor, part: FixedPointPart) -> torch.Tensor:
    """[rows, K] → float32 [rows, N]; the integer sum is exact, the scales are powers of two, one rounding."""
    codes, scales = fixed_point(x, part.bits)
    sums = torch.mm(codes.double(), part.codes)
    sums *= scales.double()[:, None]
    sums *= part.scales
    return sums.float()


def _apply_part(x: torch.Tensor, part: IntegerPart | FixedPointPart) -> torch.Tensor:
    if isinstance(part, IntegerPart):
        return _apply_integers(x, part)
    return _apply_fixed_point(x, part)


def apply(n: int, x: torch.Tensor, linear: PreparedLinear, out: torch.Tensor, residual: torch.Tensor | None) -> None:
    """out[:n] = x[:n] Wᵀ + bias (+ residual[:n]) in float32; see the module for the arithmetic."""
    assert x.shape[1] == linear.num_inputs
    assert out.shape[1] == linear.num_outputs
    for rows in row_tiles(n, linear.num_outputs, BATCHED_ELEMENTS):
        start = 0
        for part in linear.parts:
            columns = slice(start, start + part.num_outputs)
            y = _apply_part(x[rows], part)
            if linear.bias is not None:
                y += linear.bias[columns]
            if residual is not None:
                y += residual[rows, columns]
            out[rows, columns] = y
            start = columns.stop


def prepare_dense(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """a16: (weight float32 [K, N], bias float32 [N] or None)."""
    weight = torch.cat([dequantize(part) for part in linear.parts]).t().contiguous()
    return weight, None if linear.bias is None else linear.bias.float()


def apply_dense(
    n: int,
    x: torch.Tensor,
    linear: tuple[torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """a16: 16-bit x, float32 products and sums, one rounding to out's type after bias and residual."""
    weight, bias = linear
    y = x[:n].float() @ weight
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual[:n].float()
    out[:n] = y.to(out.dtype)


def gather_rows(table: WeightMatrix, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix as float32 [len(rows), K]."""
    if isinstance(table, FloatWeight):
        return table.values[rows].float()
    if isinstance(table, Int8Weight):
        return dequantize(Int8Weight(table.codes[rows], table.scales[rows], table.group_size))
    return dequantize(Int4Weight(table.codes[rows], table.scales[rows], table.offsets[rows], table.group_size))
