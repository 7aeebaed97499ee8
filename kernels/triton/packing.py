"""Weights of a linear layer as the kernels read them; the layout is described in `linear_codes`. Stateless.

Packed on the device in slices of outputs, so that the peak is little more than the source and the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear, WeightMatrix, dequantize

LINE_WORDS = 16
PLANE_CHANNELS = 32
OUTPUT_MULTIPLE = 64
"""Outputs are padded to a multiple of this, the smallest tile; what is added is zeros and never stored."""
SLICE_OUTPUTS = 2048
LARGEST_HALF = 65504.0

IntegerWeight = Int4Weight | Int8Weight


def chunk_channels(bits: int) -> int:
    """Input channels of a line of 64 bytes."""
    return LINE_WORDS * 32 // bits


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """What decides which matrices can lie in one packed matrix.

    group: input channels that share a scale in the packed form: 32, 64 or 128, a divisor of the checkpoint's group, or
    the whole chunk where one scale serves the whole row
    """

    bits: Literal[4, 8]
    group: int
    source_group: int

    @staticmethod
    def of(weight: IntegerWeight) -> IntegerForm | None:
        """None where no plane of 32 channels divides the checkpoint's group: such a matrix is held in 16 bits."""
        bits: Literal[4, 8] = 4 if isinstance(weight, Int4Weight) else 8
        channels = chunk_channels(bits)
        is_whole_row = weight.group_size == weight.num_inputs
        group = channels if is_whole_row else math.gcd(weight.group_size, channels)
        return IntegerForm(bits, group, weight.group_size) if group >= PLANE_CHANNELS else None


@dataclass(frozen=True, slots=True)
class PackedInteger:
    """Neighbouring integer matrices of one form, outputs side by side.

    words   int32 [chunks, padded outputs, 16]
    scales  [(chunks + 1) · groups per chunk, padded outputs]: int32 of two float16, scale below offset (4 bits), or
            float16; those behind the last chunk are fetched ahead and not used
    """

    bits: Literal[4, 8]
    group: int
    num_inputs: int
    num_outputs: int
    words: torch.Tensor
    scales: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return self.words.shape[0]

    @property
    def padded_outputs(self) -> int:
        return self.words.shape[1]

    @property
    def num_groups(self) -> int:
        """Of packed groups of input channels."""
        return self.num_chunks * (chunk_channels(self.bits) // self.group)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """values: [num_outputs, num_inputs] in the dtype of the activations."""

    values: torch.Tensor

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]


PackedPart = PackedInteger | PackedDense


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer on the device. bias: float32 [num_outputs] or None."""

    parts: tuple[PackedPart, ...]
    bias: torch.Tensor | None
    num_inputs: int
    num_outputs: int


def _form(part: WeightMatrix) -> IntegerForm | None:
    return None if isinstance(part, FloatWeight) else IntegerForm.of(part)


def _runs(linear: Linear) -> list[tuple[IntegerForm | None, list[WeightMatrix]]]:
    """Neighbours of one form; matrices in 16 bits are put together, too, since they are multiplied alike."""
    runs: list[tuple[IntegerForm | None, list[WeightMatrix]]] = []
    for part in linear.parts:
        form = _form(part)
        if runs and runs[-1][0] == form:
            runs[-1][1].append(part)
        else:
            runs.append((form, [part]))
    return runs


def _pack_codes(weight: IntegerWeight, out: torch.Tensor) -> None:
    """Fill out, int32 [chunks, outputs, 16], on out's device."""
    num_chunks = out.shape[0]
    for start in range(0, weight.num_outputs, SLICE_OUTPUTS):
        rows = slice(start, min(start + SLICE_OUTPUTS, weight.num_outputs))
        codes = weight.codes[rows].to(out.device)
        if isinstance(weight, Int4Weight):
            # A byte holds channels 2 i and 2 i + 1 of a plane: the two halves of word i.
            codes = pad(codes, (0, num_chunks * 64 - codes.shape[1])).view(-1, num_chunks, 4, LINE_WORDS)
            words = torch.zeros(codes.shape[0], num_chunks, LINE_WORDS, dtype=torch.int32, device=out.device)
            for plane in range(4):
                pair = codes[:, :, plane].int()
                words |= ((pair & 15) | ((pair >> 4) << 16)) << (4 * plane)
        else:
            biased = pad((codes.int() + 128).to(torch.uint8), (0, num_chunks * 64 - codes.shape[1]))
            biased = biased.view(-1, num_chunks, 2, LINE_WORDS, 2)
            words = torch.zeros(codes.shape[0], num_chunks, LINE_WORDS, dtype=torch.int32, device=out.device)
            for plane in range(2):
                for half in range(2):
                    words |= biased[:, :, plane, :, half].int() << (8 * plane + 16 * half)
        out[:, rows] = words.transpose(0, 1)


