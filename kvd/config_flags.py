"""From the words of a command line to entries, as `config_load` takes them.

Purpose: one flag per row of the table and one per known setting of vLLM, read by argparse as text; the values
are validated where the file's are, so that both give the same errors. Underscores in flags equal hyphens, a
boolean is bare, `--no-…` or `--flag=true`. Invariant: `ConfigError` is the only exception that leaves here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvd.config import SETTINGS
from kvd.config_keys import ApiKeys
from kvd.config_kinds import Boolean, TextList, ValueRefused, short
from kvd.config_load import Entry, unknown_name
from kvd.config_vllm import FOREIGN_SETTINGS, SHORT_FLAGS
from kvd.errors import ConfigError

_NEGATION = "--no-"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the words of `kvd serve` or `kvd check` say: a file, flags, and the switches of the command itself."""

    config_path: Path | None
    entries: tuple[Entry, ...]
    switches: frozenset[str]


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(short(message.removeprefix("argument ")))


def parse_flags(words: Sequence[str], *, switches: Sequence[str] = ()) -> CommandLine:
    """Read the words after the command. `switches` are bare flags of the command's own, such as `--json`."""
    parser = _make_parser()
    for switch in switches:
        parser.add_argument(switch, action="append_const", const=switch, dest="switches", default=[])
    namespace, rest = parser.parse_known_args([_normalised(word) for word in words])
    for word in rest:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            raise ConfigError(f"{short(flag)}: unknown {unknown_name(_setting_name(flag), is_flag=True)}")
    if rest:
        raise ConfigError(f"unexpected argument {short(rest[0])!r}")

    values: dict[str, Any] = vars(namespace)
    entries = []
    for name in (*SETTINGS, *FOREIGN_SETTINGS):
        value = values[name]
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is not None:
            entries.append(Entry(name, value, _origin(name, value)))
    positional = values["positional_model"]
    if positional is not None:
        if values["model"] not in (None, positional):
            raise ConfigError(f"two models: {short(positional)!r} and --model {short(values['model'])!r}")
        entries.append(Entry("model", positional, "model argument"))
    path = values["config"]
    return CommandLine(None if path is None else Path(path), tuple(entries), frozenset(values.get("switches", ())))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvd", add_help=False, allow_abbrev=False)
    parser.add_argument("positional_model", nargs="?")
    parser.add_argument("-c", "--config")
    short_flags = {name: flag for flag, name in SHORT_FLAGS.items()}
    for name in (*SETTINGS, *FOREIGN_SETTINGS):
        flags = ["--" + name.replace("_", "-"), *([short_flags[name]] if name in short_flags else [])]
        if _is_switch(name):
            parser.add_argument(*flags, action="store_const", const="true", dest=name)
            parser.add_argument(_NEGATION + flags[0][2:], action="store_const", const="false", dest=name)
        else:
            many = name in SETTINGS and isinstance(SETTINGS[name].kind, TextList | ApiKeys)
            parser.add_argument(*flags, nargs="+" if many else None, dest=name)
    return parser


def _is_switch(name: str) -> bool:
    if name in FOREIGN_SETTINGS:
        return FOREIGN_SETTINGS[name].is_switch
    return isinstance(SETTINGS[name].kind, Boolean)


def _setting_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _origin(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return (_NEGATION if _is_switch(name) and value == "false" else "--") + flag


def _normalised(word: str) -> str:
    """`--max_model_len=1` as `--max-model-len=1`, `--insecure=false` as `--no-insecure`; others unchanged."""
    if not word.startswith("--") or word == "--":
        return word
    flag, separator, value = word.partition("=")
    flag = flag.replace("_", "-")
    name = _setting_name(flag)
    if not separator or name not in {*SETTINGS, *FOREIGN_SETTINGS} or not _is_switch(name):
        return flag + separator + value
    kind = SETTINGS[name].kind if name in SETTINGS else Boolean()
    try:
        parsed = kind.parse(value)
    except ValueRefused as refused:
        raise ConfigError(f"{flag}: expected {refused}, got {short(value)!r}") from None
    if parsed is None:
        raise ConfigError(f"{flag}: auto is what leaving the flag away means")
    return flag if parsed else _NEGATION + flag[2:]
