"""Linear layers in the order that the native kernels read them. Loading thread; packed layers never change."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvd_kernels.cpu.library import Library
from kvd_kernels.cpu.structs import Part, Type
from kvd_kernels.weights import FloatWeight, Int4Weight, Linear, WeightMatrix

ACTIVATION_GROUP = 128
FLOAT_TYPES = {torch.float32: Type.F32, torch.float16: Type.F16, torch.bfloat16: Type.BF16}
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class InputForm:
    """How a linear wants its activations rounded: weight groups of `weight_group` channels, each cut into `cuts`
    activation groups of `length` channels, the last one padded with zeros."""

    num_inputs: int
    weight_group: int

    @property
    def length(self) -> int:
        return min(self.weight_group, ACTIVATION_GROUP)

    @property
    def cuts(self) -> int:
        return -(-self.weight_group // self.length)

    @property
    def groups(self) -> int:
        return self.num_inputs // self.weight_group * self.cuts

    @property
    def stride(self) -> int:
        """Bytes from one row of codes to the next; codes of a group begin at multiples of 32 (src/tiles.h)."""
        return -(-self.groups * (-(-self.length // 32) * 32) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The handle of `prepare_linear`: `parts` point into `packed`, an integer part reads `forms[part.quantized]`.

    bias: float32 [num_outputs] or None.
    """

    parts: ctypes.Array[Part]
    packed: tuple[torch.Tensor, ...]
    forms: tuple[InputForm, ...]
    bias: torch.Tensor | None
    num_inputs: int
    num_outputs: int
    reads_floats: bool


def aligned_bytes(count: int) -> torch.Tensor:
    """uint8 [count] that begins at a cache line."""
    whole = torch.empty(count + ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT_BYTES
    return whole[start : start + count]


def _form(part: WeightMatrix) -> tuple[object, ...]:
    if isinstance(part, FloatWeight):
        return (FLOAT_TYPES[part.values.dtype],)
    return (type(part), part.group_size)


def _runs(parts: Sequence[WeightMatrix]) -> list[list[WeightMatrix]]:
    """Neighbours of equal form, which one packed matrix serves."""
    runs: list[list[WeightMatrix]] = []
    for part in parts:
        if runs and _form(runs[-1][0]) == _form(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _type_and_group(part: WeightMatrix) -> tuple[Type, int]:
    if isinstance(part, FloatWeight):
        return FLOAT_TYPES[part.values.dtype], part.num_inputs
    return (Type.U4 if isinstance(part, Int4Weight) else Type.I8), part.group_size


def _packed_bytes(library: Library, kind: Type, num_outputs: int, num_inputs: int, group: int) -> int:
    num_bytes: int = library.functions.kvd_packed_bytes(kind, num_outputs, num_inputs, group)
    if num_bytes < 0:
        raise NotImplementedError(f"a {kind.name} matrix of {num_outputs} × {num_inputs} in groups of {group} channels")
    return num_bytes


def _pack_run(library: Library, run: list[WeightMatrix]) -> torch.Tensor:
    kind, group = _type_and_group(run[0])
    num_inputs = run[0].num_inputs
    num_outputs = sum(part.num_outputs for part in run)
    assert num_inputs % group == 0, "group size does not divide the input channels"
    packed = aligned_bytes(_packed_bytes(library, kind, num_outputs, num_inputs, group))
    first = 0
    for part in run:
        scales = offsets = None
        if isinstance(part, FloatWeight):
            codes = part.values.contiguous()
        else:
            codes = part.codes.contiguous()
            scales = part.scales.contiguous()
            offsets = part.offsets.contiguous() if isinstance(part, Int4Weight) else None
        failed = library.functions.kvd_pack_part(
            kind, codes.data_ptr(), None if scales is None else scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(), first, part.num_outputs, num_outputs, num_inputs, group,
            packed.data_ptr(),
        )  # fmt: skip
        assert not failed, f"packing of {kind.name} failed with {failed}"
        first += part.num_outputs
    return packed


def prepare(library: Library, linear: Linear) -> PackedLinear:
    """Pack all parts; neighbouring parts of equal form become one."""
    runs = _runs(linear.parts)
    packed = tuple(_pack_run(library, run) for run in runs)
    forms: list[InputForm] = []
    parts = (Part * len(runs))()
    first = 0
    for part, run, memory in zip(parts, runs, packed, strict=True):
        kind, group = _type_and_group(run[0])
        part.type, part.packed, part.first_output = kind, memory.data_ptr(), first
        part.num_outputs = sum(matrix.num_outputs for matrix in run)
        part.quantized = -1
        if kind in (Type.U4, Type.I8):
            form = InputForm(linear.num_inputs, group)
            if form not in forms:
                forms.append(form)
            part.quantized = forms.index(form)
        first += part.num_outputs
    bias = None if linear.bias is None else linear.bias.float().contiguous()
    reads_floats = any(isinstance(part, FloatWeight) for part in linear.parts)
    return PackedLinear(parts, packed, tuple(forms), bias, linear.num_inputs, linear.num_outputs, reads_floats)


def prepared_bytes(library: Library, linear: Linear) -> int:
    """Bytes that `prepare` will hold for this layer."""
    total = 0 if linear.bias is None else 4 * linear.num_outputs
    for run in _runs(linear.parts):
        kind, group = _type_and_group(run[0])
        num_outputs = sum(part.num_outputs for part in run)
        total += _packed_bytes(library, kind, num_outputs, run[0].num_inputs, group)
    return total
