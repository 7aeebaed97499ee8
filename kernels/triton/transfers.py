"""Copies of whole rows between pools on the device and memory of the host, beside the computation. Engine thread only.

They have a stream of their own, on which they run in the order in which they were asked for. Against the compute
stream they are ordered so that everything takes effect as if it had been done one after the other:

- a copy begins when all that was launched before it has run, since that may write or read its rows;
- what writes rows of a pool waits until copies that still read them are over; steps that write other rows do not wait,
  so a save costs the steps behind it nothing but bandwidth;
- everything waits for copies into a pool, since the step behind them is what they are made for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kvd_kernels.ops import FinishedTransfer, Transfer
from kvd_kernels.triton.device import Copy, Device, Event


class _Launched(Transfer):
    """Copies between two points of the copy stream."""

    def __init__(self, start: Event, end: Event) -> None:
        self._start, self._end = start, end

    def seconds(self) -> float:
        self._end.wait()
        return self._end.seconds_since(self._start)


def runs(source_rows: Sequence[int], target_rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first source row, first target row, count) of the stretches in which both go up by one."""
    found: list[tuple[int, int, int]] = []
    for source, target in zip(source_rows, target_rows, strict=True):
        if found:
            first_source, first_target, count = found[-1]
            if source == first_source + count and target == first_target + count:
                found[-1] = (first_source, first_target, count + 1)
                continue
        found.append((source, target, 1))
    return found


class Transfers:
    """All copies of one device, and which rows they still read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reading: dict[tuple[int, int], Event] = {}  # (address of a pool, row) → end of the copy that reads it
        self._last_reading: Event | None = None

    def copy_rows(
        self, source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
    ) -> Transfer:
        """See `Ops.copy_rows`; one of the tensors at least lies on the device."""
        device = self._device
        assert source.shape[1] == target.shape[1]
        pairs: list[Copy] = []
        for first_source, first_target, count in runs(source_rows, target_rows):
            assert 0 <= first_source <= len(source) - count
            assert 0 <= first_target <= len(target) - count
            pairs.append((target[first_target : first_target + count], source[first_source : first_source + count]))
        if not pairs:
            return FinishedTransfer(0.0)
        copies = device.copies
        copies.wait(device.compute.mark())
        start = copies.mark(is_timed=True)
        device.copy(copies, pairs)
        end = copies.mark(is_timed=True)
        if device.holds(target):
            device.compute.wait(end)
        else:
            for row in source_rows:
                self._reading[source.data_ptr(), row] = end
            self._last_reading = end
        return _Launched(start, end)

    @property
    def is_reading(self) -> bool:
        """Whether a copy may still read rows of a pool."""
        if self._last_reading is not None and self._last_reading.is_over():
            # Copies run in their order, so the others are over too.
            self._reading.clear()
            self._last_reading = None
        return self._last_reading is not None

    def before_write(self, pool: torch.Tensor, rows: Collection[int]) -> None:
        """What is launched on the compute stream from now on may write these rows of a pool."""
        if not self.is_reading:
            return
        address = pool.data_ptr()
        found = {id(end): end for row in rows if (end := self._reading.pop((address, row), None)) is not None}
        for end in found.values():
            self._device.compute.wait(end)
