"""API keys: the setting `api_key`, and the file that `api_key_file` names.

Purpose: a key has a name, under which its requests are shown and counted, and may have limits of its own. Both
sources give the same frozen `ApiKey`s. Invariant: no message of an error shows a key; a file is taken whole or not
at all. Needs the standard library alone; yaml is imported where a file is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.config_kinds import RawValue, TextList, ValueRefused, quoted, short
from kvd.errors import ConfigError

MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._@+-]{0,62}[A-Za-z0-9])?", re.ASCII)
_FIELDS = ("key", "max_requests_in_flight", "queue_share", "isolate_cache")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may take; None is no limit of its own.

    max_requests_in_flight   HTTP requests that run or wait at the same time
    queue_share              part of max_waiting that its requests may fill while they wait for their first token
    isolate_cache            share cached prefixes with nobody else
    """

    max_requests_in_flight: int | None = None
    queue_share: float | None = None
    isolate_cache: bool = False


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key; `name` is what people see of it."""

    name: str
    key: str = field(repr=False)
    limits: KeyLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """One key, a list of keys, or `name: key` pairs; keys without a name are called `key 1`, `key 2`, …"""

    metavar: str = "TEXT"
    expected: str = "a key, a list of keys, or names with keys"

    def parse(self, raw: RawValue) -> tuple[ApiKey, ...]:
        if isinstance(raw, str) and raw.lstrip().startswith("{"):
            raw = self._parse_json(raw)
        if not isinstance(raw, Mapping):
            keys = TextList(self.expected).parse(raw)
            return tuple(ApiKey(f"key {number}", key) for number, key in enumerate(keys, 1))
        for name, key in raw.items():
            if not _NAME.fullmatch(name):
                raise ValueRefused("names of 1 to 64 letters, digits, blanks and . _ @ + - before the keys")
            if not key.strip():
                raise ValueRefused(f"{self.expected}, none of them empty")
        return tuple(ApiKey(name, key) for name, key in raw.items())

    def _parse_json(self, text: str) -> dict[str, str]:
        try:
            pairs = json.loads(text)
        except ValueError:
            raise ValueRefused(self.expected) from None
        if not isinstance(pairs, dict) or not all(isinstance(key, str) for key in pairs.values()):
            raise ValueRefused(self.expected)
        return pairs

    def show(self, value: tuple[ApiKey, ...]) -> str:
        if all(each.name == f"key {number}" for number, each in enumerate(value, 1)):
            return TextList(self.expected).show(tuple(each.key for each in value))
        return "{" + ", ".join(f"{quoted(each.name)}: {quoted(each.key)}" for each in value) + "}"


def check_keys(keys: Iterable[ApiKey], where: str) -> None:
    """Raise a ConfigError that begins with `where` for a key that no client could send, or one that is there twice."""
    seen_names: set[str] = set()
    seen_keys: set[str] = set()
    for each in keys:
        subject = f"{where}: the key" if each.name.startswith("key ") else f"{where}: the key of {each.name}"
        if each.key != each.key.strip():
            raise ConfigError(f"{subject} begins or ends with a blank; clients would fail with 401")
        if not each.key.isascii() or not each.key.isprintable() or " " in each.key:
            raise ConfigError(f"{subject}: expected printable ASCII without blanks, which HTTP headers can carry")
        if each.key in seen_keys:
            raise ConfigError(f"{where}: the same key stands there twice")
        if each.name in seen_names:
            raise ConfigError(f"{where}: two keys are called {each.name}")
        seen_keys.add(each.key)
        seen_names.add(each.name)


# --------------------------------------------------------------------------- the file


def _shown(path: Path) -> str:
    """The whole of it, since its end tells which file is meant, but in one line."""
    return "".join(character if character.isprintable() else " " for character in str(path))


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a YAML file, at least one: `name: KEY`, or `name:` with `key` and limits.

    Raises ConfigError, one line, for a file that cannot be read or is wrong anywhere.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file: {_shown(path)}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file: {_shown(path)}: larger than 1 MiB, which no list of keys is")
    try:
        # BaseLoader: a key such as 0123 or 1e5 stays the text that it is.
        entries = yaml.load(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"api_key_file: {_shown(path)}{line}: not valid YAML") from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"api_key_file: {_shown(path)}: expected at least one line `name: KEY`")
    keys = tuple(_read_entry(path, name, entry) for name, entry in entries.items())
    check_keys(keys, f"api_key_file: {_shown(path)}")
    return keys


def _read_entry(path: Path, name: Any, entry: Any) -> ApiKey:
    where = f"api_key_file: {_shown(path)}: {short(str(name))}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: expected a name of 1 to 64 letters, digits, blanks and . _ @ + -")
    if isinstance(entry, str):
        entry = {"key": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str) or not entry["key"].strip():
        raise ConfigError(f"{where}: expected a key, or `key:` with a key")
    for unknown in [word for word in entry if word not in _FIELDS]:
        raise ConfigError(f"{where}: unknown field {short(str(unknown))!r}; there are {', '.join(_FIELDS)}")
    values = {word: _scalar(where, word, value) for word, value in entry.items()}
    return ApiKey(
        name,
        values["key"],
        KeyLimits(
            max_requests_in_flight=_requests(where, values.get("max_requests_in_flight")),
            queue_share=_share(where, values.get("queue_share")),
            isolate_cache=_switch(where, values.get("isolate_cache")),
        ),
    )


def _scalar(where: str, word: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {word}: expected one value")
    return value


def _requests(where: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:7]) <= 10**6 and len(text) <= 7):
        raise ConfigError(f"{where}: max_requests_in_flight: expected a whole number from 1 to 1000000")
    return int(text)


def _share(where: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: queue_share: expected a number > 0 and ≤ 1")
    return share


def _switch(where: str, text: str | None) -> bool:
    if text is None or text in ("true", "false"):
        return text == "true"
    raise ConfigError(f"{where}: isolate_cache: expected true or false")
