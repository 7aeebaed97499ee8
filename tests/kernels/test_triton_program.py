"""The GPU's step program on a fake device: what it leaves is what the same calls leave one after the other.

The ops are those of the a8 reference, whose rows depend on nothing but their own inputs, so that tokens, logits and
cache are compared bit for bit although batches are padded. The small kernels of the program itself are interpreted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights
from kvd_kernels.ops import Batch, GroupTables
from kvd_kernels.registry import create_ops
from kvd_kernels.triton import batch_mirror, program, transfers
from kvd_kernels.triton.batch_mirror import BatchMirror, StepSize, _HostViews, _SourceViews
from kvd_kernels.triton.device import HostDevice
from kvd_kernels.triton.program import GraphProgram, Programs, buckets
from kvd_kernels.triton.sampling import Sampler
from kvd_kernels.triton.transfers import runs
from tests.engine.test_batch_builder import expected_of, found_in, make_builder, simulated, with_holes
from tests.kernels.conftest import make_ops
from tests.kernels.fake_device import EAGERNESSES, Eagerness, FakeDevice, QueuedOps, Site
from tests.kernels.step_scripts import (
    MAX_SEQS,
    MAX_TOKENS,
    Action,
    Outcome,
    Stage,
    Step,
    play_ahead,
    play_in_order,
    write_script,
)
from tests.model.checkpoints import make_qwen2

NUM_STEPS = 24
SEEDS = (0, 1, 2)
Scripts = Callable[[int], tuple[list[Action], Outcome]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    """Two layers, of which one has a window: two groups of blocks."""
    path = make_qwen2(
        tmp_path_factory.mktemp("model"),
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        use_sliding_window=True, sliding_window=24, max_window_layers=1,
    )  # fmt: skip
    files = resolve_model(str(path), home=path.parent / "home", revision=None, progress=QuietProgress())
    return load_weights(files, read_spec(files), progress=QuietProgress())


@pytest.fixture(scope="module")
def expected(weights: ModelWeights) -> Scripts:
    """Script and outcome by seed, each made once."""

    @cache
    def of(seed: int) -> tuple[list[Action], Outcome]:
        actions = write_script(seed, 2, NUM_STEPS)
        return actions, play_in_order(Stage(weights, create_ops("reference")), actions)

    return of


def fake_stage(
    weights: ModelWeights, eagerness: Eagerness, dropped: frozenset[Site] = frozenset()
) -> tuple[Stage, FakeDevice]:
    device = FakeDevice(eagerness, dropped)

    stage = Stage(weights, QueuedOps(create_ops("reference"), device), settle=device.settle)
    before = [pool.clone() for pool in stage.cache.pools]
    stage.program.prepare(lambda done, total: None)
    assert all(torch.equal(*pair) for pair in zip(before, stage.cache.pools, strict=True)), "preparing wrote a block"
    device.num_replays = 0
    return stage, device


def differences(got: Outcome, wanted: Outcome) -> list[str]:
    return [name for name in ("tokens", "logits", "saved", "pools") if getattr(got, name) != getattr(wanted, name)]


@pytest.mark.parametrize("eagerness", EAGERNESSES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_copies_and_transfers_take_effect_in_their_order(
    weights: ModelWeights, expected: Scripts, seed: int, eagerness: Eagerness
) -> None:
    actions, wanted = expected(seed)
    stage, device = fake_stage(weights, eagerness)
    assert differences(play_ahead(stage, actions), wanted) == []
    plans = [action.plan for action in actions if isinstance(action, Step)]
    num_decodes = sum(all(item.samples and item.num_tokens == 1 for item in plan.items) for plan in plans)
    assert 0 < device.num_replays == num_decodes < len(plans)


@pytest.mark.parametrize("eagerness", EAGERNESSES[:2], ids=str)
def test_the_sampler_of_the_gpu_chooses_in_time(weights: ModelWeights, eagerness: Eagerness) -> None:
    """Tokens that are launched, kept, looked up and read while their buffers go round."""
    actions = write_script(1, 2, NUM_STEPS // 2)
    wanted = play_in_order(Stage(weights, create_ops("reference")), actions)
    device = FakeDevice(eagerness)
    sampler = Sampler(torch.device("cpu"), device)
    stage = Stage(weights, QueuedOps(create_ops("reference"), device, sampler), settle=device.settle)
    assert differences(play_ahead(stage, actions), wanted) == []


def test_the_scripts_hold_what_matters(expected: Scripts) -> None:
    scripts = [expected(seed)[0] for seed in SEEDS]
    kinds = {type(action).__name__ for actions in scripts for action in actions}
    assert kinds == {"Step", "Save", "Restore", "Copy"}
    steps = [action for actions in scripts for action in actions if isinstance(action, Step)]
    assert any(item.last_from_slot for step in steps for item in step.plan.items)
    assert any(not step.wants_tokens for step in steps)
    assert {len(step.plan.items) for step in steps} == set(range(1, MAX_SEQS + 1))


# --------------------------------------------------------------------------- planted faults


def is_found(weights: ModelWeights, expected: Scripts, **fault) -> bool:
    for eagerness in EAGERNESSES:
        for seed in SEEDS:
            actions, wanted = expected(seed)
            try:
                if differences(play_ahead(fake_stage(weights, eagerness, **fault)[0], actions), wanted):
                    return True
            except (AssertionError, IndexError):
                return True
    return False


WAITS = (
    ("batch_mirror.py", "staging.uploaded.wait()"),
    ("program.py", "self._end.wait()"),
    ("transfers.py", "copies.wait(device.compute.mark())"),
    ("transfers.py", "device.compute.wait(end)"),
    ("transfers.py", "self._device.compute.wait(end)"),
    ("transfers.py", "self._end.wait()"),
)


def test_all_waits_are_known(weights: ModelWeights, expected: Scripts) -> None:
    stage, device = fake_stage(weights, EAGERNESSES[0])
    for seed in SEEDS:
        play_ahead(stage, expected(seed)[0])
    # Preparing waits so that its report is true; no step depends on it.
    assert sorted(device.sites) == sorted([*WAITS, ("program.py", "self._device.compute.mark().wait()")])


@pytest.mark.parametrize("site", WAITS, ids=str)
def test_a_wait_that_is_left_out_is_found(weights: ModelWeights, expected: Scripts, site: Site) -> None:
    assert is_found(weights, expected, dropped=frozenset([site]))


def nothing(*arguments: object) -> None:
    pass


def keeps_by_row(num_rows: int, slots: torch.Tensor, token_ids: torch.Tensor, newest: torch.Tensor) -> None:
    newest[:num_rows] = token_ids


def forgets_one_position(rows: torch.Tensor, packed: torch.Tensor, tables: torch.Tensor) -> None:
    tables[:, rows.long(), : packed.shape[2] - 1] = packed[:, :, :-1]


def pads_with_slot_zero(views: _HostViews, source: _SourceViews, batch: Batch) -> None:
    _FILL(views, source, batch)
    for slots in views.write_slots:
        slots[slots < 0] = 0


def trusts_the_first_row(mirror: BatchMirror, group: int, source: _SourceViews, *rest: Any) -> int:
    """Takes the table of a step's first sequence for the one that lay there."""
    for known, table in zip(mirror._known[group], source.tables[group], strict=True):
        known[0, : table.shape[1]] = table[0]
    return _PACK(mirror, group, source, *rest)


