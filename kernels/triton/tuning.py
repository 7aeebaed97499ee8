"""Launch configurations that were measured on the user's own card, in a small file. Torch-free; engine thread.

Which configurations there are is the tables' affair: a file can only say which of a table's candidates is the fastest
for a key (kernel and class of shapes). So a file cannot make the program launch what the ahead-of-time check has not
seen, and an entry that no candidate equals any longer has no effect.

A file holds for one card, one state of the kernels' source and one triton. Written by `kvd_kernels.bench --tune`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kvd_kernels.triton.cards import Card

FOLDER = "tuned"
"""In the folder of compiled kernels."""
Config = TypeVar("Config")
"""A frozen dataclass of numbers, strings and truth values."""


class Tuned:
    """Asked whenever a launch has more than one candidate.

    choices: the fields of the fastest candidate by key. Empty: the tables' own choices hold.
    """

    def __init__(self, choices: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.choices = dict(choices or {})

    def choose(self, key: str, candidates: Sequence[Config]) -> Config:
        """The candidate that was measured to be the fastest; the first, the table's own choice, where none was."""
        wanted = self.choices.get(key)
        if wanted is not None:
            for candidate in candidates:
                if fields_of(candidate) == wanted:
                    return candidate
        return candidates[0]


class Recorder(Tuned):
    """Chooses like another, and notes what it was asked: candidates by key."""

    def __init__(self, choices: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(choices)
        self.asked: dict[str, tuple[Any, ...]] = {}

    def choose(self, key: str, candidates: Sequence[Config]) -> Config:
        self.asked[key] = tuple(candidates)
        return super().choose(key, candidates)


def fields_of(config: Any) -> dict[str, Any]:
    """A configuration as JSON would give it back."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return fields


def default_folder() -> Path:
    """Where kvd looks, unless a configuration file gives it another home."""
    return Path(os.environ.get("KVD_HOME") or "~/.cache/kvd").expanduser() / "kernels" / FOLDER


def path_of(folder: Path, card: Card) -> Path:
    """The file of a card."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', card.name.lower()).strip('-')}.json"


def identity(card: Card) -> dict[str, str]:
    """What a measurement holds for."""
    import triton

    sources = sorted(Path(__file__).parent.glob("*.py"))
    state = hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=8)
    return {"card": card.name, "kernels": state.hexdigest(), "triton": triton.__version__}


def load(card: Card, notify: Callable[[str], None], folder: Path | None = None) -> Tuned:
    """The choices for this card. Nothing where there is no file; nothing, and one line to `notify`, where the file is
    damaged or holds for something else.
    """
    path = path_of(folder or default_folder(), card)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Tuned()
    except (OSError, UnicodeDecodeError) as error:
        notify(f"{path} is ignored: {error}")
        return Tuned()
    try:
        content = json.loads(text)
        holds_for, choices = content["holds_for"], content["choices"]
        is_sound = isinstance(choices, dict) and all(isinstance(choice, dict) for choice in choices.values())
    except (ValueError, TypeError, KeyError):
        is_sound = False
    if not is_sound:
        notify(f"{path} is ignored: it is damaged; `python -m kvd_kernels.bench --device cuda --tune` writes a new one")
        return Tuned()
    for name, ours in identity(card).items():
        if not isinstance(holds_for, dict) or holds_for.get(name) != ours:
            notify(
                f"{path} is ignored: it was measured for another {name}; "
                "`python -m kvd_kernels.bench --device cuda --tune` measures again"
            )
            return Tuned()
    return Tuned(choices)


def save(card: Card, choices: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> Path:
    """Write `Tuned.choices`. OSError where the folder cannot be written."""
    path = path_of(folder or default_folder(), card)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"holds_for": identity(card), "choices": dict(sorted(choices.items()))}
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    return path
