"""Numbers and names as short text that keeps its width. Pure functions, callable from any thread.

Invariant: whatever goes in, no result contains a control character, so that nothing which a client sends (its
name, say) can move the cursor or recolour the operator's terminal.
"""

from __future__ import annotations

import math

from rich.cells import cell_len, set_cell_size

NOTHING = "–"
"""Shown where a value is not known (yet): nothing measured is a value, not an error."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T", "P")


def exact(count: int) -> str:
    """An integer with thousands separators: `32,768`."""
    return f"{count:,}"


def short_count(count: float | None) -> str:
    """A count in at most five characters: `7`, `9,999`, `12.3k`, `1.2M`."""
    if count is None or not math.isfinite(count):
        return NOTHING
    if abs(count) < 9_999.5:
        return f"{count:,.0f}"
    return _scaled(count, 1000.0, _COUNT_UNITS, separator="")


def rate(per_second: float | None) -> str:
    """A rate in at most five characters; one decimal below ten: `3.4`, `312`, `12.3k`."""
    if per_second is not None and 0 < per_second < 9.95:
        return f"{per_second:.1f}"
    return short_count(per_second)


def size(num_bytes: float) -> str:
    """Bytes in binary units: `512 MiB`, `1.5 GiB`."""
    return _scaled(num_bytes, 1024.0, _BYTE_UNITS, separator=" ")


def _scaled(value: float, base: float, units: tuple[str, ...], *, separator: str) -> str:
    index = 0
    # 999.5 and not `base`: what would be rounded up to four digits moves on to the next unit.
    while abs(value) >= 999.5 and index < len(units) - 1:
        value /= base
        index += 1
    digits = f"{value:.1f}" if index and abs(value) < 99.95 else f"{value:.0f}"
    return f"{digits.removesuffix('.0')}{separator}{units[index]}"


def duration(seconds: float | None) -> str:
    """A latency in at most five characters: `0.4ms`, `18ms`, `1.23s`, `45s`, `12m`, `3h`, `2d`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    seconds = max(0.0, seconds)
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    return age(seconds)


def age(seconds: float) -> str:
    """A duration in whole seconds and at most five characters: `7s`, `3m07`, `12m`, `3h05`, `2d`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}"
    days = hours // 24
    return f"{days}d" if days > 9 else f"{days}d{hours % 24:02d}"


def percent(part: float, whole: float) -> str:
    """`part / whole` in at most four characters; only the exact 0 and the exact whole read `0%` and `100%`."""
    if whole <= 0:
        return NOTHING
    share = 100.0 * part / whole
    if 0 < share < 1:
        return "<1%"
    if 99 < share < 100:
        return "99%"
    return f"{share:.0f}%"


def clean(text: str) -> str:
    """The text with everything that is not a printable character replaced by `·`."""
    # isprintable is false for controls, formats (bidirectional overrides), separators but the space, and unassigned.
    return text if text.isprintable() else "".join(char if char.isprintable() else "·" for char in text)


def fit(text: str, width: int) -> str:
    """The cleaned text in exactly `width` terminal cells, its end replaced by `…` where it is too long."""
    if width <= 0:
        return ""
    text = clean(text)
    if text.isascii():  # as nearly all are, and then a character is a cell
        return text.ljust(width) if len(text) <= width else f"{text[: width - 1].rstrip()}…".ljust(width)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(set_cell_size(text, width - 1).rstrip() + "…", width)


def fit_right(text: str, width: int) -> str:
    """Like `fit`, aligned to the right."""
    text = clean(text)
    missing = width - (len(text) if text.isascii() else cell_len(text))
    return " " * missing + text if missing >= 0 else fit(text, width)


def shorten_middle(text: str, width: int) -> str:
    """The text in at most `width` cells with its middle left out: the ends of paths and ids tell them apart."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    if width < 4 or not text.isascii():
        return fit(text, width).rstrip()
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def short_id(request_id: str, width: int) -> str:
    """A request id without the prefix of its endpoint (`chatcmpl-`, `resp_`), cut to `width` characters; which of its
    choices it is about is kept: `chatcmpl-0123456789-2` in six is `0123-2`.
    """
    name = clean(request_id)
    prefix, _, rest = name.partition("-" if "-" in name else "_")
    name = rest if rest and prefix.isalpha() else name
    body, dash, choice = name.rpartition("-")
    if dash and choice.isdecimal() and len(choice) + 1 < width:
        return body[: width - len(choice) - 1] + dash + choice
    return name[:width]
