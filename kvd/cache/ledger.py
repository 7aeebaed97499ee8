"""What the cache remembers about its blocks for those who want to explain it: whose they are, since when, why they go.

Owner: the engine thread, through `CacheManager`. Nothing in here decides anything. One `Ledger` serves all layer
groups; a `BlockRecords` has three numbers per block of one group. The time is taken once per plan (`tick`): what
happens within one step has one time.

Invariant: `BlockRecords.owner` of a block that is not free is the number of the client that filled it first, or
`OTHERS`; a number stands for another client only after no block has been its for a while.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from kvd.histograms import CACHE_BUCKET_BOUNDS, HistogramBuilder
from kvd.views import Histogram

OTHERS = 0
"""The number of all clients for which there was none left."""
OTHERS_NAME = "(others)"
SESSION_FILE = "(session file)"
"""Owner of blocks that came from a file: no request computed them."""
MAX_OWNERS = 64
MAX_NOTES = 65_536
_SECONDS_BETWEEN_SWEEPS = 1.0

EvictionReason = Literal["capacity", "cap", "dropped", "reset"]
"""capacity: a request needed the room; cap: `max_cached_tokens`; dropped, reset: an operator, or a step that failed."""


class Eviction(NamedTuple):
    """When a block left, for whom ("": for nobody), and how many seconds it had been unused."""

    time: float
    evicted_for: str
    idle_seconds: float


class BlockRecords:
    """Per block of a group: the number of its owner, when it was filled, and when it was used last (while cached)."""

    __slots__ = ("filled", "owner", "used")

    def __init__(self, num_blocks: int) -> None:
        self.owner = bytearray(num_blocks)
        self.filled = array("d", bytes(8 * num_blocks))
        self.used = array("d", bytes(8 * num_blocks))


class Owners:
    """The names of at most `MAX_OWNERS` clients by small numbers; names come from outside, so there may be any number.

    `in_use` gives the numbers of the owners of all blocks; it is asked when there is no number left.
    """

    def __init__(self, in_use: Callable[[], set[int]]) -> None:
        self.names = [OTHERS_NAME]
        self._numbers: dict[str, int] = {}
        self._in_use = in_use
        self._next_sweep = float("-inf")

    def number_of(self, client: str, now: float) -> int:
        number = self._numbers.get(client)
        if number is not None:
            return number
        if len(self.names) <= MAX_OWNERS:
            self.names.append(client)
            number = self._numbers[client] = len(self.names) - 1
            return number
        if now < self._next_sweep:
            return OTHERS
        self._next_sweep = now + _SECONDS_BETWEEN_SWEEPS
        unused = set(range(1, len(self.names))) - self._in_use()
        if not unused:
            return OTHERS
        number = unused.pop()
        del self._numbers[self.names[number]]
        self.names[number] = client
        self._numbers[client] = number
        return number


class EvictionNotes:
    """The latest evictions by key, at most `capacity` of them, each 350 bytes or so."""

    def __init__(self, capacity: int = MAX_NOTES) -> None:
        self._capacity = capacity
        self._notes: OrderedDict[bytes, Eviction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, key: bytes, eviction: Eviction) -> None:
        self._notes[key] = eviction
        self._notes.move_to_end(key)
        if len(self._notes) > self._capacity:
            self._notes.popitem(last=False)

    def find(self, key: bytes) -> Eviction | None:
        return self._notes.get(key)


class Ledger:
    """See the module's docstring. `clock` gives `time.monotonic()` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = clock()
        self.records: list[BlockRecords] = []
        self.owners = Owners(self._owners_in_use)
        self.notes = EvictionNotes()
        self.num_evicted: dict[EvictionReason, int] = {"capacity": 0, "cap": 0, "dropped": 0, "reset": 0}
        self._builders = {name: HistogramBuilder(bounds) for name, bounds in CACHE_BUCKET_BOUNDS.items()}

    def open(self, num_blocks: int) -> BlockRecords:
        """The records of one more group; histograms and notes are about the first."""
        self.records.append(BlockRecords(num_blocks))
        return self.records[-1]

    def tick(self) -> None:
        self.now = self._clock()

    def owner(self, client: str) -> int:
        return self.owners.number_of(client, self.now)

    def _owners_in_use(self) -> set[int]:
        return set[int]().union(*[records.owner for records in self.records])

    def evicted(
        self, records: BlockRecords, block_id: int, key: bytes, reason: EvictionReason, evicted_for: int
    ) -> None:
        """A cached block has left. evicted_for: number of the owner who gets its room, where the reason is capacity."""
        self.num_evicted[reason] += 1
        if records is not self.records[0]:
            return
        idle = self.now - records.used[block_id]
        client = self.owners.names[evicted_for] if reason == "capacity" else ""
        self.notes.add(key, Eviction(self.now, client, idle))
        if reason in ("capacity", "cap"):
            self._builders["block_lifetime_seconds"].observe(self.now - records.filled[block_id])
            self._builders["block_idle_before_eviction_seconds"].observe(idle)

    def hit(self, used: dict[float, int]) -> None:
        """Blocks of the first group were found: how many by the time at which they were used last."""
        for time, times in used.items():
            self._builders["block_reuse_gap_seconds"].observe(max(0.0, self.now - time), times)

    def freeze(self) -> dict[str, Histogram]:
        return {name: builder.freeze() for name, builder in self._builders.items()}
