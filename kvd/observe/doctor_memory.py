"""The prompts that the doctor remembers, and how it finds those that another is like.

Owner: the doctor's thread. Prompts of one cache salt share a shelf: a list in the order of their bytes, in which the
longest common beginning stands next to where a prompt belongs, and an index of their whole blocks by hash. Bounded by
tokens; the prompt that was of use the longest ago goes first. A prompt that continues one of the same client takes its
place, as a chat does turn by turn.

Invariants: no two prompts of a shelf are equal; a place in the index is that of a whole block of a remembered prompt,
counted from its beginning, and no block has more than `HOLDERS` places, the newest ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvd.core import BLOCK_SIZE
from kvd.observe.doctor_passages import (
    PASSAGE_TOKENS,
    Pace,
    Passage,
    block_hash,
    common_length,
    common_length_before,
    next_known,
    num_tokens,
    part,
    resume_after,
)

HOLDERS = 4
"""Of the prompts that have the same block, this many are compared with, the newest ones."""

MAX_SHELVES_SEARCHED = 64
"""Other salts that are searched for the beginning of a prompt, those used last."""

_LEAST_CHARGE = 64
"""Tokens that the shortest prompt is counted as, for what is kept besides them."""

_SHARDS = 256  # a power of two; a dictionary that grows is copied in one go, which must stay short
_BLOCK_BITS, _PLACE_BITS = 24, 64
_BLOCK_MASK, _PLACE_MASK = (1 << _BLOCK_BITS) - 1, (1 << _PLACE_BITS) - 1
_PLACES_MASK = (1 << HOLDERS * _PLACE_BITS) - 1

Places = int
"""Up to `HOLDERS` places in one number, the newest in its lowest bits: serial of the prompt, number of the block.
A number, since the garbage collector walks through a dictionary of anything else, all in one go."""


@dataclass(slots=True, eq=False)
class Remembered:
    """A prompt, or a prompt and its answer. `lengths`: of the prompts it stands for → how many requests had it."""

    serial: int
    salt: str
    client: str
    endpoint: str
    request_id: str
    time: float
    data: bytes
    num_prompt: int
    lengths: dict[int, int] = field(default_factory=dict)

    def num_longer(self, position: int) -> int:
        """Requests whose prompt has a token at `position`."""
        return sum(number for length, number in self.lengths.items() if length > position)


class _Shelf:
    """The prompts of one salt."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.records: list[Remembered] = []  # parallel to texts
        self.blocks: list[dict[int, Places]] = [{} for _ in range(_SHARDS)]


class Match(NamedTuple):
    """A passage of ours in a remembered prompt. num_new: its tokens that no earlier match has."""

    record: Remembered
    passage: Passage
    num_new: int


