"""One request's side of the cache: its block tables, its keys, and what is still to be brought to it.

Owner: the engine thread. Made by `CacheManager.open` and changed by it alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.cache.prefix_index import KeyChain
from kvd.cache.ram_tier import RamBlock
from kvd.core import BLOCK_SIZE

PhysicalBlock = tuple[int, int]
"""(group id, block id)"""

Wanted = list[tuple[int, bytes | None]]
"""What a sequence needs of one group: (block number, key to share, or None for a block of its own)."""

Views = tuple[tuple[tuple[int, ...], ...], tuple[Sequence[int], ...]]


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class RestoreStep:
    """One block number, in every group, that comes from elsewhere.

    key         None when it comes from the request's own swap slots
    reaches     tokens of the sequence that are in place after it
    num_copied  tokens of the block that are wanted; fewer than 16: the block belongs to another sequence
    slots       per group the RAM block that holds the content, held for this step
    from_disk   some of it had to be loaded
    has_failed  it is not to be had
    """

    number: int
    key: bytes | None
    parent_key: bytes
    token_ids: tuple[int, ...]
    reaches: int
    num_copied: int = BLOCK_SIZE
    slots: dict[int, RamBlock] = field(default_factory=dict)
    from_disk: bool = False
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class Restore:
    """Steps in order; `num_done` have been planned, for `num_prepared` slots are held or being loaded.

    reached  tokens of the sequence that are in place when what is planned has been run
    brought  tokens that the steps brought, by where they came from: pool, partial, ram, disk
    """

    steps: list[RestoreStep]
    reached: int
    num_done: int = 0
    num_prepared: int = 0
    brought: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Swapped:
    """Where a swapped-out sequence lies: (group, block number, RAM block) in order of numbers, each held."""

    num_tokens: int
    entries: list[tuple[int, int, RamBlock]]


class SequenceBlocks:
    """The block tables of one request.

    `tables[group][j]` is the block that holds tokens 16·n … 16·n + 15 with n = `numbers[group][j]`; numbers rise.
    Without holes n is j: a group with a window gives up its first blocks, a sequence that forgets tokens any of them.
    The first `num_published` blocks of the sequence are indexed. The chain of keys survives `free`, so that a
    request which starts over is not hashed again.
    """

    __slots__ = (
        "_num_viewed", "_views", "chain", "client", "counts_hits", "has_dropped", "num_covered", "num_published",
        "numbers", "registered", "restore", "swapped", "tables",
    )  # fmt: skip

    def __init__(self, num_groups: int, chain: KeyChain, client: str = "") -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.numbers: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.chain = chain
        self.client = client  # whose the blocks are that it fills
        self.num_published = 0
        self.num_covered = 0  # tokens before this one need no `CacheManager.cover`
        self.has_dropped = False  # what is computed from now on depends on what was forgotten: never published
        self.restore: Restore | None = None
        self.swapped: Swapped | None = None
        self.registered = range(0)  # blocks that others wait for, see `CacheManager`
        self.counts_hits = True  # at the first admission only
        self._views: Views | None = None
        self._num_viewed = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the table of the first group."""
        return len(self.tables[0])

    def views(self, num_tokens: int) -> Views:
        """Per group the table up to token `num_tokens - 1`, and the position of each entry's first token.

        They are built only when they have changed.
        """
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        if self._num_viewed == num_blocks and self._views is not None:
            return self._views
        tables, positions = [], []
        for table, numbers in zip(self.tables, self.numbers, strict=True):
            end = num_blocks - numbers[0]
            if len(numbers) != numbers[-1] - numbers[0] + 1:
                end = bisect_right(numbers, num_blocks - 1)
            has_last = 0 < end <= len(numbers) and numbers[end - 1] == num_blocks - 1
            assert has_last, f"no block for token {num_tokens - 1}"
            tables.append(tuple(table[:end]))
            positions.append(positions_of(numbers, end))
        self._views = tuple(tables), tuple(positions)
        self._num_viewed = num_blocks
        return self._views

    def entry_of(self, group_id: int, number: int) -> int | None:
        """Where block `number` stands in a group's table; None when it is not there (any more)."""
        numbers = self.numbers[group_id]
        if not numbers:
            return None
        entry = number - numbers[0]
        if len(numbers) == numbers[-1] - numbers[0] + 1:
            return entry if 0 <= entry < len(numbers) else None
        entry = bisect_right(numbers, number) - 1
        return entry if entry >= 0 and numbers[entry] == number else None

    def note_change(self) -> None:
        """To be called when a table has changed."""
        self._views = None
        self.num_covered = min([(numbers[-1] + 1) * BLOCK_SIZE if numbers else 0 for numbers in self.numbers])


def positions_of(numbers: Sequence[int], end: int) -> Sequence[int]:
    """First positions of the first `end` entries: a range where there is no hole."""
    first, last = numbers[0], numbers[end - 1]
    if end == last - first + 1:
        return range(first * BLOCK_SIZE, (last + 1) * BLOCK_SIZE, BLOCK_SIZE)
    return tuple([number * BLOCK_SIZE for number in numbers[:end]])
