"""The page of the requests: both lists, the timeline of one, and what the keys do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.insight import Timeline, TimelineEntry
from kvd.tui.panel import Spans, span_width
from kvd.tui.requests_page import RequestsPage
from kvd.tui.timeline import KINDS, TimelinePanel, moment, phase_lengths, phase_lines
from kvd.tui.view import History, Link
from kvd.views import LogEvent
from tests.tui.fakes import FakeConsole, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, Screen, running

ARRIVED = 1_700_000_000.0
RUNS = "chatcmpl-000001ab"
ENDED = "chatcmpl-00ffe1ab"

STORY = (
    TimelineEntry(0.0, "queued", 1200, "16 run, 3 wait"),
    TimelineEntry(0.4, "waiting", 0, "no block is free: 12 requests hold 2,048"),
    TimelineEntry(1.0, "admitted", 1200, "first in its client's turn"),
    TimelineEntry(1.0, "hit", 768, "in the KV pool"),
    TimelineEntry(1.5, "chunk", 256),
    TimelineEntry(2.0, "chunk", 176),
    TimelineEntry(2.0, "first_token", 1),
    TimelineEntry(4.0, "preempted", 1237, "for want of blocks; to be computed again (9.0 ms)"),
    TimelineEntry(7.0, "resumed", 0, "its blocks are free again"),
    TimelineEntry(8.0, "chunk", 512),
    TimelineEntry(8.5, "chunk", 725),
)
END = (TimelineEntry(10.0, "finished", 90, "stop: 1,200 prompt tokens, 768 cached, 90 generated, preempted 1×"),)


def timeline(
    request_id: str = RUNS, *, has_ended: bool = False, entries: tuple[TimelineEntry, ...] = STORY
) -> Timeline:
    return Timeline(
        request_id=request_id,
        client="openai-python 10.0.0.7",
        endpoint="chat",
        arrived=ARRIVED,
        num_prompt_tokens=1200,
        has_ended=has_ended,
        entries=(*entries, *END) if has_ended else entries,
    )


def ended(count: int) -> dict[str, Timeline]:
    """Timelines by request id, the latest first, one a minute."""
    made = [
        replace(timeline(f"chatcmpl-{index:04x}e1ab", has_ended=True), arrived=ARRIVED - 60 * index)
        for index in range(count)
    ]
    return {made_one.request_id: made_one for made_one in made}


def console(*, num_ended: int = 0) -> FakeConsole:
    fake = FakeConsole(snapshot())
    fake.known_timelines = {RUNS: timeline(), ENDED: timeline(ENDED, has_ended=True), **ended(num_ended)}
    return fake


def busy(num_requests: int = 6) -> tuple[object, ...]:
    return tuple(
        row(i, state="prefill" if i == 3 else "decode", num_preemptions=i % 3, num_swaps=int(i % 3 == 2))
        for i in range(num_requests)
    )


def table(num_requests: int = 6):  # type: ignore[no-untyped-def]
    return snapshot(active=1200, requests=busy(num_requests))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _universal_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def texts(lines: list[Spans]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


# --------------------------------------------------------------------------- where the time went


def test_the_time_of_a_request_is_split_into_its_phases() -> None:
    assert phase_lengths(timeline(has_ended=True), 10.0) == pytest.approx(
        {"queued": 1.0, "prefill": 1.0 + 1.5, "decode": 2.0 + 1.5, "preempted": 3.0}
    )


@pytest.mark.parametrize(
    ("num_entries", "state", "phase"),
    [
        (0, None, "queued"), (2, "waiting", "queued"), (3, None, "prefill"), (4, "restoring", "prefill"),
        (6, "prefill", "prefill"), (7, None, "decode"), (8, None, "preempted"), (8, "swapped", "preempted"),
        (9, None, "decode"), (9, "prefill", "prefill"), (10, "prefill", "prefill"), (11, "decode", "decode"),
    ],
)  # fmt: skip
def test_the_last_stretch_of_one_that_runs_goes_by_its_state(num_entries: int, state: str | None, phase: str) -> None:
    story = timeline(entries=STORY[:num_entries])
    last = story.entries[-1].seconds if story.entries else 0.0
    before = phase_lengths(story, last, state)  # type: ignore[arg-type]
    after = phase_lengths(story, last + 5.0, state)  # type: ignore[arg-type]
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {phase: 5.0}


def test_the_phases_add_up_to_the_age_of_any_request() -> None:
    rng = random.Random(7)
    for _ in range(300):
        moments = sorted(rng.uniform(0, 50) for _ in range(rng.randrange(0, 12)))
        entries = tuple(TimelineEntry(at, rng.choice(list(KINDS)), rng.randrange(99)) for at in moments)
        seconds = phase_lengths(timeline(entries=entries), 60.0)
        assert min(seconds.values()) >= 0.0
        assert sum(seconds.values()) == pytest.approx(60.0)


@pytest.mark.parametrize("width", [1, 7, 40, 80])
def test_the_bar_is_as_wide_as_it_may_be_and_shows_every_phase(width: int) -> None:
    bar, legend = phase_lines({"queued": 1e-4, "prefill": 0.2, "decode": 30.0, "preempted": 0.0}, width)
    assert span_width(bar) == width
    assert span_width(legend) <= width
    if width >= 7:
        assert {text[0] for text, _ in bar} == {"░", "▒", "█"}
    if width >= 80:
        assert "░ queued 0.1ms <1%  ▒ prefill 200ms <1%  █ decode 30.0s 99%  x preempted –" in texts([legend])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.000s"), (0.0004, "0.000s"), (1.2345, "1.234s"), (99.9996, "1m40.0s"), (754.06, "12m34.0s"),
     (3599.96, "59m59.9s"), (11112.0, "3h05m12s"), (-1.0, "0.000s")],
)  # fmt: skip
def test_moments(seconds: float, text: str) -> None:
    assert moment(seconds) == text


def test_every_kind_has_a_mark_of_its_own_and_a_word() -> None:
    marks = [kind.mark for kind in KINDS.values()]
    assert len(set(marks)) == len(marks)
    assert all(len(kind.mark) == 1 and kind.word for kind in KINDS.values())


def drawn(panel: TimelinePanel, width: int, height: int) -> list[str]:
    view = History().add(table(), has_details=True)
    lines = panel.draw(view, Link("address", "model", 0.5), width, height)
    assert all(span_width(line) <= width for line in lines)
    return texts(lines[:height])


def test_any_size_can_be_drawn() -> None:
    panel = TimelinePanel(id="timeline")
    for answer in (None, timeline(), timeline(has_ended=True), replace(timeline(), entries=())):
        panel.begin(RUNS)
        for width in range(1, 130, 3):
            for height in range(1, 30, 2):
                drawn(panel, width, height)
        panel.take(RUNS, answer)


def test_a_reason_that_is_too_long_for_its_row_is_shown_in_full() -> None:
    reason = (
        "every one of 2,048 blocks is held by 12 requests, and none of them may be preempted again before it has moved"
    )
    panel = TimelinePanel(id="timeline")
    panel.begin(RUNS)
    panel.take(RUNS, timeline(entries=(TimelineEntry(0.4, "waiting", 0, reason),)))
    lines = drawn(panel, 70, 20)
    assert reason not in "\n".join(lines)
    assert " ".join(" ".join(lines[-2:]).split()) == reason


def test_nothing_of_a_client_reaches_the_terminal_as_a_control_character() -> None:
    panel = TimelinePanel(id="timeline")
    evil = "\x1b[31mred\x07\u202e"
    panel.begin(evil)
    panel.take(
        evil, replace(timeline(evil), client=evil, endpoint=evil, entries=(TimelineEntry(0.0, "waiting", 0, evil),))
    )
    assert "·[31mred··" in drawn(panel, 100, 20)[0]
    assert all(line.isprintable() for line in drawn(panel, 100, 20))


# --------------------------------------------------------------------------- the page


def title_line(screen: Screen) -> str:
    return next((line for line in screen.lines if "╭" in line and "Timeline" in line), "")


@SIZES
async def test_enter_opens_the_timeline_and_escape_goes_back(size: tuple[int, int]) -> None:
    async with running(table(), size=size, page="Requests", console=console()) as screen:
        assert "6 running" in screen.text
        await screen.press("down", "enter")
        await screen.until(lambda: "first token" in screen.text)
        for word in (
            RUNS, "░ queued 1.00s", "▒ prefill", "█ decode", "x preempted 3.00s", "◌ waiting", "▪ chunk",
            "512  computed", "↓ preempted", "for want of blocks; to be", "decode 37/512",
        ):  # fmt: skip
            assert word in screen.text, word
        assert ("6 running" in screen.text) == (size[1] >= 40)
        await screen.press("escape")
        assert not title_line(screen)
        assert "6 running" in screen.text


async def test_the_timeline_follows_while_the_request_runs() -> None:
    fake = console()
    fake.known_timelines[RUNS] = timeline(entries=STORY[:4])
    async with running(table(), page="Requests", console=fake) as screen:
        await screen.press("down", "enter")
        await screen.until(lambda: "◆ hit" in screen.text)
        long = tuple(TimelineEntry(2.0 + i, "chunk", 100 + i) for i in range(40))
        fake.known_timelines[RUNS] = timeline(entries=STORY[:4] + long)
        await screen.fetch()
        assert "139  computed" in screen.text
        await screen.press("up")
        fake.known_timelines[RUNS] = timeline(entries=STORY[:4] + long + STORY[6:7])
        await screen.fetch()
        assert "first token" not in screen.text
        await screen.press("G")
        assert "first token" in screen.text


async def test_a_timeline_that_has_ended_is_asked_for_no_more() -> None:
    fake = console()
    async with running(table(), page="Requests", console=fake) as screen:
        await screen.press("e", "enter")
        await screen.until(lambda: "ended: stop" in screen.text)
        asked = len(fake.asked)
        await screen.fetch()
        assert fake.asked[asked:] == []


@SIZES
async def test_the_requests_that_ended_can_still_be_opened(size: tuple[int, int]) -> None:
    async with running(table(), size=size, page="Requests", console=console(num_ended=3)) as screen:
        await screen.press("e")
        await screen.until(lambda: "took" in screen.text)
        assert "Requests that ended lately" in screen.text
        assert "22:13:30" in screen.text  # 10 s after it arrived
        assert "10.0s  stop" in screen.text
        await screen.press("down", "enter")
        await screen.until(lambda: "ended: stop" in screen.text)
        assert "chatcmpl-0000e1ab" in screen.text
        assert "▸   0.000s  ○ queued" in screen.text or "▸   0.000s   +0.0ms  ○ queued" in screen.text
        assert "90  stop: 1,200 prompt tokens" in screen.text
        await screen.press("escape")
        assert "Requests that ended lately" in screen.text
        await screen.press("escape")
        assert "6 running" in screen.text


async def test_an_unknown_request_says_so() -> None:
    fake = console()
    fake.known_timelines = {}
    async with running(table(), page="Requests", console=fake) as screen:
        await screen.press("enter")
        await screen.until(lambda: "Nothing is known of chatcmpl-000000ab" in screen.text)
        assert "ended lately" in screen.text


async def test_an_answer_with_several_choices_opens_at_the_first_of_them() -> None:
    """The log names the answer; in the engine each of its choices is a request."""
    answer = "cmpl-" + "0a" * 16
    fake = console()
    fake.known_timelines = {f"{answer}-0": timeline(f"{answer}-0", has_ended=True)}
    fake.log = (LogEvent(ARRIVED, "info", "server", f"POST /v1/completions 200 {answer}"),)
    async with running(table(), page="Events", console=fake) as screen:
        await screen.until(lambda: "POST" in screen.text)
        await screen.press("enter")
        await screen.until(lambda: "first token" in screen.text)
        await screen.press("y")
        assert f"copied {answer}-0" in screen.text


async def test_no_request_is_invited_while_the_server_is_away() -> None:
    async with running(table(0), page="Requests", console=console()) as screen:
        assert "Point any OpenAI client here" in screen.text
        await screen.lose(ConnectionRefusedError("refused"))
        assert "Point any OpenAI client here" not in screen.text
        assert "no request when the server was seen last" in screen.text


async def test_what_was_seen_of_a_request_stays_when_its_timeline_is_gone() -> None:
    fake = console()
    async with running(table(), page="Requests", console=fake) as screen:
        await screen.press("down", "enter")
        await screen.until(lambda: "first token" in screen.text)
        fake.known_timelines = {}
        await screen.fetch()
        assert "first token" in screen.text
        assert "no longer known" in screen.text


async def test_x_aborts_the_request_of_the_timeline_after_a_question() -> None:
    async with running(table(), page="Requests", console=console()) as screen:
        await screen.press("down", "enter", "x")
        await screen.until(lambda: "Abort this request" in screen.text)
        await screen.press("y")
        await screen.until(lambda: screen.console.aborted == [RUNS])


async def test_x_says_that_an_ended_request_does_not_run() -> None:
    async with running(table(), page="Requests", console=console()) as screen:
        await screen.press("e")
        await screen.until(lambda: "took" in screen.text)
        await screen.press("down", "enter", "x")
        await screen.until(lambda: "does not run" in screen.text)
        assert screen.console.aborted == []


async def test_y_copies_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(table(), page="Requests", console=console()) as screen:
        page = screen.app.page
        assert page.copied() == "chatcmpl-000000ab"
        await screen.press("down", "enter")
        assert page.copied() == RUNS
        await screen.press("escape", "e")
        await screen.until(lambda: "took" in screen.text)
        await screen.press("down")
        assert page.copied() == ENDED


async def test_the_filter_holds_for_both_lists_and_survives_a_look_at_a_timeline() -> None:
    async with running(table(), page="Requests", console=console(num_ended=20)) as screen:
        await screen.press("e")
        await screen.until(lambda: "took" in screen.text)
        await screen.press("slash", *"0012", "enter")
        await screen.until(lambda: "1–1 of 1" in screen.text)
        await screen.press("enter")
        await screen.until(lambda: "ended: stop" in screen.text)
        assert screen.app.page.copied() == "chatcmpl-0012e1ab"
        await screen.press("escape")
        assert "1–1 of 1" in screen.text
        await screen.press("escape")
        await screen.until(lambda: "of 21" in screen.text)


async def test_another_page_opens_a_request_here() -> None:
    fake = console()
    fake.log = (LogEvent(ARRIVED, "warning", "preempted", "no block was free", RUNS),)
    async with running(table(), page="Events", console=fake) as screen:
        await screen.until(lambda: "no block was free" in screen.text)
        await screen.press("enter")
        await screen.until(lambda: "first token" in screen.text)
        assert isinstance(screen.app.page, RequestsPage)
        await screen.press("escape")
        assert screen.app.page.copied() == RUNS


async def test_the_columns_tell_how_a_request_was_preempted() -> None:
    async with running(table(), size=(160, 50), page="Requests", console=console()) as screen:
        line = next(line for line in screen.lines if "000002ab" in line)
        assert "1r1s" in line
        line = next(line for line in screen.lines if "000003ab" in line)
        assert "prefill 43%" in line
        assert "━" in line


# --------------------------------------------------------------------------- pictures

ALONE = (RequestsPage,)
"""So that a picture does not change with every page that there is."""


@SIZES
@pytest.mark.parametrize("kind", ["empty", "busy", "timeline", "ended", "disconnected"])
async def test_pictures(size: tuple[int, int], kind: str) -> None:
    current = snapshot(cached=300) if kind == "empty" else table(30)
    async with running(current, size=size, page="Requests", pages=ALONE, console=console(num_ended=30)) as screen:
        if kind == "ended":
            await screen.press("e")
            await screen.until(lambda: "took" in screen.text)
        if kind in ("timeline", "disconnected"):
            await screen.press("down", "enter")
            await screen.until(lambda: "first token" in screen.text)
        if kind == "disconnected":
            await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        await screen.pilot.pause()
        assert_picture(screen.app, f"requests-{kind}-{size[0]}x{size[1]}")
