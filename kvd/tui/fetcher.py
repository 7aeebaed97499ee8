"""Asks for what the page on the screen wants to know beyond the snapshot. Owner: the event loop, as one worker.

Invariant: one fetch at a time, of the page that is shown; a page that is left, and one that wants something else, has
its fetch cancelled. Nothing that a fetch raises ends the fetcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.insight import Console
from kvd.tui.page import Page


class Fetcher:
    """Fetches until cancelled, while `may_fetch` says so.

    on_fetched: called after each fetch with its page, and what is wrong, empty where nothing is.
    """

    def __init__(
        self,
        console: Console,
        page: Page,
        *,
        may_fetch: Callable[[], bool],
        on_fetched: Callable[[Page, str], None],
        timeout_seconds: float,
    ) -> None:
        self._console = console
        self._page = page
        self._may_fetch = may_fetch
        self._on_fetched = on_fetched
        self._timeout_seconds = timeout_seconds
        self._wake = asyncio.Event()
        self.min_seconds = 0.0

    def look_at(self, page: Page) -> None:
        """This page is on the screen now."""
        self._page = page
        self.fetch_now()

    def fetch_now(self) -> None:
        """Cancel what goes on, and begin at once."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            page = self._page
            if self._may_fetch() and type(page).fetch is not Page.fetch:
                await self._fetch(page)
            try:
                async with asyncio.timeout(max(page.fetch_seconds, self.min_seconds)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _fetch(self, page: Page) -> None:
        fetching = asyncio.ensure_future(page.fetch(self._console))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({fetching, waking}, timeout=self._timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                if not waking.done():
                    self._on_fetched(page, f"no answer within {self._timeout_seconds:g} s")
                return
        finally:
            waking.cancel()
            fetching.cancel()
            await asyncio.gather(fetching, waking, return_exceptions=True)
        if fetching.cancelled():
            return
        error = fetching.exception()
        problem = "" if error is None else (str(error).splitlines() or [""])[0] or type(error).__name__
        self._on_fetched(page, problem)
