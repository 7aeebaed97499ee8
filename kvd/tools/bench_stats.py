"""What `kvd bench` makes of its samples: medians with their spread, paired ratios, and the knee of a sweep.

Pure functions of numbers. A value that an endpoint does not reveal is None and stays None: nothing is estimated.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KNEE_SHARE = 0.9
"""The knee is the smallest concurrency that reaches this share of the highest rate of the sweep."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of the runs that gave a value."""

    median: float
    least: float
    most: float
    num_runs: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """The spread of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def paired_ratios(values: Sequence[float | None], others: Sequence[float | None]) -> list[float | None]:
    """values[i] ÷ others[i]: runs that were measured one right after the other. None where either is not known.

    Raises ValueError where the two differ in length: then they are no pairs.
    """
    return [
        None if value is None or other is None or other == 0 else value / other
        for value, other in zip(values, others, strict=True)
    ]


def knee(rates: Mapping[int, float | None]) -> int | None:
    """The smallest concurrency whose rate is at least KNEE_SHARE of the highest one.

    rates: concurrency → tokens per second of all streams together. More concurrency than the knee adds waiting and
    hardly any throughput. None where fewer than two rates are known.
    """
    known = {concurrency: rate for concurrency, rate in rates.items() if rate is not None}
    if len(known) < 2:
        return None
    enough = KNEE_SHARE * max(known.values())
    return min(concurrency for concurrency, rate in known.items() if rate >= enough)


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """The largest number of intervals (begin, end) that share a moment; touching ends do not count as shared."""
    # Ends sort before begins at the same time.
    edges = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    most = current = 0
    for _, change in edges:
        current += change
        most = max(most, current)
    return most
