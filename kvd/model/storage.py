"""Files that several processes may write: atomic replacement, locks, and a disk that may be full.

Purpose: a reader never sees half a file; two `kvd` processes never prepare the same thing at once.
Owner thread: any; nothing is kept between calls.
Invariant: what lies under its final name is complete. Half-written files have names that start with "."
and are removed by the next process that holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.errors import CheckpointError, StartupError


def readable_os_error(error: OSError, path: Path) -> StartupError:
    """One line for a failed file operation, a full disk above all."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StartupError(f"{path}: no space left on the disk")
    return StartupError(f"{path}: {error.strerror or error}")


def make_folder(path: Path) -> Path:
    """Create a folder with its parents; StartupError when that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise readable_os_error(error, path) from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file itself stays behind, empty."""
    make_folder(path.parent)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise readable_os_error(error, path) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was."""
    make_folder(path.parent)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise readable_os_error(error, path) from error


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove what an interrupted process left under names that start with `prefix`; hold the lock."""
    assert prefix.startswith(".")
    for leftover in folder.glob(f"{prefix}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; CheckpointError names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value
