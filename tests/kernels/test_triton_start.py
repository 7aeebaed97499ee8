"""What the GPU backend says where it cannot start, and what it makes of a card. No GPU here: the answers are played."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvd_kernels.triton import start, token_kernels
from kvd_kernels.triton.cards import KNOWN_CARDS
from kvd_kernels.triton.start import TritonUnavailable


def properties(**changes: object) -> SimpleNamespace:
    """Of an RTX 3090, as torch gives them."""
    return SimpleNamespace(**{
        "name": "NVIDIA GeForce RTX 3090", "major": 8, "minor": 6, "multi_processor_count": 82,
        "L2_cache_size": 6 << 20, "memory_clock_rate": 9_751_000, "memory_bus_width": 384,
        **changes,
    })  # fmt: skip


def refusal(question: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(TritonUnavailable) as caught:
        question(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tests did not set Triton to interpret."""
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the setting above has taken along; restored afterwards
    monkeypatch.delenv("TRITON_INTERPRET")


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_triton(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "triton":
            raise ImportError("No module named 'triton'")
        return load(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    assert "pip install triton" in refusal(start.check_triton)


def test_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert refusal(start.check_triton) == "Triton 3.5.1 is too old; kvd needs 3.6 or later"


def test_triton_interprets() -> None:
    assert "TRITON_INTERPRET" in refusal(start.check_triton)


def test_the_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install gcc" in refusal(start.check_compiler)
    monkeypatch.setenv("CC", "nocc -m64")
    assert "CC names 'nocc -m64'" in refusal(start.check_compiler)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(Path(__file__).parent)})
    assert "apt-get install python3-dev" in refusal(start.check_compiler)


def test_compiler_and_headers_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    folders = {"posix_prefix": tmp_path, "posix_local": tmp_path / "nothing here"}
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folders[scheme])})
    start.check_compiler()


def test_torch_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in refusal(start.first_card)


def test_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.\nSee …")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    expected = "CUDA does not start: The NVIDIA driver on your system is too old (found version 11040)"
    assert refusal(start.first_card) == expected


def test_no_card_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" in refusal(start.first_card)


def test_a_known_card_is_taken_as_it_is_known() -> None:
    card, notice = start.describe(properties())
    assert card in KNOWN_CARDS
    assert card.name == "GeForce RTX 3090"
    assert not notice


def test_an_unknown_card_is_described_by_the_driver_and_the_user_is_told() -> None:
    card, notice = start.describe(properties(name="NVIDIA GeForce RTX 3080 Ti", multi_processor_count=80))
    assert (card.architecture, card.num_sms, card.l2_bytes) == (86, 80, 6 << 20)
    assert card.bytes_per_second == pytest.approx(936e9, rel=0.001)
    assert "RTX 3080 Ti" in notice
    assert "936 GB/s, as the driver says" in notice


def test_what_the_driver_does_not_say_is_that_of_the_nearest_card() -> None:
    """A slice of a card, and an older torch, which tells less."""
    silent = properties(name="NVIDIA H200 MIG 3g.71gb", major=9, minor=0, multi_processor_count=60)
    del silent.memory_clock_rate, silent.memory_bus_width, silent.L2_cache_size
    card, notice = start.describe(silent)
    assert (card.architecture, card.num_sms) == (90, 60)
    assert (card.bytes_per_second, card.l2_bytes) == (3350e9, 50 << 20)
    assert "as of a H100" in notice
    # The name of a whole card with fewer multiprocessors is no whole card.
    assert start.describe(properties(multi_processor_count=40))[0].num_sms == 40


def test_later_minor_versions_run_earlier_code() -> None:
    assert start.describe(properties(name="Orin", major=8, minor=7))[0].architecture == 86
    message = refusal(start.describe, properties(name="NVIDIA T4", major=7, minor=5))
    assert message.startswith("NVIDIA T4 has compute capability 7.5")
    assert message.endswith("8.0, 8.6, 8.9, 9.0, 12.0")


def test_torch_must_have_code_for_the_card() -> None:
    start.check_torch_runs_on(properties(), ["sm_75", "sm_80", "sm_90"])
    start.check_torch_runs_on(properties(major=12, minor=0), ["sm_80", "compute_90"])
    start.check_torch_runs_on(properties(major=9, minor=0), ["sm_90a"])
    message = refusal(start.check_torch_runs_on, properties(major=12, minor=0), ["sm_80", "sm_90"])
    assert "only for sm_80, sm_90" in message


def test_a_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zeros", "tensor"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, device=None, **options: make(*args, **options))
    start.try_kernel()

    def wrong(num_rows: int, slots: torch.Tensor, token_ids: torch.Tensor, newest: torch.Tensor) -> None:
        newest[slots] = token_ids

    monkeypatch.setattr(token_kernels, "keep_tokens", wrong)
    assert "computed [-1, 0, 7, 0]" in refusal(start.try_kernel)

    def fails(*arguments: object) -> None:
        raise OSError("ptxas fatal: Unsupported .version 9.9\nand a page more")

    monkeypatch.setattr(token_kernels, "keep_tokens", fails)
    assert (
        refusal(start.try_kernel) == "a kernel for trial does not run: OSError: ptxas fatal: Unsupported .version 9.9"
    )


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch, compiled: None) -> None:
    """A machine on which everything is there, as far as anybody asks; the backend stays on the CPU."""
    for name in ("check_compiler", "try_kernel"):
        monkeypatch.setattr(start, name, lambda: None)
    for name in (*start.CACHE_VARIABLES, "TRITON_DEFAULT_FP_FUSION"):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_86"])
    monkeypatch.setattr(torch, "device", lambda *name, device=torch.device: device("cpu"))
    unknown = properties(name="NVIDIA GeForce RTX 3060", multi_processor_count=28, uuid="0a1b")
    monkeypatch.setattr(start, "first_card", lambda: unknown)


def test_a_backend_knows_its_card_and_says_what_the_user_should_know(willing: None, tmp_path: Path) -> None:
    ops = start.create_triton_ops(torch.bfloat16, tmp_path)
    assert ops.activation_dtype is torch.bfloat16
    assert ops.device_id == "0a1b"
    assert ops.card.num_sms == 28
    assert len(ops.notices) == 1
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"


def test_who_has_chosen_a_folder_for_kernels_keeps_it(
    willing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_HOME", "elsewhere")
    start.create_triton_ops(kernel_folder=tmp_path)
    assert "TRITON_CACHE_DIR" not in os.environ


def test_asking_for_the_answer_needs_no_triton() -> None:
    code = "import sys, kvd_kernels.triton.start; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
