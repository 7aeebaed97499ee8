"""Token ids as bytes, four to a token, and what two such texts have in common. Pure functions, any thread.

Comparing goes through slices, so that the work is done in C in short pieces; positions and lengths are in tokens.
Invariant: the cost is linear in the length of what is compared, whatever the texts are like.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvd.core import BLOCK_SIZE

TOKEN_BYTES = 4
PASSAGE_TOKENS = 32
"""Shortest run of equal tokens that counts as the same passage. One of 2 * BLOCK_SIZE - 1 tokens or more contains a
whole block of the other text, counted from its beginning, so that looking for these blocks misses none."""

_BACK_TOKENS = 2 * BLOCK_SIZE - 2
"""How far before the end of a match looking is taken up again, so that a passage that begins in it and goes on
differently is found by its last whole block."""

_ENCODED_AT_ONCE = 4096
_COMPARED_AT_ONCE = 16384
_LOOKED_AT_ONCE = 256
_POSITION_BITS, _POSITIONS_PER_BLOCK = 32, 8
_MOST_POSITIONS = 1 << _POSITION_BITS * (_POSITIONS_PER_BLOCK - 1)

Pace = Callable[[], None]
"""Called every few hundred tokens; may wait, and may raise to give up."""


class Passage(NamedTuple):
    """`length` tokens from `ours` on in one text equal those from `theirs` on in another."""

    ours: int
    theirs: int
    length: int

    @property
    def end(self) -> int:
        return self.ours + self.length


def encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, the lowest byte first."""
    values = array("I")
    assert values.itemsize == TOKEN_BYTES
    for begin in range(0, len(token_ids), _ENCODED_AT_ONCE):
        values.extend(token_ids[begin : begin + _ENCODED_AT_ONCE])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def decode_ids(data: bytes) -> list[int]:
    values = array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def num_tokens(data: bytes) -> int:
    return len(data) // TOKEN_BYTES


def part(data: bytes, begin: int, end: int) -> bytes:
    """Tokens `begin` to `end`, as far as there are any."""
    return data[max(0, begin) * TOKEN_BYTES : max(0, end) * TOKEN_BYTES]


def common_length(ours: bytes, theirs: bytes, our_begin: int = 0, their_begin: int = 0) -> int:
    """How many tokens are equal from the two positions on."""
    limit = max(0, min(num_tokens(ours) - our_begin, num_tokens(theirs) - their_begin))
    done, size = 0, BLOCK_SIZE
    while done < limit and _is_equal(ours, theirs, our_begin + done, their_begin + done, min(size, limit - done)):
        done += min(size, limit - done)
        size = min(4 * size, _COMPARED_AT_ONCE)
    size = min(size, limit - done)
    while size > BLOCK_SIZE:
        half = size // 2
        if _is_equal(ours, theirs, our_begin + done, their_begin + done, half):
            done += half
            size -= half
        else:
            size = half
    left = part(ours, our_begin + done, our_begin + done + size)
    right = part(theirs, their_begin + done, their_begin + done + size)
    difference = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return done + ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES) if difference else limit


def _is_equal(ours: bytes, theirs: bytes, our_begin: int, their_begin: int, size: int) -> bool:
    return part(ours, our_begin, our_begin + size) == part(theirs, their_begin, their_begin + size)


def common_length_before(ours: bytes, theirs: bytes, our_end: int, their_end: int, limit: int) -> int:
    """How many tokens are equal right before the two positions, at most `limit`."""
    limit = min(limit, our_end, their_end)
    done = 0
    while done < limit:
        size = min(BLOCK_SIZE, limit - done)
        left = part(ours, our_end - done - size, our_end - done)
        right = part(theirs, their_end - done - size, their_end - done)
        if left != right:
            difference = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
            return done + size - 1 - (difference.bit_length() - 1) // (8 * TOKEN_BYTES)
        done += size
    return max(0, done)


def block_hash(data: bytes, begin: int) -> int:
    return hash(data[begin * TOKEN_BYTES : (begin + BLOCK_SIZE) * TOKEN_BYTES])


def align(ours: bytes, theirs: bytes, begin: int, pace: Pace) -> list[Passage]:
    """The passages of `ours` from token `begin` on that `theirs` has too, in the order of ours, without overlap.

    Where several passages of theirs fit, the longest is taken, and of equally long ones the one that comes next.
    """
    places: dict[int, int] = {}  # hash → positions of theirs, each plus one, the bits of one behind those of another
    for at in range(0, num_tokens(theirs) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = block_hash(theirs, at)
        if (found := places.get(key, 0)) < _MOST_POSITIONS:
            places[key] = found << _POSITION_BITS | at + 1
        if at % _ENCODED_AT_ONCE == 0:
            pace()
    passages: list[Passage] = []
    covered, expected, at = begin, begin, begin
    while (at := next_known(ours, at, [places], pace)) >= 0:
        pace()
        best: Passage | None = None
        left = places[block_hash(ours, at)]
        while left:
            place = (left & (1 << _POSITION_BITS) - 1) - 1
            left >>= _POSITION_BITS
            before = common_length_before(ours, theirs, at, place, at - covered)
            passage = Passage(at - before, place - before, before + common_length(ours, theirs, at, place))
            order = (passage.length, passage.theirs >= expected, -passage.theirs)
            if best is None or order > (best.length, best.theirs >= expected, -best.theirs):
                best = passage
        if best is None or best.length < PASSAGE_TOKENS:
            at += 1
            continue
        passages.append(best)
        covered, expected = best.end, best.theirs + best.length
        at = covered
    return passages


def next_known(data: bytes, begin: int, shards: Sequence[Mapping[int, object]], pace: Pace) -> int:
    """The first position from `begin` on where a block begins whose hash is known; -1: there is none.

    shards: the known hashes, each in the one whose number its lowest bits are; a power of two of them.
    """
    mask = len(shards) - 1
    width = BLOCK_SIZE * TOKEN_BYTES
    last = num_tokens(data) - BLOCK_SIZE
    while begin <= last:
        end = min(begin + _LOOKED_AT_ONCE, last + 1)
        for at in range(begin * TOKEN_BYTES, end * TOKEN_BYTES, TOKEN_BYTES):
            if (key := hash(data[at : at + width])) in shards[key & mask]:
                return at // TOKEN_BYTES
        begin = end
        pace()
    return -1


def resume_after(at: int, end: int) -> int:
    """Where to look on for passages that are not within the one that ends at `end`."""
    return max(at + 1, end - _BACK_TOKENS)


def num_moved(passages: Sequence[Passage]) -> int:
    """Tokens in passages that are not in the order of the other text: all but those of the heaviest ordered chain.

    Of what ours repeats, one time counts: it is not in another order, only more often.
    """
    begins: list[int] = []  # of theirs, where the heaviest chain that ends with this passage weighs `weights`
    weights: list[int] = []  # both ascend
    for passage in passages:
        at = bisect_left(begins, passage.theirs)
        weight = passage.length + (weights[at - 1] if at else 0)
        behind = at
        while behind < len(weights) and weights[behind] <= weight:
            behind += 1
        begins[at:behind] = [passage.theirs]
        weights[at:behind] = [weight]
    once = union_length(((it.theirs, it.theirs + it.length) for it in passages), 0, sys.maxsize)
    return max(0, once - (weights[-1] if weights else 0))


def union_length(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """How many positions from `begin` to `end` lie in any of the intervals (first, behind the last)."""
    total, reached = 0, begin
    for first, stop in sorted(intervals):
        first, stop = max(first, reached), min(stop, end)
        if stop > first:
            total += stop - first
            reached = stop
    return total
