"""What a change of the configuration did: two results of `kvd profile`, as they are in JSON, side by side.

Pure functions. Latencies are judged against the noise of their runs; blocks are counted and have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.tools.bench_report import NOT_KNOWN, number
from kvd.tools.profile_run import METRICS
from kvd.tools.profile_stats import Difference, judge

_NO_SETTINGS = frozenset({"created"})
"""Of what a kvd says about itself, what is no matter of configuration."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one length. `side` is empty where each result has one server."""

    side: str
    length: int
    label: str
    difference: Difference

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        found = self.difference
        return (
            f"{self.side} {self.label} {self.length}".strip(),
            _with_noise(found.old, found.old_noise),
            _with_noise(found.new, found.new_noise),
            NOT_KNOWN if found.ratio is None else f"{found.ratio:.2f}",
            found.words,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """`changes`: settings that differ, in words. `notes`: why figures may not be comparable, or are missing."""

    old_started: str
    rows: Sequence[Row]
    changes: Sequence[str]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Both as `Report.as_dict` makes them. Raises KeyError or TypeError where `old` is none."""
    rows: list[Row] = []
    changes: list[str] = []
    notes: list[str] = []
    if old["machine"] != new["machine"]:
        notes.append("another machine, or another system on it: differences of latency are its differences too")
    if old["num_tokens"] != new["num_tokens"]:
        notes.append(f"answers had {old['num_tokens']} tokens, now {new['num_tokens']}")
    for before, after in _pairs(old["sides"], new["sides"], notes):
        side = "" if len(new["sides"]) == 1 else after["label"]
        changes += [f"{side} {words}".strip() for words in _changes(before["settings"], after["settings"])]
        rows += _rows(side, before["lengths"], after["lengths"])
    if not rows:
        notes.append("no length was measured in both")
    return Comparison(old["started"], rows, changes, notes)


def _pairs(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], notes: list[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Servers to compare: the only ones, else those of one name."""
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    known = {side["label"]: side for side in old}
    notes += [f"{side['label']}: the older result does not have it" for side in new if side["label"] not in known]
    return [(known[side["label"]], side) for side in new if side["label"] in known]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`max_num_seqs: 16 → 8` for every plain setting that differs, and for the bytes of the KV cache."""
    before, after = (
        {
            name: value
            for name, value in {**settings, "kv_bytes": (settings.get("budget") or {}).get("kv_bytes")}.items()
            if name not in _NO_SETTINGS and not isinstance(value, (dict, list))
        }
        for settings in (old, new)
    )
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {before.get(name, NOT_KNOWN)} → {after.get(name, NOT_KNOWN)}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _rows(side: str, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[Row]:
    known = {result["length"]: result for result in old}
    both = [(known[result["length"]], result) for result in new if result["length"] in known]
    rows = []
    for before, after in both:
        if before["memory"] and after["memory"]:
            difference = _bytes_difference(before["memory"]["num_bytes"], after["memory"]["num_bytes"])
            rows.append(Row(side, after["length"], "KV MiB", difference))
    for metric in METRICS:
        for before, after in both:
            values = [_values(result, metric.name) for result in (before, after)]
            if all(values):
                rows.append(Row(side, after["length"], metric.label, judge(*values)))
    return rows


def _values(result: Mapping[str, Any], metric: str) -> list[float]:
    values = [run["values"][metric] for run in result["runs"] if run["counted"]]
    return [value for value in values if value is not None]


def _bytes_difference(old: int, new: int) -> Difference:
    words = "the same" if new == old else "smaller" if new < old else "larger"
    return Difference(old / 2**20, new / 2**20, new / old, None, None, words)


def _with_noise(value: float, noise: float | None) -> str:
    return number(value) if noise is None else f"{number(value)} ±{noise:.0%}"