class PromptMemory:
    """See the module's docstring. max_tokens: of all prompts together; a longer one is not remembered."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._serial = 0
        self._records: OrderedDict[int, Remembered] = OrderedDict()  # the one of use the longest ago first
        self._by_request: dict[str, Remembered] = {}
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_tokens(self) -> int:
        """As they are counted against the bound."""
        return self._num_tokens

    # ------------------------------------------------------------------ remembering

    def add(self, request_id: str, client: str, endpoint: str, salt: str, time: float, data: bytes, pace: Pace) -> None:
        """Remember a prompt. `pace` is called between pieces of work and must not raise."""
        length = num_tokens(data)
        if length + _LEAST_CHARGE > self._max_tokens:
            return
        shelf = self._shelves.setdefault(salt, _Shelf())
        self._shelves.move_to_end(salt)
        at = bisect_left(shelf.texts, data)
        if at < len(shelf.texts) and shelf.texts[at] == data:
            record = shelf.records[at]
            record.lengths[length] = record.lengths.get(length, 0) + 1
            self._use(record)
            return
        before = shelf.records[at - 1] if at else None
        if before is not None and before.client == client and data.startswith(before.data):
            self._grow(before, data, pace)
            record = before
            record.num_prompt, record.time = length, time
            self._by_request.pop(record.request_id, None)
            record.request_id = request_id
        else:
            self._serial += 1
            record = Remembered(self._serial, salt, client, endpoint, request_id, time, b"", length)
            self._records[record.serial] = record
            self._num_tokens += _LEAST_CHARGE
            self._place(record, data)
            self._index(record, 0, pace)
        record.lengths[length] = record.lengths.get(length, 0) + 1
        self._by_request[request_id] = record
        self._use(record)
        self._shrink()

    def answered(self, request_id: str, data: bytes, pace: Pace) -> None:
        """The answer to a remembered prompt, which now goes on with it; nothing if it goes on already."""
        record = self._by_request.pop(request_id, None)
        if record is None or num_tokens(record.data) != record.num_prompt:
            return
        shelf, longer = self._shelves[record.salt], record.data + data
        at = bisect_left(shelf.texts, longer)
        if at == len(shelf.texts) or shelf.texts[at] != longer:
            self._grow(record, longer, pace)
            self._shrink()

    def _grow(self, record: Remembered, data: bytes, pace: Pace) -> None:
        num_before = num_tokens(record.data)
        self._unplace(record)
        self._place(record, data)
        self._index(record, num_before // BLOCK_SIZE * BLOCK_SIZE, pace)

    def _place(self, record: Remembered, data: bytes) -> None:
        shelf = self._shelves[record.salt]
        record.data = data
        at = bisect_left(shelf.texts, data)
        shelf.texts.insert(at, data)
        shelf.records.insert(at, record)
        self._num_tokens += num_tokens(data)

    def _unplace(self, record: Remembered) -> None:
        shelf = self._shelves[record.salt]
        at = bisect_left(shelf.texts, record.data)
        assert shelf.records[at] is record
        del shelf.texts[at], shelf.records[at]
        self._num_tokens -= num_tokens(record.data)

    def _index(self, record: Remembered, begin: int, pace: Pace) -> None:
        shelf = self._shelves[record.salt]
        own = record.serial << _BLOCK_BITS
        for at in range(begin, num_tokens(record.data) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = block_hash(record.data, at)
            shard = shelf.blocks[key & (_SHARDS - 1)]
            places = shard.get(key, 0)
            if all(place >> _BLOCK_BITS != record.serial for place in _each(places)):
                shard[key] = (places << _PLACE_BITS | own | at // BLOCK_SIZE) & _PLACES_MASK
            if at % 4096 == 0:
                pace()

    def _unindex(self, record: Remembered) -> None:
        shelf = self._shelves[record.salt]
        for at in range(0, num_tokens(record.data) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = block_hash(record.data, at)
            shard = shelf.blocks[key & (_SHARDS - 1)]
            left = 0
            for place in reversed(list(_each(shard.get(key, 0)))):
                if place >> _BLOCK_BITS != record.serial:
                    left = left << _PLACE_BITS | place
            if left:
                shard[key] = left
            else:
                shard.pop(key, None)

    def _use(self, record: Remembered) -> None:
        self._records.move_to_end(record.serial)

    def _shrink(self) -> None:
        while self._num_tokens > self._max_tokens:
            _, record = self._records.popitem(last=False)
            if self._by_request.get(record.request_id) is record:
                del self._by_request[record.request_id]
            self._unindex(record)
            self._unplace(record)
            self._num_tokens -= _LEAST_CHARGE
            if not self._shelves[record.salt].records:
                del self._shelves[record.salt]

    # ------------------------------------------------------------------ finding

    def longest_beginning(self, salt: str, data: bytes) -> tuple[Remembered | None, int]:
        """The prompt of that salt that has most of the beginning of `data`, and how many tokens."""
        shelf = self._shelves.get(salt)
        if shelf is None:
            return None, 0
        at = bisect_left(shelf.texts, data)
        best: Remembered | None = None
        length = 0
        for number in (at, at - 1):
            if 0 <= number < len(shelf.records):
                found = common_length(data, shelf.texts[number])
                if found > length:
                    best, length = shelf.records[number], found
        if best is not None:
            self._use(best)
        return best, length

    def beginning_elsewhere(self, salt: str, data: bytes, least: int) -> tuple[Remembered | None, int]:
        """As `longest_beginning` in other salts, where it has at least `least` tokens."""
        prefix = part(data, 0, least)
        best: tuple[Remembered | None, int] = None, 0
        if num_tokens(prefix) < least:
            return best
        for name in list(islice(reversed(self._shelves), MAX_SHELVES_SEARCHED)):
            texts = self._shelves[name].texts
            at = bisect_left(texts, prefix)
            if name != salt and at < len(texts) and texts[at].startswith(prefix):
                record, length = self.longest_beginning(name, data)
                best = max(best, (record, length), key=lambda found: found[1])
        return best

    def beginning_with(self, salt: str, data: bytes, length: int, limit: int) -> Iterator[Remembered]:
        """Prompts of that salt with the same first `length` tokens, at most `limit` of them, the most like ones."""
        shelf = self._shelves.get(salt)
        if shelf is None:
            return
        prefix = part(data, 0, length)
        at = bisect_left(shelf.texts, data)
        behind, before = islice(shelf.records, at, None), map(shelf.records.__getitem__, range(at - 1, -1, -1))
        for records in (behind, before):
            for record in islice(records, limit // 2):
                if not record.data.startswith(prefix):
                    break
                yield record

    def matches(self, salt: str, data: bytes, begin: int, pace: Pace) -> Iterator[Match]:
        """Passages of `data` with a token from `begin` on that remembered prompts of that salt have.

        Together they cover what any of them covers that holds one of its whole blocks, see `HOLDERS`.
        """
        shelf = self._shelves.get(salt)
        if shelf is None:
            return
        covered = begin
        at = max(0, begin - PASSAGE_TOKENS + 2)
        while (at := next_known(data, at, shelf.blocks, pace)) >= 0:
            pace()
            end, reach = covered, at - covered + PASSAGE_TOKENS
            for record, place in self._holders(shelf, block_hash(data, at)):
                length = common_length(data, record.data, at, place)
                if at + length <= covered or not length:
                    continue
                before = common_length_before(data, record.data, at, place, max(reach, PASSAGE_TOKENS))
                if before + length >= PASSAGE_TOKENS:
                    passage = Passage(at - before, place - before, before + length)
                    yield Match(record, passage, passage.end - max(covered, passage.ours))
                    end = max(end, passage.end)
            at = resume_after(at, end) if end > covered else at + 1
            covered = end

    def _holders(self, shelf: _Shelf, key: int) -> Iterator[tuple[Remembered, int]]:
        for place in _each(shelf.blocks[key & (_SHARDS - 1)][key]):
            yield self._records[place >> _BLOCK_BITS], (place & _BLOCK_MASK) * BLOCK_SIZE


def _each(places: Places) -> Iterator[int]:
    """The newest first."""
    while places:
        yield places & _PLACE_MASK
        places >>= _PLACE_BITS
