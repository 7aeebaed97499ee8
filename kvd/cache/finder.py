"""Finds what is known of a prompt: blocks to share, blocks to bring back from below, and a block that begins alike.

Owner: the engine thread, through `CacheManager`. Nothing in here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvd.cache.layer_group import LayerGroup
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.prefix_index import common_length
from kvd.cache.sequence import RestoreStep, SequenceBlocks
from kvd.cache.tiers import NO_TOKEN
from kvd.core import BLOCK_SIZE

WorthRestoring = Callable[[int, int, bool], bool]
"""(bytes, tokens, from disk) → whether restoring them beats computing the tokens again."""


class Finder:
    """Looks in the pools of all groups and in the tiers below."""

    def __init__(self, groups: Sequence[LayerGroup], tiers: LowerTiers) -> None:
        self._groups = groups
        self._tiers = tiers

    def match(self, sequence: SequenceBlocks, token_ids: Sequence[int], limit: int) -> int:
        """Leading full blocks of `token_ids`, at most `limit`, that can be shared.

        A group with a window needs only the blocks that the next token sees: that depends on where the next token is,
        so to cut the answer down afterwards would be wrong.
        """
        sequence.chain.extend(token_ids, limit * BLOCK_SIZE)
        keys = sequence.chain.keys
        windowed = []
        for group in self._groups:
            if group.window:
                windowed.append(group)
            else:
                limit = group.index.match_length(keys, limit)
        return _match_windows(windowed, keys, limit) if windowed else limit

    def guess(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> int:
        """About how many leading tokens are in the pool: a hint for the order of service, found by bisection."""
        limit = (len(token_ids) - 1) // BLOCK_SIZE
        sequence.chain.extend(token_ids, limit * BLOCK_SIZE)
        return min(limit, self._groups[0].index.guess_length(sequence.chain.keys)) * BLOCK_SIZE

    def below(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], first: int, last: int, worth: WorthRestoring | None
    ) -> list[RestoreStep]:
        """Steps for the blocks from `first` on, before `last`, that the tiers have without a gap."""
        steps: list[RestoreStep] = []
        places = {"pool": 0, "ram": 0, "disk": 0}
        keys = sequence.chain.keys
        for number in range(first, last):
            place = self._tiers.has(keys[number])
            if place is None:
                break
            places[place] += 1
            tokens = tuple(token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            parent = sequence.chain.parent_key(number)
            steps.append(RestoreStep(number, keys[number], parent, tokens, (number + 1) * BLOCK_SIZE))
        num_moved = places["ram"] + places["disk"]
        if not num_moved:
            return []
        num_bytes = num_moved * sum(self._tiers.block_bytes)
        if worth is not None and not worth(num_bytes, len(steps) * BLOCK_SIZE, places["disk"] > 0):
            return []
        return steps

    def partial(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], number: int, limit: int, worth: WorthRestoring | None
    ) -> RestoreStep | None:
        """The block that begins with most of the tokens after `number` blocks, before token `limit`."""
        wanted = token_ids[number * BLOCK_SIZE : min(limit, (number + 1) * BLOCK_SIZE)]
        if not wanted:
            return None
        parent = sequence.chain.parent_key(number)
        best: tuple[int, bytes, tuple[int, ...]] | None = None
        for key, tokens in self._continuations(parent, wanted[0]):
            length = common_length(tokens, wanted)
            place = self._tiers.has(key) if length > (best[0] if best is not None else 0) else None
            if place is None:
                continue
            if place == "pool" or worth is None or worth(sum(self._tiers.block_bytes), length, place == "disk"):
                best = length, key, tokens
        if best is None:
            return None
        length, key, tokens = best
        return RestoreStep(number, key, parent, tokens, number * BLOCK_SIZE + length, num_copied=length)

    def _continuations(self, parent: bytes, first: int) -> Iterable[tuple[bytes, tuple[int, ...]]]:
        """(key, tokens) of known blocks behind `parent`, the nearest tier first."""
        for block in self._groups[0].index.continuations(parent, first):
            yield block.key, block.token_ids
        for slot in self._tiers.ram.continuations(0, parent, first):
            if slot.key is not None:
                yield slot.key, slot.token_ids
        for key, tokens in self._tiers.slow.children(0, parent):
            yield key, tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens


def _match_windows(groups: Sequence[LayerGroup], keys: Sequence[bytes], limit: int) -> int:
    """The most blocks, at most `limit`, after which every group has all that the next token sees."""
    runs = []
    for group in groups:
        run, lengths = 0, [0]
        for key in keys[:limit]:
            run = run + 1 if key in group.index else 0
            lengths.append(run)
        runs.append(lengths)
    for number in range(limit, 0, -1):
        if all(
            lengths[number] >= number - group.first_seen(number * BLOCK_SIZE)
            for group, lengths in zip(groups, runs, strict=True)
        ):
            return number
    return 0
