"""Every glyph of the dashboard as ASCII, for terminals and fonts that have nothing else. Owner: the event loop.

What is drawn is drawn with Unicode; where only ASCII can be shown, `kvd.tui.terminal` passes every line through
`plain` on its way to the terminal, borders of Textual included. `glyph` is for what does not go there.

Invariant: a replacement takes as many cells as what it replaces, so that nothing moves; what is told apart by its glyph
alone keeps a glyph of its own.
"""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len

_REPLACEMENTS = {
    # heights of graphs, from low to high
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "█": "#",
    # patterns and halves
    "░": ".", "▒": ":", "▓": "%", "▀": "^", "▌": "|", "▐": "|", "■": "#", "□": "o", "▪": "*", "▫": ".",
    # lines and corners
    "─": "-", "━": "=", "═": "=", "╌": "-", "┄": "-", "│": "|", "┃": "|", "║": "|", "┆": "|", "╎": "|",
    "╭": "+", "╮": "+", "╰": "+", "╯": "+", "┌": "+", "┐": "+", "└": "+", "┘": "+", "├": "+", "┤": "+", "┬": "+",
    "┴": "+", "┼": "+", "╴": "-", "╶": "-", "╸": "=", "╺": "=",
    # states and marks
    "●": "*", "○": "o", "◌": "o", "◐": "~", "◆": "*", "◇": "o", "◉": "@", "✖": "x", "✗": "x", "✕": "x", "✓": "+",
    "✔": "+", "‖": "=", "★": "*", "☆": "*", "⚠": "!",
    # arrows
    "→": ">", "←": "<", "↑": "^", "↓": "v", "↔": "-", "↕": "|", "▸": ">", "▹": ">", "▶": ">", "◂": "<", "◀": "<",
    "▲": "^", "▴": "^", "▼": "v", "▾": "v", "↩": "<", "↪": ">", "⏎": "<", "↵": "<", "⇥": ">", "⇧": "^",
    # punctuation
    "·": ".", "•": "*", "…": "~", "–": "-", "—": "-", "×": "x", "÷": "/", "±": "~", "≈": "~", "≤": "<", "≥": ">",
    "≠": "!", "∞": "*", "°": " ", "µ": "u", "μ": "u", "Δ": "d", "Σ": "S", "§": "$", "“": '"', "”": '"', "„": '"',
    "‘": "'", "’": "'", "‚": ",", "«": "<", "»": ">", "‹": "<", "›": ">", "⋮": ":", "⋯": "~", "␣": "_", "¶": "P",
}  # fmt: skip

_TABLE = {ord(char): replacement for char, replacement in _REPLACEMENTS.items()}

_is_ascii = False


def use_ascii(is_ascii: bool) -> None:
    """From now on `glyph` answers with ASCII, or no longer. For the whole process, as it has one terminal."""
    global _is_ascii
    _is_ascii = is_ascii


def is_ascii() -> bool:
    """Whether only ASCII may be shown."""
    return _is_ascii


def glyph(text: str) -> str:
    """The text as it may be shown: itself, or `plain`."""
    return plain(text) if _is_ascii else text


@lru_cache(maxsize=8192)
def plain(text: str) -> str:
    """The text in ASCII alone, in as many cells; `?` stands for what has no replacement."""
    if text.isascii():
        return text
    translated = text.translate(_TABLE)
    if not translated.isascii():
        translated = "".join(char if char.isascii() else "?" * cell_len(char) for char in translated)
    # A joined emoji takes fewer cells than its parts.
    return translated[: cell_len(text)].ljust(cell_len(text))
