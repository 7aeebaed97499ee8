"""What pages have in common: switching, fetching, notes and acts, filter, themes, and plain terminals."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import ClassVar

import pytest
from textual import events
from textual.app import ComposeResult

from kvd.insight import Console
from kvd.tui import glyphs, palette
from kvd.tui.app import PAGES, Dashboard
from kvd.tui.help import HelpScreen
from kvd.tui.overview import OverviewPage
from kvd.tui.page import Do, Jump, Key, Note, Page, Refetch
from kvd.tui.panel import Panel, Spans
from kvd.tui.question import Answer, Question
from kvd.tui.status import AlertLine
from kvd.tui.view import Link, View
from kvd.views import Snapshot
from tests.tui.fakes import FakeConsole, row, snapshot
from tests.tui.pictures import UPDATE, assert_picture
from tests.tui.screens import SIZES, Screen, running


class WordPanel(Panel):
    word = "nothing fetched yet"

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        return [((self.word, "text"),), (("→ ● ▒ █ …", "cached"),)]


class AskingPage(Page):
    """Fetches the doctor's report, and shows how many were examined."""

    title: ClassVar[str] = "Asking"
    fetch_seconds: ClassVar[float] = 3600.0

    def __init__(self) -> None:
        super().__init__()
        self.panel = WordPanel(id="word", classes="box")
        self.focus_words: list[str] = []

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self.panel,)

    @property
    def keys(self) -> tuple[Key, ...]:
        return (("z", "zoom"),)

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return (("Word", (("word", "what was fetched"),)),)

    def compose(self) -> ComposeResult:
        yield self.panel

    async def fetch(self, console: Console) -> None:
        report = await console.doctor()
        self.panel.word = f"{report.num_examined} examined"

    def open(self, focus: str = "") -> None:
        self.focus_words.append(focus)

    def copied(self) -> str:
        return "the word"


TWO_PAGES: tuple[type[Page], ...] = (OverviewPage, AskingPage)


def asking(screen: Screen) -> AskingPage:
    page = screen.app.pages[1]
    assert isinstance(page, AskingPage)
    return page


def some_requests() -> Snapshot:
    return snapshot(
        active=300,
        cached=200,
        requests=(
            row(1, client="alpha", num_output_tokens=5, tokens_per_second=10.0),
            row(2, client="Beta agent", num_output_tokens=300, tokens_per_second=30.0),
            row(3, client="gamma", state="waiting"),
        ),
    )


# --------------------------------------------------------------------------- pages


async def test_digits_and_tab_switch_pages() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        assert "[1 Overview]" in screen.text
        await screen.press("2")
        assert "[2 Asking]" in screen.text
        assert "z zoom" in screen.text
        assert "Requests" not in screen.text
        for key, title in (("tab", "Overview"), ("shift+tab", "Asking"), ("1", "Overview"), ("9", "Overview")):
            await screen.press(key)
            assert screen.app.page.title == title, key


async def test_a_click_on_a_title_shows_its_page() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.pilot.click("#tabs", offset=(16, 0))
        assert screen.app.page.title == "Asking"
        await screen.pilot.click("#tabs", offset=(4, 0))
        assert screen.app.page.title == "Overview"


async def test_a_question_keeps_its_page() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.press("x", "tab", "2")
        assert isinstance(screen.app.screen, Question)
        await screen.press("escape")
        assert screen.app.page.title == "Overview"


async def test_jump_shows_a_page_at_its_focus() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        screen.app.page.post_message(Jump("Asking", "this-one"))
        await screen.until(lambda: screen.app.page is asking(screen))
        assert asking(screen).focus_words == ["this-one"]


@SIZES
async def test_enter_on_a_request_goes_to_the_page_of_requests(size: tuple[int, int]) -> None:
    async with running(some_requests(), size=size) as screen:
        await screen.press("down", "enter")
        await screen.until(lambda: screen.app.page.title == "Requests")


