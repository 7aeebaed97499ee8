"""What an answer consists of: text, reasoning and tool calls, as they become known.

Purpose: the one form in which every protocol of the server gets an answer. Frozen values, nothing else.
Order of the parts of one choice: any number of text and reasoning deltas and of tool calls, which do not overlap; then
one `Finish`. A call is `ToolCallBegin`, any number of `ToolCallArguments`, and `ToolCallEnd`, which is missing where
the answer ended within the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

AnswerEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the visible answer.

    start      index of its first character in all that the model wrote, markers and calls included
    logprobs   the tokens of this text, where they were asked for (the server's own type)
    """

    text: str
    start: int = 0
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call is certain to come; `call_index` counts the calls of one choice from 0."""

    call_index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces of a complete call, joined, are a JSON object as the model wrote it."""

    call_index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    call_index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The last part. `stop_string` is the one that ended the answer, if one did."""

    reason: AnswerEnd
    stop_string: str | None = None


Part = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd | Finish


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """The same parts, with neighbouring deltas of one kind as one. Deltas must not have log probabilities yet."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        match before, part:
            case TextDelta(), TextDelta() if part.start == before.start + len(before.text):
                joined[-1] = replace(before, text=before.text + part.text)
            case ReasoningDelta(), ReasoningDelta():
                joined[-1] = ReasoningDelta(before.text + part.text)
            case ToolCallArguments(), ToolCallArguments() if part.call_index == before.call_index:
                joined[-1] = replace(before, text=before.text + part.text)
            case _:
                joined.append(part)
    return joined
