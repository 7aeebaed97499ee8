"""The attention mass that a step reports: the softmax weight of each table entry, and no change to the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvd.cache.store import allocate_cache
from kvd.core import PlanItem, Request, SamplingParams, StepPlan, StepResult
from kvd.engine.runner import Runner
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights
from kvd.tools.wrapped_ops import WrappedOps
from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops
from tests.engine.harness import Recorder
from tests.engine.test_step_program import MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, PLANS
from tests.model.checkpoints import make_qwen2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    path = make_qwen2(tmp_path_factory.mktemp("model"))
    files = resolve_model(str(path), home=path.parent / "home", revision=None, progress=QuietProgress())
    return load_weights(files, read_spec(files), progress=QuietProgress())


class Watching(WrappedOps):
    """Keeps the mass of every call of `attend` since `calls` was emptied."""

    def __init__(self) -> None:
        super().__init__(create_ops("reference"))
        self.calls: list[torch.Tensor] = []

    def attend(self, *arguments: Any) -> None:
        super().attend(*arguments)
        if arguments[-1] is not None:
            self.calls.append(arguments[-1].clone())


def make_runner(weights: ModelWeights, backend: str | Ops) -> tuple[Runner, Recorder]:
    kv_format = weights.spec.kv_format("int8")
    ops = create_ops(backend) if isinstance(backend, str) else backend
    decoder = Decoder(
        weights, ops, kv_format,
        max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_positions=64, progress=QuietProgress(),
    )  # fmt: skip
    recorder = Recorder()
    cache = allocate_cache(kv_format, MAX_SEQS * MAX_BLOCKS, ops.device)
    runner = Runner(decoder, cache, max_blocks_per_request=MAX_BLOCKS, draw_seed=lambda: 0, observer=recorder)
    requests = tuple(
        Request(f"r{slot}", (1,), SamplingParams(9, temperature=1.0, seed=slot), 0.0) for slot in range(MAX_SEQS)
    )
    runner.run(StepPlan(0, (), new_requests=requests))
    return runner, recorder


def run_plans(runner: Runner, wanting: set[str]) -> list[tuple[tuple[PlanItem, ...], StepResult]]:
    """All plans; the requests named want their mass."""
    results = []
    for step_id, planned in enumerate(PLANS, 1):
        items = tuple(item._replace(wants_mass=item.request_id in wanting) for item in planned)
        results.append((items, runner.run(StepPlan(step_id, items))))
    return results


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mass_changes_neither_logits_nor_tokens(weights: ModelWeights, backend: str) -> None:
    (plain, plain_rows), (runner, rows) = make_runner(weights, backend), make_runner(weights, backend)
    expected, got = run_plans(plain, set()), run_plans(runner, {"r0", "r2"})
    assert rows.rows == plain_rows.rows
    for (_, without), (items, result) in zip(expected, got, strict=True):
        assert result.samples == without.samples
        assert without.masses == ()
        assert len(result.masses) == sum(item.wants_mass for item in items)
    assert plain._mass_program is None, "nobody asked for it"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mass_adds_up_to_the_heads_that_look(weights: ModelWeights, backend: str) -> None:
    """Softmax weights of a query and head are 1 together."""
    runner, _ = make_runner(weights, backend)
    num_looking = weights.spec.num_heads * weights.spec.num_layers
    for items, result in run_plans(runner, {"r0", "r1", "r3"}):
        wanting = [item for item in items if item.wants_mass]
        for item, mass in zip(wanting, result.masses, strict=True):
            assert len(mass) == len(item.block_tables[0])
            assert sum(mass) == pytest.approx(item.num_tokens * num_looking, rel=1e-5)
            assert min(mass) > 0


def test_mass_is_the_sum_of_what_attention_reports_layer_by_layer(weights: ModelWeights) -> None:
    ops = Watching()
    runner, _ = make_runner(weights, ops)
    for step_id, planned in enumerate(PLANS, 1):
        ops.calls.clear()
        items = tuple(item._replace(wants_mass=item.slot != 2) for item in planned)
        result = runner.run(StepPlan(step_id, items))
        rows = [row for row, item in enumerate(items) if item.wants_mass]
        assert len(ops.calls) == (weights.spec.num_layers if rows else 0)
        for row, mass in zip(rows, result.masses, strict=True):
            expected = sum(of_layer[row, : len(mass)].double() for of_layer in ops.calls)
            assert list(mass) == expected.tolist()  # type: ignore[union-attr]


def test_mass_is_the_same_on_both_backends_and_in_any_company(weights: ModelWeights) -> None:
    by_backend = [run_plans(make_runner(weights, backend)[0], {"r0", "r1"}) for backend in ("reference", "cpu")]
    alone = run_plans(make_runner(weights, "cpu")[0], {"r1"})
    for (items, expected), (_, got), (_, single) in zip(*by_backend, alone, strict=True):
        assert got.masses == expected.masses
        wanting = [item.request_id for item in items if item.wants_mass]
        assert single.masses == tuple(mass for name, mass in zip(wanting, got.masses, strict=True) if name == "r1")


def test_a_mass_that_is_a_neighbours_is_found(weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the rows of the mass are off by one."""
    from kvd.engine import runner as module

    masses = module._MassProgram.masses

    def spoiled(self: object, items: tuple[PlanItem, ...]) -> tuple[tuple[float, ...], ...]:
        return masses(self, (items[-1], *items[:-1]))  # type: ignore[arg-type]

    monkeypatch.setattr(module._MassProgram, "masses", spoiled)
    with pytest.raises(AssertionError):
        test_mass_is_the_sum_of_what_attention_reports_layer_by_layer(weights)
