"""Memory of a device: what may be taken, what a step is seen to take, and what is said where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvd.cache.sizing import GIB
from kvd.config import Config
from kvd.core import StepPlan
from kvd.device_facts import DeviceFacts
from kvd.engine import build, memory_budget
from kvd.engine.build import build_engine
from kvd.engine.build_tiers import TierSizes
from kvd.engine.memory_budget import HEADROOM_BYTES, Demand, Limits, Room, advice, find_room, plan_memory
from kvd.engine.runner import Runner
from kvd.errors import NotEnoughMemory
from kvd.model.loading import read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd_kernels.ops import DeviceMemory, Ops
from kvd_kernels.registry import create_ops
from tests.engine.test_sizing import make_spec
from tests.model.checkpoints import make_llama

TRIAL_BLOCKS = 4 + 64 // 16
"""One for each sequence and as many as hold the tokens of the largest step."""
NO_TIERS = TierSizes(0, 0)
STEP_BYTES = 64 << 20
"""What a step takes of `FakeMemory` beside its buffers, by the byte."""


class FakeMemory(DeviceMemory):
    """A card whose figures are set by hand."""

    setting = "gpu_memory_utilization"

    def __init__(self, total: float = 24 * GIB, others: float = 0.0) -> None:
        self.total, self.others, self.held, self.peak = int(total), int(others), 0, 0

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.total - self.others - self.held

    def held_bytes(self) -> int:
        return self.held

    def reset_peak(self) -> None:
        self.peak = self.held

    def peak_bytes(self) -> int:
        return self.peak


def with_memory(memory: FakeMemory | None) -> Ops:
    ops = create_ops("reference-a16")
    ops.memory = memory
    return ops


def demand(max_tokens: int = 2048, weight_bytes: int = 5 * GIB, scratch_bytes: int = 0) -> Demand:
    spec = make_spec()
    return Demand(spec, spec.kv_format("int8"), Limits(max_tokens, 32), 2, weight_bytes, scratch_bytes)


def room_of(memory: FakeMemory, lines: list[str] | None = None, **settings: Any) -> Room:
    found = [] if lines is None else lines
    return find_room(Config(**settings), with_memory(memory), 0, NO_TIERS, lambda level, line: found.append(line))


# --------------------------------------------------------------------------- what may be taken


def test_the_share_is_one_of_the_whole_card() -> None:
    lines: list[str] = []
    room = room_of(FakeMemory(24 * GIB), lines, gpu_memory_utilization=0.5)
    assert (room.limit_bytes, room.kv_share, room.setting) == (12 * GIB, 1.0, "gpu_memory_utilization")
    assert not lines


def test_what_kvd_holds_already_is_part_of_its_share() -> None:
    memory = FakeMemory(24 * GIB)
    memory.held = 2 * GIB
    assert room_of(memory, gpu_memory_utilization=0.5).limit_bytes == 12 * GIB


def test_memory_of_other_processes_is_left_to_them_and_named() -> None:
    lines: list[str] = []
    room = room_of(FakeMemory(24 * GIB, others=6 * GIB), lines)
    assert room.limit_bytes == 18 * GIB - HEADROOM_BYTES
    (line,) = lines
    assert line.startswith(
        "gpu_memory_utilization 0.9 asks for 21.60 GiB, but of 24.00 GiB the driver and others hold 6.00 GiB"
    )


def test_a_share_of_one_leaves_headroom() -> None:
    assert room_of(FakeMemory(24 * GIB), gpu_memory_utilization=1.0).limit_bytes == 24 * GIB - HEADROOM_BYTES


@pytest.mark.parametrize(
    ("memory", "setting", "other"),
    [
        (FakeMemory(), "cpu_memory_utilization", "gpu_memory_utilization"),
        (None, "gpu_memory_utilization", "cpu_memory_utilization"),
    ],
)
def test_a_setting_of_the_other_kind_of_memory_is_announced(
    memory: FakeMemory | None, setting: str, other: str
) -> None:
    lines: list[str] = []
    config = Config(gpu_memory_utilization=0.5, cpu_memory_utilization=0.5)
    find_room(config, with_memory(memory), 0, NO_TIERS, lambda level, line: lines.append(line))
    assert [line for line in lines if line.startswith(f"{setting} has no effect on the ")]
    assert not [line for line in lines if line.startswith(other)]


def test_the_ram_tier_is_measured_against_the_host_whatever_the_device_has() -> None:
    with pytest.raises(NotEnoughMemory, match=r"^swap_space takes 1024\.00 GiB, but"):
        find_room(Config(), with_memory(FakeMemory()), 0, TierSizes(1, 1024 * GIB), lambda level, line: None)


# --------------------------------------------------------------------------- what it is spent on


def test_the_cache_gets_all_that_weights_and_steps_leave() -> None:
    room = room_of(FakeMemory(24 * GIB))
    plan = plan_memory(Config(max_model_len=4096), demand(), room)
    rest = room.limit_bytes - 5 * GIB - plan.step_bytes - plan.pool.kv_bytes
    assert 0 <= rest < demand().kv_format.block_bytes + (128 << 20)  # a block, and rope tables as they were foreseen


def test_what_a_step_was_seen_to_take_is_taken_from_the_cache() -> None:
    room = room_of(FakeMemory(24 * GIB))
    before, after = (plan_memory(Config(), demand(scratch_bytes=scratch), room) for scratch in (0, GIB))
    assert before.pool.kv_bytes - after.pool.kv_bytes == pytest.approx(GIB, rel=0.05)
    assert after.step_bytes - before.step_bytes == pytest.approx(GIB, rel=0.05)


def test_a_length_that_does_not_fit_names_the_longest_that_does_and_the_share() -> None:
    room = room_of(FakeMemory(8 * GIB), gpu_memory_utilization=0.9)
    with pytest.raises(NotEnoughMemory) as refused:
        plan_memory(Config(max_model_len=131072), demand(), room)
    message = str(refused.value)
    assert "or raise gpu_memory_utilization" in message
    fits = int(message.partition("--max-model-len ")[2].partition(";")[0])
    assert plan_memory(Config(max_model_len=fits), demand(), room).pool.max_model_len == fits
    with pytest.raises(NotEnoughMemory):
        plan_memory(Config(max_model_len=int(1.02 * fits)), demand(), room)  # rope tables of what was asked for: 1%


def test_a_step_that_does_not_fit_names_the_largest_that_does() -> None:
    large = demand(max_tokens=65536)
    room = room_of(FakeMemory(12 * GIB), gpu_memory_utilization=0.6)
    with pytest.raises(NotEnoughMemory) as refused:
        plan_memory(Config(), large, room)
    message = str(refused.value)
    assert "a step of 65536 tokens" in message
    assert "gpu_memory_utilization 0.6 of 12.00 GiB is 7.20 GiB" in message
    fits = int(message.partition("--max-num-batched-tokens ")[2].partition(" ")[0])
    assert plan_memory(Config(), demand(max_tokens=fits), room).pool.num_blocks >= 16
    assert demand(max_tokens=fits + 1).buffer_bytes() + 5 * GIB + large.least_kv_bytes > room.limit_bytes


def test_a_share_that_would_do_is_named_and_does() -> None:
    room = room_of(FakeMemory(12 * GIB), gpu_memory_utilization=0.3)
    with pytest.raises(NotEnoughMemory, match="--gpu-memory-utilization 0") as refused:
        plan_memory(Config(), demand(), room)
    share = float(str(refused.value).partition("--gpu-memory-utilization ")[2].partition(" ")[0])
    assert plan_memory(Config(), demand(), room_of(FakeMemory(12 * GIB), gpu_memory_utilization=share)).pool.num_blocks
    assert "--gpu" not in advice(demand(), room_of(FakeMemory(4 * GIB)))


def test_too_many_blocks_name_the_most_that_fit() -> None:
    room = room_of(FakeMemory(12 * GIB))
    with pytest.raises(NotEnoughMemory, match="the largest that fits is ") as refused:
        plan_memory(Config(num_gpu_blocks_override=10**6), demand(), room)
    most = int(str(refused.value).rpartition(" ")[2])
    assert plan_memory(Config(num_gpu_blocks_override=most), demand(), room).pool.num_blocks == most


# --------------------------------------------------------------------------- an engine on such a device


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds an engine of a small model whose steps take `STEP_BYTES` of the memory it is given."""

    def started(
        memory: FakeMemory,
        *,
        most_step_tokens: int = 10**9,
        on_step: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> Any:
        path = make_llama(tmp_path / "model")
        files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=QuietProgress())
        ops = with_memory(memory)
        monkeypatch.setattr(build, "open_ops", lambda config, dtype, log: ops)
        steps: list[StepPlan] = []
        run = Runner.run
        cache_bytes = TRIAL_BLOCKS * read_spec(files).kv_format("int8").block_bytes

        def counted(runner: Runner, plan: StepPlan) -> Any:
            steps.append(plan)
            on_step()
            if plan.items and plan.num_tokens > most_step_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            memory.peak = max(memory.peak, memory.held + cache_bytes + STEP_BYTES)
            return run(runner, plan)

        monkeypatch.setattr(Runner, "run", counted)
        config = Config(
            model=str(path), home=str(tmp_path / "home"), max_num_seqs=4, max_num_batched_tokens=64, **settings
        )
        engine = build_engine(
            config, files, read_spec(files), home=tmp_path / "home", progress=QuietProgress(),
            log=lambda level, line: None,
        )  # fmt: skip
        return engine.info, steps

    return started


