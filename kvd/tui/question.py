"""A question with a few answers, above the dashboard. Owner: the event loop.

Invariant: nothing happens by accident: the answer that changes least is under the cursor when the question opens,
and escape answers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvd.tui.format import clean


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its key, what it says, and what the question then returns."""

    key: str
    label: str
    value: str


class Question(ModalScreen[str]):
    """Returns the chosen answer's value, or "" where none was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss('')", show=False),
        Binding("j", "cursor(1)", show=False),
        Binding("k", "cursor(-1)", show=False),
    ]

    def __init__(self, title: str, details: tuple[str, ...], answers: tuple[Answer, ...], *, ctrl_c: str = "") -> None:
        """`ctrl_c` is what Ctrl-C answers: pressing it twice means what it means in every other program."""
        super().__init__()
        self._title = title
        self._details = details
        self._answers = answers
        self._ctrl_c = ctrl_c

    def compose(self) -> ComposeResult:
        options = [
            Option(Content.assemble((f" {answer.key} ", "bold $primary"), f" {answer.label}"), id=answer.value)
            for answer in self._answers
        ]
        # Where not all of it fits, it is scrolled down to the answers.
        with VerticalScroll(id="box", can_focus=False) as box:
            box.border_title = Content(self._title)
            yield Static(Content("\n".join(map(clean, self._details))), id="detail")
            yield OptionList(*options, id="answers")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id or "")

    def on_key(self, event: events.Key) -> None:
        for answer in self._answers:
            if event.character == answer.key:
                event.stop()
                self.dismiss(answer.value)

    def action_cursor(self, delta: int) -> None:
        options = self.query_one(OptionList)
        if delta > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_answer_ctrl_c(self) -> None:
        """Answer as Ctrl-C does."""
        self.dismiss(self._ctrl_c)
