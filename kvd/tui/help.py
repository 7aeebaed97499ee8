"""The help screen: every key, and what every figure of the dashboard means."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

_SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Keys",
        (
            ("q  ctrl-c", "leave: close the dashboard, or stop the server"),
            ("space", "pause and resume the figures; serving goes on"),
            ("+  -", "read faster or slower"),
            ("↑ ↓  j k", "move through the requests; also page up/down, g, G, mouse"),
            ("x", "end the request under the cursor; asks first"),
            ("r", "drop the cached blocks that no request uses; asks first"),
            ("?  escape", "open and close this help"),
        ),
    ),
    (
        "KV blocks",
        (
            ("A █ active", "blocks that running requests read and write"),
            ("C ▒ cached", "blocks kept for prompts that begin alike"),
            ("F · free", "blocks that hold nothing"),
        ),
    ),
    (
        "Throughput",
        (
            ("prefill", "prompt tokens computed per second; cached ones cost nothing"),
            ("decode", "tokens generated per second, all requests together"),
            ("TTFT", "time to first token; median and 95th percentile"),
            ("ITL", "time between the tokens of one request"),
            ("60s, all", "over the last minute; since start where that saw nothing"),
            ("step", "tokens of the latest step, of those allowed; its time"),
        ),
    ),
    (
        "Prefix cache",
        (
            ("hit rate", "prompt tokens found in the cache, of those looked up"),
            ("└", "hit tokens from RAM, from disk, and of parts of blocks"),
            ("RAM, pinned", "blocks in the RAM tier; blocks that stay"),
            ("evicted", "cached blocks given up; at the right: in the last minute"),
            ("preempted", "requests put back because no block was free"),
            ("recomputed", "tokens computed a second time after that"),
        ),
    ),
    (
        "Requests",
        (
            ("limit", "requests that may run at the same time, as of now"),
            ("state", "waiting, restoring from RAM or disk, prefill with its"),
            ("", "progress, decode; preempted, swapped: back in the queue"),
            ("hit", "share of the prompt that came from the cache"),
            ("output", "tokens generated / max_tokens"),
            ("blks", "KV blocks held"),
            ("pre", "times preempted"),
            ("age", "since arrival"),
        ),
    ),
)


class HelpScreen(ModalScreen[None]):
    """Scrolls where the terminal is small; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box") as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("escape closes, ↑↓ scroll")
            yield Static(_text())

    def on_mount(self) -> None:
        self.query_one("#box").focus()

    def action_scroll(self, delta: int) -> None:
        self.query_one("#box").scroll_relative(y=delta, animate=False)


def _text() -> Content:
    parts: list[str | tuple[str, str]] = []
    for title, entries in _SECTIONS:
        parts.append((f"{title}\n", "bold $accent"))
        for key, meaning in entries:
            parts += [(f"  {key:<11}", "bold $primary"), f" {meaning}\n"]
        parts.append("\n")
    return Content.assemble(*parts[:-1])