async def test_every_page_survives_any_size_in_any_state() -> None:
    async with running(some_requests()) as screen:
        for number in range(len(PAGES)):
            await screen.press(str(number + 1))
            for width, height in ((160, 50), (40, 12), (12, 4), (1, 1), (80, 24)):
                await screen.pilot.resize_terminal(width, height)
                await screen.pilot.pause()
                assert len(screen.lines) == height
                assert all(len(line) <= width for line in screen.lines)
        await screen.lose(ConnectionError("gone"))
        for number in range(len(PAGES)):
            await screen.press(str(number + 1))
            assert "✖ disconnected" in screen.text
        screen.console.error = None
        await screen.show(snapshot())
        assert "● ready" in screen.text


def test_titles_are_words_of_their_own() -> None:
    titles = [page.title for page in PAGES]
    assert len(set(titles)) == len(titles)
    assert titles[0] == "Overview"
    assert len(titles) <= 9, "each has a digit"


# --------------------------------------------------------------------------- fetching


async def test_only_the_page_that_is_shown_fetches() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.refresh()
        assert screen.console.asked == []
        await screen.press("2")
        await screen.until(lambda: "0 examined" in screen.text)
        assert screen.console.asked == [("doctor", None)]


async def test_a_fetch_that_fails_is_a_note_said_once() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        screen.console.insight_error = RuntimeError("no doctor here\nwith details")
        await screen.press("2")
        await screen.until(lambda: "Asking: no doctor here" in screen.text)
        assert "with details" not in screen.text
        screen.app.note("something else")
        await screen.fetch()
        assert "something else" in screen.text, "the same problem is not said again and again"
        screen.console.insight_error = None
        await screen.fetch()
        assert "0 examined" in screen.text


async def test_a_fetch_that_does_not_end_is_given_up() -> None:
    async with running(some_requests(), pages=TWO_PAGES, timeout_seconds=0.05) as screen:
        screen.console.insight_hangs = True
        await screen.press("2")
        await screen.until(lambda: "Asking: no answer within 0.05 s" in screen.text)


async def test_leaving_a_page_cancels_its_fetch_and_resizing_does_not() -> None:
    async with running(some_requests(), pages=TWO_PAGES, timeout_seconds=3600.0) as screen:
        cancelled = asyncio.Event()

        async def hang(console: Console) -> None:
            await console.doctor()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        asking(screen).__dict__["fetch"] = hang
        await screen.press("2")
        await screen.until(lambda: screen.console.asked == [("doctor", None)])
        for size in ((160, 50), (40, 12), (80, 24)):
            await screen.pilot.resize_terminal(*size)
        await screen.pilot.pause()
        assert not cancelled.is_set()
        await screen.press("1")
        await screen.until(cancelled.is_set)


async def test_refetch_begins_anew_at_once() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.press("2")
        await screen.until(lambda: screen.app.num_fetches == 1)
        asking(screen).post_message(Refetch())
        await screen.until(lambda: screen.app.num_fetches == 2)


async def test_nothing_is_fetched_while_paused_or_disconnected() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.press("space", "2")
        screen.app.poll_now()
        await screen.pilot.pause()
        assert screen.console.asked == []
        await screen.press("space")
        await screen.until(lambda: "0 examined" in screen.text)
        await screen.lose(ConnectionError("gone"))
        asked = len(screen.console.asked)
        await screen.press("1", "2")
        assert len(screen.console.asked) == asked
        screen.console.error = None
        await screen.refresh()
        await screen.until(lambda: len(screen.console.asked) > asked)


# --------------------------------------------------------------------------- acts and notes