def launches_at_once(programs: Programs, copy: Callable[..., None], *arguments: object) -> None:
    programs._device.launch(copy, *arguments)


def joins_all(source_rows: Sequence[int], target_rows: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(source_rows[0], target_rows[0], len(target_rows))]


_FILL, _PACK = _HostViews.fill, BatchMirror._pack_changes
FAULTS: dict[str, tuple[object, str, object]] = {
    "tokens are not kept": (program, "keep_tokens", nothing),
    "tokens are kept by row": (program, "keep_tokens", keeps_by_row),
    "tokens are not looked up": (program, "resolve_tokens", nothing),
    "tables do not arrive": (batch_mirror, "store_table_rows", nothing),
    "tables arrive without their end": (batch_mirror, "store_table_rows", forgets_one_position),
    "a row is taken for known": (BatchMirror, "_pack_changes", trusts_the_first_row),
    "padding is written to the first block": (_HostViews, "fill", pads_with_slot_zero),
    "steps do not wait for who reads": (GraphProgram, "_wait_for_readers", nothing),
    "copies do not wait for who reads": (Programs, "copy_block", launches_at_once),
    "runs are joined too eagerly": (transfers, "runs", joins_all),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(
    weights: ModelWeights, expected: Scripts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    assert is_found(weights, expected)


# --------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_mirror_holds_what_the_plan_says(seed: int, has_holes: bool) -> None:
    """Under sizes that are kept and sizes that are not, with padding and without."""
    simulation, plans = simulated(seed)
    plans = (with_holes(plans, seed) if has_holes else plans)[:50]
    builder = make_builder(simulation)
    mirror = BatchMirror(HostDevice(), builder.batch)
    largest = mirror.max_seqs
    mirror.keep([StepSize(largest, largest, largest)])
    for plan in plans:
        newest = -1 - np.arange(simulation.config.max_num_seqs)
        batch = builder.fill(plan, newest)
        size = StepSize(batch.num_tokens, batch.num_seqs, batch.num_logit_rows)
        is_padded = len(set(size)) == 1
        mirrored = mirror.upload(batch, StepSize(largest, largest, largest) if is_padded else size)
        live = replace(mirrored, num_tokens=size[0], num_seqs=size[1], num_logit_rows=size[2])
        assert found_in(live, plan) == expected_of(plan, newest), f"step {plan.step_id}"
        assert mirrored.logit_slots is not None
        assert mirrored.logit_slots[: size[2]].tolist() == [item.slot for item in plan.items if item.samples]
        assert mirrored.max_query_tokens == max(item.num_tokens for item in plan.items)
        assert mirrored.max_slots == max(int(group.num_slots[: size[1]].max()) for group in batch.groups)
        if is_padded:
            check_padding(mirrored, size[0], largest)


def check_padding(mirrored: Batch, num_live: int, num_padded: int) -> None:
    assert mirrored.num_tokens == mirrored.num_seqs == mirrored.num_logit_rows == num_padded
    assert mirrored.query_starts.tolist() == list(range(num_padded + 1))
    assert not mirrored.token_ids[num_live:].any()
    assert not mirrored.positions[num_live:].any()
    assert not mirrored.logit_rows[num_live:].any()
    for group in mirrored.groups:
        assert not group.num_slots[num_live:].any()
        assert bool((group.write_slots[num_live:] == -1).all())


def test_sizes_that_nobody_said_are_looked_up() -> None:
    simulation, plans = simulated(0)
    builder = make_builder(simulation)
    mirror = BatchMirror(HostDevice(), builder.batch)
    plan = max(plans, key=lambda plan: plan.num_tokens)
    batch = builder.fill(plan, np.zeros(simulation.config.max_num_seqs, dtype=np.int64))
    said = (batch.max_query_tokens, batch.max_slots)
    batch.max_query_tokens = batch.max_slots = 0
    mirrored = mirror.upload(batch, StepSize(batch.num_tokens, batch.num_seqs, batch.num_logit_rows))
    assert (mirrored.max_query_tokens, mirrored.max_slots) == said
    assert said[0] > 1 < said[1]


def test_an_upload_that_fails_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have half of it, so the next one sends all tables."""
    simulation, plans = simulated(0)
    builder = make_builder(simulation)
    mirror = BatchMirror(HostDevice(), builder.batch)
    newest = np.zeros(simulation.config.max_num_seqs, dtype=np.int64)
    for index, plan in enumerate(plans[:30]):
        batch = builder.fill(plan, newest)
        size = StepSize(batch.num_tokens, batch.num_seqs, batch.num_logit_rows)
        if index % 3 == 1:
            with monkeypatch.context() as patch:
                patch.setattr(batch_mirror, "store_table_rows", raises_memory_error)
                patch.setattr(HostDevice, "copy", raises_memory_error)
                with pytest.raises(MemoryError):
                    mirror.upload(batch, size)
        assert found_in(mirror.upload(batch, size), plan) == expected_of(plan, newest)


def raises_memory_error(*arguments: object) -> None:
    raise MemoryError


def test_few_bytes_travel_where_tables_stay() -> None:
    """A decode step of long sequences uploads what is new, not the tables."""
    batch = Batch(
        torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32), torch.arange(33, dtype=torch.int32),
        torch.arange(32), (long_tables(32, 2048),), 32, 32, 32, torch.arange(32), 1, 2048 * 16,
    )  # fmt: skip
    uploaded: list[int] = []

    class Counting(HostDevice):
        def copy(self, stream, pairs) -> None:  # type: ignore[no-untyped-def]
            pairs = list(pairs)
            uploaded.extend(source.numel() for _, source in pairs)
            super().copy(stream, pairs)

    mirror = BatchMirror(Counting(), batch)
    for _ in range(2):
        mirror.upload(batch, StepSize(32, 32, 32))
    batch.groups[0].block_tables[3, 2047] += 1
    mirror.upload(batch, StepSize(32, 32, 32))
    assert uploaded[0] > 32 * 2048 * 8
    assert uploaded[1] < 2048
    assert uploaded[2] - uploaded[1] < 2048 * 8 + 256


def long_tables(num_seqs: int, num_blocks: int) -> GroupTables:
    shape = (num_seqs, num_blocks)
    return GroupTables(
        torch.arange(num_seqs * num_blocks, dtype=torch.int32).view(shape),
        torch.arange(0, num_blocks * 16, 16, dtype=torch.int32).expand(shape).contiguous(),
        torch.full((num_seqs,), num_blocks * 16, dtype=torch.int32),
        torch.arange(64),
    )


def test_buckets_are_dense_where_steps_are_small() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert buckets(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    assert len(buckets(256)) < 25


def test_preparing_reports_its_progress_and_a_program_works_without(weights: ModelWeights, expected: Scripts) -> None:
    actions, wanted = expected(0)
    device = FakeDevice(EAGERNESSES[0])
    stage = Stage(weights, QueuedOps(create_ops("reference"), device), settle=device.settle)
    assert differences(play_ahead(stage, actions), wanted) == []
    assert device.num_replays == 0
    reports: list[tuple[int, int]] = []
    stage.program.prepare(lambda done, total: reports.append((done, total)))
    total = reports[0][1]
    assert reports == [(done, total) for done in range(total + 1)]
    assert total == len(buckets(MAX_SEQS)) + len([MAX_TOKENS, 16, 8, 4, 2, 1])


def test_programs_of_one_batch_share_its_newest_tokens_and_die_with_it(weights: ModelWeights) -> None:
    device = FakeDevice(EAGERNESSES[0])
    ops = QueuedOps(create_ops("reference"), device)
    stage, other = Stage(weights, ops), Stage(weights, ops)
    again = ops.record(stage.builder.batch, stage.cache, partial(stage.decoder.forward, cache=stage.cache))
    assert isinstance(again, GraphProgram)
    assert again._mirror is stage.program._mirror is not other.program._mirror  # type: ignore[attr-defined]
    assert len(ops.programs._mirrors) == 2
    del other
    gc.collect()
    assert len(ops.programs._mirrors) == 1


def test_runs_of_neighbours_become_one_copy() -> None:
    assert runs([], []) == []
    assert runs([3, 4, 5, 9, 8, 1], [7, 8, 9, 10, 11, 12]) == [(3, 7, 3), (9, 10, 1), (8, 11, 1), (1, 12, 1)]
    assert runs([1, 2], [5, 7]) == [(1, 5, 1), (2, 7, 1)]


def test_rows_outside_are_refused() -> None:
    device = FakeDevice(EAGERNESSES[0])
    pool, host = device.zeros((4, 8), torch.uint8), device.pinned_bytes(32).view(4, 8)
    copies = transfers.Transfers(device)
    for sources, targets in (([-1], [0]), ([0], [-1]), ([3, 4], [0, 1]), ([0, 1], [3, 4])):
        with pytest.raises(AssertionError):
            copies.copy_rows(pool, sources, host, targets)
    assert copies.copy_rows(pool, [], host, []).seconds() == 0.0


@pytest.mark.parametrize("eagerness", EAGERNESSES)
def test_nothing_is_under_way_once_all_has_settled(eagerness: Eagerness) -> None:
    device = FakeDevice(eagerness)
    ops = QueuedOps(create_ops("reference"), device)
    pool, host = device.zeros((1, 8), torch.uint8), ops.allocate_host(2, 8)
    device.launch(pool.fill_, 7)
    ops.copy_rows(pool, [0], host, [1])
    ops.settle()
    assert host[1].tolist() == [7] * 8
    device.launch(pool.fill_, 8)
    ops.settle()
    assert pool[0].tolist() == [8] * 8


@pytest.mark.full
def test_the_interpreted_backend_computes_what_the_reference_does(weights: ModelWeights) -> None:
    """All kernels together, under the program: uploads, buckets, padding, sizes of every kind."""
    actions = [without_tokens(action) for action in write_script(1, 2, 8)]
    wanted = play_in_order(Stage(weights, create_ops("reference-a16")), actions)
    stage = Stage(weights, make_ops("triton"))
    before = [pool.clone() for pool in stage.cache.pools]
    stage.program.prepare(lambda done, total: None)
    assert all(torch.equal(*pair) for pair in zip(before, stage.cache.pools, strict=True))
    got = play_ahead(stage, actions)
    assert got.saved.keys() == wanted.saved.keys()
    assert len(wanted.logits) == 8
    for step, row_bytes in wanted.logits.items():
        rows, expected_rows = (np.frombuffer(each, np.float32) for each in (got.logits[step], row_bytes))
        # Logits reach 4. Each of some ten ops rounds to 11 bits at other places, and int8 codes of K and V may step.
        assert np.abs(rows - expected_rows).max() < 0.05, f"step {step}"


def without_tokens(action: Action) -> Action:
    """A step whose tokens are all given, so that backends that round otherwise go the same way."""
    if not isinstance(action, Step):
        return action
    items = tuple(item._replace(last_from_slot=False) for item in action.plan.items)
    return replace(action, plan=replace(action.plan, items=items), wants_tokens=False)
