"""packaging/gpu_check.sh: its dry run from the source tree, what it says without a GPU, and faults that it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported, as in tests/kernels

import gpu_check
import gpu_check_blocks
import gpu_check_cases
import gpu_check_model
import gpu_check_quick
import pytest
import torch
from gpu_check_world import DRY_RATES, TINY, Line, World, open_ops

from kvd_kernels.bench_inputs import layer_linears
from kvd_kernels.ops import FinishedTransfer
from kvd_kernels.reference import ReferenceOps16

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_FOR_SERVING = (
    "aiohttp", "gguf", "huggingface_hub", "hypothesis", "jinja2", "llguidance", "msgspec", "prometheus_client",
    "pynvml", "pytest", "rich", "safetensors", "textual", "tokenizers", "transformers", "yaml",
)  # fmt: skip
BLOCKER = f"""
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        frame, importer = sys._getframe(), ""
        while frame is not None and not importer:  # torch looks for optional packages by itself and does without
            module = frame.f_globals.get("__name__", "")
            importer = "" if module.startswith(("importlib", "_frozen", "sitecustomize")) else module
            frame = frame.f_back
        if name.split(".")[0] in {INSTALLED_FOR_SERVING!r} and importer.startswith(("kvd", "gpu_check", "tests")):
            raise ImportError(f"{{importer}} needs {{name}}")

