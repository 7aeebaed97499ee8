"""A runner without a model: it remembers what every block of the pool and every slot of the RAM tier holds.

It makes saves, copies, restores and computation in the order that `StepPlan` states, and fails on anything that a
real runner would get wrong. What a slot of memory holds is the value that `truth` gives for a token, or None where
nothing was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvd.cache.manager import CacheManager, blocks_for
from kvd.cache.prefix_index import IndexedBlock
from kvd.core import BLOCK_SIZE, Logprobs, PlanItem, Sample, StepPlan, StepResult
from kvd.scheduler.budget import UNKNOWN_TOKEN

from .truth import Truth, masses_of, next_value, sampled_token, score_of

Content = list[int | None]


@dataclass(slots=True)
class Work:
    """What was computed for one request.

    computed  prompt positions that were computed before the first token, whatever became of them
    """

    first_start: int
    next_start: int
    num_computed: int = 0
    num_restarts: int = 0
    high_water: int = 0
    num_recomputed: int = 0
    computed: set[int] = field(default_factory=set)
    has_sampled: bool = False
    largest_chunk: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a step takes."""

    decode_seconds: float = 0.5
    decode_seconds_per_request: float = 0.0
    prefill_seconds_per_token: float = 0.0
    move_seconds: float = 0.0


