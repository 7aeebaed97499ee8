"""From the text of one choice, piece by piece, to the parts of an answer.

Purpose: what all protocols need to know of an answer: visible text, reasoning, tool calls.
Owner: the event loop, one parser per choice.
Invariant: the parts, with neighbouring deltas of one kind joined, do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from typing import Literal

from kvd.text.answer_source import AnswerSource, Steps
from kvd.text.parts import Finish, Part, TextDelta
from kvd.text.tool_formats import ToolFormat

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """Splits off the reasoning, then reads tool calls of one format; without either everything is text.

    is_reasoning   what comes next is reasoning
    is_complete    nothing that may come belongs to the answer
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        *,
        tool_names: Collection[str] = (),
        one_call: bool = False,
        reasons: bool = False,
        starts_in_reasoning: bool = False,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`tool_names`: what was offered. `one_call`: the first call ends the answer.

        `reasons`: the model may begin with `<think>`. `starts_in_reasoning`: the prompt ends with it.
        """
        self.is_reasoning = starts_in_reasoning
        self.is_complete = False
        self._one_call = one_call
        self._opening = tool_format.opening if tool_format is not None else ""
        self._closing = tool_format.closing if tool_format is not None else ""
        self._num_characters = 0
        self._source = AnswerSource(call_id)
        self._steps: Steps[None] | None = None
        if tool_format is not None or reasons or starts_in_reasoning:
            self._steps = self._read(tool_format, frozenset(tool_names), reasons)
            next(self._steps)

    def push(self, text: str) -> list[Part]:
        """The parts that become known with more text."""
        if self._steps is None:
            start = self._num_characters
            self._num_characters += len(text)
            return [TextDelta(text, start)] if text else []
        position = 0
        while position < len(text) and not self.is_complete:
            if num_passed := self._source.pass_through(text, position):
                position += num_passed
                continue
            self._steps.send(text[position])
            position += 1
            self.is_complete = self._one_call and self._source.num_complete_calls > 0
        return self._source.take_parts()

    def finish(self, reason: Literal["stop", "length"], stop_string: str | None = None) -> list[Part]:
        """The parts held back until now, and the last one."""
        source = self._source
        if self.is_reasoning:
            source.release_reasoning()
        elif self.is_complete or source.num_calls > source.num_complete_calls:
            source.drop()  # the rest of a call's syntax, or an argument that was cut off
        elif source.num_calls and self._closing.startswith("".join(source.held).strip()):
            source.drop()
        elif reason == "length" and self._opening and self._opening in "".join(source.held):
            source.drop()  # a call that was cut off before its name was known
        else:
            source.release_text()
        # A stop string within a call leaves arguments that are no JSON: nothing that a client should act on.
        is_cut = stop_string is not None and source.num_calls > source.num_complete_calls
        has_calls = reason == "stop" and source.num_calls > 0 and not is_cut
        return [*source.take_parts(), Finish("tool_calls" if has_calls else reason, stop_string)]

    def _read(self, tool_format: ToolFormat | None, tool_names: frozenset[str], reasons: bool) -> Steps[None]:
        source = self._source
        if self.is_reasoning or (reasons and (yield from self._begins_reasoning())):
            yield from self._read_reasoning()
        if tool_format is not None:
            yield from tool_format.read(source, tool_names)
        while True:
            yield from source.next()
            source.release_text()

    def _begins_reasoning(self) -> Steps[bool]:
        char = yield from self._source.skip_spaces()
        for expected in THINK_OPEN[1:]:
            if char != THINK_OPEN[0] or (yield from self._source.next()) != expected:
                self._source.unread(len(self._source.held))
                return False
        return True

    def _read_reasoning(self) -> Steps[None]:
        source = self._source
        self.is_reasoning = True
        source.drop()
        yield from source.skip_spaces()
        source.unread()
        source.drop()
        yield from source.read_until((THINK_CLOSE,), "reasoning")
        source.drop()
        self.is_reasoning = False
        while (yield from source.next()) in "\r\n":
            source.drop()
        source.unread()
