"""Text of a prompt, above the dashboard, because the operator pressed the key for it. Owner: the event loop.

Invariant: nothing that is shown here is kept after the screen closes, and nothing of it goes to a log.
"""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from kvd.insight import Console, Reveal
from kvd.tui.comparison import differing, marked_lines
from kvd.tui.format import clean
from kvd.tui.page import Do
from kvd.tui.palette import STYLES
from kvd.tui.panel import Spans

_MAX_WIDTH = 100
_MARGINS = 7  # border, padding and scroll bar of the box


def show_text(app: App[Any], name: str) -> Do:
    """The message that asks for the text behind a prefix id or a request id, and opens a screen with it."""

    async def reveal(console: Console) -> str:
        app.push_screen(RevealScreen(await console.reveal(name)))
        return ""

    return Do("reveal", reveal, only_reads=True)


def reveal_lines(reveal: Reveal, width: int) -> list[Spans]:
    """The texts in lines of at most `width` cells; of two texts, what differs between them is marked."""
    if not reveal.theirs:
        return marked_lines([(reveal.ours, False)], width)
    ours, theirs = differing(reveal.ours, reveal.theirs)
    return [
        (("this prompt", "muted"),),
        *marked_lines(ours, width),
        (),
        (("the earlier one", "muted"),),
        *marked_lines(theirs, width),
    ]


class RevealScreen(ModalScreen[None]):
    """Scrolls where the text is long; any of its keys closes it."""

    DEFAULT_CSS = """
    RevealScreen #box {
        width: 100;
        max-width: 96%;
        height: auto;
        max-height: 90%;
        border: round $warning;
        border-title-color: $warning;
        border-title-style: bold;
        border-subtitle-color: $kvd-muted;
        border-subtitle-align: right;
        background: $background;
        padding: 1 2;
        scrollbar-size-vertical: 1;
    }
    RevealScreen Static {
        height: auto;
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,v", "dismiss", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, reveal: Reveal) -> None:
        super().__init__()
        self._reveal = reveal

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box") as box:
            box.border_title = Content(clean(self._reveal.title))
            box.border_subtitle = Content(f"escape closes, {'↑'}{'↓'} scroll")
            yield Static(id="text")

    def on_mount(self) -> None:
        self.query_one("#box").focus()

    def on_resize(self) -> None:
        width = max(8, min(_MAX_WIDTH, self.size.width * 96 // 100) - _MARGINS)
        self.query_one("#text", Static).update(content_of(reveal_lines(self._reveal, width)))

    def action_scroll(self, delta: int) -> None:
        self.query_one("#box").scroll_relative(y=delta, animate=False)


def content_of(lines: list[Spans]) -> Content:
    """Lines of spans as what Textual's own widgets show."""
    parts: list[str | tuple[str, str]] = []
    for line in lines:
        for text, name in line:
            style = STYLES[name]
            color = style.color.name if style.color is not None else ""
            parts.append((clean(text), f"bold {color}" if style.bold else color))
        parts.append("\n")
    return Content.assemble(*parts[:-1])
