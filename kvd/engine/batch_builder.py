"""Turns a torch-free StepPlan into the tensors of a Batch. Engine thread only.

The buffers are numpy arrays that the Batch's tensors share, so filling them is all the work there is. They are
as long as the largest step; the live sizes stand in the Batch.

A table's entries ascend in position. Where they follow each other without a hole their first positions are a range,
and a token's entry is found by arithmetic; a table with holes has a tuple, and is searched.

Most of a decode step's metadata is its block tables, and nearly all of them are those of the step before. Invariant:
row s of the tables holds what `_held[s]` says. These are immutable values, so where a plan hands over the very same
objects for that row, nothing is to be written, and where a table begins with the one that is there, only its end is.
It does not matter whose table it is, or why it changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd_kernels.ops import Batch, GroupTables

_Tables = tuple[tuple[int, ...], ...]
_Positions = tuple[Sequence[int], ...]


class BatchBuilder:
    """Owns the metadata buffers of one runner.

    max_tokens, max_seqs, max_blocks: the largest step; max_blocks counts table entries of one request.
    """

    def __init__(self, num_groups: int, *, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._query_starts = np.zeros(max_seqs + 1, dtype=np.int32)
        self._logit_rows = np.zeros(max_seqs, dtype=np.int64)
        self._logit_slots = np.zeros(max_seqs, dtype=np.int64)
        self._dense_positions = np.arange(0, max_blocks * BLOCK_SIZE, BLOCK_SIZE, dtype=np.int32)
        self._tables = [np.zeros((max_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._first_positions = [np.zeros((max_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._num_slots = [np.zeros(max_seqs, dtype=np.int32) for _ in range(num_groups)]
        self._write_slots = [np.zeros(max_tokens, dtype=np.int64) for _ in range(num_groups)]
        self._nothing: tuple[_Tables, _Positions] = (((),) * num_groups, ((),) * num_groups)
        self._held: list[tuple[_Tables, _Positions]] = [self._nothing] * max_seqs
        self._displaced: list[set[int]] = [set() for _ in range(num_groups)]  # rows whose entry j is not at 16·j
        self._counting = np.arange(max_seqs + 1, dtype=np.int32)
        self.batch = Batch(
            torch.from_numpy(self._token_ids),
            torch.from_numpy(self._positions),
            torch.from_numpy(self._query_starts),
            torch.from_numpy(self._logit_rows),
            tuple(
                GroupTables(
                    torch.from_numpy(self._tables[group]),
                    torch.from_numpy(self._first_positions[group]),
                    torch.from_numpy(self._num_slots[group]),
                    torch.from_numpy(self._write_slots[group]),
                )
                for group in range(num_groups)
            ),
            logit_slots=torch.from_numpy(self._logit_slots),
        )

    def fill(self, plan: StepPlan, newest_tokens: Sequence[int]) -> Batch:
        """Describe the plan's items, in plan order.

        newest_tokens: of every slot the latest token sampled for it, or what stands for it in a Batch, for
        items whose last token the scheduler did not know yet.
        """
        items, held = plan.items, self._held
        tokens: list[int] = []  # of the leading items that have one token each: the decodes, as a rule
        starts: list[int] = []
        for sequence, item in enumerate(items):
            tables, first_positions = held[sequence]
            if item.block_tables is not tables or item.first_positions is not first_positions:
                self._write_row(sequence, item)
            if len(item.token_ids) == 1 and len(tokens) == sequence:
                tokens.append(newest_tokens[item.slot] if item.last_from_slot else item.token_ids[0])
                starts.append(item.start)
        num_single = len(tokens)
        singles = items[:num_single]
        if singles:
            self._fill_singles(singles, tokens, starts)
        logit_rows = [row for row, item in enumerate(singles) if item.samples]
        end = num_single
        longest = int(num_single > 0)
        for sequence in range(num_single, len(items)):
            item = items[sequence]
            end = self._fill_run(sequence, item, end, newest_tokens)
            longest = max(longest, item.num_tokens)
            if item.samples:
                logit_rows.append(end - 1)
        self._logit_rows[: len(logit_rows)] = logit_rows
        self._logit_slots[: len(logit_rows)] = [item.slot for item in items if item.samples]
        batch = self.batch
        batch.num_tokens, batch.num_seqs, batch.num_logit_rows = end, len(items), len(logit_rows)
        batch.max_query_tokens = longest
        batch.max_slots = max((int(num_slots[: len(items)].max(initial=0)) for num_slots in self._num_slots), default=0)
        return batch

    def _write_row(self, sequence: int, item: PlanItem) -> None:
        """Make one row hold an item's tables."""
        old_tables, old_first_positions = self._held[sequence]
        self._held[sequence] = self._nothing  # should the table be too long for the row
        for group, table in enumerate(item.block_tables):
            old = old_tables[group]
            num_kept = len(old) if table[: len(old)] == old else 0
            self._tables[group][sequence, num_kept : len(table)] = table[num_kept:]
            self._write_positions(group, sequence, old_first_positions[group], item.first_positions[group])
        self._held[sequence] = (item.block_tables, item.first_positions)

    def _write_positions(self, group: int, sequence: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Make one row hold first positions. That of a range goes on to its end, so that a table may grow."""
        row = self._first_positions[group][sequence]
        if isinstance(new, range):
            assert new.step == BLOCK_SIZE
            if not isinstance(old, range) or old.start != new.start:
                np.add(self._dense_positions, new.start, out=row)
            is_dense = new.start == 0
        else:
            num_kept = len(old) if not isinstance(old, range) and new[: len(old)] == old else 0
            row[num_kept : len(new)] = new[num_kept:]
            is_dense = False
        if is_dense:
            self._displaced[group].discard(sequence)
        else:
            self._displaced[group].add(sequence)

    def _fill_singles(self, items: Sequence[PlanItem], tokens: list[int], starts: list[int]) -> None:
        """Sequences 0 … n - 1, of one token each: a few assignments of n values, no arithmetic.

        Beside the fixed cost of a numpy call, integers in Python are cheap for as many sequences as a step has.
        """
        num = len(tokens)
        self._token_ids[:num] = tokens
        self._positions[:num] = starts
        self._query_starts[: num + 1] = self._counting[: num + 1]
        lengths = [start + 1 for start in starts]
        for group, (write_slots, num_slots) in enumerate(zip(self._write_slots, self._num_slots, strict=True)):
            if not self._displaced[group]:
                write_slots[:num] = [
                    item.block_tables[group][start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
                    for item, start in zip(items, starts, strict=True)
                ]
                num_slots[:num] = lengths
                continue
            entries = [_entry_of(item.first_positions[group], start) for item, start in zip(items, starts, strict=True)]
            write_slots[:num] = [
                item.block_tables[group][entry] * BLOCK_SIZE + start % BLOCK_SIZE
                for item, entry, start in zip(items, entries, starts, strict=True)
            ]
            num_slots[:num] = [
                entry * BLOCK_SIZE + start % BLOCK_SIZE + 1 for entry, start in zip(entries, starts, strict=True)
            ]

    def _fill_run(self, sequence: int, item: PlanItem, row: int, newest_tokens: Sequence[int]) -> int:
        """One item of any kind, from token `row` on; returns the token after its last."""
        end = row + item.num_tokens
        self._token_ids[row:end] = item.token_ids
        if item.last_from_slot:
            self._token_ids[end - 1] = newest_tokens[item.slot]
        positions = np.arange(item.start, item.start + item.num_tokens, dtype=np.int64)
        self._positions[row:end] = positions
        self._query_starts[sequence + 1] = end
        offsets = positions % BLOCK_SIZE
        for group, first_positions in enumerate(item.first_positions):
            if isinstance(first_positions, range):
                entries = (positions - first_positions.start) // BLOCK_SIZE
            else:
                entries = np.searchsorted(np.asarray(first_positions), positions, side="right") - 1
            self._write_slots[group][row:end] = self._tables[group][sequence, entries] * np.int64(BLOCK_SIZE) + offsets
            self._num_slots[group][sequence] = entries[-1] * BLOCK_SIZE + offsets[-1] + 1
        return end


def _entry_of(first_positions: Sequence[int], position: int) -> int:
    """The entry of a table that holds a position."""
    if isinstance(first_positions, range):
        return (position - first_positions.start) // BLOCK_SIZE
    return bisect_right(first_positions, position) - 1
