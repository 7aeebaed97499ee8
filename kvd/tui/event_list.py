"""The event log: one row for each event that is loud enough and has the words looked for. Owner: the event loop.

Follows the newest event until the operator moves up; the event under the cursor then stays under it while others come.
"""

from __future__ import annotations

import re
import time

from kvd.tui.format import clean, fit, short_id
from kvd.tui.listing import ListPanel, wrap
from kvd.tui.panel import Spans, crop, span_width
from kvd.tui.view import Link, View
from kvd.views import LogEvent

LEVELS = ("debug", "info", "warning", "error")

_LETTERS = {
    "debug": ("D", "faint"),
    "info": ("I", "muted"),
    "warning": ("W", "warning-bold"),
    "error": ("E", "error-bold"),
}
_TEXTS = {"debug": "muted", "info": "text", "warning": "warning", "error": "error"}
_ID = re.compile(r"\b(?:chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{32}\b")
"""A request id as the server makes them; lines of its log have them in their text alone."""
_KIND_WIDTH = 12
_ID_WIDTH = 8
_MIN_WIDTH_WITH_ID = 70
_DETAIL_LINES = 3
_MAX_DETAIL_CHARACTERS = 2_000
"""Of a message; nobody reads more of it in three lines, and laying it out takes time."""


def clock_time(unix_seconds: float) -> str:
    """The time of day here: `14:03:59`."""
    return time.strftime("%H:%M:%S", time.localtime(unix_seconds))


def request_of(event: LogEvent) -> str:
    """The request that an event is about: as it says itself, or the first id in its message; empty where none is."""
    if event.request_id:
        return event.request_id
    found = _ID.search(event.message)
    return found.group() if found else ""


def full_text(event: LogEvent) -> str:
    """Everything that is known of an event, in one line."""
    who = f" [{event.request_id}]" if event.request_id else ""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    return clean(f"{stamp} {event.level} {event.kind}{who} {event.message}")


class EventPanel(ListPanel):
    """The events at or above a level, and those of them with every word of a text."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, follows=True, classes=classes)
        self._events: tuple[LogEvent, ...] | None = None
        self._shown: tuple[LogEvent, ...] = ()
        self.level_index = 1
        self._filter = ""

    @property
    def num_rows(self) -> int:
        return len(self._shown)

    @property
    def selected(self) -> LogEvent | None:
        """The event under the cursor."""
        return self._shown[self.cursor] if self._shown else None

    @property
    def level(self) -> str:
        return LEVELS[self.level_index]

    def take(self, events: tuple[LogEvent, ...]) -> None:
        """The newest events, oldest first."""
        if events != self._events:
            self._events = events
            self._choose()

    def next_level(self) -> None:
        """Leave out the quietest of what is shown; after errors alone, show everything."""
        self.level_index = (self.level_index + 1) % len(LEVELS)
        self._choose()

    def look_for(self, text: str) -> None:
        """Show only events with each of these words in message, kind or request id; upper and lower case alike."""
        self._filter = text
        self._choose()

    def _choose(self) -> None:
        selected = self.selected
        words = self._filter.lower().split()
        levels = LEVELS[self.level_index :]
        self._shown = tuple(
            event for event in self._events or () if event.level in levels and (not words or _has_all(event, words))
        )
        if selected is not None and not self.is_following:
            self.place(_index_of(self._shown, selected))
        self.redraw()

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        title = "Events" if self.level_index == 0 else f"Events  {self.level} and worse"
        if self._filter:
            title += f"  /{clean(self._filter)}"
        following = "follows, " if self.is_following and self.num_rows else ""
        return title, following + self.span_in_view

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        if self._events is None:
            words = "Asking for the events…"
        elif not self._events:
            words = "Nothing has happened yet that is worth telling."
        else:
            words = f"None of {len(self._events):,} events is shown: l changes the level, Esc ends the filter."
        return [crop(((words, "muted"),), width)]

    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        event = self._shown[index]
        letter = _LETTERS.get(event.level, ("?", "text"))
        spans: Spans = (
            ("▸" if is_cursor else " ", "key" if is_cursor else "text"),
            (clock_time(event.time), "muted"),
            (" ", "text"),
            letter,
            (" " + fit(event.kind, _KIND_WIDTH) + " ", "muted"),
        )
        if width >= _MIN_WIDTH_WITH_ID:
            request_id = request_of(event)
            name = short_id(request_id, _ID_WIDTH) if request_id else ""
            spans = (*spans, (fit(name, _ID_WIDTH) + " ", "bright"))
        room = width - span_width(spans)
        # No more of a message is cleaned and measured than can be seen; what is beyond shows as an ellipsis.
        message = fit(event.message[: room + 1], room)
        return (*spans, (message, _TEXTS.get(event.level, "text"))) if room > 0 else crop(spans, width)

    def footing(self, width: int, height: int) -> list[Spans]:
        """The event under the cursor in full, below a line."""
        if height < 8:
            return []
        text = full_text(self._shown[self.cursor])[:_MAX_DETAIL_CHARACTERS]
        lines = wrap(text, width, _DETAIL_LINES)
        lines += [""] * (_DETAIL_LINES - len(lines))  # so that the rows do not move with the cursor
        return [(("─" * width, "faint"),), *(((line, "bright"),) for line in lines)]


def _has_all(event: LogEvent, words: list[str]) -> bool:
    text = f"{event.kind} {event.message} {event.request_id or ''}".lower()
    return all(word in text for word in words)


def _index_of(events: tuple[LogEvent, ...], wanted: LogEvent) -> int:
    """Where the event is; where it is gone, the first that is not older."""
    first = next((index for index, event in enumerate(events) if event.time >= wanted.time), len(events))
    for index in range(first, len(events)):
        if events[index] == wanted:
            return index
        if events[index].time > wanted.time:
            break
    return first
