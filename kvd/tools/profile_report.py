"""What `kvd profile` prints and writes: tables of 80 columns, and everything as one JSON object. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.core import BLOCK_SIZE
from kvd.tools.bench_machine import machine_line
from kvd.tools.bench_report import NOT_KNOWN, WIDTH, answer_dict, number, shown, wrapped
from kvd.tools.profile_compare import Comparison, compare
from kvd.tools.profile_options import JSON_FORMAT, JSON_KIND
from kvd.tools.profile_run import METRICS, LengthResult, Run, SideResult
from kvd.tools.profile_stats import Line


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, and on what. `command` has its keys hidden; `started` is ISO 8601, UTC.

    `old`: an earlier result, as it is in JSON, to compare with.
    """

    command: Sequence[str]
    kvd_version: str
    started: str
    seconds: float
    seed: int
    num_runs: int
    num_tokens: int
    machine: dict[str, Any]
    sides: Sequence[SideResult]
    old: Mapping[str, Any] | None = None

    @property
    def what_is_shown(self) -> str:
        """What the figures are of."""
        return "one run" if self.num_runs == 1 else f"median (least–most) of {self.num_runs} runs"

    @property
    def comparison(self) -> Comparison | None:
        return None if self.old is None else compare(self.old, self._measured())

    # ------------------------------------------------------------------ for people

    def lines(self) -> list[str]:
        """The tables, at most WIDTH columns wide."""
        lines = [
            *wrapped(f"kvd profile {self.kvd_version}, {self.started}: {self.what_is_shown}"),
            *wrapped(machine_line(self.machine)),
            *(line for side in self.sides for line in wrapped(side.line)),
            *self._memory_table(),
            *self._latency_table(),
            *self._slope_table(),
        ]
        if self.comparison is not None:
            lines += _comparison_lines(self.comparison)
        notes = self.notes()
        return lines + (["", *(line for note in notes for line in wrapped(note))] if notes else [])

    def _rows(self) -> list[tuple[SideResult, LengthResult]]:
        """Measured lengths, those of one length beside each other."""
        lengths = sorted({result.length for side in self.sides for result in side.counted})
        return [
            (side, result) for length in lengths for side in self.sides for result in side.counted
            if result.length == length
        ]  # fmt: skip

    def _named(self, side: SideResult, length: int | None = None) -> list[str]:
        """The first cells of a row: context, and the side where there are several."""
        return [*([] if length is None else [str(length)]), *([side.label] if len(self.sides) > 1 else [])]

    def _memory_table(self) -> list[str]:
        rows = []
        for side, result in self._rows():
            memory, per_token = result.memory, side.settings.bytes_per_token
            if memory is not None and per_token is not None:
                predicted = memory.num_tokens * per_token
                share = f"{memory.num_bytes / predicted - 1:+.1%}"
                sizes = [f"{num_bytes / 2**20:.2f}" for num_bytes in (memory.num_bytes, predicted)]
                rows.append([*self._named(side, result.length), str(memory.num_tokens), str(memory.num_blocks), *sizes,
                             share])  # fmt: skip
        head = ["tokens", "blocks", "MiB", "predicted MiB", "more"]
        return _table("KV cache of one request", self._head(head), rows)

    def _latency_table(self) -> list[str]:
        rows = [
            [*self._named(side, result.length), *(shown(result.spread(metric.name)) for metric in METRICS)]
            for side, result in self._rows()
        ]
        return _table("latency", self._head([f"{metric.label}, {metric.unit}" for metric in METRICS]), rows)

    def _slope_table(self) -> list[str]:
        rows = []
        for side in self.sides:
            lines = [side.line_of(name) for name in ("kv", *(metric.name for metric in METRICS))]
            if any(lines):
                predicted = side.settings.bytes_per_token
                rows.append([
                    *self._named(side), _slope(lines[0], 1), NOT_KNOWN if predicted is None else number(predicted),
                    *(_slope(line, 1000) for line in lines[1:]),
                ])  # fmt: skip
        head = ["KV bytes", "predicted", *(f"{metric.label}, µs" for metric in METRICS)]
        return _table("each token more (least squares)", self._head(head, has_length=False), rows)

    def _head(self, cells: list[str], *, has_length: bool = True) -> list[str]:
        return [*(["context"] if has_length else []), *(["KV"] if len(self.sides) > 1 else []), *cells]

    def notes(self) -> list[str]:
        """What a reader must know to judge the figures."""
        notes = []
        for side in self.sides:
            name = f"{side.label}, " if len(self.sides) > 1 else ""
            if not side.settings.info:
                notes.append(f"{name}this server is no kvd, so its KV cache cannot be seen")
            for result in side.lengths:
                notes += [f"{name}{result.length}: {words}" for words in _notes_of(result, bool(side.settings.info))]
        if self.comparison is not None:
            notes += [f"compared with the older result: {words}" for words in self.comparison.notes]
        return notes

    # ------------------------------------------------------------------ for programs

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: settings, facts, summaries, every raw sample, and the comparison where there is one."""
        comparison = self.comparison
        return self._measured() | {
            "comparison": None if comparison is None else comparison.as_dict(),
            "notes": self.notes(),
        }

    def _measured(self) -> dict[str, Any]:
        return {
            "kind": JSON_KIND,
            "format": JSON_FORMAT,
            "command": list(self.command),
            "kvd_version": self.kvd_version,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "num_runs": self.num_runs,
            "num_tokens": self.num_tokens,
            "machine": self.machine,
            "sides": [_side_dict(side) for side in self.sides],
        }


def _slope(line: Line | None, factor: float) -> str:
    """The slope with its standard error, both times `factor`."""
    if line is None:
        return NOT_KNOWN
    value = number(line.slope * factor)
    error = line.slope_error
    return value if not error or number(error * factor) == "0.00" else f"{value} ±{number(error * factor)}"


def _notes_of(result: LengthResult, is_kvd: bool) -> list[str]:
    if result.skipped:
        return [f"left out: {result.skipped}"]
    notes = []
    short = [run.cold for run in result.counted if run.cold.completion_tokens < run.cold.max_tokens]
    if short:
        least = min(answer.completion_tokens for answer in short)
        notes.append(f"{len(short)} of {len(result.counted)} answers ended early, the shortest after {least} tokens")
    found = max((run.cold.cached_tokens or 0 for run in result.counted), default=0)
    if found >= BLOCK_SIZE:
        notes.append(f"up to {found} tokens of a new prompt were found in the cache, so cold is not quite cold")
    if any(run.warm.cached_tokens is not None and run.warm.cached_tokens < BLOCK_SIZE for run in result.counted):
        notes.append("a prompt that came for the second time was not found in the cache, so warm is not warm")
    if is_kvd and result.memory is None:
        notes.append("the request came and went before its blocks were seen; ask for more --tokens")
    elif result.memory is not None and result.memory.num_others:
        notes.append(f"{result.memory.num_others} other requests ran, so the blocks are not of one request alone")
    return notes


def _comparison_lines(comparison: Comparison) -> list[str]:
    title = f"compared with {comparison.old_started}"
    lines = _table(title, ["", "then", "now", "ratio", ""], [list(row.cells) for row in comparison.rows])
    changes = comparison.changes or ["no setting that the server tells has changed"]
    return [*lines, *(line for words in changes for line in wrapped(words))]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """An empty line, the title, and columns aligned to the right, the first one to the left; nothing without rows."""
    if not rows:
        return []
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    lines = [
        (" " * gap)
        .join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        .rstrip()
        for row in (head, *rows)
    ]
    return ["", title, *lines]


def _side_dict(side: SideResult) -> dict[str, Any]:
    lines = {name: side.line_of(name) for name in ("kv", *(metric.name for metric in METRICS))}
    return {
        "label": side.label,
        "url": side.url,
        "settings": dict(side.settings.info),
        "lengths": [_length_dict(result) for result in side.lengths],
        "slopes": {name: None if line is None else asdict(line) for name, line in lines.items()},
    }


def _length_dict(result: LengthResult) -> dict[str, Any]:
    summary = {metric.name: result.spread(metric.name) for metric in METRICS} if result.counted else {}
    return {
        "length": result.length,
        "skipped": result.skipped,
        "memory": None if result.memory is None else asdict(result.memory),
        "summary": {name: None if value is None else asdict(value) for name, value in summary.items()},
        "runs": [_run_dict(run) for run in result.runs],
    }


def _run_dict(run: Run) -> dict[str, Any]:
    """Times of the answers count from the first request of the run."""
    return {
        "run": run.number,
        "counted": run.number > 0,
        "values": run.values,
        "cold": answer_dict(run.cold, run.cold.sent),
        "warm": answer_dict(run.warm, run.cold.sent),
    }
