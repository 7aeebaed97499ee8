"""What is generated from the table of settings: kvd.yaml, the table of `docs/configuration.md`, `--help`.

Purpose: nothing about a setting is written twice; tests compare the files in the repository with these texts,
and `make docs` writes them. Pure functions of the table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvd.config import SECTIONS, SETTINGS, Config
from kvd.config_fields import Setting
from kvd.config_keys import ApiKeys
from kvd.config_kinds import Boolean, Choice, TextList
from kvd.config_vllm import FOREIGN_SETTINGS, ForeignSetting

_YAML_WIDTH = 100
_HELP_INDENT = 6

_YAML_HEAD = """\
# Every setting of kvd with its default; `null` means the default too. Made from the program's own table.
# Names are vLLM's where vLLM has the setting; each is also a flag: `--max-model-len 32768`.
"""


def sample_yaml() -> str:
    """kvd.yaml: every setting with its default and its explanation."""
    lines = [_YAML_HEAD.rstrip()]
    for section in SECTIONS:
        lines += ["", f"# {'-' * (_YAML_WIDTH - 5 - len(section))} {section}"]
        for setting in _of(section):
            lines += [
                "",
                *textwrap.wrap(explanation(setting), _YAML_WIDTH, initial_indent="# ", subsequent_indent="# "),
            ]
            lines.append(f"{setting.name}: {setting.show(setting.default)}")
    return "\n".join(lines) + "\n"


def explanation(setting: Setting) -> str:
    """The help text, with the words that a choice allows, and what an unset value means."""
    parts = [setting.help]
    if isinstance(setting.kind, Choice):
        parts.append(f"One of {', '.join(setting.kind.words)}.")
    if setting.null_means:
        parts.append(f"Unset: {setting.null_means}.")
    if setting.environment:
        parts.append(f"Also {setting.environment} in the environment.")
    if setting.no_effect:
        parts.append(f"No effect {setting.no_effect}.")
    return " ".join(parts)


def settings_table() -> str:
    """The tables of docs/configuration.md, one per section."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"### {section}", "", "| key, flag | value | default | meaning |", "|---|---|---|---|"]
        for setting in _of(section):
            name = f"`{setting.name}`" + ("" if setting.origin == "vllm" else " ⁺")
            value = setting.kind.expected.replace("|", "\\|")
            default = f"`{setting.show(setting.default)}`"
            lines.append(f"| {name}<br>`{flag_usage(setting)}` | {value} | {default} | {_cell(setting)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def foreign_table() -> str:
    """The table of vLLM's settings that kvd knows and has no use for."""
    by_answer: dict[tuple[str, str], list[str]] = {}
    for name, foreign in FOREIGN_SETTINGS.items():
        by_answer.setdefault((foreign.reason, _accepted(foreign)), []).append(name)
    lines = ["| vLLM's setting | accepted | why |", "|---|---|---|"]
    for (reason, accepted), names in by_answer.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {accepted} | {reason} |")
    return "\n".join(lines) + "\n"


def settings_help(width: int) -> str:
    """The part of `kvd serve --help` that lists every flag, wrapped to `width` columns."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"{section}:"]
        for setting in _of(section):
            default = "" if setting.null_means else f" (default: {setting.show(setting.default)})"
            lines.append(f"  {flag_usage(setting)}")
            lines += textwrap.wrap(
                explanation(setting) + default,
                max(width, 40),
                initial_indent=" " * _HELP_INDENT,
                subsequent_indent=" " * _HELP_INDENT,
                break_on_hyphens=False,
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def flag_usage(setting: Setting) -> str:
    """A flag as help shows it: `--port N`, `--insecure, --no-insecure`."""
    if isinstance(setting.kind, Boolean):
        return f"{setting.flag}, --no-{setting.flag[2:]}"
    many = " …" if isinstance(setting.kind, TextList | ApiKeys) else ""
    return f"{setting.flag} {setting.kind.metavar}{many}"


def resolved_yaml(config: Config, origins: Mapping[str, str]) -> str:
    """What `kvd check` prints: every setting with its value, and where a value that was set came from."""
    lines = []
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        shown = "(hidden)" if setting.secret and value else setting.show(value)
        origin = f"  # {origins[name]}" if name in origins else ""
        lines.append(f"{name}: {shown}{origin}")
    return "\n".join(lines) + "\n"


def replace_between(text: str, marker: str, content: str) -> str:
    """`text` with what stands between `<!-- marker -->` and `<!-- end marker -->` replaced by `content`."""
    begin, end = f"<!-- {marker} -->", f"<!-- end {marker} -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"no {begin} … {end}"
    return f"{head}{begin}\n\n{content.strip()}\n\n{end}{tail}"


def generated_files(root: Path, command_help: Mapping[str, str]) -> dict[Path, str]:
    """Every generated file of the repository at `root`, by path, as it should be.

    command_help: title → text of each `--help`.
    """
    configuration = root / "docs" / "configuration.md"
    text = replace_between(configuration.read_text(encoding="utf-8"), "settings", settings_table())
    text = replace_between(text, "vllm", foreign_table())
    commands = root / "docs" / "cli.md"
    help_texts = "\n\n".join(f"## {title}\n\n```text\n{body.strip()}\n```" for title, body in command_help.items())
    return {
        root / "kvd.yaml": sample_yaml(),
        configuration: text,
        commands: replace_between(commands.read_text(encoding="utf-8"), "help", help_texts),
    }


def _of(section: str) -> Iterable[Setting]:
    return (setting for setting in SETTINGS.values() if setting.section == section)


def _cell(setting: Setting) -> str:
    parts = [setting.help]
    if setting.null_means:
        parts.append(f"`null`: {setting.null_means}.")
    if setting.environment:
        parts.append(f"Also `{setting.environment}` in the environment.")
    if setting.no_effect:
        parts.append(f"No effect {setting.no_effect}.")
    aliases = getattr(setting.kind, "aliases", {})
    if aliases:
        parts.append("Also " + ", ".join(f"`{alias}` = `{word}`" for alias, word in aliases.items()) + ".")
    return " ".join(parts).replace("|", "\\|")


def _accepted(foreign: ForeignSetting) -> str:
    if foreign.harmless is None:
        return "any value"
    words = sorted(word for word in foreign.harmless if word)
    return ", ".join(f"`{word}`" for word in words) if words else "`null`"
