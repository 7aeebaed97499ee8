"""What an answer may consist of, decided before it begins.

Purpose: the prompt, the parser of the answer and the grammar that it is held to must agree on the format of calls and
on whether the model thinks first. This is where they do.
Owner: one per HTTP request, immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvd.text.output_parser import OutputParser
from kvd.text.tool_formats import ToolFormat


class ChatPrompt(NamedTuple):
    """A conversation as token ids.

    may_reason            the answer may begin with reasoning
    starts_in_reasoning   it does: the prompt ends with the mark that opens it
    """

    token_ids: list[int]
    may_reason: bool = False
    starts_in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How to take an answer apart.

    tool_format       None: calls are not looked for
    tool_names        what was offered
    one_call          the first call ends the answer
    shown_token_ids   special tokens that the parser must see
    """

    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    one_call: bool = False
    may_reason: bool = False
    starts_in_reasoning: bool = False
    shown_token_ids: frozenset[int] = frozenset()

    def open_parser(self) -> OutputParser:
        """A parser for one choice."""
        return OutputParser(
            self.tool_format,
            tool_names=self.tool_names,
            one_call=self.one_call,
            reasons=self.may_reason,
            starts_in_reasoning=self.starts_in_reasoning,
        )
