"""Which implementation is chosen, and what is said about it."""

from __future__ import annotations

import pytest

from kvd.engine.backend import open_ops
from kvd.errors import StartupError
from kvd_kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE, NativeUnavailable


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NativeUnavailable("no compiler was here: apt-get install g++")

    monkeypatch.setattr("kvd_kernels.cpu.start.installed_library", refuse)


def test_auto_is_native_and_silent(lines: list[tuple[str, str]]) -> None:
    ops = open_ops("auto", 1, lambda *line: lines.append(line))
    assert ops.name == "cpu"
    assert ops.label.endswith(", 1 thread")
    assert not lines


def test_the_reference_can_be_asked_for(lines: list[tuple[str, str]]) -> None:
    assert open_ops("reference", None, lambda *line: lines.append(line)).name == "reference"
    assert not lines


def test_auto_without_native_kernels_warns_once(lines: list[tuple[str, str]], no_native_kernels: None) -> None:
    ops = open_ops("auto", None, lambda *line: lines.append(line))
    assert ops.name == "reference"
    assert lines == [
        (
            "warning",
            "running on the reference kernels, many times slower than the native ones: no compiler was here: "
            "apt-get install g++",
        )
    ]


def test_native_kernels_by_name_are_an_error_where_they_cannot_run(no_native_kernels: None) -> None:
    with pytest.raises(StartupError, match=r"^backend cpu: no compiler"):
        open_ops("cpu", None, lambda *line: None)


def test_a_forced_level_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(StartupError, match=r"^KVD_CPU_ISA=sse9: level sse9: this processor and build offer portable"):
        open_ops("auto", None, lambda *line: None)


def test_a_named_library_that_cannot_be_loaded_is_an_error(
    monkeypatch: pytest.MonkeyPatch, no_native_kernels: None
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "missing.so")
    with pytest.raises(StartupError, match=r"^KVD_NATIVE_LIBRARY=missing\.so: no compiler"):
        open_ops("auto", None, lambda *line: None)
