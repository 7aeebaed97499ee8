"""One finding of the doctor, above the dashboard: what happened, what to change, and which requests it met lately.

Owner: the event loop. Invariant: it shows what was known when it was opened, and no text of a prompt.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvd.insight import Finding, Miss
from kvd.tui.format import duration, exact, fit, short_count, short_id
from kvd.tui.listing import wrap
from kvd.tui.page import Jump
from kvd.tui.panel import Spans
from kvd.tui.reveal import content_of, show_text

MAX_MISSES = 50
_NAME_WIDTH = 10
_MAX_LINES = 4
_MAX_WIDTH = 100
_MARGINS = 6  # border and padding of the box


def about(finding: Finding, alike: tuple[Miss, ...], width: int) -> list[Spans]:
    """The facts about a finding, in lines of at most `width` cells."""
    facts = [
        ("what", finding.words),
        ("change", finding.advice),
        ("client", f"{finding.client or 'unnamed'}, {finding.endpoint}"),
        ("requests", exact(finding.num_requests)),
        ("lost", f"{exact(finding.lost_tokens)} tokens that equal earlier ones were computed again"),
        (
            "TTFT",
            f"{duration(finding.saved_seconds)} would be saved, all of these requests together"
            if finding.saved_seconds > 0
            else "not measured yet",
        ),
    ]
    if finding.position >= 0:
        facts.append(("position", f"token {exact(finding.position)} differs first"))
    most_alike = max((miss.num_alike for miss in alike), default=0)
    if most_alike:
        requests = "1 earlier request differs" if most_alike == 1 else f"{exact(most_alike)} earlier requests differ"
        facts.append(("alike", f"{requests} at the same place"))
    lines: list[Spans] = []
    for name, text in facts:
        for index, line in enumerate(wrap(text, width - _NAME_WIDTH, _MAX_LINES)):
            label = "" if index else name
            lines.append(((f"{label:<{_NAME_WIDTH}}", "muted"), (line, "good" if name == "change" else "text")))
    return lines


class FindingScreen(ModalScreen[None]):
    """Enter shows a request on its page, v the texts that differ; escape closes it."""

    DEFAULT_CSS = """
    FindingScreen #box {
        width: 100;
        max-width: 96%;
        height: auto;
        max-height: 96%;
        border: round $primary;
        border-title-color: $kvd-bright;
        border-title-style: bold;
        border-subtitle-color: $kvd-muted;
        border-subtitle-align: right;
        background: $background;
        padding: 0 2;
    }
    FindingScreen Static {
        height: auto;
    }
    FindingScreen #misses {
        height: auto;
        max-height: 12;
        border: none;
        padding: 0;
        background: $background;
        background-tint: $background 0%;
    }
    FindingScreen #misses > .option-list--option-highlighted {
        background: $kvd-cursor;
        color: $kvd-bright;
        text-style: bold;
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", show=False),
        Binding("j", "cursor(1)", show=False),
        Binding("k", "cursor(-1)", show=False),
        Binding("v", "reveal", show=False),
    ]

    def __init__(self, cause: str, finding: Finding, alike: tuple[Miss, ...]) -> None:
        """`alike`: the recent misses that belong to the finding, the newest first."""
        super().__init__()
        self._cause = cause
        self._finding = finding
        self._alike = alike[:MAX_MISSES]

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = Content(f"Finding: {self._cause}")
            box.border_subtitle = Content("enter request, v reveal text, escape close")
            yield Static(id="facts")
            heading = f"{'request':<34}{'prompt':>8}{'cached':>8}{'lost':>8}{'at token':>10}"
            yield Static(Content(f"\n{heading}" if self._alike else "\nNone of these requests is among the latest."))
            yield OptionList(*(Option(_line(miss)) for miss in self._alike), id="misses")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_resize(self) -> None:
        width = max(8, min(_MAX_WIDTH, self.size.width * 96 // 100) - _MARGINS)
        self.query_one("#facts", Static).update(content_of(about(self._finding, self._alike, width)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        request_id = self._alike[event.option_index].request_id
        self.app.post_message(Jump("Requests", request_id))
        self.dismiss()

    def action_cursor(self, delta: int) -> None:
        misses = self.query_one(OptionList)
        if delta > 0:
            misses.action_cursor_down()
        else:
            misses.action_cursor_up()

    def action_reveal(self) -> None:
        chosen = self.query_one(OptionList).highlighted
        name = self._finding.example_id if chosen is None else self._alike[chosen].request_id
        self.post_message(show_text(self.app, name))


def _line(miss: Miss) -> Content:
    position = exact(miss.position) if miss.position >= 0 else "–"
    numbers = (miss.num_prompt_tokens, miss.num_cached_tokens, miss.lost_tokens)
    return Content(
        fit(short_id(miss.request_id, 33), 34)
        + "".join(f"{short_count(number):>8}" for number in numbers)
        + f"{position:>10}"
    )
