"""Moves blocks between the KV pool and the tiers below it. Owner: the engine thread, through `CacheManager`.

Down: a block that is published is noted, and saved by the next plan (write-through); when that plan has been run it
goes on to the slow tier. Up: a `Restore` lists the blocks of a sequence that come from below. Steps are planned in
order, so a sequence's tokens are always in place from its start on; a step that is not to be had ends the restore, and
what is left is computed.

Whatever a plan reads or writes is held until the plan has landed or is void. Every wait is for something that the slow
tier has under way, and the slow tier answers everything, so no restore waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.layer_group import LayerGroup
from kvd.cache.prefix_index import is_beginning
from kvd.cache.ram_tier import RamBlock, RamTier
from kvd.cache.sequence import Restore, RestoreStep, SequenceBlocks
from kvd.cache.tiers import NO_TOKEN, NoSlowTier, SlowTier
from kvd.core import BLOCK_SIZE, BlockCopy, BlockTransfer, StepPlan

LOOK_AHEAD_STEPS = 64
"""Steps of one restore for which slots are held at a time: enough to keep a disk busy, and room is left for others."""


class LowerTiers:
    """RAM and slow tier of all groups. Counters are cumulative, in blocks over all groups."""

    def __init__(self, groups: Sequence[LayerGroup], ram: RamTier, slow: SlowTier, block_bytes: Sequence[int]) -> None:
        self.ram = ram
        self.slow = slow
        self.block_bytes = tuple(block_bytes)
        self.num_saved = self.num_restored = self.num_loaded = self.num_unsaved = 0
        self.hit_tokens = {"partial": 0, "ram": 0, "disk": 0}
        self._groups = groups
        self._has_room = all(ram.num_slots)
        self._has_slow = not isinstance(slow, NoSlowTier)
        self._published: list[tuple[int, int, bytes, bytes, tuple[int, ...]]] = []
        self._saves: list[BlockTransfer] = []
        self._copies: list[BlockCopy] = []
        self._restores: list[BlockTransfer] = []
        self._num_under_way = 0  # stores and loads that the slow tier has not answered

    @property
    def is_busy(self) -> bool:
        """The slow tier has something under way."""
        return self._num_under_way > 0

    @property
    def has_moves(self) -> bool:
        """There is something for a plan to save, or something that the slow tier has under way to be taken in."""
        return bool(self._published) or self._num_under_way > 0

    # ------------------------------------------------------------------ plans

    def begin_plan(self) -> None:
        """Take in what the slow tier has done, and save what was published. Before any block of the plan is taken."""
        if self._num_under_way:
            for done in self.slow.poll():
                self._num_under_way -= 1
                block = self.ram.at(done.group_id, done.slot)
                if done.is_load and done.ok:
                    block.is_ready = block.is_landed = True
                elif done.is_load:
                    self.ram.fail(block)
                self.ram.release(block)
        for group_id, block_id, key, parent_key, token_ids in self._published:
            if self.ram.find(group_id, key) is None:
                slot = self.ram.take(group_id, key, parent_key, token_ids)
                if slot is None:
                    self.num_unsaved += 1
                else:
                    self.save(block_id, slot)
        self._published.clear()

    def take_transfers(self) -> tuple[tuple[BlockTransfer, ...], tuple[BlockCopy, ...], tuple[BlockTransfer, ...]]:
        """What the plan at hand has to move: saves, copies, restores."""
        transfers = tuple(self._saves), tuple(self._copies), tuple(self._restores)
        self._saves.clear()
        self._copies.clear()
        self._restores.clear()
        return transfers

    def land(self, plan: StepPlan) -> None:
        """A plan was run: what it saved goes on to the slow tier, what it read may go."""
        for transfer in plan.saves:
            block = self.ram.at(transfer.group_id, transfer.slot)
            block.is_landed = True
            if block.key is not None and not block.has_failed and not block.is_withdrawn:
                self.num_saved += 1
                self._store(block, block.key)
            self.ram.release(block)
        for transfer in plan.restores:
            self.ram.release(self.ram.at(transfer.group_id, transfer.slot))

    def void(self, plan: StepPlan) -> None:
        """A plan is not going to be run, or failed: nobody may use what it should have saved."""
        for transfer in plan.saves:
            block = self.ram.at(transfer.group_id, transfer.slot)
            self.ram.fail(block)
            self.ram.release(block)
        for transfer in plan.restores:
            self.ram.release(self.ram.at(transfer.group_id, transfer.slot))

    def publish(self, group_id: int, block_id: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """A block is complete. The next plan saves it before it does anything else."""
        if self._has_room:
            self._published.append((group_id, block_id, key, parent_key, token_ids))

    def overwrite(self, group_id: int, block_id: int) -> None:
        """A block gets other content at once, without a plan: what was published in it can be saved no more."""
        self._published = [each for each in self._published if each[:2] != (group_id, block_id)]

    def drop_tails(self, group_id: int, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Give up RAM slots of incomplete blocks that hold a beginning of these tokens."""
        for block in self.ram.continuations(group_id, parent_key, token_ids[0]):
            if is_beginning(block.token_ids, token_ids):
                self.ram.forget_if_idle(block)

    def forget(self, key: bytes) -> None:
        """Nobody is to find a block below the pools any more; who has begun to read it may go on."""
        self._published = [each for each in self._published if each[2] != key]
        for group_id in range(len(self._groups)):
            block = self.ram.find(group_id, key)
            if block is not None:
                self.ram.withdraw(block)
            if self._has_slow:
                self.slow.forget(group_id, key)

    def reset(self) -> tuple[int, int]:
        """Forget what nobody holds, in RAM and below; (RAM slots, blocks of the slow tier)."""
        self._published.clear()
        return self.ram.reset(), self.slow.reset()

    def save(self, block_id: int, block: RamBlock) -> None:
        """Plan a save into a slot; the hold that came with the slot is the plan's."""
        block.is_ready = True
        self._saves.append(BlockTransfer(block.group_id, block_id, block.slot))

    def _store(self, block: RamBlock, key: bytes) -> None:
        if self._has_slow and not self.slow.contains(block.group_id, key):
            self.ram.hold(block)
            self._num_under_way += 1
            token_ids = (*block.token_ids, *[NO_TOKEN] * (BLOCK_SIZE - len(block.token_ids)))
            self.slow.store(block.group_id, block.slot, key, block.parent_key, token_ids)

    # ------------------------------------------------------------------ from below to a sequence

    def has(self, key: bytes) -> str | None:
        """Where a block can be had in every group: "pool", "ram", "disk" (the slowest of the groups), or nowhere."""
        place = "pool"
        for group_id, group in enumerate(self._groups):
            if key in group.index:
                continue
            if self.ram.find(group_id, key) is not None:
                place = "ram" if place == "pool" else place
            elif self._has_room and self.slow.contains(group_id, key):
                place = "disk"
            else:
                return None
        return place

    def proceed(self, sequence: SequenceBlocks, max_blocks: int) -> int:
        """Plan the next steps of a restore, at most `max_blocks` of them; returns the tokens that are then in place."""
        restore = sequence.restore
        assert restore is not None
        self._prepare(restore)
        while restore.num_done < len(restore.steps) and max_blocks > 0:
            step = restore.steps[restore.num_done]
            is_possible = self._is_possible(restore)
            if is_possible is None:
                return restore.reached
            if not is_possible:
                self.cancel(sequence)
                return restore.reached
            self._plan_step(sequence, step, restore.brought)
            restore.num_done += 1
            restore.reached = step.reaches
            max_blocks -= 1
            self._prepare(restore)
        if restore.num_done == len(restore.steps):
            sequence.restore = None
        return restore.reached

    def cancel(self, sequence: SequenceBlocks) -> None:
        """Give up what is left of a restore."""
        restore, sequence.restore = sequence.restore, None
        if restore is not None:
            for step in restore.steps[restore.num_done :]:
                for block in step.slots.values():
                    self.ram.release(block)

    def _prepare(self, restore: Restore) -> None:
        """Hold the slots of the steps to come, and have loaded what is in none."""
        last = min(len(restore.steps), restore.num_done + LOOK_AHEAD_STEPS)
        while restore.num_prepared < last:
            step = restore.steps[restore.num_prepared]
            if step.key is not None and not self._prepare_step(step, step.key):
                return
            restore.num_prepared += 1

    def _prepare_step(self, step: RestoreStep, key: bytes) -> bool:
        """False when there is no slot at the moment."""
        for group_id, group in enumerate(self._groups):
            if group_id in step.slots or key in group.index:
                continue
            block = self.ram.find(group_id, key)
            if block is not None:
                self.ram.hold(block)
            elif not self.slow.contains(group_id, key):
                step.has_failed = True
                return True
            else:
                block = self.ram.take(group_id, key, step.parent_key, step.token_ids)
                if block is None:
                    # Slots come back when the slow tier is done; if it has nothing to do, they are others' for long.
                    step.has_failed = not self._num_under_way
                    return step.has_failed
                self.ram.hold(block)  # one hold is the load's, one the step's
                self._num_under_way += 1
                self.num_loaded += 1
                step.from_disk = True
                self.slow.load(group_id, block.slot, key)
            step.slots[group_id] = block
        return True

    def _is_possible(self, restore: Restore) -> bool | None:
        """Whether the next step can be planned now; None: not yet."""
        step = restore.steps[restore.num_done]
        if step.has_failed:
            return False
        if step.key is not None and restore.num_done == restore.num_prepared:
            return None
        is_ready = True
        for group_id, group in enumerate(self._groups):
            if step.key is None or step.key in group.index:
                continue
            block = step.slots.get(group_id)
            if block is None:  # it was in the pool when the step was prepared, and has left since
                block = self.ram.find(group_id, step.key)
                if block is None:
                    return False
                self.ram.hold(block)
                step.slots[group_id] = block
            if block.has_failed:
                return False
            is_ready &= block.is_ready
        return True if is_ready else None

    def _plan_step(self, sequence: SequenceBlocks, step: RestoreStep, brought: dict[str, int]) -> None:
        used = "pool"
        for group_id, group in enumerate(self._groups):
            entry = sequence.entry_of(group_id, step.number)
            block = step.slots.pop(group_id, None)
            in_pool = group.index.find(step.key) if step.key is not None else None
            if entry is None or (block is None and in_pool is None):
                # The group gave the block up before the swap, or shares it already.
                if block is not None:
                    self.ram.release(block)
                continue
            own = sequence.tables[group_id][entry]
            if in_pool is not None:
                if block is not None:
                    self.ram.release(block)
                in_pool.num_hits += 1
                group.index.ends.was_hit(in_pool)
                if step.num_copied < BLOCK_SIZE:
                    self._copies.append(BlockCopy(group_id, in_pool.block_id, own, step.num_copied))
                else:
                    sequence.tables[group_id][entry] = group.share(in_pool.key)
                    sequence.note_change()
                    group.release(own)
            else:
                assert block is not None
                self.num_restored += 1
                used = "disk" if step.from_disk else "ram"
                self._restores.append(BlockTransfer(group_id, own, block.slot))
        place = "partial" if used == "pool" and step.num_copied < BLOCK_SIZE else used
        num_tokens = step.num_copied
        if step.key is None and step.reaches:
            num_tokens = step.reaches - step.number * BLOCK_SIZE  # the last block of a swapped-out sequence
        brought[place] = brought.get(place, 0) + num_tokens
        if sequence.counts_hits:
            if step.num_copied < BLOCK_SIZE:
                self.hit_tokens["partial"] += step.num_copied
            if used != "pool":
                self.hit_tokens[used] += step.num_copied
