"""The loads of `kvd bench`: what is sent, and which figures come of it.

Purpose: each load sends one run of requests to one endpoint and returns a `Sample`; who alternates, repeats and
compares is `bench_run`. Event loop only. Invariant: every prompt of a run is new, so that nothing but what a load
means to share is ever found in a cache.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvd.tools.bench_answer import Answer
from kvd.tools.bench_client import Endpoint
from kvd.tools.bench_prompts import Prompt, joined, random_prompt
from kvd.tools.bench_stats import spread

Result = TypeVar("Result")

PROMPT_TOKENS = 32
QUESTION_TOKENS = 32
SINGLE_TOKENS = 128
STREAM_TOKENS = 64
SWEEP_LEVELS = (1, 2, 4, 8, 16, 32)
LONG_PREFIX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a load. `better`: which direction is good; None for plain facts."""

    name: str
    label: str
    unit: str
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one load at one endpoint: metric name → value, None where it cannot be known, and the raw answers."""

    values: Mapping[str, float | None]
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Load(ABC):
    """`group` is what --only names; `needed_tokens` the context that its longest request takes."""

    name: str
    group: str
    title: str
    metrics: tuple[Metric, ...] = field(init=False)
    has_warm_up = True

    @property
    @abstractmethod
    def needed_tokens(self) -> int: ...

    @abstractmethod
    async def run(self, endpoint: Endpoint, chance: random.Random) -> Sample:
        """Send one run; `chance` makes its prompts. Raises BenchFailed."""


@dataclass(frozen=True)
class Streams(Load):
    """`num_streams` short prompts sent at once, `num_tokens` tokens each.

    `decode`: with one stream its own rate. With several the tokens of all streams that came within the common
    interval ÷ its length; it begins when the last stream gets its first chunk and ends when the first stream gets its
    last one, so that in it every stream decodes and no prompt is computed. None where streams wait for others to
    finish and there is no such interval.
    `whole`: all tokens ÷ the time from sending to the last chunk of all, prompts and waiting included.
    `ttft`: median over the streams.
    """

    num_streams: int
    num_tokens: int

    def __post_init__(self) -> None:
        decode = Metric("decode", "decode", "tok/s", "higher")
        whole = Metric("whole", "overall", "tok/s", "higher")
        ttft = Metric("ttft", "TTFT", "ms", "lower")
        metrics = (whole, ttft) if self.group == "sweep" else (decode,) if self.num_streams == 1 else (decode, whole)
        object.__setattr__(self, "metrics", metrics)

    @property
    def needed_tokens(self) -> int:
        return PROMPT_TOKENS + self.num_tokens

    async def run(self, endpoint: Endpoint, chance: random.Random) -> Sample:
        num_words = endpoint.sizer.words_for(PROMPT_TOKENS)
        prompts = [random_prompt(chance, num_words) for _ in range(self.num_streams)]
        answers = await together(endpoint, prompts, self.num_tokens)
        ttft = spread([answer.ttft_seconds for answer in answers])
        known: dict[str, float | None] = {
            "decode": answers[0].decode_rate if self.num_streams == 1 else common_rate(answers),
            "whole": whole_rate(answers),
            "ttft": None if ttft is None else 1000 * ttft.median,
        }
        return Sample({metric.name: known[metric.name] for metric in self.metrics}, tuple(answers))


@dataclass(frozen=True)
class Prefill(Load):
    """One new prompt of `num_tokens` tokens, one token back: prompt tokens that were computed ÷ TTFT."""

    num_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", (Metric("rate", "", "tok/s", "higher"),))

    @property
    def needed_tokens(self) -> int:
        return self.num_tokens + 1

    async def run(self, endpoint: Endpoint, chance: random.Random) -> Sample:
        answer = await endpoint.complete(random_prompt(chance, endpoint.sizer.words_for(self.num_tokens)), 1)
        computed = answer.prompt_tokens - (answer.cached_tokens or 0)
        return Sample({"rate": computed / answer.ttft_seconds}, (answer,))


@dataclass(frozen=True)
class LongPrefix(Load):
    """A new long prefix with a question (cold), then the same prefix with another question (warm)."""

    prefix_tokens: int

    def __post_init__(self) -> None:
        metrics = (Metric("cold", "cold", "ms", "lower"), Metric("warm", "warm", "ms", "lower"))
        object.__setattr__(self, "metrics", metrics)

    @property
    def needed_tokens(self) -> int:
        return self.prefix_tokens + QUESTION_TOKENS + 1

    async def run(self, endpoint: Endpoint, chance: random.Random) -> Sample:
        shapes = DocumentShape.of(endpoint, self.prefix_tokens)
        prefix = random_prompt(chance, shapes.document_words)
        answers = []
        for _ in ("cold", "warm"):
            question = random_prompt(chance, shapes.question_words)
            answers.append(await endpoint.complete(joined((prefix, question)), 1))
        cold, warm = (1000 * answer.ttft_seconds for answer in answers)
        return Sample({"cold": cold, "warm": warm}, tuple(answers))


@dataclass(frozen=True, slots=True)
class DocumentShape:
    """Words of a long text and of a question about it that together make `document_tokens` + QUESTION_TOKENS."""

    document_words: int
    question_words: int

    @classmethod
    def of(cls, endpoint: Endpoint, document_tokens: int) -> DocumentShape:
        whole = endpoint.sizer.words_for(document_tokens + QUESTION_TOKENS)
        short = endpoint.sizer.words_for(QUESTION_TOKENS)
        return cls(max(1, whole - short), short)


async def together(endpoint: Endpoint, prompts: Sequence[Prompt], num_tokens: int) -> list[Answer]:
    """All prompts at once."""
    return await all_of([endpoint.complete(prompt, num_tokens) for prompt in prompts])


async def all_of(jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all jobs, run side by side; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def common_rate(answers: Sequence[Answer]) -> float | None:
    """Tokens per second of all streams while every one of them decodes; see `Streams`."""
    begin = max(answer.first for answer in answers)
    end = min(answer.last for answer in answers)
    if end <= begin:
        return None
    return sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin)


def whole_rate(answers: Sequence[Answer]) -> float:
    """All tokens ÷ the time from the first request sent to the last chunk received."""
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.completion_tokens for answer in answers) / seconds
