"""The GPU's benchmark and its tuning, with a clock of the test's: nothing here needs a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvd_kernels import bench_check, bench_cuda, bench_tune
from kvd_kernels.bench_cuda import Bench, Plan
from kvd_kernels.bench_tune import Ballot
from kvd_kernels.reference.a16 import ReferenceOps16
from kvd_kernels.triton import tuning
from kvd_kernels.triton.cards import KNOWN_CARDS, Card
from kvd_kernels.triton.tuning import Tuned
from tests.kernels.meters import FakeMeter

CARD = KNOWN_CARDS[0]
PLAN = Plan(bench_check.SHAPE, (1, 3), (2,), ((2, 40),), ((5, 20),), (1, 4), (3,))


# --------------------------------------------------------------------------- the check before the timing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["triton-fp16", "triton-bf16"])
def test_triton_kernels_pass_the_check_before_the_timing(dtype: torch.dtype) -> None:
    from kvd_kernels.triton.ops import TritonOps

    assert bench_check.failing_op(TritonOps(torch.device("cpu"), CARD, dtype)) is None


class Faulty(ReferenceOps16):
    """One op of it is wrong: a residual left out, a token too few, a wrong row, a block copied short."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def linear(self, n: int, x: Any, handle: Any, out: Any, residual: Any = None) -> None:
        super().linear(n, x, handle, out, None if self.fault == "linear" else residual)

    def attend(self, batch: Any, q: Any, rope: Any, cache: Any, spec: Any, out: Any, block_mass: Any = None) -> None:
        if self.fault == "attend":
            batch.groups[0].num_slots.sub_(1)
        super().attend(batch, q, rope, cache, spec, out, block_mass)

    def gather(self, batch: Any, x: Any, out: Any) -> None:
        super().gather(batch, x.flip(0) if self.fault == "gather" else x, out)

    def copy_block(self, cache: Any, group_id: int, source: int, target: int, num_tokens: int) -> None:
        super().copy_block(cache, group_id, source, target, num_tokens - (self.fault == "copy_block"))

    def sample(self, logits: Any, params: Any) -> Any:
        return super().sample(-logits if self.fault == "sample" else logits, params)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("nothing", None),
        ("linear", "linear"),
        ("attend", "attention over int8"),
        ("copy_block", "attention over int8"),
        ("gather", "a kernel over rows"),
        ("sample", "sampling"),
    ],
)
def test_triton_benchmark_would_find_a_wrong_op(fault: str, name: str | None) -> None:
    assert bench_check.failing_op(Faulty(fault)) == name


# --------------------------------------------------------------------------- what is timed


def test_triton_benchmark_times_every_op_against_its_limits() -> None:
    meter = FakeMeter()
    bench = Bench(ReferenceOps16(), meter)
    results = {result.name: result for result in bench_cuda.measure(bench, PLAN, list(bench_cuda.PARTS))}
    linears = [name for name in results if " × " in name and "rows" in name]
    assert len(linears) == 4 * len(PLAN.rows) + len(PLAN.head_rows)
    assert all(results[name].share_of_matmul == 1 for name in linears)  # every run takes the same time
    assert all(result.share_of_matmul is None for name, result in results.items() if name not in linears)
    # 3 rows of 256 16-bit channels in and out, in a millisecond, of 1 GB/s.
    assert results["rms_norm, 4 rows"].share_of_bandwidth == pytest.approx(4 * 256 * 2 * 2 / 1e-3 / 1e9)
    # 2 sequences over 3 blocks: K and V of 2 heads of 64 bytes, and a scale of 2 bytes for each head, per token.
    blocks = results["attention int8, 2 × 1 tokens at 40"]
    assert blocks.gigabytes_per_second == pytest.approx(2 * 3 * 16 * 2 * 2 * (64 + 2) / 1e-3 / 1e9)
    expected = {"rms_norm", "silu_mul", "embed", "gather", "rope_and_write", "copy_block", "sampling", "attention"}
    assert expected <= {name.split()[0].rstrip(",") for name in results}
    assert meter.num_runs > len(results)
    assert len(bench_cuda.table(list(results.values())).splitlines()) == 1 + len(results)


def test_triton_benchmark_times_only_what_is_wanted() -> None:
    results = bench_cuda.measure(Bench(ReferenceOps16(), FakeMeter()), PLAN, ["sampling"])
    assert [result.name for result in results] == [
        "sampling greedy, 3 rows, with launch",
        "sampling nucleus, 3 rows, with launch",
    ]


def test_triton_benchmark_without_a_card_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "kvd_kernels.bench", "--device", "cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("kvd: --device cuda: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tune"], "--tune: only with --device cuda"),
        (["--device", "cuda", "--only", "small"], "--only small: expected some of linear, attention, rows, sampling"),
    ],
)
def test_triton_benchmark_refuses_what_belongs_to_the_other_device(arguments: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "kvd_kernels.bench", *arguments]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"error: {complaint}\n")


# --------------------------------------------------------------------------- tuning


@dataclass(frozen=True, slots=True)
class Knob:
    tile: int
    num_warps: int = 4


SPEEDS = {16: 1.0, 32: 0.8, 64: 0.9, 128: 0.99}


