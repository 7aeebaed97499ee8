"""`kvd doctor`: why prompts missed the cache of a running kvd, and what to change, as text or JSON.

Main thread; one event loop. Invariants: it only reads; no line is wider than `TEXT_COLUMNS` or has a control
character; text of prompts is printed where it was asked for and the server shows it, and nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec

from kvd.errors import ConfigError
from kvd.insight import DoctorReport, Finding, Reveal
from kvd.tools.bench_client import parse_root
from kvd.tools.remote_console import RemoteConsole, RemoteFailed

DEFAULT_URL = "http://127.0.0.1:8000/v1"
TEXT_COLUMNS = 80
MAX_FINDINGS = 20
"""As many are printed; the rest is summed up."""


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print what the doctor of a server found; the exit code."""
    parser = _Parser(prog="kvd doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL)
    parser.add_argument("--key")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show-prompts", action="store_true")
    chosen = parser.parse_args(words)
    root = parse_root(re.sub(r"(/v1)+/*$", "", chosen.url), "URL", allow_remote=True)
    console = RemoteConsole(root, chosen.key or environment.get("KVD_API_KEY"))
    report, examples = asyncio.run(_ask(console, shows_prompts=chosen.show_prompts))
    encoding = sys.stdout.encoding or "utf-8"
    if chosen.json:
        answer: dict[str, Any] = msgspec.to_builtins(report)
        if chosen.show_prompts:
            answer["examples"] = msgspec.to_builtins(examples)
        print(json.dumps(answer, indent=2, ensure_ascii="utf" not in encoding.lower()))
    else:
        print("\n".join(report_lines(report, examples, root)).encode(encoding, "replace").decode(encoding))
    return 0


async def _ask(console: RemoteConsole, *, shows_prompts: bool) -> tuple[DoctorReport, dict[str, Reveal]]:
    """The report and, where they are wanted, the texts behind its examples, by request id."""
    examples: dict[str, Reveal] = {}
    async with contextlib.aclosing(console):
        report = await console.doctor()
        for finding in worth_saying(report)[:MAX_FINDINGS] if shows_prompts else ():
            try:
                examples[finding.example_id] = await console.reveal(finding.example_id)
            except RemoteFailed as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise  # what was forgotten meanwhile is simply not shown
    return report, examples


# --------------------------------------------------------------------------- as text


def worth_saying(report: DoctorReport) -> list[Finding]:
    """The findings that something can be gained from, in their order."""
    found = (finding for finding in report.findings if finding.cause not in ("too_short", "new"))
    return [finding for finding in found if finding.lost_tokens or finding.cause == "other_format"]


def report_lines(report: DoctorReport, examples: Mapping[str, Reveal], root: str) -> list[str]:
    """The report in lines of at most `TEXT_COLUMNS` cells. examples: texts by request id."""
    findings = worth_saying(report)
    lines = [*_summary(report, findings, root)]
    for number, finding in enumerate(findings[:MAX_FINDINGS], 1):
        lines += ["", *_finding_lines(number, finding)]
        if (reveal := examples.get(finding.example_id)) is not None:
            lines += _reveal_lines(reveal)
    if len(findings) > MAX_FINDINGS:
        rest = findings[MAX_FINDINGS:]
        lost = sum(finding.lost_tokens for finding in rest)
        lines += ["", *_wrap(f"{len(rest):,} more findings, of {lost:,} lost tokens, are in --json")]
    return lines


def _summary(report: DoctorReport, findings: Sequence[Finding], root: str) -> Iterator[str]:
    from kvd.tui.format import duration, percent

    requests = f"{report.num_examined:,} request{'s' if report.num_examined != 1 else ''} examined"
    skipped = f", {report.num_skipped:,} skipped for lack of time" if report.num_skipped else ""
    share = percent(report.cached_tokens, report.prompt_tokens)
    cached = f"{share} of {report.prompt_tokens:,} prompt tokens came from the cache"
    if not findings:
        hits = f"; {cached}" if report.prompt_tokens else ""
        yield from _wrap(f"nothing to report: {requests}{skipped}{hits}")
        return
    yield from _wrap(f"{root}: {requests}{skipped}")
    yield from _wrap(cached)
    rate = report.prefill_tokens_per_second
    cost = f": {duration(report.lost_tokens / rate)} of TTFT at {rate:,.0f} tokens/s" if rate > 0 else ""
    yield from _wrap(f"{report.lost_tokens:,} tokens were computed again though they were known{cost}")


def _finding_lines(number: int, finding: Finding) -> Iterator[str]:
    from kvd.tui.format import duration

    cause = finding.cause.replace("_", " ")
    yield from _wrap(f"{number}. {cause}, {finding.endpoint}, client {finding.client or 'unnamed'}", hanging=3)
    yield from _wrap(f"   {finding.words}", hanging=3)
    requests = f"{finding.num_requests:,} request{'s' if finding.num_requests != 1 else ''}"
    seconds = f" and {duration(finding.saved_seconds)} of TTFT" if finding.saved_seconds > 0 else ""
    yield from _wrap(f"   would save {finding.lost_tokens:,} tokens{seconds}, in {requests}", hanging=3)
    yield from _wrap(f"   change: {finding.advice}", hanging=11)
    yield from _wrap(f"   example: {finding.example_id}", hanging=12)


def _reveal_lines(reveal: Reveal) -> Iterator[str]:
    from kvd.tui.comparison import differing, marked_lines

    pieces = differing(reveal.ours, reveal.theirs) if reveal.theirs else ([(reveal.ours, False)], [])
    for name, text in zip(("its text", "earlier one"), pieces, strict=True):
        for at, spans in enumerate(marked_lines(text, TEXT_COLUMNS - 16) if text else ()):
            label = f"{name}:" if at == 0 else ""
            yield f"   {label:<13}{''.join(part for part, _ in spans)}".rstrip()


def _wrap(text: str, hanging: int = 0) -> list[str]:
    """Lines of at most `TEXT_COLUMNS` cells; all but the first begin with `hanging` spaces."""
    from kvd.tui.listing import wrap

    indent = len(text) - len(text.lstrip(" "))
    first, *rest = wrap(text[indent:], TEXT_COLUMNS - max(indent, hanging)) or [""]
    return [" " * indent + first, *(" " * hanging + line for line in rest)]
