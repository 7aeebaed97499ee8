"""Which KV formats have been written to a folder of the disk tier, so that a start in another one can say so.

A block's key says nothing about the format that it stands for; but whoever knows a format's key seed can work out the
key of a prompt in it. So the seeds are noted beside the block file, with names for people. Losing the note loses
nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvd.cache.disk_folder import DATABASE_NAME, DiskFolder, DiskStoreError

FORMATS_NAME = f"{DATABASE_NAME}-formats"
MAX_FORMATS = 32
"""The latest ones are kept; each costs two hashes per prompt that is found nowhere."""
_MAX_FILE_BYTES = 1 << 20

KVFormatName = tuple[bytes, str]
"""(key seed, name for people)"""


def remember_format(
    folder: DiskFolder, key_seed: bytes, name: str, log: Callable[[str], None]
) -> tuple[KVFormatName, ...]:
    """Note a format; returns the others that are noted. When that fails, a line is logged and there are none."""
    path = folder.path / FORMATS_NAME
    try:
        with folder.lock():
            known = _read(path, log)
            others = [each for each in known if each[0] != key_seed][1 - MAX_FORMATS :]
            formats = [*others, (key_seed, name)]
            if formats != known:
                _write(path, formats)
    except (OSError, DiskStoreError) as error:
        log(f"{path}: the KV format could not be noted: {error}")
        return ()
    return tuple(others)


def _read(path: Path, log: Callable[[str], None]) -> list[KVFormatName]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:
        text = file.read(_MAX_FILE_BYTES)
    try:
        return [(bytes.fromhex(entry["key_seed"]), str(entry["name"])) for entry in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError):
        log(f"{path} is damaged and is made anew")
        return []


def _write(path: Path, formats: list[KVFormatName]) -> None:
    text = json.dumps([{"key_seed": seed.hex(), "name": name} for seed, name in formats], indent=1)
    new = path.with_name(f"{path.name}-new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
