"""The kinds of values that a setting can have: how each is written, read and shown.

Purpose: a value arrives as text, whatever its source (a YAML scalar, a flag, an environment variable), and
leaves typed, so that a file and a flag mean the same. Owner: nobody, everything in here is immutable.
Invariant: `parse(show(value)) == value`; `parse` raises `ValueRefused` alone, whose text completes
"expected …". Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

RawValue = str | Sequence[str] | Mapping[str, str]
"""What a source delivers: text, a list of texts, or a flat mapping of texts."""

_DECIMAL_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE_UNITS = {
    "b": 1,
    **{f"{letter}b": number for letter, number in _DECIMAL_SUFFIXES.items()},
    **{f"{letter.lower()}ib": number for letter, number in _BINARY_SUFFIXES.items()},
}
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SUFFIXED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])")
_SIZED = re.compile(r"([0-9]+(?:\.[0-9]+)?) *((?:[kKmMgGtT]i?)?[bB])")
_MAX_ECHO = 80
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


class ValueRefused(ValueError):
    """A value is not of its kind. `str(error)` completes "expected …"; `words` are the valid ones, if few."""

    def __init__(self, expected: str, words: Sequence[str] = ()) -> None:
        super().__init__(expected)
        self.words = tuple(words)


class Kind(Protocol):
    """How one kind of value is read and shown."""

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`; empty for a boolean."""
        ...

    @property
    def expected(self) -> str:
        """Completes "expected …"."""
        ...

    def parse(self, raw: RawValue) -> Any:
        """The typed value; raises ValueRefused."""
        ...

    def show(self, value: Any) -> str:
        """The value as kvd.yaml writes it."""
        ...


