"""The requests that ended lately, the latest first. Owner: the event loop."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from kvd.insight import Timeline
from kvd.tui.event_list import clock_time
from kvd.tui.format import NOTHING, clean, duration, exact, fit, fit_right, short_count, short_id
from kvd.tui.listing import ListPanel
from kvd.tui.panel import Spans, crop, span_width
from kvd.tui.timeline import ending
from kvd.tui.view import Link, View

_ID_WIDTH = 12
_API_WIDTH = 9
_MIN_WIDTH_WITH_API = 90
_MAX_CLIENT_WIDTH = 30
_CLIENT_SHARE = 4
"""The client gets one part in so many of the width."""


class EndedPanel(ListPanel):
    """One row for each; enter opens its timeline."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", show=False)]

    class Opened(Message):
        """The operator wants to know more of this request."""

        def __init__(self, request_id: str) -> None:
            super().__init__()
            self.request_id = request_id

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._timelines: tuple[Timeline, ...] | None = None
        self._shown: tuple[Timeline, ...] = ()
        self._words: list[str] = []

    @property
    def num_rows(self) -> int:
        return len(self._shown)

    @property
    def selected_id(self) -> str:
        """The id of the request under the cursor; empty where there is none."""
        return self._shown[self.cursor].request_id if self._shown else ""

    def take(self, timelines: tuple[Timeline, ...]) -> None:
        """The latest first. The cursor stays with its request, or on the top row if it was there."""
        self._timelines = timelines
        self._choose()

    def look_for(self, text: str) -> None:
        self._words = text.lower().split()
        self._choose()

    def _choose(self) -> None:
        selected = self.selected_id if self.cursor else ""
        self._shown = tuple(filter(self._matches, self._timelines or ()))
        places = (index for index, timeline in enumerate(self._shown) if timeline.request_id == selected)
        self.place(next(places, self.cursor))
        self.redraw()

    def _matches(self, timeline: Timeline) -> bool:
        if not self._words:
            return True
        text = f"{timeline.request_id} {timeline.client} {timeline.endpoint} {_how(timeline)}".lower()
        return all(word in text for word in self._words)

    def action_open(self) -> None:
        if self.selected_id:
            self.post_message(self.Opened(self.selected_id))

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Requests that ended lately", self.span_in_view

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        if self._timelines is None:
            words = "Asking for the requests that ended…"
        elif not self._timelines:
            words = "No request has ended yet. e goes back to those that run."
        else:
            words = f"None of {exact(len(self._timelines))} matches the filter."
        return [crop(((words, "muted"),), width)]

    def heading(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if not self._shown:
            return []
        cells = (
            f" {'ended':<8} {'id':<{_ID_WIDTH}} {fit('client', _client_width(width))} "
            + (f"{'api':<{_API_WIDTH}} " if width >= _MIN_WIDTH_WITH_API else "")
            + f"{'prompt':>6} {'output':>6} {'took':>6}  how"
        )
        return [crop(((cells, "muted"),), width)]

    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        timeline = self._shown[index]
        last = timeline.entries[-1] if timeline.entries else None
        output = short_count(last.num_tokens) if last is not None and last.kind == "finished" else NOTHING
        spans: Spans = (
            ("▸" if is_cursor else " ", "key" if is_cursor else "text"),
            (clock_time(timeline.arrived + (last.seconds if last is not None else 0.0)) + " ", "muted"),
            (fit(short_id(timeline.request_id, _ID_WIDTH), _ID_WIDTH) + " ", "bright"),
            (fit(timeline.client or NOTHING, _client_width(width)) + " ", "text"),
        )
        if width >= _MIN_WIDTH_WITH_API:
            spans = (*spans, (fit(timeline.endpoint, _API_WIDTH) + " ", "muted"))
        spans = (
            *spans,
            (f"{short_count(timeline.num_prompt_tokens):>6} ", "text"),
            (f"{output:>6} ", "text"),
            (fit_right(duration(last.seconds if last is not None else None), 6) + "  ", "text"),
        )
        how, room = clean(_how(timeline)[: 2 * width]), width - span_width(spans)
        return crop((*spans, (how if len(how) <= room else ending(timeline), "muted")), width)


def _client_width(width: int) -> int:
    return max(8, min(_MAX_CLIENT_WIDTH, width // _CLIENT_SHARE))


def _how(timeline: Timeline) -> str:
    """How it ended, in words."""
    return timeline.entries[-1].reason if timeline.entries else ""
