"""The help screen: every key of every page, and what their figures mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from kvd.tui.page import Key, Page

Section = tuple[str, tuple[Key, ...]]
"""A title, and keys or figures with what they mean."""

_KEYS = (
    ("q  ctrl-c", "leave: close the dashboard, or stop the server"),
    ("1 … 6  tab", "show another page; shift-tab goes back"),
    ("space", "pause and resume the figures; serving goes on"),
    ("+  -", "read faster or slower"),
    ("↑ ↓  j k", "move through what can be selected; page up/down, g, G"),
    ("/  escape", "show only what matches; escape shows everything again"),
    ("R", "drop the cached blocks that no request uses; asks first"),
    ("t", "theme: dark, light, contrast, mono (plain ASCII)"),
    ("y", "copy what is selected, or the address, by OSC 52"),
    ("?  escape", "open and close this help"),
)


class HelpScreen(ModalScreen[None]):
    """Scrolls where the terminal is small; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, pages: Sequence[Page], shown: Page) -> None:
        """`shown` is explained first, since it is the one that was looked at."""
        super().__init__()
        self._sections = _sections(pages, shown)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box") as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("escape closes, ↑↓ scroll")
            yield Static(_text(self._sections))

    def on_mount(self) -> None:
        self.query_one("#box").focus()

    def action_scroll(self, delta: int) -> None:
        self.query_one("#box").scroll_relative(y=delta, animate=False)


def _sections(pages: Sequence[Page], shown: Page) -> list[Section]:
    sections: list[Section] = [("Keys", _KEYS)]
    for page in sorted(pages, key=lambda page: page is not shown):
        if page.keys:
            sections.append((f"{pages.index(page) + 1} {page.title}: keys", page.keys))
        sections += [(f"{page.title}: {title}", entries) for title, entries in page.explains]
    return sections


def _text(sections: Sequence[Section]) -> Content:
    parts: list[str | tuple[str, str]] = []
    for title, entries in sections:
        parts.append((f"{title}\n", "bold $accent"))
        for key, meaning in entries:
            parts += [(f"  {key:<11}", "bold $primary"), f" {meaning}\n"]
        parts.append("\n")
    return Content.assemble(*parts[:-1])
