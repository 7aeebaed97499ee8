"""What the table of settings holds for each field of `Config`.

Purpose: one row per setting, attached to the field itself as dataclass metadata, so that name, type and
default are stated once. Immutable; needs the standard library alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvd.config_kinds import Kind


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    section      heading under which help and documents list it
    origin       "vllm": the name and meaning are vLLM's; "kvd": ours
    null_means   what an unset value (None, or an empty list) amounts to, for people
    environment  the variable that sets it: stands above the file, below a flag
    no_effect    "in this version" or another reason: validated, and announced at start where it is set
    secret       never printed
    """

    name: str
    default: Any
    kind: Kind
    section: str
    help: str
    origin: str
    null_means: str
    environment: str
    no_effect: str
    secret: bool

    @property
    def flag(self) -> str:
        """The flag of this setting, `--max-model-len`."""
        return "--" + self.name.replace("_", "-")

    def show(self, value: Any) -> str:
        """The value as kvd.yaml writes it; `null` for an unset one that has no word of its own."""
        has_word = getattr(self.kind, "has_auto", False)
        return "null" if value in (None, ()) and not has_word else self.kind.show(value)


def setting(
    default: Any,
    kind: Kind,
    section: str,
    help: str,
    *,
    origin: str = "vllm",
    null_means: str = "",
    environment: str = "",
    no_effect: str = "",
    secret: bool = False,
) -> Any:
    """A dataclass field with its row; `table` reads it back."""
    metadata = {
        "kind": kind,
        "section": section,
        "help": help,
        "origin": origin,
        "null_means": null_means,
        "environment": environment,
        "no_effect": no_effect,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


def table(config_class: type) -> dict[str, Setting]:
    """All rows of a dataclass whose fields were made by `setting`, by name, in the order of declaration."""
    fields = dataclasses.fields(config_class)
    return {field.name: Setting(name=field.name, default=field.default, **field.metadata) for field in fields}
