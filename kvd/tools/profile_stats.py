"""Lines through measured points, and whether two sets of runs differ by more than their noise. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_LUCK = 0.05
"""Two sets of runs that do not overlap count as different only where luck would rarely part them so."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope · x. slope_error: standard error of the slope; None where every line fits: two points."""

    slope: float
    intercept: float
    slope_error: float | None
    num_points: int


def least_squares(points: Sequence[Point]) -> Line | None:
    """The line with the least sum of squared distances in y; None where the points have fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x
    intercept = mean_y - slope * mean_x
    error = None
    if len(points) > 2:
        squares = sum((y - intercept - slope * x) ** 2 for x, y in points)
        error = math.sqrt(squares / (len(points) - 2) / spread_x)
    return Line(slope, intercept, error, len(points))


@dataclass(frozen=True, slots=True)
class Difference:
    """New ÷ old, by medians. Noise: half the range of the runs ÷ their median; None with one run.

    `words` says what it comes to: "faster" and "slower" mean beyond noise.
    """

    old: float
    new: float
    ratio: float | None
    old_noise: float | None
    new_noise: float | None
    words: str


def judge(old: Sequence[float], new: Sequence[float]) -> Difference:
    """Compare times of runs, each at least one.

    They differ beyond noise where no run of one lies within the range of the other, and where that would come about by
    luck at most once in 20 times: of n and m runs of the same thing, all of one are lower with 2 ÷ (n + m choose n).
    """
    before, after = statistics.median(old), statistics.median(new)
    if min(len(old), len(new)) == 1:
        words = "too few runs to tell"
    elif not (max(new) < min(old) or max(old) < min(new)):
        words = "no difference beyond noise"
    elif 2 / math.comb(len(old) + len(new), len(old)) > MOST_LUCK:
        words = "too few runs to tell"
    else:
        words = "faster" if after < before else "slower"
    return Difference(before, after, after / before if before else None, _noise(old), _noise(new), words)


def _noise(values: Sequence[float]) -> float | None:
    median = statistics.median(values)
    return (max(values) - min(values)) / 2 / median if len(values) > 1 and median else None
