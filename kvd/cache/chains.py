"""Chains of cached blocks as operators and clients name them: kept, pinned, held, listed, put in from a file.

Owner: the engine thread, through `CacheManager`. A pin or a hold is a reference on every block of a chain, so what is
pinned is never cached and no eviction policy ever hears of it. Pins last, and what they take is no part of the pool's
capacity; holds end soon, and whoever lacks their blocks waits for that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvd.cache.layer_group import LayerGroup
from kvd.cache.ledger import SESSION_FILE
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.prefix_index import IndexedBlock
from kvd.core import BLOCK_SIZE
from kvd.views import PrefixView


@dataclass(slots=True)
class ChainHold:
    """References on a chain of indexed blocks, (group id, block) from its start, until `Chains.let_go`."""

    blocks: list[tuple[int, IndexedBlock]]
    num_tokens: int


class Chains:
    """The chains in the pools. `release` gives up references: (group id, block id) each."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        tiers: LowerTiers,
        release: Callable[[Iterable[tuple[int, int]]], None],
    ) -> None:
        self._groups = groups
        self._tiers = tiers
        self._release = release
        self._pins: dict[bytes, ChainHold] = {}
        self._num_held = 0  # references of holds that are not pins
        self._num_pinned = 0

    def keep(self, keys: Sequence[bytes], until: float) -> int:
        """Keep the blocks under a chain of keys until a time of the clock, if room allows; how many there are."""
        num_kept = 0
        for key in reversed(keys):  # as tables are released: from the end
            blocks = [(group, group.index.find(key)) for group in self._groups]
            for group, block in blocks:
                if block is not None:
                    group.keep(block, until)
            num_kept += blocks[0][1] is not None
        return num_kept

    def chain_of(self, key: bytes) -> list[IndexedBlock]:
        """The indexed blocks of group 0 from the start of a chain to the block under `key`; empty if there is a gap."""
        block = self._groups[0].index.find(key)
        if block is not None and not block.is_whole:
            return []  # the tail of a sequence, which has no name of its own
        chain: list[IndexedBlock] = []
        while block is not None:
            chain.append(block)
            block = self._groups[0].index.find(block.parent_key)
        chain.reverse()
        return chain if chain and not chain[0].depth else []

    def hold_chain(self, key: bytes) -> ChainHold | None:
        """References on all blocks of a chain, in every group that has them; None if it is not in the pool."""
        hold = self._hold(key)
        if hold is not None:
            self._num_held += len(hold.blocks)
        return hold

    def _hold(self, key: bytes) -> ChainHold | None:
        chain = self.chain_of(key)
        blocks: list[tuple[int, IndexedBlock]] = []
        for block in chain:
            for group_id, group in enumerate(self._groups):
                known = group.index.find(block.key)
                if known is not None:
                    group.share(block.key)
                    blocks.append((group_id, known))
        return ChainHold(blocks, len(chain) * BLOCK_SIZE) if chain else None

    def let_go(self, hold: ChainHold) -> None:
        """Give up the references of a hold, once."""
        self._num_held -= len(hold.blocks)
        self._let_go(hold)

    def _let_go(self, hold: ChainHold) -> None:
        self._release([(group_id, block.block_id) for group_id, block in reversed(hold.blocks)])
        hold.blocks.clear()

    @property
    def is_holding(self) -> bool:
        """Somebody holds blocks for a time, and will let them go."""
        return self._num_held > 0

    def insert(
        self, group_id: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]
    ) -> tuple[IndexedBlock, bool] | None:
        """A held block under a key, and whether it is new: then the caller fills it before it does anything else.

        None when there is no room: an eighth of the pool is left to requests. Blocks come in the order of their chain.
        To be called while no plan is in flight.
        """
        group = self._groups[group_id]
        if key in group.index:
            group.share(key)
            is_new = False
        elif group.pool.num_available > group.pool.num_blocks // 8:
            parent = group.index.find(parent_key)
            depth = 0 if parent is None else parent.depth + 1
            group.ledger.tick()
            block_id = group.take(group.ledger.owner(SESSION_FILE))
            self._tiers.overwrite(group_id, block_id)
            group.index_block(block_id, key, parent_key, depth, token_ids)
            self._tiers.publish(group_id, block_id, key, parent_key, token_ids)
            is_new = True
        else:
            return None
        self._num_held += 1
        return group.index.of_key(key), is_new

    def pin(self, key: bytes) -> int:
        """Hold a chain of cached blocks until `unpin`; returns its blocks, 0 if it is not there."""
        if key not in self._pins:
            hold = self._hold(key)
            if hold is None:
                return 0
            self._pins[key] = hold
            self._count_pinned()
        return len(self._pins[key].blocks)

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pins

    def unpin(self, key: bytes) -> bool:
        """Give a pinned chain up; False if it was not pinned."""
        hold = self._pins.pop(key, None)
        if hold is not None:
            self._let_go(hold)
            self._count_pinned()
        return hold is not None

    def longest_known(self, keys: Sequence[bytes]) -> bytes | None:
        """The last key of a chain up to which the pool has all of it."""
        length = self._groups[0].index.match_length(keys, len(keys))
        return keys[length - 1] if length else None

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of the first group that pins hold, each counted once. Any thread."""
        return self._num_pinned

    def _count_pinned(self) -> None:
        self._num_pinned = len(self.pinned_blocks(0))

    def pinned_blocks(self, group_id: int) -> array[int]:
        """Ids of the blocks of a group that pins hold, each once."""
        pinned = (each for hold in self._pins.values() for each in hold.blocks)
        return array("q", {block.block_id for of_group, block in pinned if of_group == group_id})

    def drop(self, key: bytes) -> int:
        """Drop a chain from its end on, up to a block that is in use or that another chain continues.

        What is dropped from the pool is forgotten in the tiers below too, where nobody waits for it. Returns the blocks
        that have left the pools, over all groups; with the last block go the incomplete ones behind it.
        """
        num_dropped = 0
        first = self._groups[0]
        for block in reversed(self.chain_of(key)):
            if first.index.ends.is_continued(block.key):
                break
            if not num_dropped:
                num_dropped += self._drop_tails(block.key)
            if not first.drop_cached_leaf(block):
                break
            num_dropped += 1
            for group in self._groups[1:]:
                known = group.index.find(block.key)
                num_dropped += known is not None and group.drop_cached_leaf(known)
            self._tiers.forget(block.key)
        return num_dropped

    def _drop_tails(self, parent_key: bytes) -> int:
        num_dropped = 0
        for group in self._groups:
            for block in group.index.all_continuations(parent_key):
                if not block.is_whole and group.drop_cached_leaf(block):
                    num_dropped += 1
                    self._tiers.forget(block.key)
        return num_dropped

    def token_ids(self, key: bytes, limit: int) -> tuple[int, ...]:
        """The first `limit` token ids of a chain; () if it is not in the pool."""
        blocks = self.chain_of(key)[: -(-limit // BLOCK_SIZE)]
        return tuple([token_id for block in blocks for token_id in block.token_ids][:limit])

    def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """The chains that were found most often, those in use and pinned ones included."""
        index = self._groups[0].index
        pinned = [block for key in self._pins if (block := index.find(key)) is not None]
        pinned.sort(key=lambda block: (-block.num_hits, -block.depth))
        best = pinned[:limit]
        if len(best) < limit:
            others = [block for block in index.ends.most_found(limit) if block.key not in self._pins]
            best += others[: limit - len(best)]
        self._groups[0].ledger.tick()
        return tuple(map(self._view, best))

    def _view(self, block: IndexedBlock) -> PrefixView:
        group = self._groups[0]
        now, records = group.ledger.now, group.records
        return PrefixView(
            block.key.hex(),
            (block.depth + 1) * BLOCK_SIZE,
            block.num_hits,
            block.key in self._pins,
            group.pool.references(block.block_id) > 0,
            group.ledger.owners.names[records.owner[block.block_id]],
            now - records.filled[block.block_id],
            now - group.last_used(block),
        )

    @property
    def pinned(self) -> Iterable[ChainHold]:
        return self._pins.values()
