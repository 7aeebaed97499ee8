"""What lies below the KV pool, as the manager sees it. Torch-free; no bytes pass through here.

    KV pool ──save──► RAM slot ──store──► disk
    KV pool ◄─restore─ RAM slot ◄──load── disk

Saves and restores are part of step plans: the runner makes them, in the order of the plans. Stores and loads are made
by somebody else's threads, which the engine thread asks and polls. A slot that one of the four reads or writes is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

NO_TOKEN = 0xFFFFFFFF
"""Fills up the token ids of an incomplete block in the slow tier, where all blocks have 16."""


class SlowDone(NamedTuple):
    """A store or a load that has ended. Not `ok`: nothing was stored, or what was read is not to be used."""

    is_load: bool
    group_id: int
    slot: int
    key: bytes
    ok: bool


class SlowTier(Protocol):
    """Blocks by (group, key) that outlive the process. Every call returns at once.

    Each `store` and `load` is answered by exactly one `SlowDone` from `poll`; until then the slot belongs to the tier.
    """

    def contains(self, group_id: int, key: bytes) -> bool: ...

    def children(self, group_id: int, parent_key: bytes) -> Sequence[tuple[bytes, tuple[int, ...]]]:
        """(key, 16 token ids, some of them `NO_TOKEN`) of blocks that continue a chain; a bounded number."""
        ...

    def store(self, group_id: int, slot: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None: ...

    def load(self, group_id: int, slot: int, key: bytes) -> None: ...

    def poll(self) -> list[SlowDone]: ...

    def forget(self, group_id: int, key: bytes) -> None:
        """Forget a block, also one whose store has not been carried out yet."""
        ...

    def reset(self) -> int:
        """Forget every block; returns how many there were."""
        ...

    @property
    def read_bytes_per_second(self) -> float | None:
        """Measured rate of loads; None while nothing was read."""
        ...


class NoSlowTier:
    """A tier that has nothing and takes nothing."""

    def contains(self, group_id: int, key: bytes) -> bool:
        return False

    def children(self, group_id: int, parent_key: bytes) -> Sequence[tuple[bytes, tuple[int, ...]]]:
        return ()

    def store(self, group_id: int, slot: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        raise AssertionError("nothing can be stored in a tier that is not there")

    def load(self, group_id: int, slot: int, key: bytes) -> None:
        raise AssertionError("nothing can be loaded from a tier that is not there")

    def poll(self) -> list[SlowDone]:
        return []

    def forget(self, group_id: int, key: bytes) -> None:
        """There is nothing to forget."""

    def reset(self) -> int:
        return 0

    @property
    def read_bytes_per_second(self) -> float | None:
        return None
