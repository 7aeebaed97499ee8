"""What `kvd bench` prints and writes: a table of 80 columns, and everything as one JSON object. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.tools.bench_answer import Answer
from kvd.tools.bench_client import Description
from kvd.tools.bench_documents import CONCURRENCY, NUM_DOCUMENTS, NUM_REQUESTS
from kvd.tools.bench_machine import machine_line
from kvd.tools.bench_run import LoadResult, Run, metric_title
from kvd.tools.bench_stats import KNEE_SHARE, Spread

WIDTH = 80
JSON_FORMAT = 1
"""Goes up when a field changes its meaning or goes away."""

NOT_KNOWN = "n/a"


@dataclass(frozen=True, slots=True)
class Side:
    """One endpoint in the report: its label, where it is, and what it says about itself."""

    label: str
    url: str
    description: Description

    @property
    def line(self) -> str:
        about = self.description
        # A server without a name for its model says the path of the file.
        model = about.model.rsplit("/", 1)[-1] if about.model.startswith("/") else about.model
        context = f", context {about.context_tokens}" if about.context_tokens else ""
        return f"{self.label}: {about.software} {about.version or ''}".rstrip() + f", {model}{context}, {self.url}"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, and on what. `command` has its keys hidden; `started` is ISO 8601, UTC."""

    command: Sequence[str]
    kvd_version: str
    started: str
    seconds: float
    seed: int
    num_runs: int
    machine: dict[str, Any]
    sides: Sequence[Side]
    results: Sequence[LoadResult]
    knees: Mapping[str, int | None]
    notes: Sequence[str]

    def result_of(self, group: str) -> list[LoadResult]:
        """The measured loads of a group; skipped ones are left out."""
        return [result for result in self.results if result.load.group == group and result.counted]

    @property
    def what_is_shown(self) -> str:
        """What the figures are of."""
        return "one run" if self.num_runs == 1 else f"median (least–most) of {self.num_runs} runs"

    # ------------------------------------------------------------------ for people

    def lines(self) -> list[str]:
        """The table, at most WIDTH columns wide."""
        lines = [
            *wrapped(f"kvd bench {self.kvd_version}, {self.started}: {self.what_is_shown}"),
            *wrapped(machine_line(self.machine)),
            *(line for side in self.sides for line in wrapped(side.line)),
        ]
        plain = [result for result in self.results if result.load.group not in ("sweep", "documents")]
        for unit, title in (("tok/s", "tokens per second"), ("ms", "time to first token, ms")):
            rows = [
                (metric_title(result.load, metric), *self._cells(result, metric.name))
                for result in plain
                if result.counted
                for metric in result.load.metrics
                if metric.unit == unit
            ]
            lines += self._table(title, rows)
        sweep = self.result_of("sweep")
        for index, title in enumerate(("sweep, tok/s together", "sweep, TTFT ms")):
            rows = [(result.load.title, *self._cells(result, result.load.metrics[index].name)) for result in sweep]
            if index == 0:
                rows = [self._marked(row) for row in rows]
            lines += self._table(title, rows)
        if sweep:
            lines += wrapped(f"* knee: the smallest concurrency that reaches {KNEE_SHARE:.0%} of the highest rate")
        for result in self.result_of("documents"):
            title = f"documents: {NUM_REQUESTS} requests, {CONCURRENCY} at once, {NUM_DOCUMENTS} texts"
            rows = [
                (f"{metric.label}, {metric.unit}" if metric.unit else metric.label, *self._cells(result, metric.name))
                for metric in result.load.metrics
            ]
            lines += ["", *wrapped(title), *self._table("", rows)[1:]]
        if self.notes:
            lines += ["", *(line for note in self.notes for line in wrapped(note))]
        return lines

    def _cells(self, result: LoadResult, metric: str) -> list[str]:
        """One cell per side, and the ratio where there are two."""
        cells = [shown(result.spread(side.label, metric)) for side in self.sides]
        return [*cells, shown(result.ratio(metric), is_ratio=True)] if len(self.sides) == 2 else cells

    def _marked(self, row: tuple[str, ...]) -> tuple[str, ...]:
        marks = ["*" if self.knees.get(side.label) == int(row[0]) else "" for side in self.sides]
        return tuple(cell + mark for cell, mark in zip(row, ["", *marks, ""][: len(row)], strict=True))

    def _table(self, title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
        if not rows:
            return []
        heads = [side.label for side in self.sides] + (["A/B"] if len(self.sides) == 2 else [])
        widths = [19, 19, 16] if len(heads) == 3 else [24]
        first = WIDTH - sum(widths) - len(widths)
        lines = ["", _line(first, widths, title, heads), "─" * WIDTH]
        for label, *cells in rows:
            lines.append(_line(first, widths, label, cells))
        return lines

    # ------------------------------------------------------------------ for programs

    def as_dict(self) -> dict[str, Any]:
        """For --json: facts, summaries, and every raw sample."""
        labels = [side.label for side in self.sides]
        return {
            "format": JSON_FORMAT,
            "command": list(self.command),
            "kvd_version": self.kvd_version,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "num_runs": self.num_runs,
            "machine": self.machine,
            "endpoints": {side.label: {"url": side.url} | asdict(side.description) for side in self.sides},
            "loads": [_load_dict(result, labels) for result in self.results],
            "knee": dict(self.knees),
            "knee_share": KNEE_SHARE,
            "notes": list(self.notes),
        }


def shown(value: Spread | None, *, is_ratio: bool = False) -> str:
    """`9.5 (8.8–9.7)`; the spread is left out where all runs gave the same."""
    if value is None:
        return NOT_KNOWN
    show = _ratio if is_ratio else number
    if value.least == value.most:
        return show(value.median)
    return f"{show(value.median)} ({show(value.least)}–{show(value.most)})"


def number(value: float) -> str:
    """Three digits that count, or up to five before the point; whole numbers as they are."""
    if value == int(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    if abs(value) >= 99_999.5:
        return f"{value / 1000:.0f}k"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"


def _ratio(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _line(first: int, widths: Sequence[int], label: str, cells: Sequence[str]) -> str:
    right = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
    return " ".join([f"{label:<{first}}", *right]).rstrip()


def wrapped(text: str) -> list[str]:
    """Lines of at most WIDTH columns."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _load_dict(result: LoadResult, labels: Sequence[str]) -> dict[str, Any]:
    names = [metric.name for metric in result.load.metrics] if result.counted else []
    summary: dict[str, Any] = {
        label: {name: _spread_dict(result.spread(label, name)) for name in names} for label in labels
    }
    ratio = {name: _spread_dict(result.ratio(name)) for name in names} if len(labels) == 2 else {}
    return {
        "name": result.load.name,
        "group": result.load.group,
        "skipped": result.skipped,
        "needed_tokens": result.load.needed_tokens,
        "metrics": [asdict(metric) for metric in result.load.metrics],
        "summary": summary,
        "ratio_a_b": ratio,
        "runs": [_run_dict(run) for run in result.runs],
    }


def _spread_dict(value: Spread | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _run_dict(run: Run) -> dict[str, Any]:
    """Times of the answers count from the first request of the run."""
    start = min(answer.sent for answer in run.sample.answers)
    return {
        "endpoint": run.label,
        "run": run.number,
        "counted": run.number > 0,
        "seconds": round(run.seconds, 6),
        "client_cpu_seconds": round(run.client_cpu_seconds, 6),
        "values": dict(run.sample.values),
        "answers": [answer_dict(answer, start) for answer in run.sample.answers],
    }


def answer_dict(answer: Answer, start: float) -> dict[str, Any]:
    """Times count from `start`, in seconds."""
    return {
        "sent": round(answer.sent - start, 6),
        "arrivals": [round(arrival - start, 6) for arrival in answer.arrivals],
        "last": round(answer.last - start, 6),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "max_tokens": answer.max_tokens,
        "cached_tokens": answer.cached_tokens,
    }
