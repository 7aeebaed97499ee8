"""The command line: what it prints, how it ends, and what it does not load."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd import __version__, cli
from kvd.config import SETTINGS
from kvd.errors import ModelNotFound

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path / "home"))
    for name in ("KVD_API_KEY", "KVD_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def replace_command(monkeypatch: pytest.MonkeyPatch, command: str, run: Callable[[list[str]], int]) -> None:
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS) | {command: run})


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["--version"], ["-V"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out == f"kvd {__version__}\n"


def test_help_of_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == cli.USAGE
    for command in cli.COMMANDS:
        for flag in ("-h", "--help"):
            assert cli.main([command, flag]) == 0
            assert capsys.readouterr().out == cli.all_help(100)[f"kvd {command}"]
    assert cli.main(["some/model", "--help"]) == 0
    assert "--max-model-len N" in capsys.readouterr().out


def test_check_prints_every_setting_and_where_it_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvd.yaml"
    path.write_text("port: 8123\nhead_quantization: int8\napi_key: hush\n")
    assert cli.main(["check", "-c", str(path), "--max-model-len", "4K", "org/name"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(SETTINGS)
    assert "model: org/name  # model argument" in lines
    assert "max_model_len: 4096  # --max-model-len" in lines
    assert f"port: 8123  # {path}:1" in lines
    assert "max_num_seqs: auto" in lines
    assert output.err == f"notice: {path}:2: head_quantization has no effect in this version\n"
    assert "hush" not in output.out + output.err


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", "--kv-cache-memory-bytes", "1GiB", "--api-key", "hush"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text)
    assert result["settings"]["kv_cache_memory_bytes"] == 2**30
    assert set(result["settings"]) == set(SETTINGS)
    assert result["origins"]["api_key"] == "--api-key"
    assert "hush" not in text


def test_what_check_prints_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--disk-cache", "path=/x y,size=1GiB", "--served-model-name", "a", "b c", "--no-dashboard"]
    assert cli.main(["check", *words]) == 0
    path = tmp_path / "again.yaml"
    path.write_text(capsys.readouterr().out)
    assert cli.main(["check", "--json", "-c", str(path)]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["disk_cache"] == {"path": "/x y", "size_bytes": 2**30}
    assert settings["served_model_name"] == ["a", "b c"]
    assert settings["dashboard"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--max-modle-len", "1"], "kvd: --max-modle-len: unknown flag; did you mean --max-model-len?"),
        (["check", "-c", "/no/such.yaml"], "kvd: /no/such.yaml: no such file"),
        (["--port", "8000", "check"], "kvd: the command comes first: kvd check …"),
        (["check", "--port"], "kvd: --port: expected one argument"),
        (["models", "--yaml"], "kvd: unrecognized arguments: --yaml"),
        (["convert", "src"], "kvd: the following arguments are required: DST"),
        (["version", "more"], "kvd: unrecognized arguments: more"),
        (["--tensor-parallel-size", "2"], "kvd: --tensor-parallel-size: '2' is refused: kvd serves one GPU or the CPU "
                                          "(only 1 is accepted)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.err == message + "\n"
    assert output.out == ""


def test_without_a_command_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    replace_command(monkeypatch, "serve", lambda words: seen.append(words) or 0)
    for words in ([], ["org/name", "--port", "1"], ["serve", "-c", "x"], ["--config", "x"]):
        assert cli.main(words) == 0
    assert seen == [[], ["org/name", "--port", "1"], ["-c", "x"], ["--config", "x"]]


def raise_error(error: BaseException) -> Callable[[list[str]], int]:
    def run(words: list[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelNotFound("no such\nmodel"), 1, "kvd: no such model"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "kvd: the disk is full: /x/y"),
        (MemoryError(), 1, "kvd: out of memory"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_it_ends(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(monkeypatch, "version", raise_error(error))
    assert cli.main(["version"]) == code
    assert capsys.readouterr().err.strip() == line


def test_a_bug_of_ours_is_one_line_and_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_command(monkeypatch, "version", raise_error(ZeroDivisionError("oh\nno\x1b[31m")))
    assert cli.main(["version"]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("kvd: internal error: ZeroDivisionError: oh no [31m; the report is in ")
    (report,) = (tmp_path / "home" / "crashes").iterdir()
    assert str(report) in line
    assert "ZeroDivisionError" in report.read_text()
    assert "raise error" in report.read_text()


def test_a_bug_on_a_machine_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("KVD_HOME", str(blocker / "below"))
    replace_command(monkeypatch, "version", raise_error(ZeroDivisionError("oh")))
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err == "kvd: internal error: ZeroDivisionError: oh; set KVD_DEBUG=1 to see where\n"


def test_debugging_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_DEBUG", "1")
    assert cli.main(["check", "--port", "x"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_models_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "DOWNLOAD", "LICENCE", "ON", "DISK"]
    assert any(row.split()[0] == "smollm2-135m-instruct" and row.split()[-1] == "no" for row in rows)
    assert cli.main(["models", "--json"]) == 0
    (entry, *_) = json.loads(capsys.readouterr().out)
    assert entry["licence"] == "Apache-2.0"
    assert entry["on_disk"] is False


# --------------------------------------------------------------------------- in a process of its own


def run_kvd(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvd", *words],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_module_runs_like_the_program() -> None:
    result = run_kvd("check", "-c", "kvd.yaml", "--host", "0.0.0.0")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--insecure" in result.stderr


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["check"], ["models"], ["version"]])
def test_nothing_heavy_is_loaded_for_small_things(words: list[str]) -> None:
    code = f"""
import sys
from kvd.cli import main
code = main({words!r})
heavy = [name for name in ("torch", "numpy", "transformers", "textual", "aiohttp", "tokenizers") if name in sys.modules]
sys.exit(f"loaded {{heavy}}" if heavy else code)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    """The pipe is closed before anything is written, as `kvd check | true` may do."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "kvd", "check"],
            cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert result.stderr == ""
    assert result.returncode == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_file_that_cannot_be_reached_is_one_line_and_no_fault_of_ours(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise OSError(number, os.strerror(number), "/home/other/kvd")

    replace_command(monkeypatch, "models", fail)
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == f"kvd: /home/other/kvd: {os.strerror(number)}\n"
    monkeypatch.setenv("KVD_HOME", "/home/other")
    assert cli.main(["models"]) == 1
    assert "home (KVD_HOME) must be a directory that can be written" in capsys.readouterr().err
