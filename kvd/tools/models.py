"""`kvd models`: the models that kvd knows by name.

Purpose: size, licence, and whether it is on disk. Reads the catalogue and the cache folder; downloads nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from kvd.model.catalogue import list_catalogue


def run(home: Path, *, as_json: bool) -> int:
    """Print the table, or a JSON list of rows; returns the exit code."""
    rows = list_catalogue(home)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return 0
    table = [("NAME", "DOWNLOAD", "LICENCE", "ON DISK")]
    table += [(row.name, f"{row.bytes / 1e6:.0f} MB", row.licence, "yes" if row.on_disk else "no") for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0
