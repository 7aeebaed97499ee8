"""The characters of an answer on their way to becoming parts.

Purpose: parsers of answers are written as plain sequential code that asks for one character after the other; this holds
the characters on which no decision has been made, and collects the parts made of the others.
Owner: one `OutputParser`. Parsers are generators that are sent one character at a time, so that nothing depends on how
the text was cut into pieces. Every character is released into a part, dropped (a marker, spaces around a call), or
held; what is held at the end is text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Literal, TypeVar

from kvd.text.parts import Part, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin, ToolCallEnd
from kvd.text.stop import StopMatcher

T = TypeVar("T")
Steps = Generator[None, str, T]
"""A parser that is sent characters and returns a `T`."""

_Run = Literal["text", "reasoning", "arguments"]


class AnswerSource:
    """Characters in, parts out.

    held        what was read and is neither released nor dropped
    num_calls   tool calls begun so far
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.held: list[str] = []
        self.num_calls = 0
        self.num_complete_calls = 0
        self._new_call_id = new_call_id
        self._unread: deque[str] = deque()
        self._passing: tuple[frozenset[str], _Run] | None = None  # nothing is held: first characters of markers
        self._held_start = 0  # index of the first held character in the whole answer
        self._parts: list[Part] = []
        self._run: list[str] = []  # released characters of one kind that follow each other
        self._run_kind: _Run = "text"
        self._run_start = self._run_end = 0

    # ------------------------------------------------------------------ reading

    def next(self) -> Steps[str]:
        """The next character, which is held from now on."""
        char = self._unread.popleft() if self._unread else (yield)
        self.held.append(char)
        return char

    def skip_spaces(self) -> Steps[str]:
        """The next character that is no white space."""
        while (char := (yield from self.next())).isspace():
            pass
        return char

    def unread(self, num_characters: int = 1) -> None:
        """Have the newest held characters read again."""
        if num_characters:
            self._unread.extendleft(reversed(self.held[-num_characters:]))
            del self.held[-num_characters:]

    def read_until(self, markers: tuple[str, ...], kind: _Run = "text") -> Steps[str]:
        """Release what stands before the first of `markers`, and return it.

        White space before a marker is held with it, and so is what may become a marker, until it is certain.
        """
        matcher = StopMatcher(markers)
        passing = (frozenset(marker[0] for marker in markers), kind)
        num_spaces = 0
        while True:
            self._passing = None if self.held else passing
            char = yield from self.next()
            self._passing = None
            if match := matcher.feed(char):
                return match[1]
            decided = self.held[num_spaces : len(self.held) - matcher.num_held]
            num_trailing = 0
            while num_trailing < len(decided) and decided[-1 - num_trailing].isspace():
                num_trailing += 1
            if num_trailing < len(decided):
                self._release(kind, num_spaces + len(decided) - num_trailing)
                num_spaces = num_trailing
            else:
                num_spaces += num_trailing

    def pass_through(self, text: str, start: int) -> int:
        """Release the beginning of `text[start:]` that no parser needs to see character by character; its length."""
        if self._passing is None:
            return 0
        firsts, kind = self._passing
        end = len(text)
        for first in firsts:
            if (place := text.find(first, start, end)) >= 0:
                end = place
        piece = text[start:end].rstrip()
        self._extend(kind, piece, self._held_start)
        self._held_start += len(piece)
        return len(piece)

    # ------------------------------------------------------------------ deciding

    def drop(self, num_characters: int | None = None) -> None:
        """These held characters, the oldest ones or all, are no part of the answer."""
        self._take(num_characters)

    def release_text(self, num_characters: int | None = None) -> None:
        self._release("text", num_characters)

    def release_reasoning(self, num_characters: int | None = None) -> None:
        self._release("reasoning", num_characters)

    def release_arguments(self, num_characters: int | None = None) -> None:
        self._release("arguments", num_characters)

    def give_back(self) -> None:
        """What is held is no call after all: text, but for the newest character, which may begin something."""
        self.unread()
        self.release_text()

    def settle(self) -> None:
        """After a call: what is held is syntax if it is white space, else text."""
        if "".join(self.held).isspace():
            self.drop()
        else:
            self.release_text()

    def begin_call(self, name: str, num_held: int = 0) -> None:
        """A call is certain; all but the newest `num_held` characters were its syntax."""
        self.drop(len(self.held) - num_held)
        self._flush()
        self._parts.append(ToolCallBegin(self.num_calls, self._new_call_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Arguments that do not stand in the answer as they are."""
        self._extend("arguments", text, 0)

    def end_call(self) -> None:
        self._flush()
        self._parts.append(ToolCallEnd(self.num_calls - 1))
        self.num_complete_calls += 1

    def take_parts(self) -> list[Part]:
        self._flush()
        taken, self._parts = self._parts, []
        return taken

    # ------------------------------------------------------------------ inside

    def _take(self, num_characters: int | None) -> str:
        count = len(self.held) if num_characters is None else num_characters
        text = "".join(self.held[:count])
        del self.held[:count]
        self._held_start += count
        return text

    def _release(self, kind: _Run, num_characters: int | None) -> None:
        start = self._held_start
        self._extend(kind, self._take(num_characters), start)

    def _extend(self, kind: _Run, text: str, start: int) -> None:
        if not text:
            return
        is_gap = kind == "text" and start != self._run_end
        if kind != self._run_kind or is_gap:
            self._flush()
            self._run_kind = kind
        if not self._run:
            self._run_start = start
        self._run.append(text)
        self._run_end = start + len(text)

    def _flush(self) -> None:
        text = "".join(self._run)
        self._run.clear()
        if not text:
            return
        match self._run_kind:
            case "text":
                self._parts.append(TextDelta(text, self._run_start))
            case "reasoning":
                self._parts.append(ReasoningDelta(text))
            case "arguments":
                self._parts.append(ToolCallArguments(self.num_calls - 1, text))
