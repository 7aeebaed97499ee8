"""The words of `kvd plan` as one frozen value. Raises ConfigError, as every command line of kvd does."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvd.config import Config
from kvd.config_flags import parse_flags
from kvd.config_kinds import Integer, Kind, Size, ValueRefused, scaled_integer, short
from kvd.config_load import load_config
from kvd.errors import ConfigError
from kvd.tools.bench_client import parse_root

MAX_LAYERS = 4096
MAX_EXTENT = 2**31 - 1
MAX_REQUESTS = 10**6
LEAST_MEMORY = 1 << 20
"""Of --memory: whoever asks for less has left out the unit."""

_REQUESTS = re.compile(r"\s*([0-9]+)\s*[x×*]\s*([0-9.]+[kKmM]?)\s*")
_PARAMETERS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMbBtT]?)")
_PARAMETER_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Numbers:
    """A model by its sizes; None where nothing was said. window: tokens a query sees, of `windowed_layers` layers."""

    layers: int
    kv_heads: int
    head_dim: int
    heads: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    positions: int | None = None
    parameters: int | None = None
    window: int | None = None
    windowed_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """So many requests of so many tokens at once."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """chosen: names of the settings that somebody set. source: root URL of a running server. chart: a file."""

    config: Config
    chosen: frozenset[str]
    numbers: Numbers | None
    gpu: str | None
    memory_bytes: int | None
    source: str | None
    api_key: str | None
    asked: Asked | None
    as_json: bool
    chart: str | None


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


_EXTENTS = (
    "kv-heads",
    "head-dim",
    "heads",
    "hidden",
    "intermediate",
    "vocab",
    "positions",
    "window",
    "windowed-layers",
)


def parse(words: Sequence[str], environment: Mapping[str, str]) -> PlanOptions:
    """Read the words after `kvd plan`; those that are not ours are flags of `kvd serve`."""
    parser = _Parser(prog="kvd plan", add_help=False, allow_abbrev=False)
    for name in ("gpu", "memory", "from", "requests", "chart", "layers", "parameters", *_EXTENTS):
        parser.add_argument(f"--{name}", dest=name.replace("-", "_"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--allow-remote", action="store_true")
    chosen, rest = parser.parse_known_args(list(words))
    values = vars(chosen)
    line = parse_flags(rest)
    loaded = load_config(line.config_path, line.entries, environment)
    numbers = _numbers(values)
    source = values["from"]
    if source is not None:
        source = parse_root(source, "--from", allow_remote=chosen.allow_remote)
    if numbers is not None and any(entry.name == "model" for entry in line.entries):
        raise ConfigError("--layers: a model by numbers and a model by name exclude each other")
    if source is not None and numbers is not None:
        raise ConfigError("--from: the server says what its model is; sizes by flags are of no use beside it")
    if source is not None and (chosen.gpu or chosen.memory):
        raise ConfigError("--from: the server says what memory it has; --gpu and --memory are of no use beside it")
    if chosen.gpu is not None and chosen.memory is not None:
        raise ConfigError("--gpu and --memory exclude each other: a card by name has the memory that it has")
    is_host = loaded.config.device == "cpu" or loaded.config.backend in ("cpu", "reference")
    if chosen.gpu is not None and is_host:
        raise ConfigError("--gpu: the configuration computes on the CPU (device or backend)")
    keys = loaded.config.api_key
    return PlanOptions(
        config=loaded.config,
        chosen=frozenset(loaded.origins),
        numbers=numbers,
        gpu=chosen.gpu,
        memory_bytes=None if chosen.memory is None else _memory(chosen.memory),
        source=source,
        api_key=keys[0].key if keys else None,
        asked=None if chosen.requests is None else _asked(chosen.requests),
        as_json=chosen.json,
        chart=_chart(chosen.chart),
    )


def _parsed(flag: str, text: str, kind: Kind) -> int:
    try:
        return int(kind.parse(text))
    except ValueRefused as refused:
        raise ConfigError(f"{flag}: expected {refused}, got {short(text)!r}") from None


def _memory(text: str) -> int:
    num_bytes = _parsed("--memory", text, Size())
    if num_bytes < LEAST_MEMORY:
        hint = f"; is {text}GiB meant?" if text.isdecimal() else ""
        raise ConfigError(f"--memory: expected 1MiB or more, got {short(text)!r}{hint}")
    return num_bytes


def _numbers(values: Mapping[str, str | None]) -> Numbers | None:
    names = [name.replace("-", "_") for name in ("layers", "parameters", *_EXTENTS)]
    given = {name: values[name] for name in names if values[name] is not None}
    if not given:
        return None
    for needed in ("layers", "head_dim"):
        if needed not in given:
            raise ConfigError(f"--{needed.replace('_', '-')} is missing: a model by numbers needs its layers, KV heads "
                              "and head_dim")  # fmt: skip
    if "kv_heads" not in given and "heads" not in given:
        raise ConfigError("--kv-heads is missing: how many heads keys and values have (--heads where all have)")
    parsed: dict[str, int] = {}
    for name, text in given.items():
        assert text is not None
        flag = f"--{name.replace('_', '-')}"
        if name == "parameters":
            parsed[name] = _parameters(text)
        else:
            parsed[name] = _parsed(flag, text, Integer(1, MAX_LAYERS if "layers" in name else MAX_EXTENT))
    parsed.setdefault("kv_heads", parsed.get("heads", 0))
    heads = parsed.get("heads", parsed["kv_heads"])
    if heads % parsed["kv_heads"]:
        raise ConfigError(f"--kv-heads: {heads} heads are no multiple of {parsed['kv_heads']} KV heads")
    if parsed["head_dim"] % 4 or parsed["head_dim"] > 256:
        raise ConfigError(f"--head-dim: {parsed['head_dim']} is not served; kvd serves multiples of 4 up to 256")
    if parsed.get("windowed_layers", 0) > parsed["layers"]:
        raise ConfigError(f"--windowed-layers: {parsed['windowed_layers']} of {parsed['layers']} layers")
    if "windowed_layers" in parsed and "window" not in parsed:
        raise ConfigError("--windowed-layers: --window says how many tokens these layers see")
    return Numbers(**parsed)


def _parameters(text: str) -> int:
    """`7B`, `135M`, `7000000000`."""
    match = _PARAMETERS.fullmatch(text.strip())
    number = 0 if match is None else round(float(match[1]) * _PARAMETER_UNITS[match[2].lower()])
    if not 1 <= number <= 10**14:
        raise ConfigError(f"--parameters: expected a number of parameters such as 7B or 135M, got {short(text)!r}")
    return number


def _asked(text: str) -> Asked:
    """`8x4096`, `8×4K`."""
    match = _REQUESTS.fullmatch(text)
    tokens = None if match is None else scaled_integer(match[2])
    count = 0 if match is None or len(match[1]) > 9 else int(match[1])
    if tokens is None or not 1 <= count <= MAX_REQUESTS or not 1 <= tokens <= MAX_EXTENT:
        raise ConfigError(f"--requests: expected REQUESTSxTOKENS such as 8x4096 or 64x2K, got {short(text)!r}")
    return Asked(count, tokens)


def _chart(name: str | None) -> str | None:
    if name is not None and not name.endswith(".svg"):
        raise ConfigError(f"--chart: expected a file that ends in .svg, got {short(name)!r}")
    return name
