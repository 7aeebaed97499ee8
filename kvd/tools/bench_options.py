"""The words of `kvd bench` as one frozen value. Raises ConfigError, as every command line of kvd does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from kvd.config_flags import parse_flags
from kvd.config_keys import read_key_file
from kvd.config_load import load_config
from kvd.errors import ConfigError
from kvd.tools.bench_client import parse_root
from kvd.tools.bench_run import GROUPS

DEFAULT_RUNS = 5
DEFAULT_TIMEOUT_SECONDS = 600.0
MAX_RUNS = 1000

_SECRET_FLAGS = ("--key", "--api-key", "--api-key-against")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`url` None: start kvd with `serve_words`. `against` None: one endpoint. `num_tokens` None: each load's own.

    `json` and `picture` are files; `json` "-" is stdout.
    """

    url: str | None
    against: str | None
    model: str | None
    model_against: str | None
    api_key: str | None = field(repr=False)
    api_key_against: str | None = field(repr=False)
    serve_words: tuple[str, ...]
    groups: tuple[str, ...]
    num_runs: int
    num_tokens: int | None
    context_tokens: int | None
    timeout_seconds: float
    seed: int | None
    json: str | None
    picture: str | None


class OptionParser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse(words: Sequence[str], environment: Mapping[str, str]) -> BenchOptions:
    """Read the words after `kvd bench`. Without --url, those that are not ours are flags of `kvd serve`."""
    words = [normalised(word) for word in words]
    starts_own = not any(word == "--url" or word.startswith("--url=") for word in words)
    parser = _parser(starts_own)
    chosen, rest = parser.parse_known_args(words)
    values = vars(chosen)
    if rest and not starts_own:
        raise ConfigError(f"{rest[0]}: unknown here; with --url kvd bench starts no server that could take it")
    api_key = values.get("api_key") or environment.get("KVD_API_KEY") or None
    if starts_own:
        api_key = key_of_own_server(rest, environment)
    allow_remote = chosen.allow_remote
    for name in ("model_against", "api_key_against"):
        if values[name] is not None and chosen.against is None:
            raise ConfigError(f"--{name.replace('_', '-')} is of no use without --against")
    check_target("--json", chosen.json)
    check_target("--picture", chosen.picture)
    return BenchOptions(
        url=None if starts_own else parse_root(chosen.url, "--url", allow_remote=allow_remote),
        against=None if chosen.against is None else parse_root(chosen.against, "--against", allow_remote=allow_remote),
        model=values.get("model"),
        model_against=chosen.model_against,
        api_key=api_key,
        api_key_against=chosen.api_key_against or environment.get("KVD_API_KEY_AGAINST") or None,
        serve_words=tuple(rest),
        groups=_groups(chosen.only),
        num_runs=number("--runs", chosen.runs, MAX_RUNS),
        num_tokens=None if chosen.tokens is None else number("--tokens", chosen.tokens, 10**6, least=2),
        context_tokens=None if chosen.context is None else number("--context", chosen.context, 10**8),
        timeout_seconds=number("--timeout", chosen.timeout, 10**6),
        seed=chosen.seed,
        json=chosen.json,
        picture=chosen.picture,
    )


def key_of_own_server(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The key that a `kvd serve` with these flags asks for, if any. Raises ConfigError where it would not start."""
    line = parse_flags(words)
    config = load_config(line.config_path, line.entries, environment).config
    keys = config.api_key
    if not keys and config.api_key_file is not None:
        keys = read_key_file(Path(config.api_key_file))
    return keys[0].key if keys else None


def _parser(starts_own: bool) -> OptionParser:
    parser = OptionParser(prog="kvd bench", add_help=False, allow_abbrev=False)
    for flag in ("--url", "--against", "--model-against", "--api-key-against", "--only", "--json", "--picture"):
        parser.add_argument(flag)
    if not starts_own:  # otherwise these two are for the server
        parser.add_argument("--model")
        parser.add_argument("--api-key")
    parser.add_argument("--allow-remote", action="store_true")
    parser.add_argument("--runs", type=int, default=DEFAULT_RUNS)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--timeout", type=int, default=int(DEFAULT_TIMEOUT_SECONDS))
    # `kvd serve` has --seed too, so this one has a name of its own.
    parser.add_argument("--prompt-seed", type=int, dest="seed")
    return parser


def _groups(text: str | None) -> tuple[str, ...]:
    if text is None:
        return GROUPS
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in GROUPS:
            raise ConfigError(f"--only: no load is called {name[:40]!r}; there are {', '.join(GROUPS)}")
    if not names:
        raise ConfigError(f"--only: expected names out of {', '.join(GROUPS)}")
    return tuple(name for name in GROUPS if name in names)


def number(flag: str, value: int, most: int, least: int = 1) -> int:
    if not least <= value <= most:
        raise ConfigError(f"{flag}: expected a whole number from {least} to {most}, got {value}")
    return value


def check_target(flag: str, name: str | None) -> None:
    """Minutes of measuring must not be lost for a folder that does not exist."""
    if name is None or (name == "-" and flag == "--json"):
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag}: {name}: " + ("is a folder" if path.is_dir() else "its folder does not exist"))


def normalised(word: str) -> str:
    """`--model_against=x` as `--model-against=x`, as for every command."""
    flag, separator, value = word.partition("=")
    return flag.replace("_", "-") + separator + value if word.startswith("--") else word


def without_keys(words: Sequence[str]) -> list[str]:
    """The words with the values of key flags hidden: everything up to the next flag, since a flag may take several."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        flag, separator, _ = word.partition("=")
        if word.startswith("--"):
            is_secret = flag.replace("_", "-") in _SECRET_FLAGS
            shown.append(f"{flag}=(hidden)" if is_secret and separator else word)
        else:
            shown.append("(hidden)" if is_secret else word)
    return shown
