"""What `kvd top --once` prints: a running kvd as lines of plain text. Pure functions.

Invariant: no line is wider than asked for, and none has a control character, whatever clients call themselves.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len

from kvd.insight import DoctorReport
from kvd.tui.alerts import Alert, choose_alert
from kvd.tui.device import computes_on
from kvd.tui.format import (
    NOTHING,
    age,
    clean,
    duration,
    exact,
    fit,
    fit_right,
    percent,
    rate,
    shorten_middle,
    size,
)
from kvd.tui.rates import Quantile
from kvd.tui.view import Latency, Link, Recent, View
from kvd.views import RequestView

MAX_REQUESTS = 10

_INDENT = " " * len("doctor: ")
_BADGES = {"error": "ERROR", "warning": "warning", "info": "note", "none": "ok"}
_COLUMNS = ((9, "STATE"), (7, "PROMPT"), (4, "HIT"), (7, "OUTPUT"), (6, "TOK/S"), (6, "TTFT"), (5, "AGE"))
"""Width and title of the figures behind a client's name; the first is a word, the others are numbers."""


def status_lines(view: View, report: DoctorReport | None, link: Link, width: int) -> list[str]:
    """Header, throughput, KV cache, the top requests, the alert, and what the doctor says first.

    report: None where the doctor could not be asked.
    """
    lines = [
        *_header(view, link, width),
        *_figures(view),
        *_requests(view, width),
        *_alert(view, link, width),
        *_finding(report, width),
    ]
    return [fit(line, width).rstrip() for line in lines]


def _header(view: View, link: Link, width: int) -> Iterator[str]:
    snapshot, info = view.snapshot, view.snapshot.info
    left = f"kvd {clean(info.version)}  {snapshot.state}, up {age(snapshot.uptime_seconds)}  {clean(link.address)}"
    name = shorten_middle(info.served_names[0] if info.served_names else info.model, width - cell_len(left) - 2)
    yield f"{left}  {name}"
    device = clean(computes_on(info, snapshot.device))
    yield f"{info.quantization}, {device}, context {exact(info.max_model_len)}, KV {info.kv_cache_dtype}"
    yield ""


def _figures(view: View) -> Iterator[str]:
    snapshot, counters = view.snapshot, view.snapshot.counters
    yield f"throughput  prefill {rate(view.prefill_rate)} tok/s, decode {rate(view.decode_rate)} tok/s"
    yield f"latency     TTFT {_latency(view.ttft)}; ITL {_latency(view.itl)}"
    blocks = snapshot.num_blocks
    shares = {
        "active": snapshot.num_blocks_active, "cached": snapshot.num_blocks_cached, "free": snapshot.num_blocks_free
    }  # fmt: skip
    parts = ", ".join(f"{percent(count, blocks)} {name}" for name, count in shares.items())
    yield f"KV pool     {parts} of {exact(blocks)} blocks"
    if snapshot.num_ram_blocks:
        used = percent(snapshot.num_ram_blocks_used, snapshot.num_ram_blocks)
        yield f"KV in RAM   {used} of {exact(snapshot.num_ram_blocks)} blocks"
    if snapshot.disk is not None:
        problem = f"; {snapshot.disk.problem}" if snapshot.disk.problem else ""
        yield f"KV on disk  {size(snapshot.disk.num_bytes)} of {size(snapshot.disk.max_bytes)}{problem}"
    hits = percent(counters.prefix_hit_tokens, counters.prefix_query_tokens)
    yield f"prefix hits {hits} of {exact(counters.prefix_query_tokens)} prompt tokens since the start"
    yield f"requests    {exact(snapshot.num_running)} running, {exact(snapshot.num_waiting)} waiting"
    yield ""


def _latency(latency: Latency) -> str:
    return f"p50 {_quantile(latency.p50)} p95 {_quantile(latency.p95)}"


def _quantile(value: Quantile | None) -> str:
    if value is None:
        return NOTHING
    return (">" if value.is_lower_bound else "") + duration(value.value)


def _requests(view: View, width: int) -> Iterator[str]:
    if not view.requests:
        return
    room = width - sum(columns + 1 for columns, _ in _COLUMNS)
    yield _row("CLIENT", [title for _, title in _COLUMNS], room)
    for row in view.requests[:MAX_REQUESTS]:
        yield _row(row.client or row.request_id, _cells(row), room)
    if (left_out := len(view.requests) - MAX_REQUESTS) > 0:
        yield f"and {exact(left_out)} more"
    yield ""


def _row(client: str, cells: Sequence[str], room: int) -> str:
    word, *numbers = zip(cells, _COLUMNS, strict=True)
    figures = [fit_right(text, columns) for text, (columns, _) in numbers]
    return " ".join([fit(client, room), fit(word[0], word[1][0]), *figures])


def _cells(row: RequestView) -> tuple[str, ...]:
    return (
        row.state,
        exact(row.num_prompt_tokens),
        percent(row.num_cached_tokens, row.num_prompt_tokens),
        exact(row.num_output_tokens),
        rate(row.tokens_per_second),
        duration(row.ttft_seconds),
        age(row.age_seconds),
    )


def _alert(view: View, link: Link, width: int) -> list[str]:
    alert, since = choose_alert(view, link), ""
    if alert.severity == "none":
        # Two snapshots say little about the last minute, which is what alerts are made of.
        earlier = choose_alert(replace(view, recent=_since_start(view)), link)
        if earlier.severity != "none":
            alert, since = earlier, ", since the start"
    return _wrapped(f"{_BADGES[alert.severity]}{since}: {_shortest_whole(alert, width)}", width)


def _shortest_whole(alert: Alert, width: int) -> str:
    """The words that fit a line beside the badge, else the fullest ones, for two lines."""
    return next((text for text in alert.texts if cell_len(text) < width - len("warning: ")), alert.texts[0])


def _since_start(view: View) -> Recent:
    counters = view.snapshot.counters
    return Recent(
        seconds=view.snapshot.uptime_seconds,
        query_tokens=counters.prefix_query_tokens,
        hit_tokens=counters.prefix_hit_tokens,
        preemptions=counters.num_preemptions,
        evicted_blocks=counters.num_evicted_blocks,
        recomputed_tokens=counters.recomputed_tokens,
        prefill_tokens=counters.prefill_tokens_computed,
        generation_tokens=counters.generation_tokens,
        step_seconds=counters.step_seconds,
    )


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(clean(words), width, subsequent_indent=_INDENT)


def _finding(report: DoctorReport | None, width: int) -> Iterator[str]:
    if report is None:
        return
    if not report.findings:
        yield f"doctor: no avoidable misses in {_requests_of(report.num_examined)}"
        return
    first = report.findings[0]
    lost = f"{exact(first.lost_tokens)} tokens lost in {_requests_of(first.num_requests)}"
    yield from _wrapped(f"doctor: {lost}: {first.words}", width)
    yield from _wrapped(_INDENT + first.advice, width)


def _requests_of(count: int) -> str:
    return f"{exact(count)} {'request' if count == 1 else 'requests'}"