@dataclass
class FakeRunner:
    """See the module's docstring. `depth`: plans made before the one before is committed."""

    cache: CacheManager
    truths: dict[str, Truth]
    depth: int
    speed: Speed = field(default_factory=Speed)
    work: dict[str, Work] = field(default_factory=dict)
    times_computed: Counter[int] = field(default_factory=Counter)  # full blocks of prompts, by their last value
    num_tokens: int = 0
    copies_seen: int = 0
    saves_seen: int = 0
    restores_seen: int = 0

    def __post_init__(self) -> None:
        gauges = self.cache.gauges()
        self.memory: list[list[Content]] = [_empty(each.num_blocks) for each in gauges]
        self.ram: list[list[Content]] = [_empty(each.num_ram_slots) for each in gauges]
        self.windows = [each.window for each in gauges]
        self._checked: dict[tuple[int, int], tuple[IndexedBlock, Content]] = {}
        self.newest: dict[int, tuple[str, int]] = {}
        self.registered: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.ended_request_ids:
            assert request_id in self.registered, f"told to forget {request_id}, which it never knew"
            self.registered.remove(request_id)
        for request in plan.new_requests:
            assert request.request_id not in self.registered, f"{request.request_id} is new twice"
            assert self.truths[request.request_id].request is request
            self.registered.add(request.request_id)
        self._move(plan)
        assert plan.items or plan.saves or plan.copies or plan.restores, "a plan with nothing to do"
        assert len({item.slot for item in plan.items}) == len(plan.items), "two requests in one slot"
        assert len({item.request_id for item in plan.items}) == len(plan.items)
        for item in plan.items:
            self._check_item(item)
        for item in plan.items:
            self._check_reads(item)
        for item in plan.items:
            self._write(item)
        samples = tuple([self._sample(item) for item in plan.items if item.samples])
        masses = tuple([self._masses(item) for item in plan.items if item.wants_mass])
        scores = tuple([self._scores(item) for item in plan.items if item.num_scored])
        self.num_tokens += plan.num_tokens
        return self._result(plan, samples, masses, scores)

    def check_indexed_blocks(self) -> None:
        """Every shareable block holds the chain of its tokens without a drop, and every known RAM slot is filled."""
        for group_id, (memory, group) in enumerate(zip(self.memory, self.cache._groups, strict=True)):
            for block in group.index:
                content = memory[block.block_id][: len(block.token_ids)]
                known = self._checked.get((group_id, block.block_id))
                if known is not None and known[0] is block and known[1] == content:
                    continue
                assert None not in content, f"block {block.block_id} is shareable and not filled"
                chain = list(accumulate(block.token_ids[1:], next_value, initial=content[0]))
                assert content == chain, f"block {block.block_id} is shareable and holds something else"
                self._checked[group_id, block.block_id] = block, list(content)
        for group_id, by_key in enumerate(self.cache.tiers.ram._by_key):
            for block in by_key.values():
                if block.is_landed:
                    content = self.ram[group_id][block.slot][: len(block.token_ids)]
                    assert None not in content, f"slot {block.slot} is known and not filled"

    # ------------------------------------------------------------------ moves

    def _move(self, plan: StepPlan) -> None:
        targets = [(each.group_id, each.slot) for each in plan.saves]
        assert len(set(targets)) == len(targets), "two blocks are saved in one slot"
        for save in plan.saves:
            self.ram[save.group_id][save.slot] = list(self.memory[save.group_id][save.block_id])
        for copy in plan.copies:
            assert copy.source != copy.target
            content = self.memory[copy.group_id][copy.source][: copy.num_tokens]
            assert None not in content, f"copies {copy.num_tokens} tokens of block {copy.source}, which has fewer"
            self.memory[copy.group_id][copy.target] = [*content, *[None] * (BLOCK_SIZE - copy.num_tokens)]
        for restore in plan.restores:
            self.memory[restore.group_id][restore.block_id] = list(self.ram[restore.group_id][restore.slot])
        self.saves_seen += len(plan.saves)
        self.copies_seen += len(plan.copies)
        self.restores_seen += len(plan.restores)

    # ------------------------------------------------------------------ items

    def _check_item(self, item: PlanItem) -> None:
        truth = self.truths[item.request_id]
        assert item.request_id in self.registered, f"{item.request_id} was never introduced"
        end = item.start + item.num_tokens
        token_ids = list(item.token_ids)
        if item.last_from_slot:
            assert item.samples
            assert token_ids[-1] == UNKNOWN_TOKEN
            owner, token_ids[-1] = self.newest[item.slot]
            assert owner == item.request_id, f"newest token of slot {item.slot} is {owner}'s"
            assert self.depth, "a token is unknown although nothing was in flight"
        assert token_ids == truth.token_ids[item.start : end], f"{item.request_id}: wrong tokens at {item.start}"
        if end == len(truth.token_ids):
            assert truth.finish_reason == "stop", f"{item.request_id} runs past its last token"
            assert item.last_from_slot, f"{item.request_id} runs on although its stop was known"
        assert truth.dropped_at(item.start) == truth.dropped_at(end - 1), f"{item.request_id} computes across a drop"
        self._count(item, end, truth)
        self._check_tables(item, end, truth)

    def _count(self, item: PlanItem, end: int, truth: Truth) -> None:
        num_prompt = len(truth.request.prompt_token_ids)
        work = self.work.get(item.request_id)
        if work is None:
            work = self.work[item.request_id] = Work(item.start, item.start)
            assert item.start < num_prompt
        elif item.start != work.next_start:
            work.num_restarts += 1
        work.next_start = end
        work.num_computed += item.num_tokens
        work.num_recomputed += max(0, min(end, work.high_water) - item.start)
        work.high_water = max(work.high_water, end)
        if not work.has_sampled:
            work.computed.update(range(item.start, min(end, num_prompt)))
        work.has_sampled |= item.samples
        work.largest_chunk = max(work.largest_chunk, item.num_tokens)
        if truth.request.kv_eviction == "heavy_hitter" or truth.request.num_prompt_logprobs is not None:
            return  # it computes what others have, where it needs the attention or the logits
        shareable = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
        if truth.forgotten:
            shareable = min(shareable, truth.forgotten[0][0])
        self.times_computed.update(
            truth.values[blocks_for(item.start + 1) * BLOCK_SIZE - 1 : min(end, shareable) : BLOCK_SIZE]
        )

    def _check_tables(self, item: PlanItem, end: int, truth: Truth) -> None:
        """A table names the blocks that the item's queries see or write to.

        With a window there may be some in front of them until more are needed: at most those of one chunk, the lead of
        the group, and two more.
        """
        dropped = truth.dropped_at(item.start)
        assert len(item.block_tables) == len(item.first_positions) == len(self.memory)
        for window, table, positions in zip(self.windows, item.block_tables, item.first_positions, strict=True):
            needed = max(0, item.start - window + 1) // BLOCK_SIZE if window else 0
            first = positions[0] // BLOCK_SIZE if window else 0
            expected = [number * BLOCK_SIZE for number in range(first, blocks_for(end)) if number not in dropped]
            assert list(positions) == expected, (
                f"{item.request_id} at {item.start}…{end - 1} has blocks at {list(positions)}, not at {expected}"
            )
            assert all(number in dropped for number in range(needed, first)), "a block that is seen is not there"
            spare = blocks_for(self.work[item.request_id].largest_chunk) + blocks_for(window) + 2
            assert needed - first <= spare, f"keeps {needed - first} blocks that left the window"
            assert len(table) == len(positions)
            assert len(set(table)) == len(table), "a table names a block twice"

    def _check_reads(self, item: PlanItem) -> None:
        values = self.truths[item.request_id].values
        for group_id, memory in enumerate(self.memory):
            window = self.windows[group_id]
            seen = max(0, item.start - window + 1) if window else 0
            for block_id, first in zip(item.block_tables[group_id], item.first_positions[group_id], strict=True):
                begin, last = max(first, seen), min(first + BLOCK_SIZE, item.start)
                if begin >= last:
                    continue
                found = memory[block_id][begin - first : last - first]
                assert found == values[begin:last], (
                    f"{item.request_id} reads tokens {begin}…{last - 1} in block {block_id} of group {group_id}: "
                    f"{'unwritten' if None in found else 'not its own'}"
                )

    def _write(self, item: PlanItem) -> None:
        values = self.truths[item.request_id].values
        stop = item.start + item.num_tokens
        for group_id, (group, memory) in enumerate(zip(self.cache._groups, self.memory, strict=True)):
            for block_id, first in zip(item.block_tables[group_id], item.first_positions[group_id], strict=True):
                begin, end = max(first, item.start), min(first + BLOCK_SIZE, stop)
                if begin >= end:
                    continue
                assert group.index.of_block(block_id) is None, f"{item.request_id} writes to a shareable block"
                assert group.pool.references(block_id) == 1, f"{item.request_id} writes to a shared block"
                memory[block_id][begin - first : end - first] = values[begin:end]
                # What was behind is another's: whoever reads on must find it missing.
                memory[block_id][end - first :] = [None] * (first + BLOCK_SIZE - end)

    def _sample(self, item: PlanItem) -> Sample:
        value = self.truths[item.request_id].values[item.start + item.num_tokens - 1]
        token_id = sampled_token(value)
        self.newest[item.slot] = (item.request_id, token_id)
        return Sample(item.request_id, token_id)

    def _masses(self, item: PlanItem) -> tuple[float, ...]:
        values = self.truths[item.request_id].values[item.start : item.start + item.num_tokens]
        return masses_of(values, item.start, [first // BLOCK_SIZE for first in item.first_positions[0]])

    def _scores(self, item: PlanItem) -> tuple[Logprobs, ...]:
        truth, end = self.truths[item.request_id], item.start + item.num_scored
        prompt = truth.request.prompt_token_ids
        assert truth.request.num_prompt_logprobs is not None, f"{item.request_id} did not ask for scores"
        assert item.num_scored <= item.num_tokens
        assert end < len(prompt), f"{item.request_id}: no token of the prompt follows the one at {end - 1}"
        return tuple([score_of(truth.values[at], prompt[at + 1]) for at in range(item.start, end)])

    def _result(
        self,
        plan: StepPlan,
        samples: tuple[Sample, ...],
        masses: Sequence[tuple[float, ...]],
        scores: tuple[tuple[Logprobs, ...], ...],
    ) -> StepResult:
        speed = self.speed
        num_decodes = sum(item.samples and item.num_tokens == 1 for item in plan.items)
        save, restore = len(plan.saves) * speed.move_seconds, len(plan.restores) * speed.move_seconds
        seconds = save + restore
        if plan.items:
            seconds += speed.decode_seconds + num_decodes * speed.decode_seconds_per_request
            seconds += (plan.num_tokens - num_decodes) * speed.prefill_seconds_per_token
        return StepResult(plan.step_id, samples, seconds, save, restore, tuple(masses), scores)


def _empty(number: int) -> list[Content]:
    return [[None] * BLOCK_SIZE for _ in range(number)]
