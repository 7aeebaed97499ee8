"""`kvd top`: the dashboard of a kvd that runs elsewhere, or its state as one text.

Main thread; one event loop. Invariant: it only ever talks to the URL it was given, and a server that goes away is
something that it shows, not something that ends it; one that was never there is one line and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NoReturn

from kvd.errors import ConfigError
from kvd.insight import DoctorReport
from kvd.log import setup
from kvd.tools.bench_client import parse_root
from kvd.tools.remote_console import INTERVAL_SECONDS, RemoteConsole, RemoteFailed

DEFAULT_URL = "http://127.0.0.1:8000/v1"
ONCE_SECONDS = 0.5
"""Between the two snapshots that a rate is made of."""

TEXT_COLUMNS = 80


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Show the dashboard until it is left, or print the state once; the exit code."""
    parser = _Parser(prog="kvd top", add_help=False, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL)
    parser.add_argument("--key")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readonly", action="store_true")
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--show-prompts", action="store_true")
    parser.add_argument("--interval", type=_interval, default=0.5)
    chosen = parser.parse_args(words)
    root = parse_root(re.sub(r"(/v1)+/*$", "", chosen.url), "URL", allow_remote=True)
    key = chosen.key or environment.get("KVD_API_KEY")
    if chosen.json:
        return asyncio.run(_print_json(RemoteConsole(root, key)))
    if chosen.once or not _has_terminal(environment):
        return asyncio.run(_print_status(RemoteConsole(root, key, interval_seconds=ONCE_SECONDS), chosen.ascii))
    return asyncio.run(_show(RemoteConsole(root, key, interval_seconds=chosen.interval), chosen))


def _interval(text: str) -> float:
    low, high = INTERVAL_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not low <= seconds <= high:
        raise ConfigError(f"--interval: expected {low:g} to {high:g} seconds, got {text[:40]!r}")
    return seconds


def _has_terminal(environment: Mapping[str, str]) -> bool:
    # Textual draws on stderr: with that in a file the screen would end up in there.
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and environment.get("TERM") != "dumb"


async def _print_json(console: RemoteConsole) -> int:
    async with contextlib.aclosing(console):
        text = json.dumps(json.loads(await console.snapshot_json()), indent=2, ensure_ascii=False)
        print(text if _can_print(text) else json.dumps(json.loads(text), indent=2))
    return 0


async def _print_status(console: RemoteConsole, is_ascii: bool) -> int:
    from kvd.tools.status_text import status_lines
    from kvd.tui.glyphs import plain
    from kvd.tui.view import History, Link

    async with contextlib.aclosing(console):
        history = History()
        first = await console.snapshot()
        view = history.add(first, has_details=True)
        while view.snapshot.time == first.time:
            await asyncio.sleep(ONCE_SECONDS / 5)
            view = history.add(await console.snapshot(), has_details=True)
        report = await _ask_doctor(console)
    link = Link(console.root, view.snapshot.info.model, ONCE_SECONDS)
    for line in status_lines(view, report, link, TEXT_COLUMNS):
        print(plain(line) if is_ascii or not _can_print(line) else line)
    return 0


def _can_print(line: str) -> bool:
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


async def _ask_doctor(console: RemoteConsole) -> DoctorReport | None:
    """None where the server has no doctor; the rest of its state is worth printing all the same."""
    try:
        return await console.doctor()
    except RemoteFailed as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise


async def _show(console: RemoteConsole, chosen: argparse.Namespace) -> int:
    from kvd.tui.app import Dashboard

    async with contextlib.aclosing(console):
        try:
            await console.snapshot()
        except RemoteFailed as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            # It loads its model or drains: the dashboard says so, and shows it as soon as it serves.
        problems: list[str] = []

        def keep(level: str, kind: str, message: str) -> None:
            if level == "error":
                problems.append(message)

        setup("warning", to_terminal=False, sink=keep)
        dashboard = Dashboard(
            console,
            address=f"{console.root}/v1",
            model="",
            on_quit="close",
            is_read_only=chosen.readonly,
            is_ascii=chosen.ascii,
            show_prompts=chosen.show_prompts,
            interval_seconds=chosen.interval,
        )
        await dashboard.run_async()
    for problem in problems:
        print(f"kvd: {problem}", file=sys.stderr)
    return 1 if problems else 0
