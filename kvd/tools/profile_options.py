"""The words of `kvd profile` as one frozen value. Raises ConfigError, as every command line of kvd does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvd.errors import ConfigError
from kvd.tools.bench_client import parse_root
from kvd.tools.bench_loads import QUESTION_TOKENS
from kvd.tools.bench_options import (
    DEFAULT_RUNS,
    DEFAULT_TIMEOUT_SECONDS,
    MAX_RUNS,
    OptionParser,
    check_target,
    key_of_own_server,
    normalised,
    number,
)
from kvd.tools.profile_compare import compare

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_LENGTHS = "256,2048,8192"
DEFAULT_TOKENS = 32
MAX_LENGTH = 10**8
MAX_LENGTHS = 16
JSON_KIND = "kvd profile"
JSON_FORMAT = 1
"""Goes up when a field changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """`url` None: start kvd with `serve_words`, once for each of `kv_formats`; without any, in the configured format.

    `lengths`: tokens of prompt and answer together, rising. `num_tokens`: of an answer. `old`: what --compare read.
    `json` and `picture` are files; `json` "-" is stdout.
    """

    url: str | None
    model: str | None
    api_key: str | None = field(repr=False)
    serve_words: tuple[str, ...]
    kv_formats: tuple[str, ...]
    lengths: tuple[int, ...]
    num_tokens: int
    num_runs: int
    timeout_seconds: float
    seed: int | None
    json: str | None
    picture: str | None
    old: Mapping[str, Any] | None = field(repr=False)

    @property
    def servers(self) -> list[tuple[str, ...]]:
        """The words of every `kvd serve` to start, in order."""
        if not self.kv_formats:
            return [self.serve_words]
        return [(*self.serve_words, "--kv-cache-dtype", name) for name in self.kv_formats]


def parse(words: Sequence[str], environment: Mapping[str, str]) -> ProfileOptions:
    """Read the words after `kvd profile`.

    A MODEL, or any flag of `kvd serve`, means a server of our own; else what runs at the URL is measured.
    """
    words = [normalised(word) for word in words]
    chosen, rest = _parser(starts_own=False).parse_known_args(words)
    is_url = bool(rest) and _looks_like_url(rest[0])
    if is_url and (rest[1:] or chosen.kv_cache_dtype is not None):
        unknown = rest[1] if rest[1:] else "--kv-cache-dtype"
        raise ConfigError(f"{unknown}: unknown here; with a URL kvd profile starts no server that could take it")
    starts_own = (bool(rest) and not is_url) or chosen.kv_cache_dtype is not None
    if starts_own:
        chosen, rest = _parser(starts_own=True).parse_known_args(words)
    kv_formats = () if chosen.kv_cache_dtype is None else _names("--kv-cache-dtype", chosen.kv_cache_dtype)
    num_tokens = number("--tokens", chosen.tokens, 10**6, least=2)
    check_target("--json", chosen.json)
    check_target("--picture", chosen.picture)
    if chosen.picture is not None and not chosen.picture.endswith(".svg"):
        raise ConfigError(f"--picture: expected a file that ends in .svg, got {chosen.picture[:60]!r}")
    options = ProfileOptions(
        url=None
        if starts_own
        else parse_root(rest[0] if rest else DEFAULT_URL, "URL", allow_remote=chosen.allow_remote),
        model=None if starts_own else chosen.model,
        api_key=None if starts_own else chosen.key or environment.get("KVD_API_KEY") or None,
        serve_words=tuple(rest) if starts_own else (),
        kv_formats=kv_formats,
        lengths=_lengths(chosen.lengths, num_tokens),
        num_tokens=num_tokens,
        num_runs=number("--runs", chosen.runs, MAX_RUNS),
        timeout_seconds=number("--timeout", chosen.timeout, 10**6),
        seed=chosen.seed,
        json=chosen.json,
        picture=chosen.picture,
        old=None if chosen.compare is None else read_result(chosen.compare),
    )
    if starts_own:
        for server_words in options.servers:  # before minutes are spent on the first of them
            key_of_own_server(server_words, environment)
    return options


def _parser(starts_own: bool) -> OptionParser:
    parser = OptionParser(prog="kvd profile", add_help=False, allow_abbrev=False)
    if not starts_own:  # otherwise these two are for the server
        parser.add_argument("--model")
        parser.add_argument("--key")
    for flag in ("--kv-cache-dtype", "--json", "--picture", "--compare"):
        parser.add_argument(flag)
    parser.add_argument("--allow-remote", action="store_true")
    parser.add_argument("--lengths", default=DEFAULT_LENGTHS)
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--runs", type=int, default=DEFAULT_RUNS)
    parser.add_argument("--timeout", type=int, default=int(DEFAULT_TIMEOUT_SECONDS))
    # `kvd serve` has --seed too, so this one has a name of its own.
    parser.add_argument("--prompt-seed", type=int, dest="seed")
    return parser


def _looks_like_url(word: str) -> bool:
    """A URL, or HOST:PORT. A model is a name, a path or OWNER/NAME."""
    host, _, port = word.partition("/")[0].rpartition(":")
    return "://" in word or (bool(host) and port.isdecimal())


def _names(flag: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{flag}: expected different names with commas between them, got {text[:40]!r}")
    return names


def _lengths(text: str, num_tokens: int) -> tuple[int, ...]:
    """Tokens of the contexts; each has room for a prefix, a question and the answer."""
    least = num_tokens + 2 * QUESTION_TOKENS
    try:
        lengths = sorted({int(word) for word in text.split(",") if word.strip()})
    except ValueError:
        lengths = []
    if not lengths or not least <= lengths[0] <= lengths[-1] <= MAX_LENGTH or len(lengths) > MAX_LENGTHS:
        raise ConfigError(
            f"--lengths: expected 1 to {MAX_LENGTHS} numbers of tokens, the least {least} (--tokens {num_tokens} and "
            f"{2 * QUESTION_TOKENS} of a prompt), with commas between them, got {text[:60]!r}"
        )
    return tuple(lengths)


def _no_number(text: str) -> NoReturn:
    """kvd writes no NaN and no infinity, and could not write what they come to."""
    raise ValueError(text)


def read_result(name: str) -> Mapping[str, Any]:
    """What an earlier `kvd profile --json` wrote. Raises ConfigError."""
    try:
        result = json.loads(Path(name).read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(f"--compare: {name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or result.get("kind") != JSON_KIND:
        raise ConfigError(f"--compare: {name}: not a file that kvd profile --json wrote")
    if result.get("format") != JSON_FORMAT:
        raise ConfigError(f"--compare: {name}: format {result.get('format')!r}; this kvd reads format {JSON_FORMAT}")
    try:
        compare(result, result)  # before minutes are spent on the other one
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError):
        raise ConfigError(f"--compare: {name}: what kvd profile --json wrote has been changed since") from None
    return result
