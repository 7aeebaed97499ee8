"""The dashboard: wires panels, poller and questions. Owner: the event loop, which it shares with the server.

    Poller ──SnapshotArrived──► Dashboard ──View, Link──► panel after panel repaints the lines that changed
    key ──► Question ──answer──► Control (in process or over HTTP) ──► one line about what came of it

Invariant: nothing in here can end the server. A source that fails shows as disconnected, an act that fails is a
line of text, and a dashboard that fails closes itself: `run_async` then returns "close" like any other time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.timer import Timer

from kvd.tui.blocks import BlocksPanel
from kvd.tui.cache import CachePanel
from kvd.tui.header import Header
from kvd.tui.help import HelpScreen
from kvd.tui.palette import THEME
from kvd.tui.panel import Panel
from kvd.tui.picture import save_picture
from kvd.tui.poller import Poller, SnapshotArrived, SourceLost
from kvd.tui.question import Answer, Question
from kvd.tui.requests import RequestsPanel
from kvd.tui.status import AlertLine, KeyLine
from kvd.tui.throughput import ThroughputPanel
from kvd.tui.view import History, Link, View
from kvd.views import Control, SnapshotSource

log = logging.getLogger(__name__)

Outcome = Literal["close", "stop"]
"""What the operator wants of the server when the dashboard ends: nothing, or that it stops."""

NOTE_SECONDS = 4.0
FRAME_SECONDS = 1 / 60
"""Textual paints at most this often; what changed between two frames it paints in one go."""

_Result = TypeVar("_Result")


class Dashboard(App[Outcome]):
    """One screen about one engine. `await dashboard.run_async()` returns an `Outcome`."""

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
        Binding("space", "pause", show=False),
        Binding("r", "reset_cache", show=False),
        Binding("plus,equals_sign", "pace(-1)", show=False),
        Binding("minus,underscore", "pace(1)", show=False),
    ]

    def __init__(
        self,
        source: SnapshotSource,
        control: Control,
        *,
        address: str,
        model: str,
        on_quit: Literal["ask", "close"],
        interval_seconds: float = 0.5,
        timeout_seconds: float = 5.0,
    ) -> None:
        """`address` and `model` are what a client needs. `on_quit="close"`: the server is not ours to stop."""
        super().__init__()
        self.register_theme(THEME)
        self.theme = THEME.name
        self._control = control
        self._on_quit = on_quit
        self._address = address
        self._model = model
        self._history = History()
        self._view: View | None = None
        self._problem = ""
        self._note_timer: Timer | None = None
        self._fresh = asyncio.Event()
        self.num_paints = 0
        self._poller = Poller(
            source, self.post_message, interval_seconds=interval_seconds, timeout_seconds=timeout_seconds
        )
        self._requests = RequestsPanel(id="requests")
        self._alert = AlertLine(id="alert")
        self._blocks = BlocksPanel(id="blocks")
        self._middle = (ThroughputPanel(id="throughput"), CachePanel(id="cache"))
        self._header = Header(id="header")
        self._keys = KeyLine(id="keys")
        self._panels: tuple[Panel, ...] = (
            self._header, self._blocks, *self._middle, self._requests, self._alert, self._keys,
        )  # fmt: skip

    async def run_async(self, **options: Any) -> Outcome:
        """Show the dashboard until the operator leaves it; never raises for a fault of its own.

        Takes Textual's options (`headless`, `size`, `mouse`).
        """
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        try:
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

    # ------------------------------------------------------------------ life cycle

    def compose(self) -> ComposeResult:
        yield self._header
        yield self._blocks
        with Horizontal(id="middle"):
            yield from self._middle
        yield self._requests
        yield self._alert
        yield self._keys

    def on_mount(self) -> None:
        self._requests.focus()
        self._show()
        self.run_worker(self._paint(), name="painter")
        self.run_worker(self._poller.run(), name="poller")

    def poll_now(self) -> None:
        """Read the source at once."""
        self._poller.poll_now()

    def on_snapshot_arrived(self, message: SnapshotArrived) -> None:
        self._problem = ""
        self._view = self._history.add(message.snapshot, has_details=message.has_details)
        self._fresh.set()

    def on_source_lost(self, message: SourceLost) -> None:
        self._problem = message.problem
        self._fresh.set()

    async def _paint(self) -> None:
        """Show what is new, one panel per frame: a whole screen at once would hold up the loop for too long."""
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            view, link = self._view, self._link()
            self._mark_lost()
            for panel in self._panels:
                if panel.show(view, link):
                    await asyncio.sleep(FRAME_SECONDS)
            self.num_paints += 1

    def _show(self) -> None:
        """Show everything at once, as an answer to a key."""
        link = self._link()
        self._mark_lost()
        for panel in self._panels:
            panel.show(self._view, link)

    def _link(self) -> Link:
        poller = self._poller
        return Link(self._address, self._model, poller.interval_seconds, poller.is_paused, self._problem)

    def _mark_lost(self) -> None:
        main, is_lost = self.screen_stack[0], bool(self._problem)
        if main.has_class("lost") != is_lost:
            main.set_class(is_lost, "lost")

    # ------------------------------------------------------------------ keys

    async def action_leave(self) -> None:
        if isinstance(self.screen, Question):
            self.screen.action_answer_ctrl_c()
        elif self._on_quit == "close":
            self.exit("close")
        else:
            answers = (
                Answer("c", "close the dashboard, keep serving", "close"),
                Answer("s", "stop the server", "stop"),
                Answer("n", "cancel", ""),
            )
            question = Question("Leave", self._what_stopping_means(), answers, ctrl_c="stop")
            self.push_screen(question, self._leave)

    def _what_stopping_means(self) -> tuple[str, ...]:
        if self._view is None:
            return (f"kvd serves on {self._address}.",)
        count = self._view.snapshot.num_running + self._view.snapshot.num_waiting
        served = {
            0: "No request is being served.",
            1: "1 request is being served; stopping lets it finish.",
        }
        more = f"{count} requests are being served; stopping lets them finish."
        return (f"kvd serves on {self._address}.", served.get(count, more))

    def _leave(self, answer: str | None) -> None:
        if answer == "close":
            self.exit("close")
        elif answer == "stop":
            self.exit("stop")

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_pause(self) -> None:
        self._poller.is_paused = not self._poller.is_paused
        self._poller.poll_now()
        self._show()

    def action_pace(self, steps: int) -> None:
        self._poller.change_pace(steps)
        self._show()

    def action_reset_cache(self) -> None:
        cached = self._view.snapshot.num_blocks_cached if self._view is not None else 0
        has_tiers = self._view is not None and self._view.snapshot.num_ram_blocks > 0
        details = (
            f"{cached:,} cached blocks would be dropped.",
            *(["So would all that RAM and disk keep of them and others."] if has_tiers else []),
            "Prompts that begin alike are then computed again.",
        )
        answers = (Answer("n", "keep the cache", ""), Answer("y", "drop every cached block", "reset"))

        def answered(answer: str | None) -> None:
            if answer == "reset":
                self.run_worker(self._reset_cache(), name="reset")

        self.push_screen(Question("Reset the prefix cache", details, answers), answered)

    def on_requests_panel_abort_requested(self, message: RequestsPanel.AbortRequested) -> None:
        row = message.row
        details = (row.request_id, f"{row.client or 'unnamed client'}: {row.state}, {row.num_output_tokens} tokens")
        answers = (Answer("n", "let it run", ""), Answer("y", "abort it", "abort"))

        def answered(answer: str | None) -> None:
            if answer == "abort":
                self.run_worker(self._abort(row.request_id), name="abort")

        self.push_screen(Question("Abort this request", details, answers), answered)

    # ------------------------------------------------------------------ acts

    async def _abort(self, request_id: str) -> None:
        was_running = await self._act(self._control.abort(request_id), "abort")
        if was_running is not None:
            self._note(f"{request_id} {'aborted' if was_running else 'had ended already'}")

    async def _reset_cache(self) -> None:
        dropped = await self._act(self._control.reset_cache(), "reset")
        if dropped is not None:
            self._note(f"{dropped:,} cached blocks dropped")

    async def _act(self, act: Awaitable[_Result], name: str) -> _Result | None:
        """The act's result, or None after saying why there is none."""
        try:
            return await act
        except Exception as error:  # whatever an injected control raises is for the operator to read
            self._note(f"{name} failed: {error or type(error).__name__}")
            return None
        finally:
            self._poller.poll_now()

    def _note(self, text: str) -> None:
        if self._note_timer is not None:
            self._note_timer.stop()
        self._alert.note(text)
        self._note_timer = self.set_timer(NOTE_SECONDS, lambda: self._alert.note(""))