async def test_acts_are_refused_where_the_dashboard_only_reads() -> None:
    async with running(some_requests(), pages=TWO_PAGES, is_read_only=True) as screen:
        assert "read-only" in screen.text
        await screen.press("x")
        assert not isinstance(screen.app.screen, Question)
        assert "abort: this dashboard only reads" in screen.text
        await screen.press("R")
        assert "reset: this dashboard only reads" in screen.text
        assert screen.console.acts == []

        async def look(console: Console) -> str:
            return "looked at it"

        screen.app.page.post_message(Do("look", look, only_reads=True))
        await screen.until(lambda: "looked at it" in screen.text)


async def test_an_act_with_another_answer() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:

        async def drop(console: Console) -> str:
            return f"{await console.drop_prefix('ab')} dropped"

        def ask() -> None:
            question = Question("Which", (), (Answer("a", "some", "some"), Answer("b", "all", "all")))
            screen.app.page.post_message(Do("drop", drop, question=question, answer="all"))

        ask()
        await screen.until(lambda: isinstance(screen.app.screen, Question))
        await screen.press("a")
        ask()
        await screen.until(lambda: isinstance(screen.app.screen, Question))
        assert screen.console.acts == []
        await screen.press("b")
        await screen.until(lambda: "0 dropped" in screen.text)
        assert screen.console.acts == [("drop", "ab")]


async def test_notes_give_way_to_the_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.tui.status.NOTE_SECONDS", 0.01)
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        alert = screen.app.query_one(AlertLine)
        drawn: list[str] = []
        original = alert.draw

        def spy(view: View | None, link: Link, width: int, height: int) -> list[Spans]:
            lines = original(view, link, width, height)
            drawn.append("".join(text for text, _ in lines[0]))
            return lines

        monkeypatch.setattr(alert, "draw", spy)
        screen.app.page.post_message(Note("for a moment"))
        await screen.until(lambda: len(drawn) >= 2)
        assert drawn[:2] == ["→ for a moment", "✓ 1 waiting to be admitted"]


async def test_y_copies_what_is_selected_or_the_address() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        written: list[str] = []
        assert screen.app._driver is not None
        screen.app._driver.write = written.append  # type: ignore[method-assign]
        await screen.press("down", "y")
        assert "copied chatcmpl-000002ab" in screen.text
        code = base64.b64encode(b"chatcmpl-000002ab").decode()
        assert written[-1] == f"\x1b]52;c;{code}\a"
        await screen.press("2", "y")
        assert "copied the word" in screen.text
        await screen.show(snapshot())
        await screen.press("1", "y")
        assert "copied http://127.0.0.1:8000/v1" in screen.text


# --------------------------------------------------------------------------- order and filter


async def test_the_filter_shows_what_matches() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.press("slash")
        assert "filter: request id, client, endpoint, state" in screen.text
        await screen.press(*"q2 beta", "space", "backspace")
        assert "No request matches the filter" in screen.text
        await screen.press(*["backspace"] * 7, *"BETA chat")
        assert "Beta agent"[:7] in screen.text
        assert "alpha" not in screen.text
        await screen.press("enter")
        assert "/BETA chat" in screen.text
        assert "q quit" in screen.text
        assert "1–1 of 1" in screen.text
        await screen.press("escape")
        assert "1–3 of 3" in screen.text


async def test_keys_that_come_at_once_after_the_slash_are_filter() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        for key in "/xq":
            screen.app.post_message(events.Key({"/": "slash"}.get(key, key), key))
        await screen.settle()
        assert "No request matches the filter" in screen.text
        assert len(screen.app.screen_stack) == 1, "neither x nor q has asked anything"
        await screen.press("slash", "escape", "question_mark", "slash")
        assert isinstance(screen.app.screen, HelpScreen)
        assert "filter: " not in screen.text


async def test_escape_takes_the_filter_back_and_other_pages_have_none() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        await screen.press("slash", *"gam", "escape")
        assert "1–3 of 3" in screen.text
        await screen.press("slash", *"gam", "tab")
        assert screen.app.page is asking(screen)
        await screen.press("slash")
        assert "Asking has nothing to filter" in screen.text
        await screen.press("1")
        assert "1–1 of 1" in screen.text, "each page keeps its filter"


