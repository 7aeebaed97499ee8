"""The native backend around its kernels: library, ISA levels, self-check, threads, and the list of stages."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvd_kernels.cpu import library as native
from kvd_kernels.cpu.library import (
    Library,
    NativeUnavailable,
    Pool,
    available_threads,
    cgroup_quota,
    choose_level,
    installed_library,
    open_library,
)
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.cpu.program import Stage, fuse
from kvd_kernels.cpu.self_check import failing_op
from kvd_kernels.cpu.start import sound_level, start
from kvd_kernels.cpu.structs import Kernel, LinearArgs, NormArgs, QuantizeArgs, SiluArgs
from kvd_kernels.ops import Ops

# --------------------------------------------------------------------------- library and levels


def test_the_levels_are_ordered_and_the_best_usable_one_is_chosen() -> None:
    library = installed_library()
    assert library.levels[0] == "portable"
    assert choose_level(library, None) == library.levels[-1]


def test_a_level_can_be_forced_and_a_missing_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    assert start(1).level == "portable"
    monkeypatch.setenv(native.ISA_VARIABLE, "sse9")
    with pytest.raises(NativeUnavailable, match="level sse9: this processor and build offer portable"):
        start(1)


def test_an_emulated_build_runs_every_level(emulated_library: Library) -> None:
    assert emulated_library.levels == ("portable", "avx2", "avxvnni", "avx512vnni", "amx")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        open_library(tmp_path / "broken.so")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    with pytest.raises(NativeUnavailable, match="built for another version"):
        open_library(installed_library().path)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "library.py"))
    monkeypatch.delenv(native.LIBRARY_VARIABLE, raising=False)
    installed_library.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match=r"apt-get install g\+\+"):
            installed_library()
    finally:
        installed_library.cache_clear()


# --------------------------------------------------------------------------- self-check


def test_every_usable_level_passes_the_self_check() -> None:
    library = installed_library()

    def make(*, level: str) -> Ops:
        return CpuOps(1, level, library)

    for level in library.levels:
        assert failing_op(make, level) is None


@pytest.mark.parametrize("level", ["avx2", "avxvnni", "avx512vnni", "amx"])
def test_every_emulated_level_passes_the_self_check(emulated_library: Library, level: str) -> None:
    def make(*, level: str) -> Ops:
        return CpuOps(1, level, emulated_library)

    assert failing_op(make, level) is None


class OneBitOff(CpuOps):
    """A level whose linear is wrong in the last bit of one output."""

    def linear(self, n: int, x: torch.Tensor, handle, out: torch.Tensor, residual=None) -> None:  # type: ignore[no-untyped-def]
        super().linear(n, x, handle, out, residual)
        out.view(torch.int32)[-1, -1] ^= 1


def test_a_level_that_is_one_bit_off_is_not_used(monkeypatch: pytest.MonkeyPatch, emulated_library: Library) -> None:
    def make(number: int, library: Library, *, level: str) -> CpuOps:
        return OneBitOff(number, level, library) if level == "amx" else CpuOps(number, level, library)

    monkeypatch.setattr("kvd_kernels.cpu.start.CpuOps", make)
    sound_level.cache_clear()
    try:
        level, notices = sound_level(emulated_library, None)
        assert level == "avx512vnni"
        assert len(notices) == 1
        assert "amx kernels failed their self-check (linear)" in notices[0]
        with pytest.raises(NativeUnavailable, match="KVD_CPU_ISA=amx: the amx kernels failed"):
            sound_level(emulated_library, "amx")
    finally:
        sound_level.cache_clear()


# --------------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"user/job/cpu.max": "150000 100000"}, "0::/user/job\n", 1.5),
        ({"user/cpu.max": "50000 100000", "user/job/cpu.max": "max 100000"}, "0::/user/job\n", 0.5),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        (
            {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/job\n3:memory:/job\n", 2.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None),
        ({}, "0::/gone\n", None),
    ],
)  # fmt: skip
def test_the_quota_of_the_control_group(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "membership").write_text(membership)
    assert cgroup_quota(tmp_path / "membership", tmp_path) == expected


def test_threads_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(native, "_first_sibling", lambda number: number // 2 * 2)
    monkeypatch.setattr(native, "cgroup_quota", lambda: None)
    assert available_threads() == 2, "one per core"
    monkeypatch.setattr(native, "_first_sibling", lambda number: number)
    assert available_threads() == 4
    monkeypatch.setattr(native, "cgroup_quota", lambda: 1.5)
    assert available_threads() == 2
    monkeypatch.setattr(native, "cgroup_quota", lambda: 0.2)
    assert available_threads() == 1


def _states_of_threads() -> dict[int, str]:
    states = {}
    for folder in Path("/proc/self/task").iterdir():
        states[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    return states


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="thread states are read from Linux's /proc")
def test_an_idle_pool_sleeps() -> None:
    before = set(_states_of_threads())
    ops = CpuOps(3)
    x = torch.ones(4, 64)
    ops.rms_norm(4, x, torch.ones(64), 1e-5, x)
    ours = set(_states_of_threads()) - before
    assert len(ours) == 2, "the calling thread is the third"
    deadline = time.monotonic() + 20
    while any(_states_of_threads()[thread] != "S" for thread in ours):
        assert time.monotonic() < deadline, "a thread of an idle pool keeps running"
        time.sleep(0.01)
    ops.pool.close()
    assert not ours & set(_states_of_threads())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted from Linux's /proc")
def test_a_backend_that_is_dropped_ends_its_threads() -> None:
    before = set(_states_of_threads())
    ops = CpuOps(3)
    ours = set(_states_of_threads()) - before
    assert len(ours) == 2
    del ops
    gc.collect()
    assert not ours & set(_states_of_threads())


def test_a_closed_pool_refuses_to_run() -> None:
    ops, x = CpuOps(2), torch.ones(1, 64)
    ops.pool.close()
    ops.pool.close()
    with pytest.raises(RuntimeError, match="have ended"):
        ops.rms_norm(1, x, torch.ones(64), 1e-5, x)
    with pytest.raises(RuntimeError, match="have ended"):
        _ = ops.pool.num_runs


def test_a_pool_does_not_run_in_a_forked_child() -> None:
    code = (
        "import os, sys, torch, warnings\n"
        "from kvd_kernels.cpu.ops import CpuOps\n"
        "ops, x = CpuOps(2), torch.ones(1, 64)\n"
        "ops.rms_norm(1, x, torch.ones(64), 1e-5, x)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        ops.rms_norm(1, x, torch.ones(64), 1e-5, x)\n"
        "    except RuntimeError:\n"
        "        ops.pool.close()  # nothing to wait for\n"
        "        os._exit(7)\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 7


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(NativeUnavailable, match="cannot start 0 threads"):
        Pool(installed_library(), "portable", 0)


def test_the_benchmark_refuses_a_file_that_it_cannot_write_before_it_measures(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "figures.json"
    command = [sys.executable, "-m", "kvd_kernels.bench", "--only", "attention", "--json", str(target)]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"error: --json {target}: No such file or directory\n")
    assert not ended.stdout


# --------------------------------------------------------------------------- fusing


NORM = Stage(Kernel.RMS_NORM, NormArgs(-1, 10, 11, 20, 64, 1e-5), (10,), (20,))
QUANTIZE = Stage(Kernel.QUANTIZE, QuantizeArgs(-1, 20, None, 64, 0.0), (20,), (30,))
LINEAR = Stage(Kernel.LINEAR, LinearArgs(-1, 20, None, None, None, None, 40), (30,), (40,))
SILU = Stage(Kernel.SILU_MUL, SiluArgs(-1, 40, 50, 64), (40,), (50,))


def kernels(stages: list[Stage]) -> list[Kernel]:
    return [stage.kernel for stage in stages]


def test_norm_and_activation_are_folded_into_their_neighbours() -> None:
    fused = fuse([NORM, QUANTIZE, LINEAR, SILU])
    assert kernels(fused) == [Kernel.QUANTIZE, Kernel.LINEAR]
    quantize, linear = (stage.args for stage in fused)
    assert isinstance(quantize, QuantizeArgs)
    assert isinstance(linear, LinearArgs)
    assert (quantize.x, quantize.norm_weight) == (10, 11)
    assert (linear.out, linear.gated) == (50, 1)
    assert not LINEAR.args.gated, "what was recorded stays as it is"  # type: ignore[attr-defined]


def test_what_somebody_else_reads_is_not_folded_away() -> None:
    reads_norm = Stage(Kernel.GATHER, SiluArgs(), (20,), (60,))
    assert kernels(fuse([NORM, QUANTIZE, reads_norm])) == [Kernel.RMS_NORM, Kernel.QUANTIZE, Kernel.GATHER]
    reads_gate = Stage(Kernel.GATHER, SiluArgs(), (40,), (60,))
    assert kernels(fuse([LINEAR, SILU, reads_gate])) == [Kernel.LINEAR, Kernel.SILU_MUL, Kernel.GATHER]
    # Written again before it is read: nobody misses it.
    writes_norm = Stage(Kernel.GATHER, SiluArgs(), (70,), (20,))
    assert kernels(fuse([NORM, QUANTIZE, writes_norm, reads_norm])) == [Kernel.QUANTIZE, Kernel.GATHER, Kernel.GATHER]
