"""Measures every launch configuration that the tables allow on this card, and keeps the best for the next starts.

Keys (kernel and class of shapes) and candidates come from the kernels themselves, which ask `Tuned.choose` at a launch
with more than one candidate: a call of an op shows what it asks for, and is then timed under each answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvd_kernels.bench_cuda import (
    ELEMENTS,
    Bench,
    Meter,
    Plan,
    Run,
    attention_runs,
    attention_work,
    linear_copies,
    linear_runs,
    linears_of,
)
from kvd_kernels.triton import tuning
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.tuning import Recorder, Tuned

MARGIN = 0.02
"""Another candidate replaces the table's own choice only where it is faster by more than this: noise is not."""


class Tunable(Protocol):
    """Ops whose kernels ask a `Tuned`."""

    card: Card

    def use_tuning(self, tuned: Tuned) -> None:
        """Ask this one from now on."""


def work(bench: Bench, plan: Plan, wanted: Sequence[str]) -> Iterator[tuple[str, list[Run]]]:
    """What is tuned: a name and equivalent calls of an op, one after the other, since each takes memory."""
    if "linear" in wanted:
        for name, linear, row_counts in linears_of(plan):
            handles = linear_copies(bench, linear)
            for n in row_counts:
                yield f"{name}, {n} rows", linear_runs(bench, linear, handles, n, is_head=name == "head")
    if "attention" in wanted:
        for num_seqs, context, num_new in attention_work(plan):
            for element in ELEMENTS:
                runs, _ = attention_runs(bench, plan.shape, num_seqs, context, num_new, element)
                yield f"attention {element}, {num_seqs} × {num_new} tokens at {context}", runs


class Ballot:
    """Times of the candidates of every key, over all calls that asked for it: one class of shapes, one choice.

    Times count relative to the table's own choice for the same call, which may differ from call to call.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, dict[Any, list[float]]] = {}

    @property
    def keys(self) -> list[str]:
        return sorted(self._ratios)

    def add(self, key: str, candidates: Sequence[Any], seconds: Sequence[float]) -> None:
        """seconds: of one call, by candidate; the first candidate is the table's own choice."""
        ratios = self._ratios.setdefault(key, {})
        for candidate, taken in zip(candidates, seconds, strict=True):
            ratios.setdefault(candidate, []).append(taken / seconds[0])

    def best(self, key: str) -> tuple[Any, float] | None:
        """The candidate that beats the table's own choices, and its mean share of their time; None where none does.

        Only what was a candidate at every call.
        """
        ratios = self._ratios[key]
        calls = max(map(len, ratios.values()))
        means = {candidate: sum(row) / calls for candidate, row in ratios.items() if len(row) == calls}
        found = min(means, key=lambda candidate: means[candidate])
        return (found, means[found]) if means[found] < 1 - MARGIN else None


def time_candidates(ops: Tunable, meter: Meter, runs: Sequence[Run], ballot: Ballot) -> None:
    """Time equivalent calls under each candidate of each key that they ask for, the other keys as the tables have them.

    A key with one candidate is no choice.
    """
    recorder = Recorder()
    ops.use_tuning(recorder)
    runs[0]()
    for key, candidates in recorder.asked.items():
        if len(candidates) < 2:
            continue
        seconds = []
        for candidate in candidates:
            ops.use_tuning(Tuned({key: tuning.fields_of(candidate)}))
            seconds.append(meter.seconds(runs))
        ballot.add(key, candidates, seconds)


def run(bench: Bench, ops: Tunable, plan: Plan, wanted: Sequence[str]) -> None:
    """Tune what is wanted, let the ops use it, and keep it, beside what other runs have found for other keys."""
    before = tuning.load(ops.card, lambda line: print(f"kvd: {line}", file=sys.stderr))
    ballot = Ballot()
    for name, runs in work(bench, plan, wanted):
        print(f"tuning: {name}", file=sys.stderr)
        time_candidates(ops, bench.meter, runs, ballot)
    choices = {key: fields for key, fields in before.choices.items() if key not in ballot.keys}
    for key in ballot.keys:
        best = ballot.best(key)
        if best is None:
            print(f"{key}: the table's own choice")
            continue
        choices[key] = tuning.fields_of(best[0])
        words = ", ".join(f"{field} {value}" for field, value in choices[key].items())
        print(f"{key}: {words}; {best[1]:.0%} of the time of the table's own choice")
    tuned = Tuned(choices)
    ops.use_tuning(tuned)
    try:
        print(f"written: {tuning.save(ops.card, tuned.choices)}")
    except OSError as error:
        sys.exit(f"kvd: the choices could not be kept: {error}")