def short(text: str) -> str:
    """A piece of what a user wrote, in one line, short enough for an error and without control characters."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "…"


def _text(raw: RawValue, expected: str) -> str:
    if not isinstance(raw, str):
        raise ValueRefused(f"{expected}, not a {'list' if isinstance(raw, Sequence) else 'mapping'}")
    return raw


def quoted(text: str) -> str:
    """`text` as a YAML scalar that reads back as itself."""
    plain = re.fullmatch(r"[A-Za-z0-9/._~][A-Za-z0-9/._~+@-]*(:[A-Za-z0-9/._~+@-]+)*", text) is not None
    reserved = text.lower() in {"null", "~", "", *(_TRUE - {"1"}), *(_FALSE - {"0"})}
    return text if plain and not reserved else json.dumps(text, ensure_ascii=False)


def scaled_integer(text: str) -> int | None:
    """An integer as vLLM writes them: `32768`, `32k` = 32,000, `32K` = 32,768, `25.6k`; else None."""
    if _INTEGER.fullmatch(text):
        return int(text)
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix in _BINARY_SUFFIXES:
        return int(number) * _BINARY_SUFFIXES[suffix] if "." not in number else None
    return round(float(number) * _DECIMAL_SUFFIXES[suffix])


def size_in_bytes(text: str) -> int | None:
    """Bytes from `1048576`, `512MiB`, `1.5 GiB`, `4GB` (decimal) or vLLM's `4G` (binary); else None."""
    plain = scaled_integer(text)
    if plain is not None:
        return plain
    match = _SIZED.fullmatch(text)
    if match is None:
        return None
    number, unit = match.groups()
    return round(float(number) * _SIZE_UNITS[unit.lower()])


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false; a bare flag and `--no-…` on the command line. `auto` stands for None where allowed."""

    has_auto: bool = False
    metavar: str = ""

    @property
    def expected(self) -> str:
        return "true, false or auto" if self.has_auto else "true or false"

    def parse(self, raw: RawValue) -> bool | None:
        text = _text(raw, self.expected).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if self.has_auto and text == "auto":
            return None
        raise ValueRefused(self.expected, ("true", "false"))

    def show(self, value: bool | None) -> str:
        return "auto" if value is None else str(value).lower()


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within bounds, in vLLM's spellings. `auto`, or -1, stands for None where allowed."""

    minimum: int
    maximum: int
    has_auto: bool = False
    metavar: str = "N"

    @property
    def expected(self) -> str:
        upper = f"from {self.minimum} to {self.maximum:,}" if self.maximum < 2**31 else f"≥ {self.minimum}"
        return f"a whole number {upper}{' or auto' if self.has_auto else ''}"

    def parse(self, raw: RawValue) -> int | None:
        text = _text(raw, self.expected).strip()
        if self.has_auto and text in ("auto", "-1"):
            return None
        number = scaled_integer(text)
        if number is None or not self.minimum <= number <= self.maximum:
            raise ValueRefused(self.expected)
        return number

    def show(self, value: int | None) -> str:
        return "auto" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds; `open_below` excludes the lower bound itself."""

    minimum: float
    maximum: float = math.inf
    open_below: bool = False
    metavar: str = "X"

    @property
    def expected(self) -> str:
        lower = f"{'>' if self.open_below else '≥'} {self.minimum:g}"
        return f"a number {lower}" + ("" if math.isinf(self.maximum) else f" and ≤ {self.maximum:g}")

    def parse(self, raw: RawValue) -> float:
        text = _text(raw, self.expected).strip()
        if not _NUMBER.fullmatch(text):
            raise ValueRefused(self.expected)
        number = float(text)
        too_small = number <= self.minimum if self.open_below else number < self.minimum
        if too_small or number > self.maximum or math.isinf(number):
            raise ValueRefused(self.expected)
        return number

    def show(self, value: float) -> str:
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, at least `minimum`."""

    minimum: int = 1
    metavar: str = "SIZE"
    expected: str = "a size in bytes such as 4GiB, 512MiB or 1073741824"

    def parse(self, raw: RawValue) -> int:
        number = size_in_bytes(_text(raw, self.expected).strip())
        if number is None or not self.minimum <= number < 2**63:
            raise ValueRefused(self.expected)
        return number

    def show(self, value: int) -> str:
        for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value and value % factor == 0:
                return f"{value // factor}{unit}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One word of several. `aliases` are other spellings, vLLM's among them."""

    words: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    metavar: str = "WORD"

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.words)}"

    def parse(self, raw: RawValue) -> str:
        text = _text(raw, self.expected).strip().lower()
        word = self.aliases.get(text, text)
        if word not in self.words:
            raise ValueRefused(self.expected, (*self.words, *self.aliases))
        return word

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not blank. A path has its leading `~` expanded."""

    expected: str = "a text"
    is_path: bool = False
    metavar: str = "TEXT"

    def parse(self, raw: RawValue) -> str:
        text = _text(raw, self.expected)
        if not text.strip():
            raise ValueRefused(f"{self.expected} that is not empty")
        if "\0" in text:
            raise ValueRefused(f"{self.expected} without a NUL character")
        return os.path.expanduser(text) if self.is_path else text

    def show(self, value: str) -> str:
        return quoted(value)


@dataclass(frozen=True, slots=True)
class TextList:
    """One text or several; `commas` also splits `a,b`. A single text in brackets is a JSON list, as in vLLM."""

    expected: str
    commas: bool = False
    metavar: str = "TEXT"

    def parse(self, raw: RawValue) -> tuple[str, ...]:
        if isinstance(raw, Mapping):
            raise ValueRefused(f"{self.expected}, not a mapping")
        entries = [raw] if isinstance(raw, str) else list(raw)
        if isinstance(raw, str) and raw.lstrip().startswith("["):
            try:
                entries = json.loads(raw)
            except ValueError:
                raise ValueRefused(self.expected) from None
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise ValueRefused(self.expected)
        if self.commas:
            entries = [piece.strip() for entry in entries for piece in entry.split(",")]
        if not all(entry.strip() for entry in entries):
            raise ValueRefused(f"{self.expected}, none of them empty")
        return tuple(entries)

    def show(self, value: tuple[str, ...]) -> str:
        if len(value) == 1 and not value[0].lstrip().startswith("["):
            return quoted(value[0])
        return "[" + ", ".join(quoted(entry) for entry in value) + "]"


@dataclass(frozen=True, slots=True)
class DiskCache:
    """The NVMe tier: a folder and the most bytes it may take."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DiskCacheKind:
    """The one nested setting: `{path: …, size: …}` in a file, `path=…,size=…` on the command line."""

    metavar: str = "path=DIR,size=SIZE"
    expected: str = "path and size, such as path=/var/cache/kvd,size=20GiB"

    def parse(self, raw: RawValue) -> DiskCache:
        if isinstance(raw, str):
            pairs = [piece.partition("=") for piece in raw.split(",")]
            if not all(separator for _, separator, _ in pairs):
                raise ValueRefused(self.expected)
            parts = {key.strip(): value.strip() for key, _, value in pairs}
            if len(parts) != len(pairs):
                raise ValueRefused(f"{self.expected}, each once")
        elif isinstance(raw, Mapping):
            parts = dict(raw)
        else:
            raise ValueRefused(f"{self.expected}, not a list")
        unknown = sorted(set(parts) - {"path", "size"})
        if unknown:
            raise ValueRefused(f"{self.expected}, not {unknown[0]!r}", ("path", "size"))
        if set(parts) != {"path", "size"} or not parts["path"]:
            raise ValueRefused(self.expected)
        size = size_in_bytes(parts["size"])
        if size is None or size < 2**24:
            raise ValueRefused(f"{self.expected}, of at least 16MiB")
        return DiskCache(os.path.expanduser(parts["path"]), size)

    def show(self, value: DiskCache) -> str:
        return f"{{path: {quoted(value.path)}, size: {Size().show(value.size_bytes)}}}"