async def test_arrows_choose_the_column_and_r_turns_it_round() -> None:
    def clients(screen: Screen) -> list[str]:
        page = screen.app.page
        assert isinstance(page, OverviewPage)
        return [request.client for request in page.requests.rows]

    async with running(some_requests(), pages=TWO_PAGES) as screen:
        assert clients(screen) == ["alpha", "Beta agent", "gamma"]
        await screen.press("right", "right")
        assert "by client ▲" in screen.text
        assert clients(screen) == ["alpha", "Beta agent", "gamma"]
        await screen.press("r")
        assert "by client ▼" in screen.text
        assert clients(screen) == ["gamma", "Beta agent", "alpha"]
        await screen.press(*["right"] * 5)
        assert "by tok/s ▼" in screen.text
        assert clients(screen) == ["Beta agent", "alpha", "gamma"], "what has no rate comes last"
        await screen.press("r")
        assert clients(screen) == ["alpha", "Beta agent", "gamma"]
        await screen.press(*["left"] * 7)
        assert "by " not in screen.lines[-3]
        await screen.press("r")
        assert clients(screen) == ["gamma", "Beta agent", "alpha"]


async def test_the_cursor_stays_with_its_request_when_the_order_changes() -> None:
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        page = screen.app.page
        assert isinstance(page, OverviewPage)
        await screen.press("down")
        await screen.press(*["right"] * 7)
        assert page.requests.selected is not None
        assert page.requests.selected.client == "Beta agent"


# --------------------------------------------------------------------------- help


async def test_help_lists_the_keys_of_all_pages_those_of_the_shown_one_first() -> None:
    async with running(some_requests(), size=(160, 200), pages=TWO_PAGES) as screen:
        await screen.press("2", "question_mark")
        assert isinstance(screen.app.screen, HelpScreen)
        text = screen.text
        for word in ("1 Overview: keys", "2 Asking: keys", "zoom", "what was fetched", "shift-tab", "OSC 52", "abort"):
            assert word in text, word
        assert text.index("2 Asking: keys") < text.index("1 Overview: keys")


async def test_every_key_of_every_page_is_in_the_help() -> None:
    async with running(some_requests(), size=(160, 400)) as screen:
        await screen.press("question_mark")
        for page in screen.app.pages:
            for key, meaning in page.keys:
                assert any(key in line and meaning in line for line in screen.lines), (page.title, key)


# --------------------------------------------------------------------------- terminals


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (40, 12)])
async def test_an_ascii_terminal_gets_no_other_character(size: tuple[int, int]) -> None:
    odd = some_requests().requests[0]
    requests = (row(1, client="naïve 客户 🦀 \u202e"), *some_requests().requests[1:], odd)
    async with running(snapshot(active=300, cached=200, requests=requests), size=size, is_ascii=True) as screen:
        for keys in (
            *(str(number + 1) for number in range(len(PAGES))),
            "1",
            "slash",
            "escape",
            "x",
            "n",
            "q",
            "n",
            "question_mark",
        ):
            await screen.press(keys)
            for strip in screen.strips:
                assert strip.text.isascii(), (keys, strip.text)
                assert strip.cell_length == size[0]
        await screen.press("escape")
        if size[0] > 40:
            await screen.press("1")
            assert "+- KV blocks" in screen.text
            assert "na?ve" in screen.text or "na?" in screen.text


async def test_a_plain_text_takes_as_many_cells() -> None:
    from rich.cells import cell_len

    for text in ("▁▂▃▄▅▆▇█", "╭─╮│╰╯", "客户 🦀 é", "e\u0301", "👨\u200d👩\u200d👧", "–…×→", "plain"):
        plain = glyphs.plain(text)
        assert plain.isascii()
        assert len(plain) == cell_len(text), text
    heights = [glyphs.plain(char) for char in " ▁▂▃▄▅▆▇█"]
    assert len(set(heights)) == len(heights), "heights are told apart"
    assert len({glyphs.plain(char) for char in "█▒·"}) == 3


