"""The document load: many questions about a few long documents, as a knowledge base is asked.

Purpose: what the long-context service of a small team sees, in one table: context, KV memory per request, TTFT with and
without a prefix hit, how many requests are answered at once, and tokens per second of each.
Event loop only. Invariant: the documents of every run are new.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvd.tools.bench_answer import Answer
from kvd.tools.bench_client import Description, Endpoint
from kvd.tools.bench_loads import QUESTION_TOKENS, DocumentShape, Load, Metric, Sample, all_of, whole_rate
from kvd.tools.bench_prompts import joined, random_prompt
from kvd.tools.bench_stats import most_at_once, spread

NUM_REQUESTS = 100
NUM_DOCUMENTS = 10
CONCURRENCY = 8
DOCUMENT_SHARE = 15 / 32
"""Prompt tokens ÷ context: 15K of 32K."""

Visit = Literal["first", "overlapping", "again"]
"""Of a request to its document: nobody asked before; somebody asked and waits for a first token; one was answered."""

METRICS = (
    Metric("context", "largest context", "tokens"),
    Metric("prompt", "prompt", "tokens"),
    Metric("kv", "KV per request", "MiB", "lower"),
    Metric("miss", "TTFT new document", "ms", "lower"),
    Metric("hit", "TTFT seen document", "ms", "lower"),
    Metric("found", "found in cache", "%"),
    Metric("stable", "stable concurrency", "", "higher"),
    Metric("preemptions", "preemptions", "", "lower"),
    Metric("rate", "per request", "tok/s", "higher"),
    Metric("whole", "together", "tok/s", "higher"),
)


@dataclass(frozen=True)
class Documents(Load):
    """`num_requests` questions, `concurrency` at any time, about documents of `document_tokens` tokens each.

    `miss`: median TTFT of requests that found at most half of their prompt in the cache, by the endpoint's own
    `cached_tokens`; `hit`: of the others. An endpoint that does not report `cached_tokens`: `miss` are the first
    requests to their document, `hit` those sent after such a request had its first token, and those between count for
    neither.
    `stable`: the most requests that were between their first and their last chunk at one moment.
    `rate`: median over the requests of (tokens − 1) ÷ (last chunk − first chunk).
    """

    document_tokens: int
    num_tokens: int
    num_requests: int = NUM_REQUESTS
    num_documents: int = NUM_DOCUMENTS
    concurrency: int = CONCURRENCY
    has_warm_up = False  # every document is cold once in every run, as it should be

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", METRICS)

    @property
    def needed_tokens(self) -> int:
        return self.document_tokens + QUESTION_TOKENS + self.num_tokens

    async def run(self, endpoint: Endpoint, chance: random.Random) -> Sample:
        shape = DocumentShape.of(endpoint, self.document_tokens)
        documents = [random_prompt(chance, shape.document_words) for _ in range(self.num_documents)]
        order = [number % self.num_documents for number in range(self.num_requests)]
        chance.shuffle(order)
        questions = [random_prompt(chance, shape.question_words) for _ in order]
        queue = iter(range(self.num_requests))
        answers: dict[int, Answer] = {}

        async def ask() -> None:
            for number in queue:
                prompt = joined((documents[order[number]], questions[number]))
                answers[number] = await endpoint.complete(prompt, self.num_tokens)

        preemptions = await endpoint.num_preemptions()
        await all_of([ask() for _ in range(self.concurrency)])
        after = await endpoint.num_preemptions()
        in_order = [answers[number] for number in range(self.num_requests)]
        misses, hits = split_by_hit(in_order, order)
        ttfts = [spread([1000 * answer.ttft_seconds for answer in some]) for some in (misses, hits)]
        rates = spread([answer.decode_rate for answer in in_order])
        return Sample(
            {
                "context": endpoint.description.context_tokens,
                "prompt": statistics.median(answer.prompt_tokens for answer in in_order),
                "kv": kv_mebibytes(endpoint.description, in_order),
                "miss": None if ttfts[0] is None else ttfts[0].median,
                "hit": None if ttfts[1] is None else ttfts[1].median,
                "found": found_percent(in_order),
                "stable": most_at_once([(answer.first, answer.last) for answer in in_order]),
                "preemptions": None if preemptions is None or after is None else after - preemptions,
                "rate": None if rates is None else rates.median,
                "whole": whole_rate(in_order),
            },
            tuple(in_order),
        )


def visits(answers: Sequence[Answer], documents: Sequence[int]) -> list[Visit]:
    """How each request stood to its document when it was sent; `documents[i]` is that of `answers[i]`."""
    first_sent: dict[int, float] = {}
    answered: dict[int, float] = {}
    for answer, document in zip(answers, documents, strict=True):
        first_sent[document] = min(answer.sent, first_sent.get(document, math.inf))
        answered[document] = min(answer.first, answered.get(document, math.inf))
    return [
        "again" if answer.sent >= answered[document] else "first" if answer.sent == first_sent[document]
        else "overlapping"
        for answer, document in zip(answers, documents, strict=True)
    ]  # fmt: skip


def split_by_hit(answers: Sequence[Answer], documents: Sequence[int]) -> tuple[list[Answer], list[Answer]]:
    """(misses, hits) as `Documents` defines them."""
    misses: list[Answer] = []
    hits: list[Answer] = []
    for answer, visit in zip(answers, visits(answers, documents), strict=True):
        if answer.cached_tokens is not None:
            (hits if answer.cached_tokens > answer.prompt_tokens / 2 else misses).append(answer)
        elif visit != "overlapping":
            (hits if visit == "again" else misses).append(answer)
    return misses, hits


def found_percent(answers: Sequence[Answer]) -> float | None:
    """Prompt tokens found in the cache, in percent of all; None where one answer does not say."""
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if len(cached) < len(answers):
        return None
    return 100 * sum(cached) / sum(answer.prompt_tokens for answer in answers)


def kv_mebibytes(description: Description, answers: Sequence[Answer]) -> float | None:
    """Median over the requests of the whole blocks that prompt and answer take, shared ones counted in full."""
    if description.kv_block_bytes is None or description.kv_bytes_per_token is None:
        return None
    tokens_per_block = description.kv_block_bytes / description.kv_bytes_per_token
    blocks = [math.ceil((answer.prompt_tokens + answer.completion_tokens) / tokens_per_block) for answer in answers]
    return statistics.median(blocks) * description.kv_block_bytes / 2**20
