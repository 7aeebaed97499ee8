"""The line in which a filter is typed; it stands where the keys stand otherwise. Owner: the event loop.

Invariant: what is typed filters at once; enter keeps it, escape takes it back.
"""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class FilterLine(Input):
    """Posts `Input.Changed` with every key, and `Closed` at the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close(False)", show=False),
        Binding("enter,up,down", "close(True)", show=False),
    ]

    class Closed(Message):
        """The operator has ended typing; `is_kept`: the filter stays."""

        def __init__(self, *, is_kept: bool) -> None:
            super().__init__()
            self.is_kept = is_kept

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, compact=True, select_on_focus=False)
        self.cursor_blink = False
        self.display = False

    def action_close(self, is_kept: bool) -> None:
        self.post_message(self.Closed(is_kept=is_kept))
