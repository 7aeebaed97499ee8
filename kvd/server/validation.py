"""Request bodies → typed structs, with messages that name the parameter. Pure functions.

msgspec checks structure and types while it parses; this module words its complaints for people and offers the
range checks that the protocols share. Input is echoed in pieces of at most a few dozen characters.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Collection, Generator, Hashable, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import msgspec

from kvd.errors import RequestError
from kvd.server.responses import invalid, short

T = TypeVar("T")

_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_COMPLAINT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<actual>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_NOT_FINITE = re.compile(rb"-?(NaN|Infinity|inf|nan)")
_KEY_BEFORE = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]*)"\s*:\s*-?$')


@functools.cache
def _decoder(model: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(model)


def decode_body(body: bytes, model: type[T]) -> T:
    """The JSON `body` as a `model`; raises a 400 `RequestError` that names the parameter where there is
    one.
    """
    try:
        decoder: msgspec.json.Decoder[T] = _decoder(cast(Hashable, model))
        with _collector_paused():
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _describe_wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _describe_bad_json(str(error), body) from None
    except RecursionError:
        raise invalid(None, "the request body is nested too deeply") from None


@contextmanager
def _collector_paused() -> Generator[None]:
    """A parser makes many objects and no cycles: looking for them made a body of 64 MB take fifteen times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def convert_value(value: object, model: type[T], path: str) -> T:
    """A part of a decoded body as a `model`, for parts whose kind decides how they are read.

    `path` is where the part lies in the body; raises a 400 `RequestError` that names it.
    """
    try:
        return msgspec.convert(value, model)
    except msgspec.ValidationError as error:
        raise _describe_wrong_field(str(error), path) from None


def _describe_wrong_field(complaint: str, base: str = "") -> RequestError:
    match = _COMPLAINT.match(complaint)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    param = (base + path.partition("$")[2]).lstrip(".") or None
    if missing := _MISSING.match(what):
        name = f"{param}.{missing['name']}" if param else missing["name"]
        return invalid(name, f"'{name}' is required")
    subject = f"'{param}'" if param else "the request body"
    if wrong := _WRONG_TYPE.match(what):
        expected = [_TYPE_WORDS.get(word, word) for word in wrong["expected"].split(" | ") if word != "null"]
        actual = _TYPE_WORDS.get(wrong["actual"], wrong["actual"])
        actual = "a boolean" if wrong["actual"] == "bool" else actual
        return invalid(param, f"{subject} must be {' or '.join(expected)}, not {actual}")
    if "out of range" in what:
        return invalid(param, f"{subject} is a number that is out of range")
    return invalid(param, f"{subject}: {short(what, 100)}")


def _describe_bad_json(complaint: str, body: bytes) -> RequestError:
    """NaN and Infinity are what JSON has no word for but many encoders write: say so, and where."""
    if position := _BYTE.search(complaint):
        start = int(position[1])
        begin = start - 1 if body[start - 1 : start] == b"-" else start
        if _NOT_FINITE.match(body, begin):
            key = _KEY_BEFORE.search(body[max(0, begin - 100) : begin])
            name = key[1].decode() if key else None
            subject = f"'{name}'" if name else "every number"
            return invalid(name, f"{subject} must be finite")
    reason = complaint.removeprefix("JSON is malformed: ")
    return invalid(None, f"the request body is not valid JSON: {short(reason, 100)}")


# --------------------------------------------------------------------------- checks of single values


def check_range(name: str, value: float | None, low: float, high: float, *, is_low_excluded: bool = False) -> None:
    """Raise unless `value` is None or lies in [low, high], or in (low, high]."""
    if value is None or (low < value <= high) or (value == low and not is_low_excluded):
        return
    begin = f"greater than {_plain(low)} and at most" if is_low_excluded else f"from {_plain(low)} to"
    raise invalid(name, f"'{name}' must be {begin} {_plain(high)}, not {short(_plain(value))}")


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else repr(number)


def check_choice(name: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise unless `value` is None or one of `choices`."""
    if value is not None and value not in (known := list(choices)):
        raise invalid(name, f"'{name}' must be one of {', '.join(known)}, not '{short(value)}'")


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise unless every id lies in the vocabulary."""
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid(name, f"'{name}' has token id {short(token_id)}, but the vocabulary has {vocab_size} tokens")


def unsupported(name: str, message: str) -> RequestError:
    """A 400 for what is valid but not offered; never a silently different answer."""
    return invalid(name, f"'{name}': {message}")


def check_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(name, f"'{name}' must be an object")
    return value
