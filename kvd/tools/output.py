"""Where the results of a measurement go: a picture, JSON, and a table for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Measured(Protocol):
    """A report that can be read by programs and by people."""

    def as_dict(self) -> dict[str, Any]: ...

    def lines(self) -> Sequence[str]: ...


def write_results(report: Measured, *, json_path: str | None) -> None:
    """JSON to a file, or to stdout for "-", and the table to stdout, or to stderr where that is taken.

    What a terminal's encoding does not know is replaced in the table and escaped in the JSON.
    """
    is_stdout = json_path == "-"
    if json_path is not None:
        text = json.dumps(report.as_dict(), ensure_ascii=is_stdout, allow_nan=False) + "\n"
        if is_stdout:
            sys.stdout.write(text)
        else:
            Path(json_path).write_text(text, encoding="utf-8")
    table = sys.stderr if is_stdout else sys.stdout
    encoding = table.encoding or "utf-8"
    print("\n".join(report.lines()).encode(encoding, "replace").decode(encoding), file=table)
