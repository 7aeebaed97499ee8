"""Which implementation is chosen, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvd.config import Config
from kvd.engine import backend
from kvd.engine.backend import checkpoint_dtype, open_cpu_ops, open_ops
from kvd.errors import ConfigError, StartupError
from kvd_kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE, NativeUnavailable
from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops
from kvd_kernels.triton.start import TritonUnavailable


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NativeUnavailable("no compiler was here: apt-get install g++")

    monkeypatch.setattr("kvd_kernels.cpu.start.installed_library", refuse)


def test_auto_is_native_and_silent(lines: list[tuple[str, str]]) -> None:
    ops = open_cpu_ops("auto", 1, lambda *line: lines.append(line))
    assert ops.name == "cpu"
    assert ops.label.endswith(", 1 thread")
    assert not lines


def test_the_reference_can_be_asked_for(lines: list[tuple[str, str]]) -> None:
    assert open_cpu_ops("reference", None, lambda *line: lines.append(line)).name == "reference"
    assert not lines


def test_auto_without_native_kernels_warns_once(lines: list[tuple[str, str]], no_native_kernels: None) -> None:
    ops = open_cpu_ops("auto", None, lambda *line: lines.append(line))
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
        open_cpu_ops("cpu", None, lambda *line: None)


def test_a_forced_level_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(StartupError, match=r"^KVD_CPU_ISA=sse9: level sse9: this processor and build offer portable"):
        open_cpu_ops("auto", None, lambda *line: None)


def test_a_named_library_that_cannot_be_loaded_is_an_error(
    monkeypatch: pytest.MonkeyPatch, no_native_kernels: None
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "missing.so")
    with pytest.raises(StartupError, match=r"^KVD_NATIVE_LIBRARY=missing\.so: no compiler"):
        open_cpu_ops("auto", None, lambda *line: None)


# --------------------------------------------------------------------------- the GPU


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "nvidia_device_is_here", lambda: True)


def usable(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Make the GPU's backend start; the dtypes that it is asked for."""
    asked: list[torch.dtype] = []

    def create(activation_dtype: torch.dtype, kernel_folder: Path) -> Ops:
        assert kernel_folder == Config().home_path / "kernels"
        asked.append(activation_dtype)
        ops = create_ops("reference-a16")
        ops.notices = ("the card is unknown",)
        return ops

    monkeypatch.setattr("kvd_kernels.triton.start.create_triton_ops", create)
    return asked


def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(activation_dtype: torch.dtype, kernel_folder: Path) -> Ops:
        raise TritonUnavailable("no C compiler: apt-get install gcc")

    monkeypatch.setattr("kvd_kernels.triton.start.create_triton_ops", refuse)


def opened(lines: list[tuple[str, str]], of_checkpoint: str | None = None, **settings: Any) -> Ops:
    return open_ops(Config(cpu_threads=1, **settings), of_checkpoint, lambda *line: lines.append(line))


def test_auto_takes_a_usable_gpu(lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, a_device: None) -> None:
    asked = usable(monkeypatch)
    assert opened(lines).name == "reference-a16"
    assert asked == [torch.float16]
    assert lines == [("warning", "the card is unknown")]


def test_auto_without_a_device_does_not_look_for_one(
    lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "nvidia_device_is_here", lambda: False)
    asked = usable(monkeypatch)
    assert opened(lines).name == "cpu"
    assert not asked
    assert not lines


def test_auto_beside_an_unusable_device_says_why_and_what_it_costs(
    lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, a_device: None
) -> None:
    unusable(monkeypatch)
    assert opened(lines).name == "cpu"
    assert lines == [
        (
            "warning",
            "computing on the CPU, many times slower than the NVIDIA device that is here: no C compiler: "
            "apt-get install gcc",
        )
    ]


@pytest.mark.parametrize(
    ("settings", "blamed"),
    [({"device": "cuda"}, "device cuda"), ({"backend": "triton"}, "backend triton")],
)
@pytest.mark.parametrize("is_here", [False, True])
def test_a_gpu_by_name_is_an_error_where_it_cannot_be_used(
    settings: dict[str, str], blamed: str, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "nvidia_device_is_here", lambda: is_here)
    unusable(monkeypatch)
    with pytest.raises(StartupError, match=f"^{blamed}: no C compiler: apt-get install gcc$"):
        opened([], **settings)


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"backend": "cpu"}, {"backend": "reference"}])
def test_the_cpu_by_name_leaves_the_gpu_alone(
    settings: dict[str, str], lines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, a_device: None
) -> None:
    asked = usable(monkeypatch)
    assert opened(lines, **settings).device.type == "cpu"
    assert not asked
    assert not lines


@pytest.mark.parametrize(
    ("dtype", "of_checkpoint", "expected"),
    [
        ("auto", None, torch.float16),
        ("auto", "float16", torch.float16),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float16),
        ("float16", "bfloat16", torch.float16),
        ("bfloat16", "float16", torch.bfloat16),
    ],
)
def test_activations_follow_the_checkpoint_or_the_setting(
    dtype: str, of_checkpoint: str | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, a_device: None
) -> None:
    asked = usable(monkeypatch)
    opened([], of_checkpoint, dtype=dtype)
    assert asked == [expected]


def test_float32_is_refused_where_auto_has_led_to_the_gpu(monkeypatch: pytest.MonkeyPatch, a_device: None) -> None:
    usable(monkeypatch)
    with pytest.raises(ConfigError, match=r"float32 is refused on the GPU.*--device cpu"):
        opened([], dtype="float32")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, None),
    ],
)
def test_the_checkpoints_type_is_read_in_both_spellings(config: dict[str, str], expected: str | None) -> None:
    assert checkpoint_dtype(config) == expected
