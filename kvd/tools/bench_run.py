"""The order of a benchmark: load by load, run by run, A and B in alternation, and what came of it.

Event loop only. Invariant: run i of A and run i of B of one load follow each other directly, with prompts of the same
sizes, so that their ratio is little touched by a machine whose speed drifts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.core import BLOCK_SIZE
from kvd.tools.bench_client import ContextRefused, Endpoint
from kvd.tools.bench_documents import DOCUMENT_SHARE, Documents
from kvd.tools.bench_loads import (
    LONG_PREFIX_TOKENS,
    QUESTION_TOKENS,
    SINGLE_TOKENS,
    STREAM_TOKENS,
    SWEEP_LEVELS,
    Load,
    LongPrefix,
    Metric,
    Prefill,
    Sample,
    Streams,
)
from kvd.tools.bench_stats import Spread, knee, paired_ratios, spread

GROUPS = ("single", "prefill-512", "prefill-4k", "streams-8", "streams-16", "ttft", "sweep", "documents")
"""What --only accepts, in the order in which it is measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sample, with when it was taken. `number` counts from 1; 0 is the warm-up, which no summary counts."""

    label: str
    number: int
    sample: Sample
    seconds: float
    client_cpu_seconds: float


@dataclass(slots=True)
class LoadResult:
    """All runs of one load, in the order in which they were measured; or why there are none."""

    load: Load
    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None

    def values(self, label: str, metric: str) -> list[float | None]:
        """One value per counted run."""
        return [run.sample.values[metric] for run in self.counted if run.label == label]

    def spread(self, label: str, metric: str) -> Spread | None:
        return spread(self.values(label, metric))

    def ratio(self, metric: str) -> Spread | None:
        """A ÷ B, pair by pair."""
        return spread(paired_ratios(self.values("A", metric), self.values("B", metric)))

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if run.number > 0]


def make_loads(groups: Sequence[str], context_tokens: int | None, num_tokens: int | None) -> list[Load]:
    """The loads of `groups`, scaled to a context; `num_tokens` replaces the length of their answers.

    Where no context is known, the long prefix has its full length, and the documents are left to `skip_reason`.
    """
    single, stream = num_tokens or SINGLE_TOKENS, num_tokens or STREAM_TOKENS
    room = context_tokens or 2 * LONG_PREFIX_TOKENS
    prefix_tokens = max(1, min(LONG_PREFIX_TOKENS, room // 2))
    document_tokens = max(1, round(room * DOCUMENT_SHARE) - QUESTION_TOKENS)
    loads: list[Load] = [
        Streams("single", "single", "1 stream", 1, single),
        Prefill("prefill-512", "prefill-512", "prefill 512", 512),
        Prefill("prefill-4k", "prefill-4k", "prefill 4096", 4096),
        Streams("streams-8", "streams-8", "8 streams", 8, stream),
        Streams("streams-16", "streams-16", "16 streams", 16, stream),
        LongPrefix("ttft", "ttft", f"TTFT {prefix_tokens}", prefix_tokens),
        *(Streams(f"sweep-{level}", "sweep", str(level), level, stream) for level in SWEEP_LEVELS),
        Documents("documents", "documents", "documents", document_tokens, stream),
    ]
    return [load for load in loads if load.group in groups]


def skip_reason(load: Load, contexts: Mapping[str, int | None]) -> str | None:
    """Why a load cannot be measured; contexts: label → the endpoint's context, None where it is not known."""
    if isinstance(load, Documents) and not any(contexts.values()):
        return "the context is not known; give --context"
    for label, context in contexts.items():
        if context is not None and load.needed_tokens > context:
            return f"needs a context of {load.needed_tokens} tokens; {label} has {context}"
    return None


