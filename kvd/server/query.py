"""Parameters after the question mark. Pure functions; each raises a 400 that names the parameter."""

from __future__ import annotations

import re

from aiohttp import web

from kvd.server.responses import invalid, short
from kvd.server.validation import check_range

_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def query_integer(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number from `low` ≥ 0 to `high`."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid(name, f"'{name}' must be a whole number, not '{short(text)}'")
    check_range(name, int(text), low, high)
    return int(text)


def query_seconds(request: web.Request, name: str, default: float, low: float, high: float) -> float:
    """A number of seconds in plain decimals, from `low` ≥ 0 to `high`."""
    text = request.query.get(name)
    if text is None:
        return default
    if not _DECIMAL.fullmatch(text):
        raise invalid(name, f"'{name}' must be a number of seconds, not '{short(text)}'")
    check_range(name, float(text), low, high)
    return float(text)
