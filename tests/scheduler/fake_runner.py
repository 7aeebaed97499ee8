"""A runner without a model: it remembers what every physical slot holds, and whose it is.

The "model" is a chain function: every token's chain value depends on the salt and on all tokens before it, and
the next token is a function of the chain value. So the right output of a request is known beforehand, like
running it alone, and a slot that holds another's value is recognised as such.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from kvd.cache.manager import CacheManager, blocks_for
from kvd.core import BLOCK_SIZE, FinishReason, PlanItem, Request, Sample, StepPlan, StepResult
from kvd.scheduler.budget import UNKNOWN_TOKEN

VOCAB_SIZE = 50
STOP_TOKEN = 0
_MASK = (1 << 64) - 1


def root_chain(salt: str) -> int:
    return zlib.crc32(salt.encode()) + 1


def next_chain(chain: int, token_id: int) -> int:
    chain = (chain * 6364136223846793005 + token_id * 1442695040888963407 + 1) & _MASK
    return chain ^ (chain >> 29)


def sampled_token(chain: int) -> int:
    return (chain >> 20) % VOCAB_SIZE


@dataclass(slots=True)
class Truth:
    """What a request gives when nobody else is there. `chains[p]` belongs to position p."""

    request: Request
    token_ids: list[int]
    chains: list[int]
    finish_reason: FinishReason

    @classmethod
    def of(cls, request: Request, max_total: int) -> Truth:
        chain = root_chain(request.cache_salt)
        token_ids = list(request.prompt_token_ids)
        chains = []
        for token_id in token_ids:
            chain = next_chain(chain, token_id)
            chains.append(chain)
        max_total = min(max_total, len(token_ids) + request.sampling.max_tokens)
        while True:
            token_ids.append(sampled_token(chain))
            chain = next_chain(chain, token_ids[-1])
            chains.append(chain)
            if token_ids[-1] in request.sampling.stop_token_ids:
                return cls(request, token_ids, chains, "stop")
            if len(token_ids) >= max_total:
                return cls(request, token_ids, chains, "length")

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]


@dataclass(slots=True)
class Work:
    """What was computed for one request."""

    first_start: int
    next_start: int
    num_computed: int = 0
    num_restarts: int = 0
    high_water: int = 0
    num_recomputed: int = 0


@dataclass
class FakeRunner:
    """Runs plans in order and fails (AssertionError) on anything that a real runner would get wrong."""

    cache: CacheManager
    truths: dict[str, Truth]
    depth: int
    work: dict[str, Work] = field(default_factory=dict)
    num_tokens: int = 0
    copies_seen: int = 0

    def __post_init__(self) -> None:
        self.memory: list[list[list[int | None]]] = [
            [[None] * BLOCK_SIZE for _ in range(gauges.num_blocks)] for gauges in self.cache.gauges()
        ]
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
        for copy in plan.copies:
            target = self.memory[copy.group_id][copy.target]
            target[: copy.num_tokens] = self.memory[copy.group_id][copy.source][: copy.num_tokens]
            self.copies_seen += 1
        assert plan.items, "a plan with nothing to do"
        assert len({item.slot for item in plan.items}) == len(plan.items), "two requests in one slot"
        assert len({item.request_id for item in plan.items}) == len(plan.items)
        for item in plan.items:
            self._check_item(item)
        for item in plan.items:
            self._check_reads(item)
        for item in plan.items:
            self._write(item)
        samples = tuple(self._sample(item) for item in plan.items if item.samples)
        self.num_tokens += plan.num_tokens
        return StepResult(plan.step_id, samples, 0.5)

    def check_indexed_blocks(self) -> None:
        """Every shareable block has all its tokens, and they are one chain."""
        for memory, group in zip(self.memory, self.cache._groups, strict=True):
            for block in group.index:
                assert None not in memory[block.block_id], f"block {block.block_id} is shareable and not filled"

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
        work = self.work.get(item.request_id)
        if work is None:
            work = self.work[item.request_id] = Work(item.start, item.start)
            assert not item.start % BLOCK_SIZE
            assert item.start < len(truth.request.prompt_token_ids)
        elif item.start != work.next_start:
            assert not item.start % BLOCK_SIZE, f"{item.request_id} goes from {work.next_start} to {item.start}"
            work.num_restarts += 1
        assert len(item.block_tables) == len(item.first_positions) == len(self.memory)
        for table, positions in zip(item.block_tables, item.first_positions, strict=True):
            assert len(table) == len(positions) == blocks_for(end)
            assert list(positions) == list(range(0, end, BLOCK_SIZE))
            assert len(set(table)) == len(table), "a table names a block twice"
        work.next_start = end
        work.num_computed += item.num_tokens
        work.num_recomputed += max(0, min(end, work.high_water) - item.start)
        work.high_water = max(work.high_water, end)

    def _check_reads(self, item: PlanItem) -> None:
        chains = self.truths[item.request_id].chains
        for memory, table in zip(self.memory, item.block_tables, strict=True):
            for number in range(blocks_for(item.start)):
                first = number * BLOCK_SIZE
                last = min(first + BLOCK_SIZE, item.start)
                found = memory[table[number]][: last - first]
                assert found == chains[first:last], (
                    f"{item.request_id} reads tokens {first}…{last - 1} in block {table[number]}: "
                    f"{'unwritten' if None in found else 'not its own'}"
                )

    def _write(self, item: PlanItem) -> None:
        chains = self.truths[item.request_id].chains
        for group, memory, table in zip(self.cache._groups, self.memory, item.block_tables, strict=True):
            for number in range(item.start // BLOCK_SIZE, len(table)):
                block_id = table[number]
                assert group.index.of_block(block_id) is None, f"{item.request_id} writes to a shareable block"
                assert group.pool.references(block_id) == 1, f"{item.request_id} writes to a shared block"
                first = number * BLOCK_SIZE
                begin, end = max(first, item.start), min(first + BLOCK_SIZE, item.start + item.num_tokens)
                memory[block_id][begin - first : end - first] = chains[begin:end]
                # What was behind is another's: whoever reads on must find it missing.
                memory[block_id][end - first :] = [None] * (first + BLOCK_SIZE - end)

    def _sample(self, item: PlanItem) -> Sample:
        chain = self.truths[item.request_id].chains[item.start + item.num_tokens - 1]
        token_id = sampled_token(chain)
        self.newest[item.slot] = (item.request_id, token_id)
        return Sample(item.request_id, token_id)
