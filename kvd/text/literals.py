"""Keeps text that a user typed apart from control tokens that the chat template wrote.

Purpose: a template joins both into one string, in which `<|im_end|>` typed by a user looks like the real one.
`Literals.mark` puts unguessable marks around control tokens in user strings before rendering; `Literals.resolve`
takes all marks out of the rendered text and says which control tokens in it are the template's own.
Owner: one `Literals` per rendering; the marks are drawn anew each time and never leave the process.
Invariant: an occurrence is a control token only if no character of it lies inside marks and no mark lies inside it;
so a token can be formed neither by a user's string alone, nor by two, nor by one and the template's text.

The token's own text stays readable between its marks, so that templates which search the content still find it.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple


class Rendered(NamedTuple):
    """Rendered text without marks; `control_spans` are (start, end) of its real control tokens, in order."""

    text: str
    control_spans: list[tuple[int, int]]


class ControlTokens:
    """The control tokens of a vocabulary, compiled once.

    `hidden` are special tokens, which never appear in visible output; `visible` are others, such as
    `<think>`, that a model writes into its answer and clients send back as part of it.
    """

    def __init__(self, hidden: Iterable[str], visible: Iterable[str] = ()) -> None:
        self.hidden = frozenset(hidden)
        self.all = self.hidden | frozenset(visible)
        self.pattern = _any_of(self.all)
        self.hidden_pattern = _any_of(self.hidden)
        # A part made of letters only is ordinary language and no edge: "system" must compare equal to "system".
        self.heads = frozenset(part for token in self.all for part in _proper_suffixes(token) if not part.isalnum())
        self.tails = frozenset(part for token in self.all for part in _proper_prefixes(token) if not part.isalnum())
        self.edge_lengths = sorted(set(map(len, self.heads | self.tails)))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens; of several that begin at one place the longest, as tokenizers does.

    Tokens share their beginnings in the pattern: a plain list of alternatives takes time per token at every "<|"
    of a text, and matching holds the interpreter for as long.
    """
    return re.compile(_factored(sorted(set(tokens))) or r"(?!)")


def _factored(tokens: list[str]) -> str:
    """A pattern for sorted distinct strings; "" for none, or for the empty string alone."""
    parts = []
    for _, group in itertools.groupby((token for token in tokens if token), key=lambda token: token[0]):
        members = list(group)
        num_shared = _common_length(members[0], members[-1])  # sorted: what these two share, all share
        parts.append(re.escape(members[0][:num_shared]) + _factored([member[num_shared:] for member in members]))
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)}){'?' if '' in tokens else ''}"


def _common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _proper_prefixes(token: str) -> list[str]:
    return [token[:length] for length in range(1, len(token))]


def _proper_suffixes(token: str) -> list[str]:
    return [token[start:] for start in range(1, len(token))]


class Literals:
    """The marks of one rendering: digits between tildes, which pass JSON, case and trim filters unchanged."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        secret = str(secrets.randbits(96))
        self._open, self._close, self._break, self.final = (f"~{secret}{kind}~" for kind in "1234")
        self._marks = re.compile(f"~{secret}[1-4]~")

    def mark(self, value: Any, *, from_model: bool = False) -> Any:
        """A copy of a JSON value whose strings and keys are marked where needed.

        `from_model`: an earlier answer, in which visible control tokens are the model's own and stay what they are.
        """
        if isinstance(value, str):
            return self._mark_string(value, from_model)
        if isinstance(value, dict):
            return {
                self.mark(key, from_model=from_model): self.mark(item, from_model=from_model)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, from_model=from_model) for item in value]
        return value

    def _mark_string(self, text: str, from_model: bool) -> str:
        control = self._control
        start, end = _trimmed_span(text)
        head = tail = ""
        for length in control.edge_lengths:
            if length > end - start:
                break
            if text[start : start + length] in control.heads:
                head = self._break
            if text[end - length : end] in control.tails:
                tail = self._break
        pattern = control.hidden_pattern if from_model else control.pattern
        core = pattern.sub(self._mark_match, text[start:end])
        return f"{text[:start]}{head}{core}{tail}{text[end:]}"

    def _mark_match(self, match: re.Match[str]) -> str:
        return f"{self._open}{match[0]}{self._close}"

    def remove_marks(self, text: str) -> str:
        """For error messages: marks must not become known to anybody."""
        return self._marks.sub("", text)

    def resolve(self, rendered: str) -> Rendered:
        """Takes the marks out; see the invariant above."""
        parts: list[str] = []
        protected: list[tuple[int, int]] = []  # (start, end): a control token may not touch the inside; (p, p): a cut
        position = read_from = 0
        opened: int | None = None
        for mark in self._marks.finditer(rendered):
            parts.append(rendered[read_from : mark.start()])
            position += mark.start() - read_from
            read_from = mark.end()
            if mark[0] == self._open:
                opened = position
            elif mark[0] == self._close and opened is not None:
                protected.append((opened, position))
                opened = None
            protected.append((position, position))
        parts.append(rendered[read_from:])
        text = "".join(parts)
        return Rendered(text, self._find_control_tokens(text, sorted(protected)))

    def _find_control_tokens(self, text: str, protected: list[tuple[int, int]]) -> list[tuple[int, int]]:
        spans = []
        next_protected = search_from = 0
        while match := self._control.pattern.search(text, search_from):
            start, end = match.span()
            while next_protected < len(protected) and protected[next_protected][1] <= start:
                next_protected += 1
            is_protected = next_protected < len(protected) and protected[next_protected][0] < end
            if is_protected:
                search_from = start + 1
            else:
                spans.append((start, end))
                search_from = end
        return spans


def _trimmed_span(text: str) -> tuple[int, int]:
    start = len(text) - len(text.lstrip())
    return start, max(start, len(text.rstrip()))
