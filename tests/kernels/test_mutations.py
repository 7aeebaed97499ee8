"""Planted faults: each must fail the check that is there to find it, on every implementation.

A fault is a wrapper around an implementation that changes what goes in or comes out, so that new backends are
covered by the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, Ops, RopeTable
from kvd_kernels.weights import FloatWeight, Int4Weight, Linear, WeightMatrix
from tests.kernels.cases import LINEAR_CASES, MIXED, AttentionCase
from tests.kernels.checks import check_attention, check_linear, check_rope_and_write


class Faulty:
    """Passes everything on to a real implementation; subclasses spoil one thing."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyWeights(Faulty):
    def __init__(self, inner: Ops, spoil: Callable[[WeightMatrix], WeightMatrix]) -> None:
        super().__init__(inner)
        self.spoil = spoil

    def prepare_linear(self, linear: Linear) -> Any:
        return self.inner.prepare_linear(Linear(tuple(self.spoil(part) for part in linear.parts), linear.bias))


def swap_nibbles(weight: WeightMatrix) -> WeightMatrix:
    assert isinstance(weight, Int4Weight)
    return replace(weight, codes=(weight.codes >> 4) | (weight.codes << 4))


def shift_scales(weight: WeightMatrix) -> WeightMatrix:
    assert not isinstance(weight, FloatWeight)
    return replace(weight, scales=weight.scales.roll(1, dims=1))


def shift_offsets(weight: WeightMatrix) -> WeightMatrix:
    assert isinstance(weight, Int4Weight)
    return replace(weight, offsets=weight.offsets.roll(1, dims=1))


def drop_offsets(weight: WeightMatrix) -> WeightMatrix:
    assert isinstance(weight, Int4Weight)
    return replace(weight, offsets=torch.zeros_like(weight.offsets))


def drop_last_group(weight: WeightMatrix) -> WeightMatrix:
    assert isinstance(weight, Int4Weight)
    scales, offsets = weight.scales.clone(), weight.offsets.clone()
    scales[:, -1] = 0
    offsets[:, -1] = 0
    return replace(weight, scales=scales, offsets=offsets)


def drop_last_output(weight: WeightMatrix) -> WeightMatrix:
    assert isinstance(weight, Int4Weight)
    scales, offsets = weight.scales.clone(), weight.offsets.clone()
    scales[-1] = 0
    offsets[-1] = 0
    return replace(weight, scales=scales, offsets=offsets)


@pytest.mark.parametrize(
    "spoil", [swap_nibbles, shift_scales, shift_offsets, drop_offsets, drop_last_group, drop_last_output]
)
def test_faulty_weights_are_found(ops: Ops, spoil: Callable[[WeightMatrix], WeightMatrix]) -> None:
    case = LINEAR_CASES[0]
    check_linear(ops, case, 7)
    with pytest.raises(AssertionError, match="expected"):
        check_linear(FaultyWeights(ops, spoil), case, 7)  # type: ignore[arg-type]


class FaultyLinear(Faulty):
    def __init__(self, inner: Ops, fault: str) -> None:
        super().__init__(inner)
        self.fault = fault

    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        rows = n + 1 if self.fault == "one row too many" else n - 1 if self.fault == "last row missing" else n
        more = None if residual is None or self.fault == "no residual" else torch.cat((residual, residual))
        self.inner.linear(rows, x, handle, out, more)


@pytest.mark.parametrize("fault", ["one row too many", "last row missing", "no residual"])
def test_faulty_rows_are_found(ops: Ops, fault: str) -> None:
    case = next(case for case in LINEAR_CASES if case.residual)
    check_linear(ops, case, 7)
    with pytest.raises(AssertionError):
        check_linear(FaultyLinear(ops, fault), case, 7)  # type: ignore[arg-type]


Arguments = tuple[Batch, torch.Tensor, RopeTable, KVCache, AttentionSpec]


class FaultyAttention(Faulty):
    def __init__(self, inner: Ops, spoil: Callable[[Batch, torch.Tensor, AttentionSpec], tuple[Any, ...]]) -> None:
        super().__init__(inner)
        self.spoil = spoil

    def attend(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None = None,
    ) -> None:
        batch, q, spec = self.spoil(batch, q, spec)
        self.inner.attend(batch, q, rope, cache, spec, out, block_mass)


def _with_tables(batch: Batch, spec: AttentionSpec, change: Callable[[GroupTables], GroupTables]) -> Batch:
    own = spec.group.group_id
    return replace(batch, groups=tuple(change(g) if i == own else g for i, g in enumerate(batch.groups)))


