"""Turns a torch-free StepPlan into the tensors of a Batch. Engine thread only.

The buffers are numpy arrays that the Batch's tensors share, so filling them is all the work there is. They are
as long as the largest step; the live sizes stand in the Batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd_kernels.ops import Batch, GroupTables


class BatchBuilder:
    """Owns the metadata buffers of one runner.

    max_tokens, max_seqs, max_blocks: the largest step; max_blocks counts table entries of one request.
    """

    def __init__(self, num_groups: int, *, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._query_starts = np.zeros(max_seqs + 1, dtype=np.int32)
        self._logit_rows = np.zeros(max_seqs, dtype=np.int64)
        self._tables = [np.zeros((max_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._first_positions = [np.zeros((max_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._num_slots = [np.zeros(max_seqs, dtype=np.int32) for _ in range(num_groups)]
        self._write_slots = [np.zeros(max_tokens, dtype=np.int64) for _ in range(num_groups)]
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
        )

    def fill(self, plan: StepPlan, newest_tokens: np.ndarray) -> Batch:
        """Describe the plan's items, in plan order.

        newest_tokens: int64 [num_slots]; the latest token sampled for each slot, for items whose last token the
        scheduler did not know yet.
        """
        batch = self.batch
        row = num_logit_rows = 0
        for sequence, item in enumerate(plan.items):
            end = row + item.num_tokens
            self._token_ids[row:end] = item.token_ids
            if item.last_from_slot:
                self._token_ids[end - 1] = newest_tokens[item.slot]
            self._positions[row:end] = np.arange(item.start, item.start + item.num_tokens, dtype=np.int32)
            self._query_starts[sequence + 1] = end
            for group in range(len(self._tables)):
                self._fill_tables(group, sequence, item, row)
            if item.samples:
                self._logit_rows[num_logit_rows] = end - 1
                num_logit_rows += 1
            row = end
        batch.num_tokens, batch.num_seqs, batch.num_logit_rows = row, len(plan.items), num_logit_rows
        return batch

    def _fill_tables(self, group: int, sequence: int, item: PlanItem, row: int) -> None:
        table, first_positions = item.block_tables[group], item.first_positions[group]
        self._tables[group][sequence, : len(table)] = table
        self._first_positions[group][sequence, : len(table)] = first_positions
        positions = np.arange(item.start, item.start + item.num_tokens)
        entries = _entries_of(positions, first_positions)
        tokens = positions - np.asarray(first_positions)[entries]
        self._write_slots[group][row : row + item.num_tokens] = np.asarray(table)[entries] * BLOCK_SIZE + tokens
        self._num_slots[group][sequence] = entries[-1] * BLOCK_SIZE + tokens[-1] + 1


def _entries_of(positions: np.ndarray, first_positions: Sequence[int]) -> np.ndarray:
    """Index of the table entry that holds each position."""
    if isinstance(first_positions, range):
        return positions // BLOCK_SIZE
    return np.searchsorted(np.asarray(first_positions), positions, side="right") - 1