def _expand(per_group: torch.Tensor, form: IntegerForm, num_inputs: int, num_groups: int) -> torch.Tensor:
    """[outputs, groups of the checkpoint] → [groups of the packed form, outputs]."""
    if form.source_group == num_inputs:
        return per_group.expand(-1, num_groups).t()
    repeated = per_group.repeat_interleave(form.source_group // form.group, dim=1)
    return pad(repeated, (0, num_groups - repeated.shape[1])).t()


def _pack_integers(form: IntegerForm, weights: Sequence[IntegerWeight], device: torch.device) -> PackedInteger:
    num_inputs = weights[0].num_inputs
    num_outputs, padded, num_chunks, num_groups = _sizes(form, weights)
    words = torch.zeros(num_chunks, padded, LINE_WORDS, dtype=torch.int32, device=device)
    scales = torch.zeros(num_groups, padded, dtype=torch.int32 if form.bits == 4 else torch.float16, device=device)
    start = 0
    for weight in weights:
        columns = slice(start, start + weight.num_outputs)
        _pack_codes(weight, words[:, columns])
        scale = weight.scales.to(device)
        if isinstance(weight, Int4Weight):
            low = scale.view(torch.int16).int() & 0xFFFF
            both = low | (weight.offsets.to(device).view(torch.int16).int() << 16)
            scales[:, columns] = _expand(both, form, num_inputs, num_groups)
        else:
            scales[:, columns] = _expand(scale, form, num_inputs, num_groups)
        start = columns.stop
    return PackedInteger(form.bits, form.group, num_inputs, num_outputs, words, scales)


def _sizes(form: IntegerForm, weights: Sequence[WeightMatrix]) -> tuple[int, int, int, int]:
    """(outputs, padded outputs, chunks, rows of scales)."""
    channels = chunk_channels(form.bits)
    num_outputs = sum(weight.num_outputs for weight in weights)
    padded = -(-num_outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
    num_chunks = -(-weights[0].num_inputs // channels)
    return num_outputs, padded, num_chunks, (num_chunks + 1) * (channels // form.group)


def _pack_dense(weights: Sequence[WeightMatrix], device: torch.device, dtype: torch.dtype) -> PackedDense:
    num_outputs = sum(weight.num_outputs for weight in weights)
    values = torch.empty(num_outputs, weights[0].num_inputs, dtype=dtype, device=device)
    start = 0
    for weight in weights:
        source = weight.values if isinstance(weight, FloatWeight) else dequantize(weight)
        values[start : start + weight.num_outputs] = source.to(device)
        start += weight.num_outputs
    if dtype == torch.float16:
        values.clamp_(-LARGEST_HALF, LARGEST_HALF)  # a larger weight would make every output infinite
    return PackedDense(values)


def pack(linear: Linear, device: torch.device, dtype: torch.dtype) -> PackedLinear:
    """Pack every part; neighbouring parts of one form become one matrix.

    Held in 16 bits, rounded to dtype: matrices that come as floats, and integer matrices of a group that no plane of
    32 channels divides (such checkpoints are rare, and 4 bits would have to be read across groups).
    """
    parts: list[PackedPart] = []
    for form, weights in _runs(linear):
        if form is None:
            parts.append(_pack_dense(weights, device, dtype))
        else:
            integers = [weight for weight in weights if not isinstance(weight, FloatWeight)]
            parts.append(_pack_integers(form, integers, device))
    bias = None if linear.bias is None else linear.bias.to(device, torch.float32).contiguous()
    return PackedLinear(tuple(parts), bias, linear.num_inputs, linear.num_outputs)


def packed_bytes(linear: Linear) -> int:
    """Bytes of the tensors that `pack` makes of this layer."""
    total = 0 if linear.bias is None else 4 * linear.num_outputs
    for form, weights in _runs(linear):
        if form is None:
            total += 2 * sum(weight.num_outputs * weight.num_inputs for weight in weights)
        else:
            _, padded, num_chunks, num_groups = _sizes(form, weights)
            total += padded * (num_chunks * LINE_WORDS * 4 + num_groups * (4 if form.bits == 4 else 2))
    return total
