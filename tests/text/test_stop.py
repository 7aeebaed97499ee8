"""Stop strings: what is shown must not depend on how the text arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import RequestError
from kvd.text.stop import MAX_STOP_CHARACTERS, StopMatcher


def expected(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Written from the rule: complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return None


def held(text: str, stops: tuple[str, ...]) -> int:
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@given(
    text=st.text(alphabet="abé", max_size=40),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_matches_rule_however_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(tuple(stops))
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = None
    for start, end in itertools.pairwise(edges):
        match = matcher.feed(text[start:end])
        if match is not None:
            found = (start + match[0], match[1])
            break
        assert matcher.num_held == held(text[:end], tuple(stops))
    assert found == expected(text, tuple(stops))


def test_unarmed_occurrence_does_not_count_but_one_that_began_then_does() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("END EN", armed=False) is None
    assert matcher.feed("D!") == (1, "END")


def test_long_stop_strings_cost_linear_work() -> None:
    """A quadratic matcher would take hours here; the assertion is on the result only."""
    stops = ("a" * 30_000 + "b", "a" * 30_000 + "c")
    matcher = StopMatcher(stops)
    assert matcher.feed("a" * 300_000) is None
    assert matcher.num_held == 30_000
    assert matcher.feed("c") == (1, stops[1])


@pytest.mark.parametrize("stops", [("",), ("ok", ""), ("x" * (MAX_STOP_CHARACTERS + 1),)])
def test_unusable_stop_strings_are_refused_naming_the_parameter(stops: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as refusal:
        StopMatcher(stops)
    assert refusal.value.status == 400
    assert refusal.value.param == "stop"
