"""From the text of one choice, piece by piece, to the parts of an answer.

Purpose: what all protocols need to know of an answer: visible text, reasoning, tool calls.
Owner: the event loop, one parser per choice.
Invariant: the parts, with neighbouring deltas of one kind joined, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from typing import Literal

from kvd.text.parts import Finish, Part, TextDelta


class OutputParser:
    """Everything is visible text.

    is_reasoning   what comes next is reasoning
    is_complete    nothing that may come belongs to the answer
    """

    def __init__(self) -> None:
        self.is_reasoning = False
        self.is_complete = False
        self._position = 0

    def push(self, text: str) -> list[Part]:
        """The parts that become known with more text."""
        start = self._position
        self._position += len(text)
        return [TextDelta(text, start)] if text else []

    def finish(self, reason: Literal["stop", "length"], stop_string: str | None = None) -> list[Part]:
        """The parts held back until now, and the last one."""
        return [Finish(reason, stop_string)]
