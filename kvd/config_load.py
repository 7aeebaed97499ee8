"""From a file, flags and the environment to one checked `Config`.

Purpose: read the sources, say in one line what is wrong with them (source, line, key, what was expected, the
nearest valid name), and check what needs no model. Sources in rising order: defaults, file, environment,
flags; a value is validated even where a later source overrides it. Called once at start, before anything else.
Invariant: `ConfigError` is the only exception that leaves here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.config import SETTINGS, Config
from kvd.config_check import check
from kvd.config_kinds import RawValue, ValueRefused, short
from kvd.config_vllm import FOREIGN_SETTINGS, NAMES_ELSEWHERE
from kvd.errors import ConfigError

if TYPE_CHECKING:
    from yaml import Node

_MAX_FILE_BYTES = 2**20
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value from one source. `value` None is YAML's null: the default. `origin` is how errors begin."""

    name: str
    value: RawValue | None
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration, where each value that is not a default came from, and what a user should know."""

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def load_config(
    path: Path | None = None, flags: Iterable[Entry] = (), environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """The configuration that a file (or None), flags and environment variables amount to; raises ConfigError."""
    entries = [] if path is None else read_file(path)
    for setting in SETTINGS.values():
        text = (environment or {}).get(setting.environment, "") if setting.environment else ""
        if text:
            entries.append(Entry(setting.name, text, setting.environment))
    entries.extend(flags)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    foreign: list[Entry] = []
    for entry in entries:
        name = canonical_name(entry)
        if name in FOREIGN_SETTINGS:
            foreign.append(entry)
        elif entry.value is not None:
            values[name] = _parse(name, entry)
            origins[name] = entry.origin
        elif name in values:  # a null takes back what a weaker source said
            del values[name], origins[name]
    config = Config(**values)
    notices = _check_foreign(foreign, config)
    notices += check(config, lambda name: _place(name, origins.get(name)))
    return LoadedConfig(config, origins, tuple(notices))


def canonical_name(entry: Entry) -> str:
    """The name of a setting of ours or of vLLM's, hyphens and underscores being equal; else ConfigError."""
    name = entry.name.replace("-", "_")
    if name in SETTINGS or name in FOREIGN_SETTINGS:
        return name
    raise ConfigError(f"{entry.origin}: unknown {unknown_name(name, entry.origin.startswith('-'))}")


def unknown_name(name: str, is_flag: bool) -> str:
    """The end of an error about an unknown name, with the nearest valid one."""
    known = NAMES_ELSEWHERE.get(name)
    nearest = [known] if known else difflib.get_close_matches(name, [*SETTINGS, *FOREIGN_SETTINGS], 1, 0.6)
    hint = f"; did you mean {_as_written(nearest[0], is_flag)}?" if nearest else ""
    return f"flag{hint}" if is_flag else f"key {short(name)!r}{hint}"


def _as_written(name: str, is_flag: bool) -> str:
    return "--" + name.replace("_", "-") if is_flag else name


def _place(name: str, origin: str | None) -> str:
    """A setting with the place that set it: `kvd.yaml:3: port`, `--port`, `KVD_HOME`, or `port` by default."""
    if origin is None:
        return name
    names_itself = origin.startswith("-") or origin == SETTINGS[name].environment
    return origin if names_itself else f"{origin}: {name}"


def _parse(name: str, entry: Entry) -> Any:
    setting = SETTINGS[name]
    assert entry.value is not None
    try:
        return setting.kind.parse(entry.value)
    except ValueRefused as refused:
        got = ""
        if isinstance(entry.value, str) and not setting.secret:
            got = f", got {short(entry.value)!r}"
            nearest = difflib.get_close_matches(entry.value.lower(), refused.words, 1, 0.6)
            got += f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"{_place(name, entry.origin)}: expected {refused}{got}") from None


def _check_foreign(entries: Iterable[Entry], config: Config) -> list[str]:
    """One notice for each of vLLM's settings that changes nothing; ConfigError where one would."""
    notices = []
    for entry in entries:
        name = canonical_name(entry)
        foreign = FOREIGN_SETTINGS[name]
        if entry.value is None or (name == "tokenizer" and entry.value == config.model):
            continue
        where = entry.origin if entry.origin.startswith("-") else f"{entry.origin}: {name}"
        if foreign.accepts(entry.value):
            notices.append(f"{where} has no effect: {foreign.reason}")
            continue
        written = f"{short(entry.value)!r} is" if isinstance(entry.value, str) else "is"
        accepted = " or ".join(sorted(word for word in foreign.harmless or () if word not in ("", "{}")))
        hint = f" (only {accepted} is accepted)" if accepted else ""
        raise ConfigError(f"{where}: {written} refused: {foreign.reason}{hint}")
    return notices


# --------------------------------------------------------------------------- the file


def read_file(path: Path) -> list[Entry]:
    """The entries of a YAML file, in its order; an empty file has none. Scalars stay as they are written."""
    import yaml

    try:
        root = yaml.compose(_read_text(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = error.problem or error.context or "cannot be read"
        if "\\t" in problem:
            problem = "a tab stands where YAML wants spaces"
        raise ConfigError(f"{path}{line}: not valid YAML: {short(problem)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {short(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: expected lines of the form `key: value`")
    entries: list[Entry] = []
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: expected the name of a setting before the colon")
        entry = Entry(key_node.value, _raw(value_node), f"{path}:{line}")
        name = canonical_name(entry)
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} is already set in line {lines[name]}")
        if name in SETTINGS and not _is_flat(value_node):
            raise ConfigError(f"{path}:{line}: {name}: expected {SETTINGS[name].kind.expected}")
        lines[name] = line
        entries.append(entry)
    return entries


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB, which no configuration is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from None


def _is_scalar(node: Node) -> bool:
    from yaml import ScalarNode

    return isinstance(node, ScalarNode)


def _children(node: Node) -> list[Node]:
    from yaml import SequenceNode

    if isinstance(node, SequenceNode):
        return list(node.value)
    return [child for pair in node.value for child in pair]


def _is_flat(node: Node) -> bool:
    """Whether `node` is a scalar, or a list or mapping of scalars that are not null."""
    if _is_scalar(node):
        return True
    return all(_is_scalar(child) and child.tag != _NULL for child in _children(node))


def _raw(node: Node) -> RawValue | None:
    """A node as text; what is nested deeper than one level is left out (only vLLM's own settings nest)."""
    from yaml import SequenceNode

    if _is_scalar(node):
        return None if node.tag == _NULL else str(node.value)
    if isinstance(node, SequenceNode):
        return [str(child.value) for child in node.value]
    return {str(key.value): str(value.value) for key, value in node.value}
