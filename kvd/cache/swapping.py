"""Swaps the sequences of preempted requests out to RAM, and brings them back.

Owner: the engine thread, through `CacheManager`. What was written through already lies in RAM under its key; only the
others are saved, into slots that have no key and belong to the sequence. All of them are held until it is back or has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.layer_group import LayerGroup
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.ram_tier import RamBlock
from kvd.cache.sequence import Restore, RestoreStep, SequenceBlocks, Swapped, Wanted, blocks_for
from kvd.core import BLOCK_SIZE


class Swapper:
    """See the module's docstring."""

    def __init__(self, groups: Sequence[LayerGroup], tiers: LowerTiers) -> None:
        self._groups = groups
        self._tiers = tiers

    def swap_out(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Plan to save all blocks of the first `num_tokens` tokens, and hold them. The caller frees the blocks then.

        False, and nothing is changed, if the slots do not suffice.
        """
        assert sequence.swapped is None
        entries: list[tuple[int, int, RamBlock]] = []
        saves: list[tuple[int, RamBlock]] = []
        for group_id, (table, numbers) in enumerate(zip(sequence.tables, sequence.numbers, strict=True)):
            for block_id, number in zip(table, numbers, strict=True):
                if number >= blocks_for(num_tokens):
                    break
                block, is_new = self._swap_slot(sequence, group_id, number)
                if block is None:
                    for _, _, held in entries:
                        self._tiers.ram.release(held)
                    return False
                entries.append((group_id, number, block))
                if is_new:
                    saves.append((block_id, block))
        for block_id, block in saves:
            self._tiers.ram.hold(block)  # one hold is the plan's, one the sequence's
            self._tiers.save(block_id, block)
        entries.sort(key=lambda entry: entry[1])
        sequence.swapped = Swapped(num_tokens, entries)
        return True

    def _swap_slot(self, sequence: SequenceBlocks, group_id: int, number: int) -> tuple[RamBlock | None, bool]:
        """A held slot for one block, and whether it is still to be filled."""
        if number < sequence.num_published:
            known = self._tiers.ram.find(group_id, sequence.chain.keys[number])
            if known is not None and known.is_ready:
                self._tiers.ram.hold(known)
                return known, False
        return self._tiers.ram.take(group_id, None), True

    def forget(self, sequence: SequenceBlocks) -> None:
        """Give up what a swapped-out sequence holds."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is not None:
            for _, _, block in swapped.entries:
                self._tiers.ram.release(block)

    def num_saved(self, sequence: SequenceBlocks) -> int:
        """Blocks of the first group that RAM has already."""
        known = sequence.chain.keys[: sequence.num_published]
        return sum([self._tiers.ram.find(0, key) is not None for key in known])

    def wants(self, sequence: SequenceBlocks, num_total: int) -> list[Wanted]:
        """Per group what a swapped-out sequence needs of the pool: what is still there is shared."""
        assert sequence.swapped is not None
        numbers: list[list[int]] = [[] for _ in self._groups]
        for group_id, number, _ in sequence.swapped.entries:
            numbers[group_id].append(number)
        # Its last block may have been completed and published after the swap, by a step that was in flight.
        num_shareable = min(sequence.num_published, sequence.swapped.num_tokens // BLOCK_SIZE)
        wants = []
        for group, own in zip(self._groups, numbers, strict=True):
            wanted: Wanted = []
            for number in own:
                key = sequence.chain.keys[number] if number < num_shareable else None
                wanted.append((number, key if key is not None and key in group.index else None))
            # Where it forgets tokens its table is as long as it may be; `cover` gets it more when it has dropped some.
            last = own[-1] + 1
            end = last if sequence.has_dropped else num_total
            if group.window:
                end = min(end, last + group.lead)
            wants.append([*wanted, *[(number, None) for number in range(last, end)]])
        return wants

    def begin_return(self, sequence: SequenceBlocks, wants: Sequence[Wanted]) -> int:
        """The sequence has got what it wants: set up the restore of the rest; returns the tokens in place."""
        swapped, sequence.swapped = sequence.swapped, None
        assert swapped is not None
        shared = [{number for number, key in wanted if key is not None} for wanted in wants]
        steps: dict[int, RestoreStep] = {}
        for group_id, number, block in swapped.entries:
            if number in shared[group_id]:
                self._tiers.ram.release(block)
            else:
                step = steps.setdefault(number, RestoreStep(number, None, b"", (), 0))
                step.slots[group_id] = block
        if not sequence.has_dropped:
            sequence.num_published = 0  # what is restored is to be published again
        if not steps:
            return swapped.num_tokens
        ordered = [steps[number] for number in sorted(steps)]
        ordered[-1].reaches = swapped.num_tokens
        sequence.restore = Restore(ordered, 0)
        return 0