def test_the_largest_step_is_run_before_the_cache_is_sized(start: Callable[..., Any]) -> None:
    info, steps = start(FakeMemory(GIB), gpu_memory_utilization=0.5, max_model_len=512)
    computed = [step for step in steps if step.items]
    assert [step.num_tokens for step in computed] == [64, 64]
    assert computed[0].items[0].start == 0
    assert all(item.start + item.num_tokens == 511 for item in computed[1].items)  # with the whole context behind it
    budget = info.budget
    assert budget.setting == "gpu_memory_utilization"
    assert budget.total_bytes == GIB // 2
    assert budget.activation_bytes >= STEP_BYTES
    taken = budget.weight_bytes + budget.activation_bytes + budget.kv_bytes
    assert GIB // 2 - (4 << 20) < taken <= GIB // 2


def test_what_the_driver_takes_for_kernels_and_graphs_is_counted(start: Callable[..., Any]) -> None:
    """It is in nobody's name: what is free shrinks, and what kvd holds does not grow."""
    memory = FakeMemory(GIB)

    def load_kernels() -> None:
        memory.others = 50 << 20

    info, _ = start(memory, on_step=load_kernels, gpu_memory_utilization=0.5, max_model_len=512)
    assert info.budget.activation_bytes >= STEP_BYTES + (50 << 20)


