"""Page of the event log: what the server found worth telling, how loud, and about which request."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from kvd.insight import Console
from kvd.tui.event_list import EventPanel, full_text, request_of
from kvd.tui.page import Jump, Key, Note, Page
from kvd.tui.panel import Panel

MAX_EVENTS = 1_000
"""As many as the log keeps."""


class EventsPage(Page):
    """The log, the newest at the bottom."""

    title: ClassVar[str] = "Events"
    fetch_seconds: ClassVar[float] = 1.0
    filters: ClassVar[str] = "message, kind or request id"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "level", show=False),
        Binding("enter", "open_request", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._events = EventPanel(id="events", classes="box flush")

    def compose(self) -> ComposeResult:
        yield self._events

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self._events,)

    @property
    def keys(self) -> tuple[Key, ...]:
        return (("l", "level"), ("enter", "its request"), ("G", "follow"))

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        entries = (
            ("D I W E", "debug, information, warning, error"),
            ("l", "leaves out the quietest that are shown; then shows all again"),
            ("kind, id", "what happened; the id of the request that it is about"),
            ("follows", "the newest stays in view; G follows again after moving up"),
        )
        return (("Events", entries),)

    async def fetch(self, console: Console) -> None:
        self._events.take(await console.events(MAX_EVENTS))

    def set_filter(self, text: str) -> None:
        super().set_filter(text)
        self._events.look_for(text)

    def copied(self) -> str:
        event = self._events.selected
        return full_text(event) if event is not None else ""

    def action_level(self) -> None:
        self._events.next_level()

    def action_open_request(self) -> None:
        event = self._events.selected
        if event is None:
            return
        request_id = request_of(event)
        if request_id:
            self.post_message(Jump("Requests", request_id))
        else:
            self.post_message(Note("this event is not about a request"))
