"""The page of the event log: what is shown, what follows, what the keys do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.tui.event_list import LEVELS, EventPanel, full_text, request_of
from kvd.tui.events_page import EventsPage
from kvd.tui.listing import wrap
from kvd.tui.panel import Spans, span_width
from kvd.tui.view import Link
from kvd.views import LogEvent
from tests.tui.fakes import FakeConsole, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, running

NOON = 1_700_049_600.0
LINK = Link("address", "model", 0.5)


def event(number: int, *, level: str = "info", message: str = "", request_id: str | None = None) -> LogEvent:
    kinds = {"debug": "step", "info": "start", "warning": "preempted", "error": "failed"}
    return LogEvent(NOON + number, level, kinds[level], message or f"message {number}", request_id)  # type: ignore[arg-type]


def mixed(count: int) -> tuple[LogEvent, ...]:
    return tuple(
        event(i, level=LEVELS[i % 4], request_id=f"chatcmpl-{i:06d}ab" if i % 4 == 2 else None) for i in range(count)
    )


@pytest.fixture(autouse=True)
def _universal_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def console(log: tuple[LogEvent, ...]) -> FakeConsole:
    fake = FakeConsole(snapshot())
    fake.log = log
    return fake


def lines_of(panel: EventPanel, width: int, height: int) -> list[str]:
    lines: list[Spans] = panel.draw(None, LINK, width, height)[:height]
    assert all(span_width(line) <= width for line in lines)
    return ["".join(text for text, _ in line) for line in lines]


# --------------------------------------------------------------------------- the panel


def test_any_size_can_be_drawn() -> None:
    panel = EventPanel(id="events")
    for log in (None, (), mixed(50)):
        if log is not None:
            panel.take(log)
        for width in range(1, 130, 3):
            for height in range(1, 30, 2):
                lines_of(panel, width, height)


def test_the_level_goes_from_everything_to_errors_and_back() -> None:
    panel = EventPanel(id="events")
    panel.take(mixed(8))
    seen = []
    for _ in range(5):
        seen.append((panel.level, panel.num_rows))
        panel.next_level()
    assert seen == [("info", 6), ("warning", 4), ("error", 2), ("debug", 8), ("info", 6)]


def test_levels_are_told_by_letters() -> None:
    panel = EventPanel(id="events")
    panel.next_level(), panel.next_level(), panel.next_level()
    panel.take(mixed(4))
    assert [line[10] for line in lines_of(panel, 80, 7)[:4]] == ["D", "I", "W", "E"]


def test_a_filter_looks_at_message_kind_and_request() -> None:
    panel = EventPanel(id="events")
    panel.take(mixed(40))
    for text, count in (("message 2", 8), ("PREEMPTED", 10), ("000006ab", 1), ("preempted 38", 1), ("nothing", 0)):
        panel.look_for(text)
        assert panel.num_rows == count, text


def test_the_event_under_the_cursor_stays_there_while_others_come_and_go() -> None:
    panel = EventPanel(id="events")
    log = tuple(event(i // 2, message=f"number {i}") for i in range(100))  # two at the same time
    panel.take(log)
    lines_of(panel, 80, 20)
    assert panel.selected == log[-1]
    panel.place(40)
    panel.is_following = False
    for start in (5, 20, 40):
        panel.take((*log[start:], *(event(100 + i) for i in range(start))))
        assert panel.selected == log[40]
    panel.take(log[60:])
    assert panel.selected == log[60]


def test_a_long_message_is_cut_in_its_row_and_told_in_full_below() -> None:
    message = "a KV cache of 2,048 blocks is full: 12 requests wait for the blocks that 16 others hold since 40 s"
    panel = EventPanel(id="events")
    panel.take((event(0, message=message),))
    lines = lines_of(panel, 60, 20)
    assert lines[0].endswith("…")
    assert " ".join(" ".join(lines[-3:]).split()) == f"2023-11-15 12:00:00 info start {message}"


def test_nothing_reaches_the_terminal_as_a_control_character() -> None:
    evil = "\x1b[31mred\x07\u202e\n" * 5
    panel = EventPanel(id="events")
    panel.take((LogEvent(NOON, "error", evil, evil, evil),))
    assert all(line.isprintable() for line in lines_of(panel, 120, 20))
    assert full_text(LogEvent(NOON, "error", evil, evil, evil)).isprintable()


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("the quick brown fox jumps over", 10, ["the quick", "brown fox", "jumps over"]),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaa bb", 10, ["aaaaaaaaaa", "aaaaaaaaaa", "aaaaaa bb"]),
        ("日本語日本語", 7, ["日本語", "日本語"]),
        ("a\nb\x1b", 9, ["a·b·"]),
        ("", 9, []),
        ("words", 0, []),
    ],
)
def test_text_is_wrapped_at_blanks(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines


def test_wrapped_text_says_that_it_goes_on() -> None:
    assert wrap("one two three four", 5, 2) == ["one", "two…"]


# --------------------------------------------------------------------------- the page


@SIZES
async def test_the_newest_event_is_in_view_and_followed(size: tuple[int, int]) -> None:
    async with running(snapshot(), size=size, page="Events", console=console(mixed(400))) as screen:
        assert "message 399" in screen.text
        assert "follows, " in screen.text
        screen.console.log = mixed(404)
        await screen.fetch()
        assert "message 403" in screen.text
        await screen.press("pageup", "up")
        top = screen.text
        assert "message 403" not in top
        screen.console.log = mixed(408)
        await screen.fetch()
        assert "message 407" not in screen.text
        assert [line[:40] for line in screen.lines[4:14]] == [line[:40] for line in top.splitlines()[4:14]]
        await screen.press("G")
        assert "message 407" in screen.text


async def test_l_leaves_out_the_quiet_ones() -> None:
    async with running(snapshot(), page="Events", console=console(mixed(40))) as screen:
        assert "Events  info and worse" in screen.text
        assert "30 of 30" in screen.text
        await screen.press("l", "l")
        assert "Events  error and worse" in screen.text
        assert "10 of 10" in screen.text
        await screen.press("l")
        assert "40 of 40" in screen.text


async def test_the_filter_and_escape() -> None:
    async with running(snapshot(), page="Events", console=console(mixed(40))) as screen:
        await screen.press("slash", *"000006ab", "enter")
        assert "1–1 of 1" in screen.text
        await screen.press("escape")
        assert "30 of 30" in screen.text


async def test_enter_says_that_an_event_is_about_no_request() -> None:
    async with running(snapshot(), page="Events", console=console((event(1),))) as screen:
        await screen.press("enter")
        await screen.until(lambda: "not about a request" in screen.text)


async def test_enter_shows_the_request_of_an_event() -> None:
    fake = console((event(1, level="warning", request_id="chatcmpl-000001ab"),))
    async with running(snapshot(requests=(row(1),)), page="Events", console=fake) as screen:
        await screen.press("enter")
        await screen.until(lambda: ("timeline", "chatcmpl-000001ab") in fake.asked)


@pytest.mark.parametrize(
    ("event_id", "message", "request_id"),
    [
        ("chatcmpl-1", "of chatcmpl-" + "b" * 32, "chatcmpl-1"),
        (None, f"POST /v1/messages 200 3 ms msg_{'0a' * 16} tester", f"msg_{'0a' * 16}"),
        (None, f"POST /v1/completions 200 3 ms cmpl-{'0a' * 16}", f"cmpl-{'0a' * 16}"),
        (None, "chatcmpl-ab is too short for an id", ""),
    ],
)
def test_the_request_of_an_event_is_found_in_its_text_too(event_id: str | None, message: str, request_id: str) -> None:
    assert request_of(event(1, message=message, request_id=event_id)) == request_id


async def test_y_copies_the_whole_line() -> None:
    log = (event(1, level="warning", request_id="chatcmpl-000001ab"),)
    async with running(snapshot(), page="Events", console=console(log)) as screen:
        assert screen.app.page.copied() == ("2023-11-15 12:00:01 warning preempted [chatcmpl-000001ab] message 1")


async def test_when_nothing_is_shown_the_page_says_why() -> None:
    async with running(snapshot(), page="Events", console=console(())) as screen:
        assert "Nothing has happened yet" in screen.text
        screen.console.log = (replace(event(1), level="debug"),)
        await screen.fetch()
        assert "None of 1 events is shown" in screen.text


# --------------------------------------------------------------------------- pictures

ALONE = (EventsPage,)
"""So that a picture does not change with every page that there is."""


def story() -> tuple[LogEvent, ...]:
    """What a log looks like after a while."""
    lines = (
        ("info", "start", "smollm2-135m-instruct serves on http://127.0.0.1:8000/v1", None),
        ("info", "disk", "RAM tier: 500 blocks, 90.6 MiB", None),
        ("warning", "preempted", "preempted by recomputing 1,200 tokens: no block was free for 4 requests", 3),
        ("warning", "evicted", "412 cached blocks evicted in 10 s for claude-code 127.0.0.1", None),
        ("error", "failed", "out of memory in a step of 512 tokens: lower max_num_batched_tokens", 7),
        ("info", "refused", "a prompt of 40,000 tokens and its answer need 2,501 blocks, the KV cache has 2,048", 9),
    )
    return tuple(
        LogEvent(NOON + 7 * i, level, kind, words, None if number is None else f"chatcmpl-{number:06d}ab")  # type: ignore[arg-type]
        for i in range(9)
        for level, kind, words, number in lines
    )


@SIZES
@pytest.mark.parametrize("kind", ["empty", "busy", "disconnected"])
async def test_pictures(size: tuple[int, int], kind: str) -> None:
    fake = console(() if kind == "empty" else story())
    async with running(snapshot(cached=300), size=size, page="Events", pages=ALONE, console=fake) as screen:
        if kind == "disconnected":
            await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        await screen.pilot.pause()
        assert_picture(screen.app, f"events-{kind}-{size[0]}x{size[1]}")
