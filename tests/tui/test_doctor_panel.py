"""What the doctor's panel draws, and the screens that open above it; no terminal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest

from kvd.insight import DoctorReport, Finding, Miss, MissCause, Reveal
from kvd.tui.doctor_panel import CAUSES, DoctorPanel
from kvd.tui.finding import about
from kvd.tui.panel import Spans, span_width
from kvd.tui.reveal import reveal_lines
from kvd.tui.view import Link
from tests.tui.fakes import no_findings

LINK = Link("http://127.0.0.1:8000/v1", "smollm2-135m-instruct", 0.5)

VOLATILE = Finding(
    "volatile_line", "claude-code 127.0.0.1", "chat", 41, 60_680, 173.4, 14,
    "differs from 41 earlier requests at token 14; 1,480 equal tokens after it were recomputed",
    "Put the line with the date after what stays the same.", "chatcmpl-000001ab",
)  # fmt: skip
EVICTED = Finding(
    "evicted", "", "completions", 3, 1_480, 0.0, -1, "evicted for rag-indexer, 40 s after its last use",
    "Give the pool more memory.", "cmpl-000003ab",
)  # fmt: skip
MISSES = tuple(
    Miss(f"chatcmpl-{i:06d}ab", "claude-code 127.0.0.1", "chat", 1e9, "volatile_line", 1_600, 14, 1_480, 14, 40 - i, "")
    for i in range(3)
)
REPORT = DoctorReport((VOLATILE, EVICTED), MISSES, 123, 2, 200_000, 90_000, 62_160, 350.0, 0.2, ())


def texts(lines: list[Spans]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def drawn(panel: DoctorPanel, width: int, height: int) -> list[str]:
    return texts(panel.draw(None, LINK, width, height)[:height])


def reporting(report: DoctorReport) -> DoctorPanel:
    panel = DoctorPanel(id="doctor")
    panel.put(report)
    return panel


def test_every_cause_has_a_name() -> None:
    assert set(CAUSES) == set(get_args(MissCause))
    assert len(set(CAUSES.values())) == len(CAUSES)


def test_the_findings_with_what_they_cost_and_what_to_change() -> None:
    lines = drawn(reporting(REPORT), 78, 9)
    assert lines[0] == " 62,160 of 200k tokens lost (31%), 45% cached; 123 prompts, 2 skipped; prefill 3…"[:77] + "…"
    assert lines[2].split() == ["▸", "60.7k", "41", "2m53", "volatile", "line", "claude-code", "127.0.0.1"]
    assert lines[3].split() == ["1,480", "3", "–", "evicted", "unnamed"]
    below = " ".join(lines[4:])
    assert "differs from 41 earlier requests at token 14" in below
    assert "→ Put the line with the date after what stays the same." in below


def test_wide_terminals_have_the_words_in_the_row() -> None:
    lines = drawn(reporting(REPORT), 158, 9)
    assert lines[0].endswith("123 prompts, 2 skipped; prefill 350 tok/s")
    assert "1,480 equal tokens after it were recomputed" in lines[2]
    assert "evicted for rag-indexer" in lines[3]


def test_the_cursor_stays_with_its_finding() -> None:
    panel = reporting(REPORT)
    panel.place(1)
    panel.put(replace(REPORT, findings=(EVICTED, VOLATILE)))
    assert panel.selected == EVICTED
    panel.put(replace(REPORT, findings=()))
    assert panel.selected is None


def test_the_filter_looks_at_client_and_cause() -> None:
    panel = reporting(REPORT)
    for text, findings in (("CLAUDE", [VOLATILE]), ("evict", [EVICTED]), ("", [VOLATILE, EVICTED])):
        panel.set_filter(text)
        assert list(panel._findings) == findings
    panel.set_filter("nobody")
    assert "No finding matches the filter." in drawn(panel, 78, 9)[1]


def test_without_findings_it_says_what_that_means() -> None:
    assert "waiting" in drawn(DoctorPanel(id="doctor"), 78, 9)[0]
    assert drawn(reporting(no_findings()), 78, 9) == ["No prompt was examined yet.".ljust(78)]
    well = replace(no_findings(), num_examined=9, prompt_tokens=900, cached_tokens=450)
    lines = drawn(reporting(well), 78, 9)
    assert lines[0] == " 0 of 900 tokens lost (0%), 50% cached; 9 prompts"
    assert lines[1].startswith("✓ No prompt lost tokens")


def test_about_a_finding() -> None:
    text = "\n".join(texts(about(VOLATILE, MISSES, 60)))
    for words in (
        "token 14 differs first", "40 earlier requests differ at the same place", "60,680 tokens",
        "2m53 would be saved", "claude-code 127.0.0.1, chat", "Put the line with the date",
    ):  # fmt: skip
        assert words in text
    text = "\n".join(texts(about(EVICTED, (), 60)))
    assert "not measured yet" in text
    assert "unnamed" in text
    assert "position" not in text
    assert "alike" not in text


def test_a_revealed_difference_is_marked_in_both_texts() -> None:
    lines = texts(reveal_lines(Reveal("x", "Today is 00:22 o'clock", "Today is 00:23 o'clock"), 40))
    assert lines == ["this prompt", "Today is ▸00:22◂ o'clock", "", "the earlier one", "Today is ▸00:23◂ o'clock"]
    assert texts(reveal_lines(Reveal("x", "You are\nhelpful"), 40)) == ["You are", "helpful"]


def test_no_text_from_outside_brings_controls_with_it() -> None:
    evil = replace(VOLATILE, client="\x1b[2J", words="\x07 words \u202e", advice="\x1b]0;title\x07")
    for lines in (about(evil, MISSES, 60), reveal_lines(Reveal("x", "\x1b[2J a", "\x1b[2J b"), 40)):
        assert all(text.isprintable() for text in texts(lines))


@pytest.mark.parametrize("width", [1, 2, 9, 40, 78, 158, 300])
def test_no_size_is_too_small(width: int) -> None:
    for height, report in itertools.product((1, 2, 3, 6, 30), (REPORT, no_findings())):
        lines = reporting(report).draw(None, LINK, width, height)
        assert width < 40 or all(span_width(line) <= width for line in lines)
    assert all(span_width(line) <= max(width, 11) for line in about(VOLATILE, MISSES, width))
