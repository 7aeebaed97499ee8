"""A forward pass as a list of native stages: recorded once, fused where a neighbour saves a pass over memory, replayed
in one native call per step.

Engine thread only. A program holds every buffer that its stages point at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvd_kernels.cpu.structs import BatchStruct, GroupTablesStruct, Kernel, LinearArgs, QuantizeArgs, StageStruct
from kvd_kernels.ops import Batch


@dataclass(slots=True)
class Stage:
    """One stage and what it touches: addresses of the buffers that it reads and writes; `keep` lives as long as it."""

    kernel: Kernel
    args: ctypes.Structure
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    keep: tuple[Any, ...] = field(default=(), repr=False)


def _is_read_before_written(stages: list[Stage], address: int) -> bool:
    """Whether the first stage that touches the buffer reads it. Steps repeat, but begin by writing what they read."""
    for stage in stages:
        if address in stage.reads:
            return True
        if address in stage.writes:
            return False
    return False


def fuse(stages: list[Stage]) -> list[Stage]:
    """Fold a norm into the quantisation behind it, and silu · mul into the linear before it.

    Only where nobody else reads what lies between the two: that buffer is then no longer written.
    """
    result: list[Stage] = []
    for index, stage in enumerate(stages):
        before = result[-1] if result else None
        rest = stages[index + 1 :]
        if (
            before is not None
            and before.kernel is Kernel.RMS_NORM
            and isinstance(stage.args, QuantizeArgs)
            and stage.reads == before.writes
            and not _is_read_before_written(rest, before.writes[0])
        ):
            norm: Any = before.args
            quantize = QuantizeArgs(norm.rows, norm.x, norm.weight, norm.width, norm.eps, stage.args.out)
            result[-1] = Stage(Kernel.QUANTIZE, quantize, before.reads, stage.writes, before.keep + stage.keep)
        elif (
            before is not None
            and isinstance(before.args, LinearArgs)
            and stage.kernel is Kernel.SILU_MUL
            and stage.reads == before.writes
            and not before.args.residual
            and not _is_read_before_written(rest, before.writes[0])
        ):
            silu: Any = stage.args
            linear = LinearArgs.from_buffer_copy(before.args)
            linear.out, linear.gated = silu.out, 1
            result[-1] = Stage(Kernel.LINEAR, linear, before.reads, stage.writes, before.keep + stage.keep)
        else:
            result.append(stage)
    return result


def as_array(stages: Iterable[Stage]) -> ctypes.Array[StageStruct]:
    """The list that the native side reads; the stages must outlive it."""
    listed = list(stages)
    array = (StageStruct * len(listed))()
    for entry, stage in zip(array, listed, strict=True):
        entry.kernel, entry.args = stage.kernel, ctypes.addressof(stage.args)
    return array


class NativeBatch:
    """A `Batch` as the native side sees it: addresses once, live sizes at every step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._groups = (GroupTablesStruct * len(batch.groups))()
        for target, group in zip(self._groups, batch.groups, strict=True):
            assert group.block_tables.stride() == group.first_positions.stride()
            target.block_tables = group.block_tables.data_ptr()
            target.first_positions = group.first_positions.data_ptr()
            target.num_slots = group.num_slots.data_ptr()
            target.write_slots = group.write_slots.data_ptr()
            target.table_stride = group.block_tables.stride(0)
        self.struct = BatchStruct(
            batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.query_starts.data_ptr(),
            batch.logit_rows.data_ptr(), ctypes.addressof(self._groups), 0, 0, 0, len(batch.groups),
        )  # fmt: skip

    def refresh(self, batch: Batch) -> BatchStruct:
        """The struct with the live sizes of `batch`, whose buffers must be those that this was made of."""
        struct = self.struct
        struct.num_tokens, struct.num_seqs = batch.num_tokens, batch.num_seqs
        struct.num_logit_rows = batch.num_logit_rows
        return struct
