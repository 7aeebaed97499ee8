"""Pictures of whole screens, kept beside the tests: letters, colours, bold and all.

    KVD_UPDATE_PICTURES=1 .venv/bin/python -m pytest -n 0 tests/tui -k pictures

writes what the screens look like now to `tests/tui/pictures/`; look at them before they are committed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from textual.app import App

from kvd.tui.picture import picture

FOLDER = Path(__file__).resolve().parent / "pictures"
UPDATE = "KVD_UPDATE_PICTURES"
_MAX_LINES = 40


def assert_picture(app: App[Any], name: str, *, folder: Path = FOLDER) -> None:
    """The screen looks as in `folder`/`name`.svg, to the last letter and colour."""
    path = folder / f"{name}.svg"
    shown = picture(app)
    if os.environ.get(UPDATE):
        folder.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
        return
    screen = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
    assert path.exists(), f"there is no picture {name} yet; {UPDATE}=1 takes it of this screen:\n{screen}"
    kept = path.read_text(encoding="utf-8")
    if shown == kept:
        return
    differences = [
        line
        for line in difflib.unified_diff(kept.splitlines(), shown.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    raise AssertionError(
        f"the screen is not as in {path.name}; {UPDATE}=1 takes the picture anew. {len(differences)} lines differ:\n"
        + "\n".join(differences[:_MAX_LINES])
        + f"\non the screen:\n{screen}"
    )
