"""What `kvd profile` measures at one server: memory and latency of one request, by the length of its context.

Event loop only. Each run sends a new prompt (cold) and then the same prefix with another question (warm), alone, one
after the other. The warm-up of a length, which no figure of latency counts, is the one during which the server is asked
how many blocks are active: the questions would slow the others down.
Invariant: a length that does not fit is left out with the reason, and everything else of it is empty.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.tools.bench_answer import Answer
from kvd.tools.bench_client import ContextRefused, Endpoint
from kvd.tools.bench_loads import QUESTION_TOKENS, DocumentShape
from kvd.tools.bench_prompts import joined, random_prompt
from kvd.tools.bench_stats import Spread, spread
from kvd.tools.profile_stats import Line, Point, least_squares

POLL_SECONDS = 0.03
"""Between two looks at the blocks. The engine publishes their number every 50 ms."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a length; all of them are better when lower."""

    name: str
    label: str
    unit: str


METRICS = (
    Metric("cold", "TTFT cold", "ms"),
    Metric("warm", "TTFT warm", "ms"),
    Metric("itl", "ITL", "ms"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Blocks that one request of `num_tokens` tokens held at most, as far as the server was seen.

    num_others: most requests that ran besides it; where there were any, the blocks are theirs too.
    """

    num_tokens: int
    num_blocks: int
    num_bytes: int
    num_looks: int
    num_others: int


@dataclass(frozen=True, slots=True)
class Run:
    """One pair of requests. `number` counts from 1; 0 is the warm-up."""

    number: int
    cold: Answer
    warm: Answer

    @property
    def values(self) -> dict[str, float | None]:
        """Metric name → milliseconds; None where the answer came in one chunk."""
        rate = self.cold.decode_rate
        return {
            "cold": 1000 * self.cold.ttft_seconds,
            "warm": 1000 * self.warm.ttft_seconds,
            "itl": None if rate is None else 1000 / rate,
        }

    def tokens_of(self, metric: str) -> float:
        """The number of tokens that a metric is a function of: computed, prompt, or in the context while decoding."""
        if metric == "cold":
            return self.cold.prompt_tokens - (self.cold.cached_tokens or 0)
        if metric == "warm":
            return self.warm.prompt_tokens
        return self.cold.prompt_tokens + self.cold.completion_tokens / 2


@dataclass(slots=True)
class LengthResult:
    """All runs of one length, or why there are none."""

    length: int
    runs: list[Run] = field(default_factory=list)
    memory: Memory | None = None
    skipped: str | None = None

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if run.number > 0]

    def values(self, metric: str) -> list[float | None]:
        """One value per counted run."""
        return [run.values[metric] for run in self.counted]

    def spread(self, metric: str) -> Spread | None:
        return spread(self.values(metric))


@dataclass(frozen=True, slots=True)
class Settings:
    """What a kvd says about itself in its snapshots; empty for another server."""

    info: Mapping[str, Any]

    @property
    def kv_format(self) -> str:
        return str(self.info.get("kv_cache_dtype", "as it is"))

    @property
    def bytes_per_token(self) -> float | None:
        budget = self.info.get("budget")
        return budget["bytes_per_token"] if budget else None


@dataclass(frozen=True, slots=True)
class SideResult:
    """One server with one KV format. `label` names it in tables."""

    label: str
    url: str
    line: str
    settings: Settings
    lengths: Sequence[LengthResult]

    @property
    def counted(self) -> list[LengthResult]:
        return [result for result in self.lengths if result.counted]

    def points(self, metric: str) -> list[Point]:
        """(tokens, milliseconds) of every counted run; for "kv" (tokens, bytes) of every length."""
        if metric == "kv":
            seen = [result.memory for result in self.lengths if result.memory is not None]
            return [(memory.num_tokens, memory.num_bytes) for memory in seen if not memory.num_others]
        runs = [run for result in self.lengths for run in result.counted]
        return [(run.tokens_of(metric), value) for run in runs if (value := run.values[metric]) is not None]

    def line_of(self, metric: str) -> Line | None:
        return least_squares(self.points(metric))


async def measure(
    endpoint: Endpoint,
    *,
    lengths: Sequence[int],
    num_tokens: int,
    num_runs: int,
    seed: int,
    on_run: Callable[[int, int], None],
) -> list[LengthResult]:
    """Measure every length that fits. `on_run(length, run number)` is called before each run. Raises BenchFailed."""
    is_kvd = endpoint.description.software == "kvd"
    context = endpoint.description.context_tokens
    results = []
    for length in lengths:
        result = LengthResult(length)
        results.append(result)
        if context is not None and length > context:
            result.skipped = f"the context holds {context} tokens"
            continue
        chance = random.Random(f"{seed} {length}")
        try:
            for number in range(num_runs + 1):
                on_run(length, number)
                watch = _Watch(endpoint) if is_kvd and number == 0 else None
                result.runs.append(await _run(endpoint, length, num_tokens, number, chance, watch))
                if watch is not None:
                    result.memory = watch.memory(result.runs[-1].cold)
        except ContextRefused as refusal:
            result.runs.clear()
            result.memory = None
            result.skipped = str(refusal)
    return results


async def _run(
    endpoint: Endpoint, length: int, num_tokens: int, number: int, chance: random.Random, watch: _Watch | None
) -> Run:
    shape = DocumentShape.of(endpoint, length - num_tokens - QUESTION_TOKENS)
    prefix = random_prompt(chance, shape.document_words)
    prompts = [joined((prefix, random_prompt(chance, shape.question_words))) for _ in range(2)]
    cold = endpoint.complete(prompts[0], num_tokens)
    return Run(
        number,
        await (cold if watch is None else watch.during(cold)),
        await endpoint.complete(prompts[1], 1),
    )


class _Watch:
    """Looks at the active blocks of a kvd while something runs there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._num_before = 0
        self._num_most = 0
        self._num_running = 0
        self._num_looks = 0
        self._block_bytes = 0

    async def during(self, answering: Any) -> Answer:
        """The answer; meanwhile the server is asked again and again. Raises BenchFailed."""
        before = await self._endpoint.ask("/kvd/snapshot")
        self._num_before = before["num_blocks_active"]
        self._block_bytes = before["info"]["budget"]["block_bytes"]
        self._num_running = before["num_running"] + 1 if before["num_running"] else 0
        task = asyncio.ensure_future(answering)
        try:
            while not task.done():
                snapshot = await self._endpoint.ask("/kvd/snapshot")
                self._num_looks += 1
                self._num_most = max(self._num_most, snapshot["num_blocks_active"])
                self._num_running = max(self._num_running, snapshot["num_running"])
                await asyncio.wait({task}, timeout=POLL_SECONDS)
            answer: Answer = await task
        finally:
            task.cancel()
        return answer

    def memory(self, answer: Answer) -> Memory | None:
        """None where the request came and went between two looks."""
        num_blocks = self._num_most - self._num_before
        if num_blocks <= 0:
            return None
        return Memory(
            num_tokens=answer.prompt_tokens + answer.completion_tokens,
            num_blocks=num_blocks,
            num_bytes=num_blocks * self._block_bytes,
            num_looks=self._num_looks,
            num_others=max(0, self._num_running - 1),
        )
