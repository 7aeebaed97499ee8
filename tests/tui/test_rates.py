"""Windows, rates and quantiles are right for every history of counters."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.tui import rates
from kvd.views import Counters, Histogram
from tests.tui.fakes import BOUNDS, histogram

observations = st.lists(st.floats(0.0, 30.0), max_size=60)
fractions = st.floats(0.0, 1.0)


def point(time: float, **counters: int) -> rates.Point:
    return rates.Point(time, Counters(**counters), {})


def bucket_of(value: float) -> tuple[float, float]:
    index = bisect_left(BOUNDS, value)
    return (BOUNDS[index - 1] if index else 0.0), BOUNDS[index]


@given(observations, observations)
def test_difference_is_what_was_observed_in_between(before: list[float], after: list[float]) -> None:
    gained = rates.difference(histogram(before), histogram(before + after))
    assert gained.counts == histogram(after).counts
    assert gained.sum == pytest.approx(sum(after))


@given(observations.filter(bool), observations)
def test_difference_across_a_restart_is_all_of_the_new_engine(before: list[float], after: list[float]) -> None:
    later = histogram(after)
    if later.total < len(before):
        assert rates.difference(histogram(before), later) == later
    assert rates.difference(Histogram((1.0, math.inf), (0, 1), 2.0), later) == later
    assert rates.difference(None, later) == later
    other = Histogram((1.0, 2.0, math.inf), (3, 4, 5), 6.0)  # no bucket fell, and yet nothing grows by 3, 0, 1
    assert rates.difference(Histogram(other.bounds, (0, 4, 4), 6.0), other) == other


@given(observations.filter(bool), fractions)
def test_quantile_lies_in_the_bucket_of_the_true_quantile(values: list[float], fraction: float) -> None:
    true = sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
    lower, upper = bucket_of(true)
    found = rates.quantile(histogram(values), fraction)
    assert found is not None
    if math.isinf(upper):
        assert found == rates.Quantile(lower, is_lower_bound=True)
    else:
        assert lower - 1e-9 <= found.value <= upper + 1e-9
        assert not found.is_lower_bound


@given(observations.filter(bool), fractions, fractions)
def test_quantiles_do_not_cross(values: list[float], a: float, b: float) -> None:
    low, high = (rates.quantile(histogram(values), fraction) for fraction in sorted((a, b)))
    assert low is not None
    assert high is not None
    assert low.value <= high.value


def test_quantile_interpolates_as_prometheus_does() -> None:
    # Ten observations in (1, 2]: the median is in the middle of the bucket.
    assert rates.quantile(Histogram((1.0, 2.0, math.inf), (0, 10, 10), 15.0), 0.5) == rates.Quantile(1.5)
    assert rates.quantile(Histogram((1.0, 2.0, math.inf), (10, 10, 10), 5.0), 0.25) == rates.Quantile(0.25)


def test_quantile_of_nothing_is_none() -> None:
    assert rates.quantile(histogram([]), 0.5) is None
    assert rates.quantile(Histogram((), (), 0.0), 0.5) is None


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40), st.floats(0.1, 200))
def test_window_is_the_shortest_tail_that_spans_it(times: list[float], seconds: float) -> None:
    points = [point(time) for time in sorted(times)]
    kept = rates.window(points, seconds)
    assert kept == tuple(points[len(points) - len(kept) :])
    start = points[-1].time - seconds
    assert all(p.time > start for p in kept[1:])
    assert len(kept) == len(points) or kept[0].time <= start


def test_window_of_nothing_is_empty() -> None:
    assert rates.window([], 5.0) == ()


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.floats(0.001, 1000))
def test_rate_is_growth_over_time(start: int, growth: int, seconds: float) -> None:
    assert rates.per_second(start, start + growth, seconds) == pytest.approx(growth / seconds)


@pytest.mark.parametrize(("earlier", "later", "seconds"), [(5, 4, 1.0), (0, 5, 0.0), (0, 5, -1.0)])
def test_rate_without_meaning_is_none(earlier: int, later: int, seconds: float) -> None:
    assert rates.per_second(earlier, later, seconds) is None


@pytest.mark.parametrize(
    ("later", "restarted"),
    [
        (point(11.0, num_steps=8, prompt_tokens=50), False),
        (point(11.0, num_steps=7, prompt_tokens=51), False),
        (point(11.0, num_steps=6, prompt_tokens=51), True),
        (point(11.0, num_steps=9, prompt_tokens=49), True),
        (point(9.0, num_steps=9, prompt_tokens=51), True),
    ],
)
def test_restart_is_noticed(later: rates.Point, restarted: bool) -> None:
    assert rates.is_restart(point(10.0, num_steps=7, prompt_tokens=50), later) is restarted


def test_ratio() -> None:
    assert rates.ratio(1, 4) == 0.25
    assert rates.ratio(5, 4) == 1.0
    assert rates.ratio(0, 0) is None
