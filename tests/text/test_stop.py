"""Stop strings: what is shown must not depend on how the text arrives."""

from __future__ import annotations

import itertools
import random

import pytest

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


def test_matches_rule_however_cut() -> None:
    """Small alphabets, so that stop strings overlap themselves and each other."""
    chance = random.Random(20)
    num_matches = 0
    for _ in range(4000):
        stops = tuple("".join(chance.choices("abé", k=chance.randint(1, 5))) for _ in range(chance.randint(1, 4)))
        text = "".join(chance.choices("abé", k=chance.randint(0, 30)))
        edges = sorted({0, len(text), *(chance.randint(0, len(text)) for _ in range(4))})
        matcher = StopMatcher(stops)
        found = None
        for start, end in itertools.pairwise(edges):
            match = matcher.feed(text[start:end])
            if match is not None:
                found = (start + match[0], match[1])
                break
            assert matcher.num_held == held(text[:end], stops), (text[:end], stops)
        assert found == expected(text, stops), (text, stops)
        num_matches += found is not None
    assert 1000 < num_matches < 3900


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
