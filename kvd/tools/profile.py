"""`kvd profile`: memory and latency of one request by the length of its context, for one KV format or several.

Purpose: wire options, servers, measuring and reports together. Main thread; the event loop runs inside `run`.
Invariant: a server that was started here is stopped in every way out, and a failure is one line.
"""

from __future__ import annotations

import asyncio
import datetime
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvd import __version__
from kvd.tools import profile_run
from kvd.tools.bench_child import own_server
from kvd.tools.bench_client import Address, connect
from kvd.tools.bench_ending import StatusLine, signals_unwind, unless_ended
from kvd.tools.bench_machine import describe_machine
from kvd.tools.bench_options import key_of_own_server, without_keys
from kvd.tools.output import write_results
from kvd.tools.profile_options import ProfileOptions, parse
from kvd.tools.profile_picture import draw
from kvd.tools.profile_report import Report
from kvd.tools.profile_run import Settings, SideResult


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure, print, write; returns the exit code. Raises ConfigError and BenchFailed."""
    options = parse(words, environment)
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begun = time.monotonic()
    sides: list[SideResult] = []
    with signals_unwind(), StatusLine() as status:
        if options.url is not None:
            sides.append(_measured(options, options.url, options.api_key, seed, status, sides))
        else:
            for server_words in options.servers:
                status.say("starting kvd serve")
                with own_server(server_words) as url:
                    key = key_of_own_server(server_words, environment)
                    sides.append(_measured(options, url, key, seed, status, sides))
    report = Report(
        command=["kvd", "profile", *without_keys(words)],
        kvd_version=__version__,
        started=started,
        seconds=time.monotonic() - begun,
        seed=seed,
        num_runs=options.num_runs,
        num_tokens=options.num_tokens,
        machine=describe_machine(),
        sides=sides,
        old=options.old,
    )
    if options.picture is not None:
        Path(options.picture).write_text(draw(report), encoding="utf-8")
    write_results(report, json_path=options.json)
    return 0


def _measured(
    options: ProfileOptions, url: str, api_key: str | None, seed: int, status: StatusLine, before: Sequence[SideResult]
) -> SideResult:
    """One server, measured; `before` are the others, whose names are taken."""
    result = asyncio.run(unless_ended(_measure(options, url, api_key, seed, status, [side.label for side in before])))
    if isinstance(result, int):
        raise SystemExit(128 + result)
    return result


async def _measure(
    options: ProfileOptions, url: str, api_key: str | None, seed: int, status: StatusLine, taken: Sequence[str]
) -> SideResult:
    address = Address("A", url, options.model, api_key)
    async with connect([address], timeout_seconds=options.timeout_seconds) as (endpoint,):
        about = endpoint.description
        settings = Settings((await endpoint.ask("/kvd/snapshot"))["info"] if about.software == "kvd" else {})
        label = settings.kv_format
        while label in taken:
            label += "'"

        def on_run(length: int, number: int) -> None:
            what = f"run {number} of {options.num_runs}" if number else "warm-up"
            status.say(f"{label}, context of {length} tokens, {what}")

        lengths = await profile_run.measure(
            endpoint,
            lengths=options.lengths,
            num_tokens=options.num_tokens,
            num_runs=options.num_runs,
            seed=seed,
            on_run=on_run,
        )
    context = f", context {about.context_tokens}" if about.context_tokens else ""
    line = f"{about.software} {about.version or ''}".rstrip() + f", {about.model}{context}, KV {label}, {url}"
    return SideResult(label, url, line, settings, lengths)