class Knobs(ReferenceOps16):
    """Asks for a tile by the number of rows at every linear, as the kernels do; the clock reads what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.card = CARD
        self.tuned = Tuned()
        self.last = Knob(0)
        self.asks_one = False

    def use_tuning(self, tuned: Tuned) -> None:
        self.tuned = tuned

    def linear(self, n: int, x: Any, handle: Any, out: Any, residual: Any = None) -> None:
        candidates = [Knob(16), Knob(128)] if n == 1 else [Knob(16), Knob(64), Knob(32)]
        self.last = self.tuned.choose(f"linear M {n}", candidates)
        assert self.tuned.choose("only one", [Knob(16)]) == Knob(16)

    def seconds(self) -> float:
        return SPEEDS[self.last.tile]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    return tmp_path


def test_triton_tuning_keeps_the_fastest_candidate(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = Knobs()
    bench_tune.run(Bench(ops, FakeMeter(ops.seconds)), ops, PLAN, ["linear"])
    kept = tuning.load(CARD, pytest.fail)
    # A hundredth faster, as for one row, is noise: the table's own choice stays.
    assert kept.choices == {
        "linear M 2": {"tile": 32, "num_warps": 4},
        "linear M 3": {"tile": 32, "num_warps": 4},
    }
    assert ops.tuned.choices == kept.choices
    shown = capsys.readouterr().out
    assert "linear M 1: the table's own choice\n" in shown
    assert "linear M 3: tile 32, num_warps 4; 80% of the time of the table's own choice\n" in shown
    assert f"written: {home / 'kernels' / 'tuned' / 'a100-sxm4-80gb.json'}" in shown
    # What another run has found for other keys stays; what it has found for these does not.
    other = {"attention": {"rows": 16}}
    tuning.save(CARD, {**other, "linear M 1": {"tile": 128, "num_warps": 4}})
    bench_tune.run(Bench(ops, FakeMeter(ops.seconds)), ops, PLAN, ["linear"])
    assert tuning.load(CARD, pytest.fail).choices == {**kept.choices, **other}


def test_triton_tuning_says_where_it_cannot_write(home: Path) -> None:
    (home / "kernels").write_text("in the way")
    ops = Knobs()
    with pytest.raises(SystemExit, match="the choices could not be kept"):
        bench_tune.run(Bench(ops, FakeMeter(ops.seconds)), ops, PLAN, ["linear"])


def test_triton_tuning_weighs_all_shapes_of_a_class() -> None:
    ballot = Ballot()
    ballot.add("class", [Knob(16), Knob(32), Knob(64)], [1.0, 0.5, 0.7])
    # A long call has no more votes than a short one; the table may choose differently for it.
    ballot.add("class", [Knob(64), Knob(16), Knob(32), Knob(128)], [10.0, 12.0, 11.0, 1.0])
    assert ballot.best("class") == (Knob(32), pytest.approx((0.5 + 1.1) / 2))
    ballot.add("other", [Knob(16), Knob(32)], [1.0, 0.99])
    assert ballot.best("other") is None
    assert ballot.keys == ["class", "other"]


def test_triton_tuned_choice_is_always_a_candidate() -> None:
    candidates = [Knob(16), Knob(32)]
    assert Tuned().choose("key", candidates) == Knob(16)
    assert Tuned({"key": {"tile": 32, "num_warps": 4}}).choose("key", candidates) == Knob(32)
    assert Tuned({"key": {"tile": 32, "num_warps": 8}}).choose("key", candidates) == Knob(16)
    assert Tuned({"other": {"tile": 32, "num_warps": 4}}).choose("key", candidates) == Knob(16)


def _rewrite(path: Path, **changes: str) -> None:
    content = json.loads(path.read_text())
    content["holds_for"].update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: path.write_text(path.read_text()[:-20]), "damaged"),
        (lambda path: path.write_text("[]"), "damaged"),
        (lambda path: path.write_text('{"holds_for": {}, "choices": {"key": 3}}'), "damaged"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't decode"),
        (lambda path: path.write_text('{"holds_for": 3, "choices": {}}'), "another card"),
        (lambda path: _rewrite(path, card="H200"), "another card"),
        (lambda path: _rewrite(path, kernels="0"), "another kernels"),
        (lambda path: _rewrite(path, triton="1.0"), "another triton"),
    ],
)
def test_triton_tuning_of_something_else_is_ignored_with_a_line(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    path = tuning.save(CARD, {"key": {"tile": 32}}, tmp_path)
    assert tuning.load(CARD, pytest.fail, tmp_path).choices == {"key": {"tile": 32}}
    damage(path)
    lines: list[str] = []
    assert tuning.load(CARD, lines.append, tmp_path).choices == {}
    (line,) = lines
    assert complaint in line
    assert str(path) in line


def test_triton_without_a_tuning_file_nothing_is_said(tmp_path: Path) -> None:
    other = Card("Another / Card", 80, 1, 1e9, 1)
    assert tuning.load(other, pytest.fail, tmp_path / "missing").choices == {}
    assert tuning.path_of(tmp_path, other).name == "another-card.json"
