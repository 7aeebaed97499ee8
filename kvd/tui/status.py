"""The lines around a page: which page it is, what is wrong and what helps, and the keys."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual import events
from textual.message import Message
from textual.timer import Timer

from kvd.tui.alerts import Alert, choose_alert
from kvd.tui.page import Page
from kvd.tui.panel import Panel, Span, Spans, crop, span_width
from kvd.tui.view import Link, View

NOTE_SECONDS = 4.0

_BADGES = {"error": ("!", "error-badge"), "warning": ("!", "warning-badge"), "info": ("i", "info-badge")}
_TEXTS = {"error": "error-bold", "warning": "warning-bold", "info": "bright", "none": "good"}


class AlertLine(Panel):
    """The alert, or for a few seconds what came of the operator's last act."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._note = ""
        self._timer: Timer | None = None

    def note(self, text: str) -> None:
        """Show this text instead of the alert, for a few seconds."""
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(NOTE_SECONDS, self._forget)
        self._note = text
        self.redraw()

    def _forget(self) -> None:
        self._note = ""
        self.redraw()

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if self._note:
            return [crop((("→", "key"), (" " + self._note, "bright")), width)]
        return [_line(choose_alert(view, link), width)]


def _line(alert: Alert, width: int) -> Spans:
    badge = _BADGES.get(alert.severity, ("✓" if alert.severity == "none" else " ", "good"))
    text = next((text for text in alert.texts if len(text) + 2 <= width), alert.texts[-1])
    return crop((badge, (" " + text, _TEXTS[alert.severity])), width)


class TabLine(Panel):
    """The pages with the keys that lead to them; the one that is shown is marked by brackets and style."""

    def __init__(self, titles: Sequence[str], *, id: str) -> None:
        super().__init__(id=id)
        self._pages = tuple(titles)
        self._shown = 0

    def mark(self, index: int) -> None:
        """This page is shown now."""
        self._shown = index
        self.redraw()

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        line = self._line(self._pages)
        if span_width(line) > width:
            # The title that is shown says where one is, the digits of the others where one could be.
            line = self._line([title if i == self._shown else "" for i, title in enumerate(self._pages)])
        return [crop(line, width)]

    def _line(self, titles: Sequence[str]) -> Spans:
        spans: list[Span] = []
        for index, title in enumerate(titles):
            label = f"{index + 1} {title}".rstrip()
            if index == self._shown:
                spans.append((f"[{label}]", "badge"))
            else:
                spans += [(f" {index + 1}", "key"), (f" {title}".rstrip() + " ", "muted")]
        return tuple(spans)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not self._lines:
            return
        # Every page has as many spans as it takes; what is left of the click ends with the page that was clicked.
        index, right = -1, 0
        for text, style in self._lines[0]:
            index += style != "muted"
            right += cell_len(text)
            if offset.x < right:
                self.post_message(self.Clicked(index))
                return

    class Clicked(Message):
        """The operator wants to see this page."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index


class KeyLine(Panel):
    """The keys that do something, as many as fit: those of the page that is shown among the general ones."""

    def __init__(self, page: Page, *, id: str) -> None:
        super().__init__(id=id)
        self.page = page

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        keys = [("q", "quit"), ("?", "help")]
        if self.page.filters:
            keys.append(("/", "filter"))
        keys += [*self.page.keys, ("space", "resume" if link.is_paused else "pause")]
        keys += [("+/-", f"{link.interval_seconds:g}s"), ("y", "copy"), ("t", "theme")]
        spans: Spans = ()
        for key, meaning in keys:
            more: Spans = ((" " if not spans else "  ", "text"), (key, "key"), (f" {meaning}", "muted"))
            if span_width((*spans, *more)) > width:
                break
            spans = (*spans, *more)
        return [spans]
