"""Makes the blocks of sequences shareable. Owner: the engine thread, through `CacheManager`.

Only blocks whose tokens were put in place by committed steps are published, and nobody writes to them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.layer_group import LayerGroup
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.prefix_index import tail_key
from kvd.cache.sequence import PhysicalBlock, SequenceBlocks
from kvd.core import BLOCK_SIZE


class Publisher:
    """See the module's docstring. `computing` says which sequence is about to compute which block."""

    def __init__(self, groups: Sequence[LayerGroup], tiers: LowerTiers, computing: dict[bytes, SequenceBlocks]) -> None:
        self._groups = groups
        self._tiers = tiers
        self._computing = computing

    def publish(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> list[PhysicalBlock]:
        """Make the full blocks among the first `num_tokens` tokens shareable; see `CacheManager.publish`."""
        num_full = num_tokens // BLOCK_SIZE
        replaced: list[PhysicalBlock] = []
        chain = sequence.chain
        chain.extend(token_ids, num_tokens)
        for number in range(sequence.num_published, num_full):
            key, parent = chain.keys[number], chain.parent_key(number)
            tokens = tuple(token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            for group_id, group in enumerate(self._groups):
                entry = sequence.entry_of(group_id, number)
                if entry is None:
                    continue  # it left its window before its step was committed
                table = sequence.tables[group_id]
                known = group.index.find(key)
                if known is None:
                    self._index(group_id, table[entry], key, parent, number, tokens)
                elif known.block_id != table[entry]:
                    replaced.append((group_id, table[entry]))
                    table[entry] = group.share(key)
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.num_published = num_full
        if replaced:
            sequence.note_change()
        return replaced

    def publish_tail(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Make what lies behind the last whole block among the first `num_tokens` tokens reusable."""
        number, num_left = divmod(num_tokens, BLOCK_SIZE)
        parent = sequence.chain.parent_key(number)
        tail = tuple(token_ids[number * BLOCK_SIZE : num_tokens])
        for group_id, group in enumerate(self._groups):
            entry = sequence.entry_of(group_id, number)
            alike = group.index.continuations(parent, tail[0])
            if entry is not None and not any(block.token_ids[:num_left] == tail for block in alike):
                block_id = sequence.tables[group_id][entry]
                self._index(group_id, block_id, tail_key(parent, tail), parent, number, tail)

    def _index(
        self, group_id: int, block_id: int, key: bytes, parent: bytes, number: int, token_ids: tuple[int, ...]
    ) -> None:
        """Make a block known, and have it saved; what says less than it is given up."""
        group = self._groups[group_id]
        group.drop_tails(parent, token_ids)
        self._tiers.drop_tails(group_id, parent, token_ids)
        group.index_block(block_id, key, parent, number, token_ids)
        self._tiers.publish(group_id, block_id, key, parent, token_ids)
