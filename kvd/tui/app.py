"""The dashboard: wires pages, poller and questions. Owner: the event loop, which it shares with the server.

    Poller ──SnapshotArrived──► Dashboard ──View, Link──► panel after panel repaints the lines that changed
    Fetcher ──fetch──► the page on the screen ──► its panels
    key ──► Do ──► Question ──answer──► Console (in process or over HTTP) ──► one line about what came of it

Invariant: nothing in here can end the server. A source that fails shows as disconnected, an act that fails is a
line of text, and a dashboard that fails closes itself: `run_async` then returns "close" like any other time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual.actions import SkipAction
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.filter import LineFilter

from kvd.insight import Console
from kvd.tui import palette
from kvd.tui.acts import perform, reset_cache
from kvd.tui.cache_page import CachePage
from kvd.tui.events_page import EventsPage
from kvd.tui.fetcher import Fetcher
from kvd.tui.filter_line import FilterLine
from kvd.tui.header import Header
from kvd.tui.help import HelpScreen
from kvd.tui.leaving import Outcome, leave_question
from kvd.tui.looks import Looks
from kvd.tui.machine_page import MachinePage
from kvd.tui.overview import OverviewPage
from kvd.tui.page import Do, Jump, Note, Page, Refetch
from kvd.tui.panel import FRAME_SECONDS, Panel
from kvd.tui.picture import save_picture
from kvd.tui.poller import Poller, SnapshotArrived, SourceLost
from kvd.tui.question import Question
from kvd.tui.requests_page import RequestsPage
from kvd.tui.status import AlertLine, KeyLine, TabLine
from kvd.tui.suspension import handlers_kept, stay_awake
from kvd.tui.view import History, Link, View
from kvd.tui.what_if_page import WhatIfPage

log = logging.getLogger(__name__)

PAGES: tuple[type[Page], ...] = (OverviewPage, CachePage, RequestsPage, MachinePage, EventsPage, WhatIfPage)
"""In the order of their keys."""


class Dashboard(App[Outcome]):
    """Pages about one engine. `await dashboard.run_async()` returns an `Outcome`."""

    CSS_PATH = "dashboard.tcss"
    TITLE = "kvd"
    ENABLE_COMMAND_PALETTE = False
    # Textual declares these two without ClassVar.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (22, "-short"), (40, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+q", "leave", show=False),
        Binding("ctrl+c", "leave", show=False, priority=True),
        Binding("question_mark,f1", "help", show=False),
        Binding("tab", "turn(1)", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        *(Binding(str(number + 1), f"page({number})", show=False) for number in range(9)),
        Binding("slash", "filter", show=False, priority=True),  # so that the key after it finds the filter in place
        Binding("escape", "clear_filter", show=False),
        Binding("space", "pause", show=False),
        Binding("t", "theme", show=False),
        Binding("y", "copy", show=False),
        Binding("R", "reset_cache", show=False),
        Binding("plus,equals_sign", "pace(-1)", show=False),
        Binding("minus,underscore", "pace(1)", show=False),
    ]

    def __init__(
        self,
        console: Console,
        *,
        address: str,
        model: str,
        on_quit: Literal["ask", "close"],
        is_read_only: bool = False,
        is_ascii: bool = False,
        show_prompts: bool = False,
        interval_seconds: float = 0.5,
        timeout_seconds: float = 5.0,
        pages: Sequence[type[Page]] = PAGES,
    ) -> None:
        """`address` and `model` are what a client needs; the model of the first snapshot replaces `model`.

        on_quit: "close" where the server is not ours to stop. is_ascii: nothing beyond ASCII reaches the terminal.
        show_prompts: text of prompts is shown without a key for it. NO_COLOR in the environment is honoured.
        """
        self._looks = Looks(is_ascii=is_ascii)
        no_color = os.environ.get("NO_COLOR")
        super().__init__()
        if no_color is not None:
            os.environ["NO_COLOR"] = no_color  # Textual takes it away; it is not ours alone
        for theme in palette.textual_themes():
            self.register_theme(theme)
        self._use_theme()
        self._console = console
        self._on_quit = on_quit
        self._address = address
        self._model = model
        self._is_read_only = is_read_only
        self._show_prompts = show_prompts
        self._history = History()
        self._view: View | None = None
        self._problem = ""
        self._fresh = asyncio.Event()
        self.num_paints = 0
        self.num_fetches = 0
        self._fetch_problems: dict[str, str] = {}
        self.pages = tuple(page() for page in pages)
        self.page = self.pages[0]
        self._poller = Poller(
            console, self.post_message, interval_seconds=interval_seconds, timeout_seconds=timeout_seconds
        )
        self._fetcher = Fetcher(
            console,
            self.page,
            may_fetch=lambda: not self._poller.is_paused and not self._problem,
            on_fetched=self._fetched,
            timeout_seconds=timeout_seconds,
        )
        self._fetcher.min_seconds = interval_seconds
        self._header = Header(id="header")
        self._tabs = TabLine([page.title for page in self.pages], id="tabs")
        self._alert = AlertLine(id="alert")
        self._keys = KeyLine(self.page, id="keys")
        self._filter = FilterLine(id="filter")

    async def run_async(self, **options: Any) -> Outcome:
        """Show the dashboard until the operator leaves it; never raises for a fault of its own.

        Takes Textual's options (`headless`, `size`, `mouse`).
        """
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        try:
            with handlers_kept():
                outcome = await super().run_async(**options)
        except Exception:
            log.exception("the dashboard failed and was closed; the server keeps running")
            return "close"
        finally:
            loop.set_task_factory(factory)
        if self.return_code:  # Textual has caught the exception and printed it
            log.error("the dashboard failed and was closed; the server keeps running")
        return outcome or "close"

    def save_picture(self, path: Path) -> None:
        """Write what is shown now as an SVG file."""
        save_picture(self, path)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """What every line passes on its way to the terminal; Textual's own only greys what NO_COLOR forbids."""
        line_filter = self._looks.line_filter()
        return [line_filter] if line_filter.enabled else []

    # ------------------------------------------------------------------ life cycle

    def compose(self) -> ComposeResult:
        yield self._header
        yield self._tabs
        with Container(id="pages"):
            yield from self.pages
        yield self._alert
        yield self._keys
        yield self._filter

    def on_mount(self) -> None:
        stay_awake()
        for page in self.pages:
            page.display = page is self.page
        self.show_page(self.page)
        self.run_worker(self._paint(), name="painter")
        self.run_worker(self._poller.run(), name="poller")
        self.run_worker(self._fetcher.run(), name="fetcher")

    def poll_now(self) -> None:
        """Read the source at once, and what the page asks beyond it."""
        self._poller.poll_now()
        self._fetcher.fetch_now()

    def on_snapshot_arrived(self, message: SnapshotArrived) -> None:
        was_lost = bool(self._problem)
        self._problem = ""
        self._view = self._history.add(message.snapshot, has_details=message.has_details)
        self._fresh.set()
        if was_lost:
            self._fetcher.fetch_now()

    def on_source_lost(self, message: SourceLost) -> None:
        self._problem = message.problem
        self._fresh.set()

    def _fetched(self, page: Page, problem: str) -> None:
        self.num_fetches += 1
        if problem and problem != self._fetch_problems.get(page.title):
            self.note(f"{page.title}: {problem}")
        self._fetch_problems[page.title] = problem
        self._fresh.set()

    async def _paint(self) -> None:
        """Show what is new, one panel per frame: a whole screen at once would hold up the loop for too long."""
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            view, link = self._view, self._link()
            self._mark_lost()
            for panel in self._panels:
                panel.show(view, link)
                while panel.is_painting:  # noqa: ASYNC110  # it takes a few frames, and nobody else waits for it
                    await asyncio.sleep(FRAME_SECONDS)
            self.num_paints += 1

    @property
    def _panels(self) -> tuple[Panel, ...]:
        return self._header, self._tabs, *self.page.panels, self._alert, self._keys

    def paint_now(self) -> None:
        """Show everything at once, as an answer to a key."""
        link = self._link()
        self._mark_lost()
        for panel in (self._header, self._tabs, self._alert, self._keys):
            panel.show(self._view, link)
        self.page.show(self._view, link)

    def _link(self) -> Link:
        poller = self._poller
        names = self._view.snapshot.info.served_names if self._view is not None else ()
        return Link(
            self._address,
            names[0] if names else self._model,
            poller.interval_seconds,
            poller.is_paused,
            self._problem,
            self._is_read_only,
            self._show_prompts,
        )

    def _mark_lost(self) -> None:
        main, is_lost = self.screen_stack[0], bool(self._problem)
        if main.has_class("lost") != is_lost:
            main.set_class(is_lost, "lost")

    # ------------------------------------------------------------------ pages

    def show_page(self, page: Page, focus: str = "") -> None:
        """Show this page, at `focus`."""
        self._close_filter()
        self.page.display = False
        self.page = self._keys.page = page
        page.display = True
        self._tabs.mark(self.pages.index(page))
        page.open(focus)
        self.paint_now()
        target = next((panel for panel in page.panels if panel.can_focus), page)
        self.screen_stack[0].set_focus(target, scroll_visible=False)
        self._fetcher.look_at(page)

    def action_page(self, index: int) -> None:
        if index < len(self.pages) and self.pages[index] is not self.page:
            self.show_page(self.pages[index])

    def action_turn(self, delta: int) -> None:
        if len(self.screen_stack) == 1:
            self.action_page((self.pages.index(self.page) + delta) % len(self.pages))

    def on_tab_line_clicked(self, message: TabLine.Clicked) -> None:
        self.action_page(message.index)

    def on_jump(self, message: Jump) -> None:
        for page in self.pages:
            if page.title == message.title:
                self.show_page(page, message.focus)

    def on_refetch(self, message: Refetch) -> None:
        self._fetcher.fetch_now()

    # ------------------------------------------------------------------ filter

    def action_filter(self) -> None:
        if len(self.screen_stack) > 1 or self._filter.display:
            raise SkipAction
        if not self.page.filters:
            self.note(f"{self.page.title} has nothing to filter")
            return
        self._filter.placeholder = f"filter: {self.page.filters}"
        self._filter.value = self.page.filter_text
        self._keys.display = False
        self._filter.display = True
        self.screen.set_focus(self._filter, scroll_visible=False)

    def on_input_changed(self, message: FilterLine.Changed) -> None:
        if message.input is self._filter and self._filter.display:
            self.page.set_filter(message.value)

    def on_filter_line_closed(self, message: FilterLine.Closed) -> None:
        if not message.is_kept:
            self.page.set_filter("")
        self.show_page(self.page)

    def action_clear_filter(self) -> None:
        if self.page.filter_text:
            self.page.set_filter("")

    def _close_filter(self) -> None:
        self._filter.display = False
        self._keys.display = True

    # ------------------------------------------------------------------ keys

    async def action_leave(self) -> None:
        if isinstance(self.screen, Question):
            self.screen.action_answer_ctrl_c()
        elif self._on_quit == "close":
            self.exit("close")
        else:
            self.push_screen(leave_question(self._address, self._view), self._leave)

    def _leave(self, answer: str | None) -> None:
        if answer:
            self.exit("stop" if answer == "stop" else "close")

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.pages, self.page))

    def action_pause(self) -> None:
        self._poller.is_paused = not self._poller.is_paused
        self.poll_now()
        self.paint_now()

    def action_pace(self, steps: int) -> None:
        self._poller.change_pace(steps)
        self._fetcher.min_seconds = self._poller.interval_seconds
        self.paint_now()

    def action_theme(self) -> None:
        if self._looks.is_fixed:
            self.note("NO_COLOR is set: there is one theme, without colours")
            return
        self._looks.turn()
        self._use_theme()
        self.paint_now()
        for widget in self.screen.walk_children():
            widget.refresh()
        self.note(f"theme: {self._looks.theme}")

    def _use_theme(self) -> None:
        self.theme = f"kvd-{self._looks.theme}"
        self.set_class(self._looks.is_mono, "-mono")

    def action_copy(self) -> None:
        text = self.page.copied() or self._address
        self.copy_to_clipboard(text)
        self.note(f"copied {text}")

    def action_reset_cache(self) -> None:
        self.on_do(reset_cache(self._view))

    # ------------------------------------------------------------------ acts and notes

    def on_do(self, message: Do) -> None:
        if self._is_read_only and not message.only_reads:
            self.note(f"{message.name}: this dashboard only reads")
            return
        if message.question is None:
            self.run_worker(self._act(message), name=message.name)
            return

        def answered(answer: str | None) -> None:
            if answer == message.answer:
                self.run_worker(self._act(message), name=message.name)

        self.push_screen(message.question, answered)

    async def _act(self, message: Do) -> None:
        result = await perform(message, self._console)
        if result:
            self.note(result)
        self.poll_now()

    def on_note(self, message: Note) -> None:
        self.note(message.text)

    def note(self, text: str) -> None:
        """Say something to the operator for a few seconds, in place of the alert."""
        self._alert.note(text)