async def measure(
    loads: Sequence[Load],
    endpoints: Sequence[Endpoint],
    *,
    contexts: Mapping[str, int | None],
    num_runs: int,
    seed: int,
    on_run: Callable[[Load, int, str], None],
) -> list[LoadResult]:
    """Measure every load. `on_run(load, run number, label)` is called before each run. Raises BenchFailed."""
    results = []
    for load in loads:
        result = LoadResult(load, skipped=skip_reason(load, contexts))
        results.append(result)
        if result.skipped:
            continue
        try:
            for number in range(0 if load.has_warm_up else 1, num_runs + 1):
                for endpoint in endpoints:
                    on_run(load, number, endpoint.label)
                    # The label too: two addresses may lead to one server, and then B must not find A's prompts in
                    # its cache. Sizes are the same; which words, does not change how fast a model is.
                    chance = random.Random(f"{seed} {load.name} {number} {endpoint.label}")
                    result.runs.append(await _run(load, endpoint, number, chance))
        except ContextRefused as refusal:
            result.runs.clear()
            result.skipped = str(refusal)
    return results


async def _run(load: Load, endpoint: Endpoint, number: int, chance: random.Random) -> Run:
    begun, cpu = time.perf_counter(), time.process_time()
    sample = await load.run(endpoint, chance)
    return Run(endpoint.label, number, sample, time.perf_counter() - begun, time.process_time() - cpu)


def knees(results: Sequence[LoadResult], labels: Sequence[str]) -> dict[str, int | None]:
    """Label → the knee of its sweep, on the medians of the runs."""
    sweep = [result for result in results if isinstance(result.load, Streams) and result.load.group == "sweep"]
    found = {}
    for label in labels:
        rates: dict[int, float | None] = {}
        for result in sweep:
            assert isinstance(result.load, Streams)
            median = result.spread(label, "whole") if result.runs else None
            rates[result.load.num_streams] = None if median is None else median.median
        found[label] = knee(rates)
    return found


def notes(results: Sequence[LoadResult], labels: Sequence[str]) -> list[str]:
    """What a reader must know to judge the figures: skipped loads, early ends, lengths, missing values, our own CPU."""
    lines = [f"{result.load.name}: skipped: {result.skipped}" for result in results if result.skipped]
    for result in results:
        for label in labels:
            answers = [answer for run in result.counted if run.label == label for answer in run.sample.answers]
            short = [answer.completion_tokens for answer in answers if answer.completion_tokens < answer.max_tokens]
            if short:
                lines.append(
                    f"{result.load.name}: {label} ended {len(short)} of {len(answers)} answers early, the shortest "
                    f"after {min(short)} of {answers[0].max_tokens} tokens"
                )
            found = _unexpected_hits(result, label)
            if found:
                lines.append(f"{result.load.name}: {label} found up to {found} tokens of a new prompt in its cache")
            if "decode" in [metric.name for metric in result.load.metrics]:
                num_unknown = sum(value is None for value in result.values(label, "decode"))
                if num_unknown:
                    lines.append(
                        f"{result.load.name}: {label} gave no decode rate in {num_unknown} runs: at no time did every "
                        "stream decode"
                    )
    shares = {result.load.name: _cpu_share(result.counted) for result in results if result.counted}
    if shares:
        busiest = max(shares, key=lambda name: shares[name])
        overall = _cpu_share([run for result in results for run in result.counted])
        lines.append(
            f"the client itself used {overall:.1%} of one core, at most {shares[busiest]:.1%} ({busiest}); "
            "it shares the machine with the server"
        )
    return lines


def _unexpected_hits(result: LoadResult, label: str) -> int:
    """Most tokens that `label` found of a prompt that it cannot have seen; less than a block is no surprise."""
    if isinstance(result.load, Documents):
        return 0
    num_new = 1 if isinstance(result.load, LongPrefix) else None
    answers = [answer for run in result.counted if run.label == label for answer in run.sample.answers[:num_new]]
    most = max((answer.cached_tokens or 0 for answer in answers), default=0)
    return most if most >= BLOCK_SIZE else 0


def _cpu_share(runs: Sequence[Run]) -> float:
    return sum(run.client_cpu_seconds for run in runs) / sum(run.seconds for run in runs)


def metric_title(load: Load, metric: Metric) -> str:
    """`8 streams, decode together`."""
    return f"{load.title}, {metric.label}" if metric.label else load.title