async def test_no_colour_reaches_a_terminal_that_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(some_requests()) as screen:
        for keys in ("1", "2", "slash", "escape", "1", "down", "x", "n", "question_mark", "escape", "t"):
            await screen.press(keys)
            codes = "".join(strip.render(screen.app.console) for strip in screen.strips)
            for kind in ("38;", "48;", "[3", "[4", ";3", ";4"):
                assert f"{kind}" not in codes.replace("\x1b[39;49m", ""), (keys, kind)
        assert "NO_COLOR is set" in screen.text
        assert "\x1b[7m" in codes or ";7" in codes, "the row under the cursor is reversed"


async def test_an_empty_no_color_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    async with running(some_requests()) as screen:
        assert any(s.style and s.style.color for strip in screen.strips for s in strip)


async def test_t_goes_through_the_themes_and_round() -> None:
    async with running(some_requests()) as screen:
        seen = []
        for name in ("light", "contrast", "mono", "dark"):
            await screen.press("t")
            assert f"theme: {name}" in screen.text
            colors = {s.style.color.name for strip in screen.strips for s in strip if s.style and s.style.color}
            seen.append(frozenset(colors))
            assert screen.text.isascii() == (name == "mono")
            assert bool(colors) == (name != "mono")
        assert len(set(seen)) == 4


def test_every_theme_has_the_same_names() -> None:
    names = set(palette.STYLES)
    try:
        for theme in palette.THEME_NAMES:
            palette.use(theme)
            assert set(palette.STYLES) == names, theme
            assert set(palette.CURSOR_STYLES) <= names
    finally:
        palette.use("dark")


@pytest.mark.parametrize("theme", ["dark", "light", "contrast"])
def test_text_can_be_read(theme: str) -> None:
    """Contrast by WCAG 2: 4.5 is what text needs, 7 what high contrast does."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    try:
        palette.use(theme)
        for name in ("text", "bright", "muted", "key", "active", "cached", "prefill", "decode", "warning", "error"):
            style = palette.STYLES[name]
            assert style.color is not None
            assert style.bgcolor is not None
            light, dark = sorted((luminance(style.color.name), luminance(style.bgcolor.name)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= (7 if theme == "contrast" else 4.5), name
    finally:
        palette.use("dark")


# --------------------------------------------------------------------------- the tool for pictures


async def test_a_picture_fails_for_another_letter_and_for_another_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UPDATE, raising=False)
    async with running(some_requests(), pages=TWO_PAGES) as screen:
        with pytest.raises(AssertionError, match="there is no picture"):
            assert_picture(screen.app, "one", folder=tmp_path)
        monkeypatch.setenv(UPDATE, "1")
        assert_picture(screen.app, "one", folder=tmp_path)
        monkeypatch.delenv(UPDATE)
        assert_picture(screen.app, "one", folder=tmp_path)
        kept = (tmp_path / "one.svg").read_text(encoding="utf-8")
        for old, new in (("Beta", "Beto"), (palette.DARK.active, "#38d3c3"), (' font-weight="bold"', "")):
            assert old in kept
            (tmp_path / "one.svg").write_text(kept.replace(old, new, 1), encoding="utf-8")
            with pytest.raises(AssertionError, match=r"not as in one\.svg"):
                assert_picture(screen.app, "one", folder=tmp_path)


def test_a_dashboard_needs_no_engine() -> None:
    """Whoever shows one elsewhere gives it any console."""
    assert isinstance(FakeConsole(snapshot()), object)
    assert Dashboard(FakeConsole(snapshot()), address="x", model="m", on_quit="close").pages[0].title == "Overview"
