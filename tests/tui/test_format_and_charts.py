"""Short texts keep their widths, and bars their sums, for every value."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from kvd.tui import charts, format
from kvd.tui.columns import columns_for, prefill_fraction
from kvd.tui.panel import Spans, crop, justify, span_width
from tests.tui.fakes import row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (9999, "9,999"), (10_000, "10k"), (12_345, "12.3k"), (999_949, "1M"), (1_250_000, "1.2M"),
        (None, "–"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_short_count(value: float | None, text: str) -> None:
    assert format.short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (float("inf"), "–"), (0.00042, "0.4ms"), (0.018, "18ms"), (0.99949, "999ms"), (0.9996, "1.00s"),
        (1.234, "1.23s"), (45.04, "45.0s"), (61, "1m01"), (3 * 3600 + 300, "3h05"), (-1, "0.0ms"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert format.duration(seconds) == text


@given(st.floats(0, 1e9))
def test_durations_and_ages_stay_narrow(seconds: float) -> None:
    assert len(format.duration(seconds)) <= 6
    assert len(format.age(seconds)) <= 6
    if seconds < 9 * 86_400:
        assert len(format.duration(seconds)) <= 5
        assert len(format.age(seconds)) <= 5


@given(st.floats(0, 9e14))
def test_counts_stay_narrow(count: float) -> None:
    assert len(format.short_count(count)) <= 5
    assert len(format.rate(count)) <= 5


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (371 << 20, "371 MiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert format.size(num_bytes) == text


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_only_all_is_100_percent_and_only_nothing_0(part: int, whole: int) -> None:
    text = format.percent(min(part, whole), whole)
    assert (text == "100%") == (part >= whole)
    assert (text == "0%") == (part == 0)
    assert len(text) <= 4


@settings(max_examples=40)
@given(st.text(max_size=40), st.integers(0, 30))
def test_fit_is_exactly_as_wide_as_asked_and_printable(text: str, width: int) -> None:
    for fitted in (format.fit(text, width), format.fit_right(text, width)):
        assert cell_len(fitted) == width
        assert fitted.isprintable()


@settings(max_examples=40)
@given(st.text(max_size=60), st.integers(1, 40))
def test_shorten_middle_fits(text: str, width: int) -> None:
    assert cell_len(format.shorten_middle(text, width)) <= width


def test_shorten_middle_keeps_both_ends() -> None:
    shortened = format.shorten_middle("/home/someone/models/Qwen2.5-7B-Instruct-AWQ", 24)
    assert len(shortened) == 24
    assert shortened.startswith("/home")
    assert shortened.endswith("-AWQ")


def test_short_id_drops_the_prefix_of_the_endpoint() -> None:
    assert format.short_id("chatcmpl-0123456789", 6) == "012345"
    assert format.short_id("plain", 12) == "plain"
    assert format.short_id("ends-", 12) == "ends-"
    assert format.short_id("resp_0123456789", 6) == "012345"


@pytest.mark.parametrize(("width", "text"), [(6, "0123-2"), (8, "012345-2"), (33, "0123456789abcdef-2"), (2, "01")])
def test_short_id_keeps_which_choice_it_is(width: int, text: str) -> None:
    assert format.short_id("chatcmpl-0123456789abcdef-2", width) == text


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 200))
def test_divide_adds_up_and_hides_nothing(parts: list[int], width: int) -> None:
    cells = charts.divide(width, parts)
    if sum(parts) == 0 or width == 0:
        assert cells == [0] * len(parts)
        return
    assert sum(cells) == width
    assert all(cell == 0 for cell, part in zip(cells, parts, strict=True) if part == 0)
    if width >= sum(part > 0 for part in parts):
        assert all(cell > 0 for cell, part in zip(cells, parts, strict=True) if part > 0)


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=50), st.integers(0, 30), st.integers(0, 6))
def test_area_has_the_size_asked_for_and_shows_every_value(values: list[float | None], width: int, height: int) -> None:
    rows = charts.area(values, width, height, charts.nice_top(values))
    if width == 0 or height == 0:
        assert rows == []
        return
    assert [len(row) for row in rows] == [width] * height
    shown = values[-width:]
    floor = rows[-1][width - len(shown) :]
    assert [char != " " for char in floor] == [value is not None and value > 0 for value in shown]


def test_area_fills_from_the_floor() -> None:
    assert charts.area([1.0, 2.0, 4.0], 4, 2, 4.0) == ["   █", " ▄██"]


@given(st.lists(st.floats(0, 1e12), max_size=20))
def test_nice_top_is_not_below_any_value_and_not_far_above(values: list[float]) -> None:
    top = charts.nice_top(list(values))
    largest = max(values, default=0.0)
    assert top >= largest * (1 - 1e-9)
    assert largest < 1e-9 or top <= 1.51 * largest * (1 + 1e-9)


@given(st.floats(0, 1), st.integers(0, 40))
def test_meter_is_full_only_at_the_end(fraction: float, width: int) -> None:
    filled, empty = charts.meter(fraction, width)
    assert len(filled) + len(empty) == width
    if width > 1:
        assert (empty == "") == (fraction == 1)
        assert (filled == "") == (fraction == 0)


@given(st.integers(33, 400))
def test_columns_fit_and_80_columns_show_the_essential_ones(width: int) -> None:
    columns = columns_for(width)
    taken = sum(cells for _, cells in columns) + len(columns) - 1
    assert taken <= width
    essential = {"id", "client", "state", "age"}
    if width >= 76:
        essential |= {"api", "hit", "output", "tok/s", "TTFT", "blks", "pre"}
    assert essential <= {column.title for column, _ in columns}


def test_prefill_after_a_preemption_has_more_to_reach_than_the_prompt() -> None:
    again = row(1, state="prefill", num_prompt_tokens=100, num_prefill_tokens=400, num_computed_tokens=100)
    assert prefill_fraction(again) == 0.25
    state = next(column for column, _ in columns_for(76) if column.title == "state")
    assert state.cell(again, 11)[0] == "prefill 25%"
    assert prefill_fraction(replace(again, num_prefill_tokens=0)) == 1.0, "an older server does not tell"


lines = st.lists(st.tuples(st.text("ab· é漢", max_size=9), st.just("text")), max_size=5).map(tuple)


@given(lines, lines, st.integers(1, 40))
def test_justify_fills_the_line_and_keeps_the_right_end(left: Spans, right: Spans, width: int) -> None:
    line = justify(left, right, width)
    assert line[len(line) - len(right) :] == right
    if span_width(right) < width:
        # A wide character that does not fit leaves one cell empty.
        assert width - 1 <= span_width(line) <= width


@given(lines, st.integers(1, 40))
def test_crop_marks_what_is_missing(line: Spans, width: int) -> None:
    cropped = crop(line, width)
    assert span_width(cropped) <= width
    assert (cropped == line) == (span_width(line) <= width)
