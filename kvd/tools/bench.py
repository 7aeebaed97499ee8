"""`kvd bench`: how fast an OpenAI-compatible endpoint is, alone or against another one under the same load.

Purpose: wire options, endpoints, loads and reports together. Main thread; the event loop runs inside `run`.
Invariant: a server that was started here is stopped in every way out, and a failure is one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from kvd import __version__
from kvd.tools import bench_run
from kvd.tools.bench_child import own_server
from kvd.tools.bench_client import Address, connect
from kvd.tools.bench_loads import Load
from kvd.tools.bench_machine import describe_machine
from kvd.tools.bench_options import BenchOptions, parse
from kvd.tools.bench_picture import draw
from kvd.tools.bench_report import Report, Side

_SECRET_FLAGS = ("--api-key", "--api-key-against")


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure, print, write; returns the exit code. Raises ConfigError and BenchFailed."""
    options = parse(words, environment)
    with _signals_unwind(), contextlib.ExitStack() as stack:
        with _Progress() as progress:
            url = options.url
            if url is None:
                progress.say("starting kvd serve")
                url = stack.enter_context(own_server(options.serve_words))
            report = asyncio.run(_unless_ended(_measure(options, url, words, progress)))
        if isinstance(report, int):
            raise SystemExit(128 + report)
    _write(options, report)
    return 0


async def _unless_ended(measuring: Coroutine[Any, Any, Report]) -> Report | int:
    """What `measuring` returns, or the number of the signal that cancelled it.

    An exception out of a signal handler would surface wherever the event loop happens to be; a cancelled task unwinds.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def leave(number: int) -> None:
        received.append(number)
        task.cancel()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # handlers belong to the main thread
    for number in handled:
        loop.add_signal_handler(number, leave, number)
    try:
        return await measuring
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


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


def _write(options: BenchOptions, report: Report) -> None:
    """Picture, JSON, table; with the JSON on stdout, the table goes to stderr."""
    if options.picture is not None:
        Path(options.picture).write_text(draw(report), encoding="utf-8")
    if options.json is not None:
        text = json.dumps(report.as_dict(), ensure_ascii=False, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    table = sys.stderr if options.json == "-" else sys.stdout
    print("\n".join(report.lines()), file=table)


def without_keys(words: Sequence[str]) -> list[str]:
    """The words with the values of key flags hidden: everything up to the next flag, since a flag may take several."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        flag, separator, _ = word.partition("=")
        if word.startswith("--"):
            is_secret = flag.replace("_", "-") in _SECRET_FLAGS
            shown.append(f"{flag}=(hidden)" if is_secret and separator else word)
        else:
            shown.append("(hidden)" if is_secret else word)
    return shown


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a server of ours does not outlive us."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """One line on a terminal that says what is measured now; nothing elsewhere."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._num_done = 0
        self._num_expected = 0
        self._num_runs = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.say("")

    def expect(self, loads: Sequence[Load], num_runs: int, num_endpoints: int) -> None:
        self._num_runs = num_runs
        self._num_expected = sum(num_runs + load.has_warm_up for load in loads) * num_endpoints

    def step(self, load: Load, number: int, label: str) -> None:
        self._num_done += 1
        what = f"run {number} of {self._num_runs}" if number else "warm-up"
        self.say(f"{self._num_done}/{self._num_expected}  {load.name}, {label}, {what}")

    def say(self, text: str) -> None:
        if self._shows:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
