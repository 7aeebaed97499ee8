"""`kvd bench`: how fast an OpenAI-compatible endpoint is, alone or against another one under the same load.

Purpose: wire options, endpoints, loads and reports together. Main thread; the event loop runs inside `run`.
Invariant: a server that was started here is stopped in every way out, and a failure is one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvd import __version__
from kvd.tools import bench_run
from kvd.tools.bench_child import own_server
from kvd.tools.bench_client import Address, connect
from kvd.tools.bench_ending import StatusLine, signals_unwind, unless_ended
from kvd.tools.bench_loads import Load
from kvd.tools.bench_machine import describe_machine
from kvd.tools.bench_options import BenchOptions, parse, without_keys
from kvd.tools.bench_picture import draw
from kvd.tools.bench_report import Report, Side
from kvd.tools.output import write_results


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure, print, write; returns the exit code. Raises ConfigError and BenchFailed."""
    options = parse(words, environment)
    with signals_unwind(), contextlib.ExitStack() as stack:
        with _Progress() as progress:
            url = options.url
            if url is None:
                progress.say("starting kvd serve")
                url = stack.enter_context(own_server(options.serve_words))
            report = asyncio.run(unless_ended(_measure(options, url, words, progress)))
        if isinstance(report, int):
            raise SystemExit(128 + report)
    if options.picture is not None:
        Path(options.picture).write_text(draw(report), encoding="utf-8")
    write_results(report, json_path=options.json)
    return 0


async def _measure(options: BenchOptions, url: str, words: Sequence[str], progress: _Progress) -> Report:
    addresses = [Address("A", url, options.model, options.api_key)]
    if options.against is not None:
        addresses.append(Address("B", options.against, options.model_against, options.api_key_against))
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begun = time.monotonic()
    progress.say("asking the endpoints who they are")
    async with connect(addresses, timeout_seconds=options.timeout_seconds) as endpoints:
        contexts = {
            endpoint.label: endpoint.description.context_tokens or options.context_tokens for endpoint in endpoints
        }
        smallest = min((context for context in contexts.values() if context), default=None)
        loads = bench_run.make_loads(options.groups, smallest, options.num_tokens)
        progress.expect(loads, options.num_runs, len(endpoints))
        results = await bench_run.measure(
            loads, endpoints, contexts=contexts, num_runs=options.num_runs, seed=seed, on_run=progress.step
        )
        sides = [Side(endpoint.label, endpoint.root, endpoint.description) for endpoint in endpoints]
    labels = [side.label for side in sides]
    return Report(
        command=["kvd", "bench", *without_keys(words)],
        kvd_version=__version__,
        started=started,
        seconds=time.monotonic() - begun,
        seed=seed,
        num_runs=options.num_runs,
        machine=describe_machine(),
        sides=sides,
        results=results,
        knees=bench_run.knees(results, labels),
        notes=bench_run.notes(results, labels),
    )


class _Progress(StatusLine):
    """Says what is measured now, and how much of all that is."""

    def __init__(self) -> None:
        super().__init__()
        self._num_done = 0
        self._num_expected = 0
        self._num_runs = 0

    def expect(self, loads: Sequence[Load], num_runs: int, num_endpoints: int) -> None:
        self._num_runs = num_runs
        self._num_expected = sum(num_runs + load.has_warm_up for load in loads) * num_endpoints

    def step(self, load: Load, number: int, label: str) -> None:
        self._num_done += 1
        what = f"run {number} of {self._num_runs}" if number else "warm-up"
        self.say(f"{self._num_done}/{self._num_expected}  {load.name}, {label}, {what}")
