"""What an op may leave under way, and the memory of a device: what matters where Python does not wait for every op.
`ops.py` hands it on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvd_kernels.sampling_types import SamplingResult


class PendingStep(ABC):
    """A step that was launched and may still be under way."""

    @abstractmethod
    def result(self) -> SamplingResult | None:
        """Wait for its end. The tokens, or None where none were to be chosen."""


@dataclass(frozen=True, slots=True)
class FinishedStep(PendingStep):
    """A step that was over when its launch returned."""

    tokens: SamplingResult | None

    def result(self) -> SamplingResult | None:
        return self.tokens


class Transfer(ABC):
    """Copies that were ordered and may still be under way."""

    @abstractmethod
    def seconds(self) -> float:
        """Wait for their end; how long the copies themselves took."""


@dataclass(frozen=True, slots=True)
class FinishedTransfer(Transfer):
    """Copies that were over when the call returned."""

    taken_seconds: float

    def seconds(self) -> float:
        return self.taken_seconds


class DeviceMemory(ABC):
    """The memory that weights, cache and steps live in, where that is not the host's. All figures are bytes.

    setting: the name of the configuration field that says which share of it may be taken.
    """

    setting: str

    @abstractmethod
    def total_bytes(self) -> int:
        """As the device has it."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What this process may still take now; what other processes hold is not in it."""

    @abstractmethod
    def held_bytes(self) -> int:
        """What this process holds now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new high-water mark for `peak_bytes`."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that this process held since the mark was reset."""
