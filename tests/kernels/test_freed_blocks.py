"""A table may lose what no query of the step sees: attention gives the bytes that the whole table gives.

So a windowed group that frees its leading blocks stays exact, whenever it frees them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, ElementType
from kvd_kernels.ops import Batch, Ops
from tests.kernels.builders import SENTINEL, AttentionInputs, make_attention, make_batch, make_out
from tests.kernels.cases import AttentionCase
from tests.kernels.compare import assert_same_bytes
from tests.kernels.natives import Natives

SEQUENCES = ((700, 1), (1000, 9), (255, 2), (256, 1), (1290, 40), (527, 1), (30, 1), (0, 5), (512, 1), (272, 70))
"""Decodes and chunks over one to six splits, at both sides of the edges of blocks and splits."""
WINDOWS = (1, 15, 16, 17, 40, 48, 300)
ELEMENTS: tuple[ElementType, ...] = ("int8", "fp16", "bf16")


def windowed(element: ElementType, window: int, *, key_bias: float = 0.0) -> AttentionInputs:
    case = AttentionCase(
        "freed", SEQUENCES, element=element, rotated=element == "int8", window=window, key_bias=key_bias
    )
    return make_attention(case)


def num_hidden(inputs: AttentionInputs) -> list[int]:
    """Leading entries of each table whose last token is behind the window of the first query."""
    window = inputs.case.window
    return [max(0, before - window + 1) // BLOCK_TOKENS for before, _ in inputs.case.sequences]


def without(inputs: AttentionInputs, num_freed: list[int]) -> AttentionInputs:
    """The same cache, with tables that have lost their first entries."""
    tables = [table[freed:] for table, freed in zip(inputs.tables, num_freed, strict=True)]
    firsts = [firsts[freed:] for firsts, freed in zip(inputs.first_positions, num_freed, strict=True)]
    num_slots = [count - freed * BLOCK_TOKENS for count, freed in zip(inputs.num_slots, num_freed, strict=True)]
    batch = make_batch(inputs.case, inputs.spec.group, tables, firsts, num_slots)
    return replace(inputs, batch=batch, tables=tables, first_positions=firsts, num_slots=num_slots)


def attend(ops: Ops, inputs: AttentionInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """out, and the mass of each sequence's entries."""
    out = make_out(inputs.batch.num_tokens, inputs.q.shape[1], torch.float32)
    mass = torch.full(inputs.batch.groups[inputs.spec.group.group_id].block_tables.shape, SENTINEL)
    ops.attend(inputs.batch, inputs.q, inputs.rope, inputs.cache, inputs.spec, out, mass)
    return out, [row[: len(table)] for row, table in zip(mass, inputs.tables, strict=False)]


def check(ops: Ops, inputs: AttentionInputs) -> None:
    """All that is hidden is freed, or half of it, as when freeing lags behind."""
    out, masses = attend(ops, inputs)
    hidden = num_hidden(inputs)
    assert max(hidden) > 2 * 256 // BLOCK_TOKENS
    for num_freed in (hidden, [count // 2 for count in hidden]):
        freed_out, freed_masses = attend(ops, without(inputs, num_freed))
        assert_same_bytes(freed_out, out, "out")
        for mass, freed_mass, freed in zip(masses, freed_masses, num_freed, strict=True):
            assert not mass[:freed].any()
            assert_same_bytes(freed_mass, mass[freed:], "mass")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_freeing_what_the_window_hides_changes_no_byte(exact_ops: Ops, element: ElementType, window: int) -> None:
    check(exact_ops, windowed(element, window))


@pytest.mark.parametrize("window", [17, 48])
def test_nor_does_it_with_a_key_bias(exact_ops: Ops, window: int) -> None:
    check(exact_ops, windowed("int8", window, key_bias=1.0))


@pytest.mark.parametrize("element", ["int8", "fp16"])
def test_nor_at_any_level_on_any_threads(natives: Natives, element: ElementType) -> None:
    for threads in (1, 3):
        check(natives.with_threads(threads), windowed(element, 40))


class CutsByTableSlot:
    """Planted fault: splits are counted from a table's first entry. Moving a whole sequence has the same effect."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def attend(self, batch: Batch, *arguments: object) -> None:
        positions = batch.positions.clone()
        groups = []
        for group in batch.groups:
            firsts = group.first_positions.clone()
            for sequence in range(batch.num_seqs):
                firsts[sequence] -= group.first_positions[sequence, 0]
            groups.append(replace(group, first_positions=firsts))
        for sequence in range(batch.num_seqs):
            start, stop = batch.query_starts[sequence : sequence + 2].tolist()
            positions[start:stop] -= batch.groups[0].first_positions[sequence, 0]
        moved = replace(batch, positions=positions, groups=tuple(groups))
        self.inner.attend(moved, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [40, 300])
@pytest.mark.parametrize("element", ELEMENTS)
def test_cutting_by_table_slot_is_found(exact_ops: Ops, element: ElementType, window: int) -> None:
    with pytest.raises(AssertionError, match="differ in their bits"):
        check(CutsByTableSlot(exact_ops), windowed(element, window))  # type: ignore[arg-type]


def test_tables_that_do_not_ascend_are_refused_by_the_reference() -> None:
    from kvd_kernels.registry import create_ops

    inputs = make_attention(AttentionCase("order", ((300, 2), (40, 1))))
    firsts = inputs.batch.groups[inputs.spec.group.group_id].first_positions
    for spoiled in ([16, 0], [0, 0], [0, 20]):
        before = firsts[0, :2].clone()
        firsts[0, :2] = torch.tensor(spoiled)
        with pytest.raises(AssertionError, match="table entr"):
            attend(create_ops("reference"), inputs)
        firsts[0, :2] = before
