"""Page of the requests: those that run, those that ended lately, and what became of one of them.

Owner: the event loop. One of the two lists is shown, and the timeline of one request in its place, or below it where
there is room for both. The page fetches what is on the screen alone, and a timeline that has ended only once.
"""

from __future__ import annotations

from typing import ClassVar

from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from kvd.insight import Console
from kvd.tui.acts import abort
from kvd.tui.ended_list import EndedPanel
from kvd.tui.page import Key, Note, Page, Refetch
from kvd.tui.panel import Panel
from kvd.tui.requests import RequestsPanel
from kvd.tui.timeline import TimelinePanel
from kvd.tui.view import Link, View

MAX_ENDED = 200
"""How many ended requests are asked for."""


class RequestsPage(Page):
    """Two lists and a timeline."""

    title: ClassVar[str] = "Requests"
    fetch_seconds: ClassVar[float] = 0.5
    filters: ClassVar[str] = "request id, client, endpoint, state, how it ended"

    DEFAULT_CSS = """
    RequestsPage Panel { height: 1fr; }
    RequestsPage #timeline { display: none; }
    RequestsPage #ended { display: none; }
    RequestsPage.ended #ended { display: block; }
    RequestsPage.ended #running { display: none; }
    RequestsPage.opened #timeline { display: block; }
    RequestsPage.opened #running, RequestsPage.opened #ended { display: none; }
    .-tall RequestsPage.opened #timeline { height: 2fr; }
    .-tall RequestsPage.opened #running { display: block; }
    .-tall RequestsPage.opened.ended #running { display: none; }
    .-tall RequestsPage.opened.ended #ended { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "ended", show=False),
        Binding("escape", "back", show=False),
        Binding("x,delete", "abort", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._table = RequestsPanel(id="running", classes="box flush")
        self._ended = EndedPanel(id="ended", classes="box flush")
        self._timeline = TimelinePanel(id="timeline", classes="box")
        self._latest: tuple[View | None, Link] | None = None
        self._focus = ""  # a request that another page wants to be looked at

    def compose(self) -> ComposeResult:
        yield self._table
        yield self._ended
        yield self._timeline

    # ------------------------------------------------------------------ what is shown

    @property
    def _is_opened(self) -> bool:
        return self.has_class("opened")

    @property
    def _shows_ended(self) -> bool:
        return self.has_class("ended")

    @property
    def _list(self) -> RequestsPanel | EndedPanel:
        return self._ended if self._shows_ended else self._table

    @property
    def panels(self) -> tuple[Panel, ...]:
        if not self._is_opened:
            return (self._list,)
        return (self._timeline, self._list) if self._list.display else (self._timeline,)

    @property
    def keys(self) -> tuple[Key, ...]:
        other = ("e", "running" if self._shows_ended else "ended")
        if self._is_opened:
            return (("esc", "back"), ("↑↓", "select"), ("x", "abort"), other)
        if self._shows_ended:
            return (("↑↓", "select"), ("enter", "timeline"), ("esc", "back"), other)
        return (*self._table.keys[:2], other, *self._table.keys[2:])

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return (
            (
                "Requests",
                (
                    ("pre 2r1s", "preempted three times: computed again, kept in RAM"),
                    ("e", "the requests that ended lately, and back"),
                    ("enter", "the timeline of the request under the cursor"),
                ),
            ),
            (
                "Timeline",
                (
                    ("░ queued", "time until it was admitted"),
                    ("▒ prefill", "time of computing its prompt, again after a preemption"),
                    ("█ decode", "time of generating"),
                    ("x preempted", "time without a place, after it had one"),
                    ("at, after", "since it arrived, since the entry above"),
                    ("chunk", "part of the prompt that one step computed"),
                    ("forgot", "tokens dropped under kv_eviction"),
                ),
            ),
        )

    def open(self, focus: str = "") -> None:
        if focus:
            self._focus = focus
            self._open_timeline(focus)

    def show(self, view: View | None, link: Link) -> None:
        self._latest = (view, link)
        for panel in (self._table, self._ended, self._timeline):
            panel.show(view, link)
        if self._focus and self._table.select(self._focus):
            self._focus = ""

    def set_filter(self, text: str) -> None:
        super().set_filter(text)
        self._table.set_filter(text)
        self._ended.look_for(text)

    def copied(self) -> str:
        if self._is_opened:
            return self._timeline.request_id
        return self._ended.selected_id if self._shows_ended else self._table.copied()

    # ------------------------------------------------------------------ fetching

    async def fetch(self, console: Console) -> None:
        wanted = self._timeline.request_id
        if self._is_opened and not self._timeline.has_ended:
            await self._fetch_timeline(console, wanted)
        if self._shows_ended and self._list.display:
            self._ended.take(await console.timelines(MAX_ENDED))

    async def _fetch_timeline(self, console: Console, wanted: str) -> None:
        timeline = await console.timeline(wanted)
        if timeline is None and self._timeline.is_known is not True:
            # The id of an answer with several choices, as the log has it: each choice is a request of its own.
            timeline = await console.timeline(f"{wanted}-0")
            if timeline is not None and self._timeline.request_id == wanted:
                wanted = timeline.request_id
                self._timeline.begin(wanted)
        self._timeline.take(wanted, timeline)

    # ------------------------------------------------------------------ keys

    def on_requests_panel_opened(self, message: RequestsPanel.Opened) -> None:
        message.stop()
        self._open_timeline(message.request_id)

    def on_ended_panel_opened(self, message: EndedPanel.Opened) -> None:
        message.stop()
        self._open_timeline(message.request_id)

    def action_ended(self) -> None:
        self.set_classes(() if self._shows_ended else ("ended",))
        self._arranged()

    def action_back(self) -> None:
        if self._is_opened:
            self.remove_class("opened")
        elif self._shows_ended and not self.filter_text:
            self.remove_class("ended")
        else:
            raise SkipAction
        self._arranged()

    def action_abort(self) -> None:
        if not self._is_opened:
            raise SkipAction
        view = self._timeline.view
        rows = view.requests if view is not None else ()
        row = next((row for row in rows if row.request_id == self._timeline.request_id), None)
        self.post_message(abort(row) if row is not None else Note("this request does not run"))

    def _open_timeline(self, request_id: str) -> None:
        self._timeline.begin(request_id)
        self.add_class("opened")
        self._arranged()

    def _arranged(self) -> None:
        """Something else is on the screen now."""
        if self._latest is not None:
            self.show(*self._latest)
        (self._timeline if self._is_opened else self._list).focus(scroll_visible=False)
        self.post_message(Refetch())
