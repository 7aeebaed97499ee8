"""A dashboard in a headless terminal, for tests: what is on its screen, and hands on its keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.strip import Strip

from kvd.tui.app import Dashboard, Outcome
from kvd.tui.page import Page
from kvd.tui.panel import Panel
from kvd.views import Snapshot
from tests.tui.fakes import FakeConsole

SIZES = pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])


class Screen:
    """A running dashboard. What is read from it is what the terminal would show."""

    def __init__(self, app: Dashboard, pilot: Pilot[Outcome], console: FakeConsole) -> None:
        self.app, self.pilot, self.console = app, pilot, console

    @property
    def strips(self) -> list[Strip]:
        """The lines with their styles."""
        return self.app.screen._compositor.render_strips()

    @property
    def lines(self) -> list[str]:
        return [strip.text.rstrip() for strip in self.strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Let the app work until this holds; it is an error when it never does."""
        for _ in range(500):
            if is_so():
                return
            await self.pilot.pause()
            await asyncio.sleep(0.005)
        raise AssertionError(f"never came true; on the screen:\n{self.text}")

    async def settle(self) -> None:
        """Until everything is painted that has changed."""
        await self.pilot.pause()
        main = self.app.screen_stack[0]
        await self.until(lambda: not any(panel.is_painting for panel in main.query(Panel)))
        await self.pilot.pause()

    async def refresh(self) -> None:
        """One more poll, painted."""
        calls, paints = self.console.num_calls, self.app.num_paints
        self.app.poll_now()
        await self.until(lambda: self.console.num_calls > calls and self.app.num_paints > paints)
        await self.settle()

    async def fetch(self) -> None:
        """One more fetch of the page that is shown, painted."""
        fetches = self.app.num_fetches
        self.app.poll_now()
        await self.until(lambda: self.app.num_fetches > fetches)
        self.app.paint_now()
        await self.settle()

    async def show(self, current: Snapshot) -> None:
        """Another snapshot, painted."""
        self.console.current = current
        # The request table is asked for four times a second at most; here there is no reason to wait.
        self.app._poller._details_time = float("-inf")
        await self.refresh()

    async def lose(self, error: Exception) -> None:
        """The source fails from now on, and the screen says so."""
        self.console.error = error
        await self.refresh()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        if self.app.is_running:
            await self.settle()

    async def turn_to(self, title: str) -> None:
        """Show the page with this title."""
        titles = [page.title for page in self.app.pages]
        await self.press(str(titles.index(title) + 1))


@asynccontextmanager
async def running(
    current: Snapshot,
    *,
    size: tuple[int, int] = (80, 24),
    on_quit: str = "ask",
    page: str = "",
    console: FakeConsole | None = None,
    **options: Any,
) -> AsyncIterator[Screen]:
    """A dashboard that polls and fetches at the start and when told to, at the page with this title.

    Further options are the dashboard's.
    """
    console = console or FakeConsole(current)
    console.current = current
    options = {"address": "http://127.0.0.1:8000/v1", "model": "smollm2-135m-instruct", **options}
    app = Dashboard(console, on_quit=on_quit, interval_seconds=60.0, **options)  # type: ignore[arg-type]
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot, console)
        await screen.until(lambda: app.num_paints > 0)
        await screen.settle()
        if page:
            await screen.turn_to(page)
            if type(app.page).fetch is not Page.fetch and console.error is None:
                await screen.fetch()
        yield screen
