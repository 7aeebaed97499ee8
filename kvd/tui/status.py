"""The two lowest lines: what is wrong and what helps, and the keys."""

from __future__ import annotations

from kvd.tui.alerts import Alert, choose_alert
from kvd.tui.panel import Panel, Spans, crop, span_width
from kvd.tui.view import Link, View

_BADGES = {"error": ("!", "error-badge"), "warning": ("!", "warning-badge"), "info": ("i", "info-badge")}
_TEXTS = {"error": "error-bold", "warning": "warning-bold", "info": "bright", "none": "good"}

_KEYS = (
    ("q", "quit"),
    ("?", "help"),
    ("space", "pause"),
    ("↑↓", "select"),
    ("x", "abort"),
    ("r", "reset cache"),
    ("+/-", "every"),
)


class AlertLine(Panel):
    """The alert, or for a few seconds what came of the operator's last act."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._note = ""

    def note(self, text: str) -> None:
        """Show this text instead of the alert; empty shows the alert again."""
        self._note = text
        self.redraw()

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if self._note:
            return [crop((("→", "key"), (" " + self._note, "bright")), width)]
        return [_line(choose_alert(view, link), width)]


def _line(alert: Alert, width: int) -> Spans:
    badge = _BADGES.get(alert.severity, ("✓" if alert.severity == "none" else " ", "good"))
    text = next((text for text in alert.texts if len(text) + 2 <= width), alert.texts[-1])
    return crop((badge, (" " + text, _TEXTS[alert.severity])), width)


class KeyLine(Panel):
    """The keys that do something, as many as fit."""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        spans: Spans = ()
        for key, meaning in _KEYS:
            label = "resume" if meaning == "pause" and link.is_paused else meaning
            if meaning == "every":
                label = f"every {link.interval_seconds:g}s"
            more: Spans = ((" " if not spans else "  ", "text"), (key, "key"), (f" {label}", "muted"))
            if span_width((*spans, *more)) > width:
                break
            spans = (*spans, *more)
        return [spans]
