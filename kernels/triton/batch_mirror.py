"""A Batch of the host, on the device: one pinned upload per step. Engine thread only.

What a step needs to know is written into one of two pinned staging buffers, goes to the device in one copy, and is read
there through tensors over one buffer, at addresses that depend on the step's size alone: a graph that was captured for
a size finds its metadata where it lay at capture.

Block tables stay on the device from step to step, at one address for all sizes, since nearly all of them are those of
the step before. Invariant: `_known` is what the device's tables hold once all that was launched has run; the rows that
differ from it travel behind the rest of the metadata and are put in their places by a kernel.

Padding: a size may be larger than the step. Each token beyond the live ones is a sequence of its own with nothing in
its table, is written nowhere (slot -1), and asks for no logits of its own (row 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import Batch, GroupTables
from kvd_kernels.triton.device import Device, Event
from kvd_kernels.triton.token_kernels import store_table_rows

Bytes = npt.NDArray[np.uint8]
ALIGNMENT_BYTES = 64
TABLE_ALIGNMENT = 16
"""Entries by which rows of the device's tables are padded: Triton compiles other code for odd strides."""


class StepSize(NamedTuple):
    """Rows of each kind, padding included."""

    num_tokens: int
    num_seqs: int
    num_logit_rows: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a step's metadata lie, in bytes from the start of the buffer: (offset, entries).

    Those of one kind for all groups follow each other: `num_slots[g]`, `write_slots[g]`.
    """

    token_ids: tuple[int, int]
    logit_rows: tuple[int, int]
    logit_slots: tuple[int, int]
    write_slots: tuple[tuple[int, int], ...]
    positions: tuple[int, int]
    query_starts: tuple[int, int]
    num_slots: tuple[tuple[int, int], ...]
    end: int

    @classmethod
    def of(cls, size: StepSize, num_groups: int) -> Layout:
        end = 0

        def place(count: int, entry_bytes: int) -> tuple[int, int]:
            nonlocal end
            start, end = end, _aligned(end + count * entry_bytes)
            return start, count

        return cls(
            place(size.num_tokens, 8),
            place(size.num_logit_rows, 8),
            place(size.num_logit_rows, 8),
            tuple(place(size.num_tokens, 8) for _ in range(num_groups)),
            place(size.num_tokens, 4),
            place(size.num_seqs + 1, 4),
            tuple(place(size.num_seqs, 4) for _ in range(num_groups)),
            end,
        )


class _HostViews:
    """The parts of one staging buffer under a layout."""

    def __init__(self, buffer: Bytes, layout: Layout) -> None:
        def wide(part: tuple[int, int]) -> npt.NDArray[np.int64]:
            return buffer[part[0] : part[0] + 8 * part[1]].view(np.int64)

        def narrow(part: tuple[int, int]) -> npt.NDArray[np.int32]:
            return buffer[part[0] : part[0] + 4 * part[1]].view(np.int32)

        self.token_ids, self.logit_rows = wide(layout.token_ids), wide(layout.logit_rows)
        self.logit_slots = wide(layout.logit_slots)
        self.write_slots = [wide(part) for part in layout.write_slots]
        self.positions, self.query_starts = narrow(layout.positions), narrow(layout.query_starts)
        self.num_slots = [narrow(part) for part in layout.num_slots]

    def fill(self, source: _SourceViews, batch: Batch) -> None:
        """The live part of a batch, and padding behind it."""
        num_tokens, num_seqs, num_rows = batch.num_tokens, batch.num_seqs, batch.num_logit_rows
        self.token_ids[:num_tokens] = source.token_ids[:num_tokens]
        self.token_ids[num_tokens:] = 0
        self.positions[:num_tokens] = source.positions[:num_tokens]
        self.positions[num_tokens:] = 0
        self.query_starts[: num_seqs + 1] = source.query_starts[: num_seqs + 1]
        if len(self.query_starts) > num_seqs + 1:
            self.query_starts[num_seqs:] = np.arange(num_tokens, len(self.token_ids) + 1)
        self.logit_rows[:num_rows] = source.logit_rows[:num_rows]
        self.logit_rows[num_rows:] = 0
        if source.logit_slots is not None:
            self.logit_slots[:num_rows] = source.logit_slots[:num_rows]
        for group, (slots, counts) in enumerate(zip(source.write_slots, source.num_slots, strict=True)):
            self.write_slots[group][:num_tokens] = slots[:num_tokens]
            self.write_slots[group][num_tokens:] = -1
            self.num_slots[group][:num_seqs] = counts[:num_seqs]
            self.num_slots[group][num_seqs:] = 0


class _SourceViews:
    """The buffers of a batch of the host as numpy arrays, opened once: slicing them costs a fifth."""

    def __init__(self, batch: Batch) -> None:
        self.token_ids, self.positions = batch.token_ids.numpy(), batch.positions.numpy()
        self.query_starts, self.logit_rows = batch.query_starts.numpy(), batch.logit_rows.numpy()
        self.logit_slots = None if batch.logit_slots is None else batch.logit_slots.numpy()
        self.write_slots = [group.write_slots.numpy() for group in batch.groups]
        self.num_slots = [group.num_slots.numpy() for group in batch.groups]
        self.tables = [(group.block_tables.numpy(), group.first_positions.numpy()) for group in batch.groups]


class _Staging:
    """One pinned buffer. Invariant: nobody writes to it until the copy that reads it is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.bytes: Bytes = tensor.numpy()
        self.uploaded: Event | None = None
        self.views: dict[StepSize, _HostViews] = {}