def see_one_less(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return replace(batch, positions=batch.positions - 1), q, spec


def see_one_more(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return replace(batch, positions=batch.positions + 1), q, spec


def ignore_first_positions(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    def change(tables: GroupTables) -> GroupTables:
        dense = torch.arange(tables.first_positions.shape[1], dtype=torch.int32) * 16
        return replace(tables, first_positions=dense.expand_as(tables.first_positions).contiguous())

    return _with_tables(batch, spec, change), q, spec


def ignore_table_order(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    def change(tables: GroupTables) -> GroupTables:
        swapped = tables.block_tables.clone()
        swapped[:, [0, 1]] = swapped[:, [1, 0]]
        return replace(tables, block_tables=swapped)

    return _with_tables(batch, spec, change), q, spec


def drop_last_slot(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return _with_tables(batch, spec, lambda tables: replace(tables, num_slots=tables.num_slots - 1)), q, spec


def drop_after_first_split(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    def change(tables: GroupTables) -> GroupTables:
        return replace(tables, num_slots=tables.num_slots.clamp(max=256))

    return _with_tables(batch, spec, change), q, spec


def interleave_heads(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    """Query head h meets KV head h % num_kv_heads instead of h // heads per group."""
    heads = q.view(len(q), -1, spec.num_kv_heads, spec.head_dim).transpose(1, 2)
    return batch, heads.reshape(q.shape).contiguous(), spec


def ignore_window(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return batch, q, replace(spec, group=replace(spec.group, window=0))


def widen_window(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return batch, q, replace(spec, group=replace(spec.group, window=spec.group.window + 1))


def ignore_key_bias(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return batch, q, replace(spec, key_bias=None)


def ignore_scale(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    return batch, q, replace(spec, scale=1.0)


def ignore_rotation(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    layers = tuple((index, replace(layer, rotated=False)) for index, layer in spec.group.layers)
    return batch, q, replace(spec, group=replace(spec.group, layers=layers))


def read_neighbour_layer(batch: Batch, q: torch.Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    other = next(index for index, layer in spec.group.layers[::-1] if index != spec.layer_index)
    return batch, q, replace(spec, layer_index=other)


ATTENTION_FAULTS = (
    (see_one_less, {}),
    (see_one_more, {}),
    (ignore_first_positions, {"holes": (1, 2)}),
    (ignore_table_order, {}),
    (drop_last_slot, {}),
    (drop_after_first_split, {}),
    (interleave_heads, {}),
    (ignore_window, {"window": 24}),
    (widen_window, {"window": 24}),
    (ignore_key_bias, {"key_bias": 1.0}),
    (ignore_scale, {}),
    (ignore_rotation, {"element": "int8", "rotated": True}),
    (read_neighbour_layer, {}),
)


# A fault may turn garbage into numbers that are not finite, of which the interpreter of Triton warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("spoil", "changes"), ATTENTION_FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_faulty_attention_is_found(
    ops: Ops,
    spoil: Callable[[Batch, torch.Tensor, AttentionSpec], tuple[Any, ...]],
    changes: dict[str, Any],
) -> None:
    case = replace(AttentionCase("fault", MIXED[1:5], element="fp16"), **changes)
    check_attention(ops, case)
    with pytest.raises(AssertionError):
        check_attention(FaultyAttention(ops, spoil), case)  # type: ignore[arg-type]


class FaultyWriting(Faulty):
    def __init__(self, inner: Ops, fault: str) -> None:
        super().__init__(inner)
        self.fault = fault

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        own = spec.group.group_id
        slots = batch.groups[own].write_slots.clone()
        if self.fault == "next slot":
            slots[0] += 1
        elif self.fault == "last token missing":
            batch = replace(batch, num_tokens=batch.num_tokens - 1)
        elif self.fault == "wrong position":
            batch = replace(batch, positions=batch.positions + 1)
        elif self.fault == "no rotation":
            layers = tuple((index, replace(layer, rotated=False)) for index, layer in spec.group.layers)
            spec = replace(spec, group=replace(spec.group, layers=layers))
        elif self.fault == "k and v swapped":
            k, v = spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            qkv = torch.cat((qkv[:, :k], qkv[:, v:], qkv[:, k:v]), dim=1)
        elif self.fault == "foreign byte":
            cache.pools[own][slots[0] // 16, -1] ^= 1
        batch = _with_tables(batch, spec, lambda tables: replace(tables, write_slots=slots))
        self.inner.rope_and_write(batch, qkv, rope, cache, spec, q_out)


WRITE_FAULTS = ("next slot", "last token missing", "wrong position", "no rotation", "k and v swapped", "foreign byte")


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_faulty_writing_is_found(ops: Ops, fault: str) -> None:
    case = AttentionCase("fault", ((3, 5), (30, 17)), rotated=True)
    check_rope_and_write(ops, case)
    with pytest.raises(AssertionError):
        check_rope_and_write(FaultyWriting(ops, fault), case)  # type: ignore[arg-type]