def test_a_step_that_runs_out_of_memory_is_one_line_with_the_largest_that_did_not(start: Callable[..., Any]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"^a step of 64 tokens does not fit .* --max-num-batched-tokens 32$"):
        start(FakeMemory(GIB), most_step_tokens=40)


def test_not_even_the_smallest_step_is_one_line_too(start: Callable[..., Any]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"not even a step of 4 tokens fits .*lower max_num_seqs"):
        start(FakeMemory(GIB), most_step_tokens=1)


def test_a_ram_tier_that_the_driver_does_not_pin_is_one_line(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise MemoryError("the driver cannot pin 0.25 GiB")

    monkeypatch.setattr("kvd.engine.build_tiers.allocate_arena", refused)
    with pytest.raises(NotEnoughMemory, match=r"^swap_space of 0\.25 GiB is not to be had: the driver cannot pin"):
        start(FakeMemory(GIB), swap_space=0.25)


@pytest.mark.parametrize(("name", "doing"), [("Decoder", "packing the weights"), ("open_tiers", "making the KV cache")])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
    ids=["allocator", "driver", "cublas"],
)
def test_no_exhaustion_is_a_traceback(
    error: Exception, name: str, doing: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(build, name, exhausted)
    with pytest.raises(NotEnoughMemory, match=rf"^the memory ran out while {doing} \(kvd holds 0\.00 GiB, 1\.00 GiB"):
        start(FakeMemory(GIB))


def test_another_error_is_not_taken_for_exhaustion(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(build, "Decoder", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        start(FakeMemory(GIB))


@pytest.mark.parametrize("device_id", ["", "f1d2d2f9"])
async def test_facts_about_the_device_reach_the_snapshot(
    device_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_llama(tmp_path / "model")
    files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=QuietProgress())
    ops = with_memory(None)
    ops.device_id = device_id
    monkeypatch.setattr(build, "open_ops", lambda config, dtype, log: ops)
    watched: list[str] = []

    def watch(name: str) -> Callable[[], DeviceFacts]:
        watched.append(name)
        return lambda: DeviceFacts("card")

    engine = build_engine(
        Config(model=str(path), num_gpu_blocks_override=8, max_num_seqs=4, max_num_batched_tokens=16),
        files, read_spec(files), home=tmp_path / "home", progress=QuietProgress(), log=lambda level, line: None,
        watch=watch,
    )  # fmt: skip
    assert watched == ([device_id] if device_id else [])
    assert (await engine.snapshot()).device == (DeviceFacts("card") if device_id else None)


def test_a_smaller_scratch_is_assumed_for_a_smaller_step() -> None:
    whole = demand(scratch_bytes=GIB)
    assert whole.buffer_bytes(1024) == pytest.approx(whole.buffer_bytes() / 2, rel=0.05)
    assert replace(whole, scratch_bytes=0).buffer_bytes() == whole.buffer_bytes() - GIB
    assert memory_budget.gib(-1) == "0.00 GiB"