sys.meta_path.insert(0, Block())
"""


def run_script(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a fresh process that has nothing but torch, triton and numpy for it."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(folder), "OUT": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(ROOT / "packaging" / "gpu_check.sh"), *flags],
        cwd=folder, env={**kept, **settings, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = run_script(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("gpu_check: no GPU to check: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "gpu_check.json").exists()


def test_a_part_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--only", "everything")
    assert done.returncode == 2
    assert "--only everything: expected some of quick, model" in done.stderr


@pytest.mark.parametrize("part", ["blocks", "rates", "cases"])
def test_the_dry_run_of_a_part_holds(part: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, "--dry", "--only", part)
    assert_holds(done, tmp_path, {part})


@pytest.mark.full
def test_the_whole_dry_run_holds(tmp_path: Path) -> None:
    assert_holds(run_script(tmp_path, "--dry"), tmp_path, set(gpu_check.PART_SECONDS))


def assert_holds(done: subprocess.CompletedProcess[str], folder: Path, parts: set[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((folder / "gpu_check.json").read_text())
    assert content["is_dry"]
    lines = [Line(**line) for line in content["lines"]]
    assert {line.part for line in lines} == parts
    assert not [line for line in lines if line.is_failure]
    assert all(line.name in done.stdout for line in lines)


def test_every_part_has_a_module_and_all_of_them_fit_into_the_time() -> None:
    for name in gpu_check.PART_SECONDS:
        assert (ROOT / "packaging" / f"gpu_check_{name}.py").is_file()
    assert max(gpu_check.PART_SECONDS.values()) < gpu_check.TOTAL_SECONDS < 360


def test_what_it_needs_is_small() -> None:
    """Under 40 MB: the sources, and nothing that has to be built or downloaded."""
    folders = ("kvd", "kernels", "packaging", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".txt")]
    assert sum(path.stat().st_size for path in files) < 40e6


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.1+cu128"), ("triton", "3.5.0"), ("numpy", "1.25.2")])
def test_a_package_that_is_too_old_is_named(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_check.importlib.import_module

    def importing(wanted: str) -> Any:
        return SimpleNamespace(__version__=version) if wanted == name else real(wanted)

    assert gpu_check.missing_packages() == ""
    monkeypatch.setattr(gpu_check.importlib, "import_module", importing)
    assert gpu_check.missing_packages() == (
        f"{name} {'.'.join(map(str, gpu_check.OLDEST[name]))} or later (this is {version})"
    )


# --------------------------------------------------------------------------- faults


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """In every test of this room."""


def dry_world(ops: Any, **changes: Any) -> Any:
    values = {
        "is_dry": True, "ops": ops, "rates": DRY_RATES, "shape": TINY, "deadline": time.monotonic() + 600,
        "ops_of": lambda dtype: ops,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def failures(lines: list[Line]) -> list[str]:
    return [line.name for line in lines if line.is_failure]


class DroppedTail(ReferenceOps16):
    """Leaves the last output of every product as it was."""

    def linear(self, n: int, x: Any, handle: Any, out: torch.Tensor, residual: Any = None) -> None:
        tail = out[:n, -1].clone()
        super().linear(n, x, handle, out, residual)
        out[:n, -1] = tail


class WritesTooMuch(ReferenceOps16):
    """Writes a row that nobody asked for."""

    def linear(self, n: int, x: Any, handle: Any, out: torch.Tensor, residual: Any = None) -> None:
        super().linear(n, x, handle, out, residual)
        out[n] = 0


@pytest.mark.parametrize("faulty", [DroppedTail, WritesTooMuch])
def test_a_wrong_product_is_found(faulty: Callable[[], ReferenceOps16]) -> None:
    linear = layer_linears(TINY)["qkv"]
    assert gpu_check_quick._wrong_rows(ReferenceOps16(), linear, (1, 20)) == ""
    assert gpu_check_quick._wrong_rows(faulty(), linear, (1, 20)) == "wrong at 1, 20 rows"


def test_a_case_that_does_not_hold_is_a_line_and_the_others_run() -> None:
    assert failures(gpu_check_cases.run(dry_world(ReferenceOps16()))) == []
    lines = gpu_check_cases.run(dry_world(DroppedTail()))
    assert {name.partition(":")[0] for name in failures(lines)} == {
        f"linear {case}, 1 rows, {dtype}" for case in ("int4-g32", "int4-g64") for dtype in ("float16", "bfloat16")
    }
    assert [line.result for line in lines if not line.is_failure] == ["2 hold", "2 hold"]


def test_cases_without_time_are_counted_and_not_taken_as_held() -> None:
    lines = gpu_check_cases.run(dry_world(ReferenceOps16(), deadline=time.monotonic() - 1))
    assert [line.result for line in lines] == ["0 hold, 4 left out for time"] * 2


def test_a_block_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_one(ops: Any, cache: Any, arena: Any, transfers: Any) -> list[FinishedTransfer]:
        restore(ops, cache, arena, transfers[:-1])
        return [FinishedTransfer(0.0)]

    restore = gpu_check_blocks.restore_blocks
    assert failures(gpu_check_blocks.run(dry_world(ReferenceOps16()))) == []
    monkeypatch.setattr(gpu_check_blocks, "restore_blocks", forgets_one)
    assert failures(gpu_check_blocks.run(dry_world(ReferenceOps16()))) == [
        "restored blocks are the bytes that were saved"
    ]


def test_logits_that_differ_are_found() -> None:
    assert not gpu_check_model.agreement(dry_world(ReferenceOps16())).is_failure
    assert gpu_check_model.agreement(dry_world(DroppedTail())).is_failure


def test_a_part_that_raises_is_a_failed_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(world: World) -> list[Line]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    part = ModuleType("gpu_check_blocks")
    part.run = explode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpu_check_blocks", part)
    (line,) = gpu_check.run_part("blocks", is_dry=True, seconds=0.0)
    assert line.is_failure
    assert line.name == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "outcome"),
    [("import time; time.sleep(60)", "took longer than 1 s"), ("import os; os._exit(9)", "ended with code 9")],
)
def test_a_part_that_hangs_or_dies_is_a_failed_line(
    program: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "part.py"
    script.write_text(program)
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    (line,) = gpu_check.run_part_apart("blocks", 1.0, 0.0)
    assert line.is_failure
    assert line.name == outcome


def test_the_interpreted_backend_is_what_a_dry_run_takes() -> None:
    ops = open_ops(torch.bfloat16, is_dry=True)
    assert (ops.name, ops.device.type, ops.activation_dtype) == ("triton", "cpu", torch.bfloat16)
