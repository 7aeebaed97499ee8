"""Lines through points, and what counts as a difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.tools.profile_stats import judge, least_squares

NUMBERS = st.floats(-1e3, 1e3)
POINTS = st.lists(st.tuples(st.integers(0, 10_000), NUMBERS), min_size=3, max_size=30)


def test_too_few_points_make_no_line() -> None:
    assert least_squares([]) is None
    assert least_squares([(5, 1.0)]) is None
    assert least_squares([(5, 1.0), (5, 2.0)]) is None
    line = least_squares([(0, 1.0), (2, 5.0)])
    assert line is not None
    assert (line.slope, line.intercept, line.slope_error, line.num_points) == (2.0, 1.0, None, 2)


@given(st.lists(st.integers(0, 10_000), min_size=3, max_size=20, unique=True), NUMBERS, NUMBERS)
def test_points_on_a_line_give_it_back(tokens: list[int], slope: float, intercept: float) -> None:
    line = least_squares([(x, intercept + slope * x) for x in tokens])
    assert line is not None
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert line.intercept == pytest.approx(intercept, rel=1e-6, abs=1e-2)


@given(POINTS.filter(lambda points: len({x for x, _ in points}) > 1))
def test_agrees_with_numpy(points: list[tuple[int, float]]) -> None:
    x, y = np.array(points, dtype=float).T
    design = np.stack([x - x.mean(), np.ones_like(x)], axis=1)
    (slope, level), *_ = np.linalg.lstsq(design, y, rcond=None)
    residuals = y - design @ [slope, level]
    error = math.sqrt(residuals @ residuals / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    line = least_squares(points)
    assert line is not None
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert line.slope_error == pytest.approx(error, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ([10, 11, 12, 13], [5, 6, 7, 8], "faster"),
        ([5, 6, 7, 8], [10, 11, 12, 13], "slower"),
        ([10, 11, 12, 13], [9, 10, 11, 12], "no difference beyond noise"),
        ([10, 11, 12, 13], [13, 14, 15, 16], "no difference beyond noise"),
        ([10, 11, 12, 13], [11, 11, 11, 11], "no difference beyond noise"),
        ([10, 11, 12], [1, 2, 3], "too few runs to tell"),  # luck parts 3 and 3 once in 10 times
        ([10, 11], [1, 2, 3, 4, 5, 6, 7, 8], "faster"),  # once in 22
        ([10, 11], [1, 2, 3, 4, 5, 6], "too few runs to tell"),  # once in 14
        ([10], [10], "too few runs to tell"),
        ([10], [1, 2, 3, 4, 5, 6, 7, 8, 9], "too few runs to tell"),
    ],
)
def test_a_difference_is_one_that_noise_hardly_makes(old: list[float], new: list[float], words: str) -> None:
    difference = judge(old, new)
    assert difference.words == words
    assert difference.ratio == pytest.approx(difference.new / difference.old)


def test_noise_is_half_the_range_of_the_median() -> None:
    difference = judge([9, 10, 12], [20])
    assert difference.old_noise == pytest.approx(0.15)
    assert difference.new_noise is None
    assert judge([0, 0, 0, 0], [1, 1, 1, 1]).ratio is None


@given(st.integers(4, 12))
def test_luck_is_bounded(num_runs: int) -> None:
    """The share of all ways to deal the same values to two sets that would be called different."""
    parted = 2 / math.comb(2 * num_runs, num_runs)
    assert parted <= 0.05
    values = [float(each) for each in range(2 * num_runs)]
    assert judge(values[:num_runs], values[num_runs:]).words == "slower"
