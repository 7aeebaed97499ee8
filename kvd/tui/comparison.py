"""Two texts of prompts side by side, with what differs between them marked. Pure functions, callable from any thread.

Invariant: like everything in `format`, no result contains a control character.
"""

from __future__ import annotations

import difflib
import re

from rich.cells import cell_len

from kvd.tui.format import clean
from kvd.tui.panel import Span, Spans

_MAX_COMPARED_WORDS = 400
"""Longer texts are compared from their ends only: the cost of the comparison grows with the square."""


def differing(ours: str, theirs: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts in pieces, each with whether it differs from the other text. The pieces join to the text again.

    Compared are words and the white space between them: a time of day that differs in one digit is marked whole.
    """
    left, right = _words(ours), _words(theirs)
    if max(len(left), len(right)) > _MAX_COMPARED_WORDS:
        return _differing_middle(left, right)
    left_pieces: list[tuple[str, bool]] = []
    right_pieces: list[tuple[str, bool]] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for pieces, words in ((left_pieces, left[i:j]), (right_pieces, right[k:m])):
            if words:
                pieces.append(("".join(words), tag != "equal"))
    return left_pieces, right_pieces


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|[^\s]+", text)


def _differing_middle(left: list[str], right: list[str]) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    shorter = min(len(left), len(right))
    before = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    after = next((i for i in range(shorter - before) if left[-1 - i] != right[-1 - i]), shorter - before)

    def pieces(words: list[str]) -> list[tuple[str, bool]]:
        end = len(words) - after
        parts = (("".join(words[:before]), False), ("".join(words[before:end]), True), ("".join(words[end:]), False))
        return [part for part in parts if part[0]]

    return pieces(left), pieces(right)


def marked_lines(pieces: list[tuple[str, bool]], width: int) -> list[Spans]:
    """The pieces of `differing` in lines of at most `width` cells; what differs is in marks, its blanks visible."""
    lines: list[list[Span]] = [[]]
    used = 0

    def begin_line() -> None:
        nonlocal used
        lines.append([])
        used = 0

    def put(text: str, style: str) -> None:
        nonlocal used
        for word in re.findall(r" +|[^ ]+", text):
            cells = cell_len(word)
            if used and used + cells > width:
                begin_line()
                if word.isspace():
                    continue
            for part in _parts(word, width):
                if used + cell_len(part) > width:
                    begin_line()
                lines[-1].append((part, style))
                used += cell_len(part)

    for text, differs in pieces:
        style = "warning-bold" if differs else "text"
        if differs:
            # The mark stays with what it marks.
            if used and used + 2 + cell_len(_words(text)[0]) > width:
                begin_line()
            put("▸", "key")
        for index, line in enumerate(text.expandtabs(4).replace("\r\n", "\n").split("\n")):
            if index:
                if differs:
                    put("↵", style)
                begin_line()
            put(clean(line.replace(" ", "␣") if differs else line), style)
        if differs:
            put("◂", "key")
    return [tuple(line) for line in lines]


def _parts(word: str, width: int) -> list[str]:
    """The word, in parts of at most `width` cells where it is longer."""
    parts = [""]
    for char in word:
        if cell_len(parts[-1] + char) > max(1, width):
            parts.append("")
        parts[-1] += char
    return parts
