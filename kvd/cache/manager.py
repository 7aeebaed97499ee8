"""The KV blocks of all requests: find what is cached, allocate, grow, publish, forget, swap, free.

Owner: the engine thread; nobody else calls anything in here.

One `CacheManager` holds a `LayerGroup` (pool, prefix index, eviction policy) per layer group and the tiers below. A
`SequenceBlocks` is one request's side of it: a block table per group and the chain of its keys. Requests never touch a
pool. `swapper` keeps preempted sequences in RAM, `allocate` brings them back; `chains` is what operators name.

Invariants, checked after every step of the simulator:
  - a block's references are exactly the tables that name it, pins, and blocks that wait for a step in flight;
  - an indexed block is active or cached, never free; a cached one is always indexed;
  - only blocks whose 16 tokens were put in place by committed steps are indexed, and nobody writes to them again;
  - a RAM slot is held exactly by the plans, transfers, restores and swapped-out sequences that depend on it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from kvd.cache.chains import Chains
from kvd.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from kvd.cache.finder import Finder, WorthRestoring
from kvd.cache.layer_group import LayerGroup, PoolGauges
from kvd.cache.ledger import Ledger
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.prefix_index import KEY_BYTES, IndexedBlock, KeyChain
from kvd.cache.publishing import Publisher
from kvd.cache.ram_tier import RamTier
from kvd.cache.sequence import PhysicalBlock, Restore, RestoreStep, SequenceBlocks, Wanted, blocks_for
from kvd.cache.swapping import Swapper
from kvd.cache.tiers import NoSlowTier, SlowTier
from kvd.core import BLOCK_SIZE

__all__ = ["KEY_BYTES", "CacheManager", "PhysicalBlock", "PoolGauges", "Refusal", "SequenceBlocks", "blocks_for"]


class Refusal(Enum):
    """Why a sequence got no blocks."""

    NO_ROOM = "no room"
    AWAITED = "another request is computing the blocks that come next"


class CacheManager:
    """All KV blocks.

    num_blocks         blocks per layer group
    windows            tokens that a query sees in each group, 0 for all
    key_seed           model fingerprint, KV layout id and arithmetic id: what else decides the bytes of a block
    other_formats      (key seed, name) of other KV formats in which the slow tier may have blocks of this model
    make_policy        called once per group, with the clock
    max_cached_blocks  most cached blocks per group beside those in use
    num_ram_slots      slots of the RAM tier per group; all 0: there is none
    slow_tier          what lies below the RAM tier, which it needs
    block_bytes        bytes of a block per group, for decisions by cost
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        *,
        key_seed: bytes,
        other_formats: Sequence[tuple[bytes, str]] = (),
        windows: Sequence[int] | None = None,
        enable_prefix_caching: bool = True,
        make_policy: Callable[[Callable[[], float]], EvictionPolicy] = LeastRecentlyUsed,
        max_cached_blocks: int | None = None,
        num_ram_slots: Sequence[int] | None = None,
        slow_tier: SlowTier | None = None,
        block_bytes: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        windows = (0,) * len(num_blocks) if windows is None else windows
        assert len(windows) == len(num_blocks) > 0, (num_blocks, windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.latest_shortage = (
            0,
            0,
            0,
        )  # blocks needed, to be left over, and available when `allocate` last found no room
        self.num_changes = 0  # rises whenever blocks may have become available, or known
        self.key_seed = key_seed
        self._other_formats = tuple(other_formats)
        self.ledger = Ledger(clock)
        self._groups = tuple(
            LayerGroup(number, window, make_policy(clock), max_cached_blocks, self.ledger)
            for number, window in zip(num_blocks, windows, strict=True)
        )
        self.tiers = LowerTiers(
            self._groups,
            RamTier((0,) * len(num_blocks) if num_ram_slots is None else num_ram_slots),
            NoSlowTier() if slow_tier is None else slow_tier,
            (0,) * len(num_blocks) if block_bytes is None else block_bytes,
        )
        self.swapper = Swapper(self._groups, self.tiers)
        self._finder = Finder(self._groups, self.tiers)
        self.chains = Chains(self._groups, self.tiers, self.release)
        self._computing: dict[bytes, SequenceBlocks] = {}  # who is about to compute, or restore, which block
        self._publisher = Publisher(self._groups, self.tiers, self._computing)

    def open(self, salt: str, client: str = "") -> SequenceBlocks:
        """A sequence without blocks. Sequences share blocks only within one salt; what it fills is the client's."""
        return SequenceBlocks(len(self._groups), KeyChain(self.key_seed, salt), client)

    def other_format(self, token_ids: Sequence[int], salt: str) -> str:
        """Name of another KV format in which the slow tier has the first block of a prompt; "" if there is none."""
        if len(token_ids) >= BLOCK_SIZE:
            for seed, name in self._other_formats:
                chain = KeyChain(seed, salt)
                chain.extend(token_ids, BLOCK_SIZE)
                if self.tiers.slow.contains(0, chain.keys[0]):
                    return name
        return ""

    def guess_cached(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> int:
        """About how many leading tokens are in the pool: a hint for the order of service."""
        return self._finder.guess(sequence, token_ids) if self.enable_prefix_caching else 0

    def allocate(
        self,
        sequence: SequenceBlocks,
        token_ids: Sequence[int],
        *,
        num_spare_blocks: int = 0,
        num_extra_tokens: int = 0,
        max_blocks: int | None = None,
        max_matched_tokens: int | None = None,
        max_reused_tokens: int | None = None,
        worth: WorthRestoring | None = None,
    ) -> int | Refusal:
        """Give an empty sequence blocks for all its tokens and `num_extra_tokens` more, shared ones where there are.

        Returns how many leading tokens are in place; where `sequence.restore` is set, more come by `proceed`. A
        refusal changes nothing: the blocks that come next are being computed by somebody else, or less than
        `num_spare_blocks` would be left in some group.
        max_blocks: of a sequence that forgets tokens, see `drop`; max_matched_tokens: what lies behind depends on
        what was forgotten. max_reused_tokens: what lies behind the sequence computes itself, though others have it.
        """
        assert not sequence.num_blocks, "allocate() for a sequence that has blocks"
        num_total = blocks_for(len(token_ids) + num_extra_tokens)
        num_total = num_total if max_blocks is None else min(num_total, max_blocks)
        if sequence.swapped is not None:
            return self._bring_back(sequence, num_total, num_spare_blocks)
        limit = (len(token_ids) - 1) if max_matched_tokens is None else min(len(token_ids) - 1, max_matched_tokens)
        limit = min(limit, num_total * BLOCK_SIZE)
        most = limit if max_reused_tokens is None else min(limit, max_reused_tokens)
        num_shared = 0
        steps: list[RestoreStep] = []
        if self.enable_prefix_caching:
            num_shared = self._finder.match(sequence, token_ids, most // BLOCK_SIZE)
            keys = sequence.chain.keys
            if num_shared < most // BLOCK_SIZE:
                steps = self._finder.below(sequence, token_ids, num_shared, most // BLOCK_SIZE, worth)
                if not steps and keys[num_shared] in self._computing:
                    return Refusal.AWAITED
            partial = self._finder.partial(sequence, token_ids, num_shared + len(steps), most, worth)
            if partial is not None:
                steps.append(partial)
        wants: list[Wanted] = []
        for group in self._groups:
            first = group.first_seen(num_shared * BLOCK_SIZE)
            ahead = max(group.lead, len(steps))
            last = num_total if not group.window else min(num_total, num_shared + ahead)
            shared = [(number, sequence.chain.keys[number]) for number in range(first, num_shared)]
            wants.append([*shared, *[(number, None) for number in range(num_shared, last)]])
        if not self._acquire(sequence, wants, num_spare_blocks):
            return Refusal.NO_ROOM
        sequence.num_published = num_shared
        if steps:
            sequence.restore = Restore(steps, num_shared * BLOCK_SIZE)
        if self.enable_prefix_caching:
            self._register(sequence, token_ids, num_shared, min(len(token_ids), limit + 1) // BLOCK_SIZE)
        return num_shared * BLOCK_SIZE

    def _acquire(self, sequence: SequenceBlocks, wants: Sequence[Wanted], num_spare_blocks: int) -> bool:
        """Fill empty tables with (number, key to share or None for a block of its own) per group."""
        found: list[list[IndexedBlock | None]] = []
        for group, wanted in zip(self._groups, wants, strict=True):
            blocks = [None if key is None else group.index.of_key(key) for _, key in wanted]
            references = group.pool.references
            # A shared block that nobody else uses is no longer there to be evicted.
            num_needed = sum([block is None or not references(block.block_id) for block in blocks])
            if num_needed + num_spare_blocks > group.pool.num_available:
                self.latest_shortage = num_needed, num_spare_blocks, group.pool.num_available
                return False
            found.append(blocks)
        if sequence.counts_hits:
            self._count_hits(found)
        owner = self.ledger.owner(sequence.client)
        for group_id, (group, blocks) in enumerate(zip(self._groups, found, strict=True)):
            for block in blocks:
                if block is not None:
                    group.share_block(block)
            table = [group.take(owner) if block is None else block.block_id for block in blocks]
            sequence.tables[group_id].extend(table)
            sequence.numbers[group_id].extend([number for number, _ in wants[group_id]])
        sequence.note_change()
        return True

    def _count_hits(self, found: Sequence[Sequence[IndexedBlock | None]]) -> None:
        """Blocks were found; per group, those of the first also by the time at which they were used last."""
        for blocks in found:
            for block in blocks:
                if block is not None:
                    block.num_hits += 1
        self._groups[0].note_hits([block for block in found[0] if block is not None])

    def _bring_back(self, sequence: SequenceBlocks, num_total: int, num_spare_blocks: int) -> int | Refusal:
        """Blocks for a swapped-out sequence: those that the pool still has, and a restore for the others."""
        wants = self.swapper.wants(sequence, num_total)
        if not self._acquire(sequence, wants, num_spare_blocks):
            return Refusal.NO_ROOM
        return self.swapper.begin_return(sequence, wants)

    # ------------------------------------------------------------------ growing

    def cover(self, sequence: SequenceBlocks, start: int, end: int) -> tuple[bool, list[PhysicalBlock]]:
        """Let the tables cover the queries `start` … `end` - 1, and give up what left the windows.

        False where a group lacks the blocks: then no table has grown. The blocks given up are returned and still
        referenced: the caller hands them to `release` as soon as no step in flight reads them.
        """
        number = (end - 1) // BLOCK_SIZE
        retired: list[PhysicalBlock] = []
        is_short = False
        for group_id, (group, table, numbers) in enumerate(
            zip(self._groups, sequence.tables, sequence.numbers, strict=True)
        ):
            if group.window and numbers[0] < group.first_seen(start):
                num_left = min(bisect_left(numbers, group.first_seen(start)), len(numbers) - 1)
                retired += [(group_id, block_id) for block_id in table[:num_left]]
                del table[:num_left]
                del numbers[:num_left]
                sequence.note_change()
            is_short |= numbers[-1] < number
        if not is_short:
            return True, retired
        for group, numbers in zip(self._groups, sequence.numbers, strict=True):
            if number - numbers[-1] > group.pool.num_available:
                return False, retired
        owner = self.ledger.owner(sequence.client)
        for group, table, numbers in zip(self._groups, sequence.tables, sequence.numbers, strict=True):
            for new in range(numbers[-1] + 1, number + 1):
                table.append(group.take(owner))
                numbers.append(new)
        sequence.note_change()
        return True, retired

    def drop(self, sequence: SequenceBlocks, dropped: Iterable[int]) -> list[PhysicalBlock]:
        """Forget blocks in the middle of a sequence; returned and still referenced, as from `cover`."""
        sequence.has_dropped = True
        self._unregister(sequence)
        gone = set(dropped)
        retired: list[PhysicalBlock] = []
        for group_id, (table, numbers) in enumerate(zip(sequence.tables, sequence.numbers, strict=True)):
            pairs = list(zip(numbers, table, strict=True))
            retired += [(group_id, block_id) for number, block_id in reversed(pairs) if number in gone]
            numbers[:] = [number for number, _ in pairs if number not in gone]
            table[:] = [block_id for number, block_id in pairs if number not in gone]
        sequence.note_change()
        return retired

    def publish(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> list[PhysicalBlock]:
        """Make the full blocks among the first `num_tokens` tokens shareable.

        To be called when the step that put token `num_tokens - 1` in place is committed. Where another block is known
        under the same key, the sequence goes over to that one. The blocks it had instead are returned and
        still referenced: the caller hands them to `release` as soon as no step in flight reads them.
        """
        is_new = num_tokens // BLOCK_SIZE > sequence.num_published
        if not self.enable_prefix_caching or sequence.has_dropped or not is_new:
            return []
        self.num_changes += 1
        return self._publisher.publish(sequence, token_ids, num_tokens)

    def publish_rest(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """A sequence has ended, and no step in flight names it: make all of its first `num_tokens` tokens reusable.

        What lies behind its last whole block is found by `proceed` alone, which copies what matches.
        """
        self.release(self.publish(sequence, token_ids, num_tokens))
        number, num_left = divmod(num_tokens, BLOCK_SIZE)
        if num_left and self.enable_prefix_caching and not sequence.has_dropped and sequence.num_published == number:
            self._publisher.publish_tail(sequence, token_ids, num_tokens)

    # ------------------------------------------------------------------ giving up

    def release(self, blocks: Iterable[PhysicalBlock]) -> None:
        """Give up the references that `publish`, `cover` and `drop` returned."""
        for group_id, block_id in blocks:
            self._groups[group_id].release(block_id)
        self.num_changes += 1

    def free(self, sequence: SequenceBlocks) -> None:
        """Give up all blocks of a sequence, from the end: what is indexed stays cached, leaves leave first."""
        self._unregister(sequence)
        self.tiers.cancel(sequence)
        for group, table, numbers in zip(self._groups, sequence.tables, sequence.numbers, strict=True):
            for block_id in reversed(table):
                group.release(block_id)
            table.clear()
            numbers.clear()
        if sequence.swapped is None:
            sequence.num_published = 0
            sequence.has_dropped = False
        sequence.counts_hits = False
        sequence.note_change()
        self.num_changes += 1

    def reset(self) -> int:
        """Drop every cached block and what the lower tiers can spare; blocks in use and pinned ones stay.

        Returns how many blocks of the pools were dropped, over all groups.
        """
        self.tiers.reset()
        return self.drop_cached()

    def drop_cached(self) -> int:
        """Drop every cached block of the pools; the lower tiers keep what they have."""
        num_dropped = sum([group.drop_cached() for group in self._groups])
        self.num_changes += 1
        return num_dropped

    def drop_chain(self, key: bytes) -> int:
        """`Chains.drop`: how many blocks have left the pools."""
        self.num_changes += 1
        return self.chains.drop(key)

    def _register(self, sequence: SequenceBlocks, token_ids: Sequence[int], first: int, last: int) -> None:
        """Tell others that this sequence is about to compute or restore blocks `first` … `last` - 1."""
        sequence.chain.extend(token_ids, last * BLOCK_SIZE)
        sequence.registered = range(first, last)
        for key in sequence.chain.keys[first:last]:
            self._computing.setdefault(key, sequence)

    def _unregister(self, sequence: SequenceBlocks) -> None:
        for number in sequence.registered:
            if number >= sequence.num_published and self._computing.get(sequence.chain.keys[number]) is sequence:
                del self._computing[sequence.chain.keys[number]]
        sequence.registered = range(0)

    # ------------------------------------------------------------------ numbers

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence can have in the cache when it is alone."""
        return (
            min(group.pool.num_blocks for group in self._groups) * BLOCK_SIZE
            - self.chains.num_pinned_blocks * BLOCK_SIZE
        )

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """For those who look; whoever changes something goes through the manager."""
        return self._groups

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def has_only_windows(self) -> bool:
        return all(group.window for group in self._groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all groups; 0 where it was not told."""
        return sum(self.tiers.block_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group, as are the next three numbers; `gauges` has all groups."""
        return self._groups[0].pool.num_blocks

    @property
    def num_blocks_active(self) -> int:
        return self._groups[0].pool.num_active

    @property
    def num_blocks_cached(self) -> int:
        return self._groups[0].pool.num_cached

    @property
    def num_blocks_free(self) -> int:
        return self._groups[0].pool.num_free

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that had to give way, over all groups, since the start."""
        return self.ledger.num_evicted["capacity"] + self.ledger.num_evicted["cap"]

    def gauges(self) -> tuple[PoolGauges, ...]:
        return tuple(group.gauges(group_id, self.tiers.ram) for group_id, group in enumerate(self._groups))