class BatchMirror:
    """The device's side of one Batch.

    source: the batch that every step is described in. newest_tokens: int64 [max_seqs] on the device, by slot.
    """

    def __init__(self, device: Device, source: Batch) -> None:
        self.source = source
        self._device = device
        self._num_groups = len(source.groups)
        self.max_seqs = source.logit_rows.numel()
        self.max_tokens = source.token_ids.numel()
        self.max_blocks = max((group.block_tables.shape[1] for group in source.groups), default=0)
        largest = StepSize(self.max_tokens, self.max_seqs, self.max_seqs)
        capacity = Layout.of(largest, self._num_groups).end
        self._tables: list[torch.Tensor] = []
        self._known: list[npt.NDArray[np.int32]] = []
        for group in source.groups:
            max_seqs, width = group.block_tables.shape
            width = -(-width // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
            self._tables.append(device.zeros((2, max_seqs, width), torch.int32))
            self._known.append(np.zeros((2, max_seqs, width), np.int32))
            capacity += _aligned(4 * max_seqs) + _aligned(2 * 4 * max_seqs * width)
        self._buffer = device.zeros((capacity,), torch.uint8)
        self._stagings = [_Staging(device.pinned_bytes(capacity)) for _ in range(2)]
        self._turn = 0
        self._source_views = _SourceViews(source)
        self._layouts: dict[StepSize, Layout] = {}
        self._batches: dict[StepSize, Batch] = {}
        self.newest_tokens = device.zeros((self.max_seqs,), torch.int64)

    def keep(self, sizes: Sequence[StepSize]) -> None:
        """Open the views of sizes that will come again and again."""
        for size in sizes:
            self._layouts[size] = layout = Layout.of(size, self._num_groups)
            self._batches[size] = self._open(size, layout)
            for staging in self._stagings:
                staging.views[size] = _HostViews(staging.bytes, layout)

    def upload(self, batch: Batch, size: StepSize) -> Batch:
        """Launch the upload of a step; the batch on the device, whose content is valid until the next upload.

        batch: `source`, or another of the host with as many groups. Its object and buffers are free when this returns.
        What the caller left unsaid about the longest sequence and table is looked up.
        """
        staging = self._stagings[self._turn]
        self._turn = 1 - self._turn
        if staging.uploaded is not None:
            staging.uploaded.wait()
        layout = self._layouts.get(size) or Layout.of(size, self._num_groups)
        source = self._source_views if batch is self.source else _SourceViews(batch)
        (staging.views.get(size) or _HostViews(staging.bytes, layout)).fill(source, batch)
        end = layout.end
        changes: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        compute = self._device.compute
        try:
            for group in range(self._num_groups):
                end = self._pack_changes(group, source, batch.num_seqs, staging.bytes, end, changes)
            self._device.copy(compute, [(self._buffer[:end], staging.tensor[:end])])
            staging.uploaded = compute.mark()
            for group, rows, packed in changes:
                self._device.launch(store_table_rows, rows, packed, self._tables[group])
        except BaseException:
            for known in self._known:  # what arrived is unknown, so send all of it next time
                known.fill(-1)
            raise
        mirrored = self._batches.get(size) or self._open(size, layout)
        starts = source.query_starts[: batch.num_seqs + 1]
        mirrored.max_query_tokens = batch.max_query_tokens or int(np.diff(starts).max(initial=1))
        mirrored.max_slots = batch.max_slots or max(
            (int(counts[: batch.num_seqs].max(initial=1)) for counts in source.num_slots), default=1
        )
        return mirrored

    def _pack_changes(
        self,
        group: int,
        source: _SourceViews,
        num_seqs: int,
        staging: Bytes,
        end: int,
        changes: list[tuple[int, torch.Tensor, torch.Tensor]],
    ) -> int:
        """Put the rows of a group's tables that the device does not have behind `end`; the new end."""
        most_slots = int(source.num_slots[group][:num_seqs].max(initial=0))
        width = -(-most_slots // BLOCK_TOKENS)
        known = self._known[group]
        news = [table[:num_seqs, :width] for table in source.tables[group]]
        differs = (news[0] != known[0, :num_seqs, :width]).any(axis=1)
        differs |= (news[1] != known[1, :num_seqs, :width]).any(axis=1)
        rows = np.flatnonzero(differs)
        if not len(rows):
            return end
        first, last = end, _aligned(end + 4 * len(rows))
        end = _aligned(last + 2 * 4 * len(rows) * width)
        staging[first : first + 4 * len(rows)].view(np.int32)[:] = rows
        packed = staging[last : last + 2 * 4 * len(rows) * width].view(np.int32).reshape(2, len(rows), width)
        for part, table in enumerate(news):
            packed[part] = known[part, rows, :width] = table[rows]
        changes.append((
            group,
            self._buffer[first : first + 4 * len(rows)].view(torch.int32),
            self._buffer[last : last + 2 * 4 * len(rows) * width].view(torch.int32).view(2, len(rows), width),
        ))  # fmt: skip
        return end

    def _open(self, size: StepSize, layout: Layout) -> Batch:
        """The batch of that size over the device's buffer."""

        def wide(part: tuple[int, int]) -> torch.Tensor:
            return self._buffer[part[0] : part[0] + 8 * part[1]].view(torch.int64)

        def narrow(part: tuple[int, int]) -> torch.Tensor:
            return self._buffer[part[0] : part[0] + 4 * part[1]].view(torch.int32)

        groups = tuple(
            GroupTables(tables[0], tables[1], narrow(num_slots), wide(write_slots))
            for tables, num_slots, write_slots in zip(self._tables, layout.num_slots, layout.write_slots, strict=True)
        )
        return Batch(
            wide(layout.token_ids), narrow(layout.positions), narrow(layout.query_starts), wide(layout.logit_rows),
            groups, *size, logit_slots=wide(layout.logit_slots),
        )  # fmt: skip
