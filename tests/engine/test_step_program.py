"""The decoder's forward pass can be recorded: the calls do not depend on what is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kvd.cache.store import allocate_cache
from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd.engine.batch_builder import BatchBuilder
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights
from kvd.tools.wrapped_ops import WrappedOps
from kvd_kernels.ops import Batch, KVCache, LiveSize, SamplingBatch, SamplingResult, StepProgram
from kvd_kernels.registry import create_ops
from tests.model.checkpoints import make_qwen2

MAX_TOKENS, MAX_SEQS, MAX_BLOCKS = 24, 4, 4
RECORDED = ("embed", "rms_norm", "linear", "silu_mul", "rope_and_write", "attend", "gather")


class _Replay(StepProgram):
    """Calls what was recorded again, with the sizes of the live batch in the place of their codes."""

    def __init__(self, calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]]) -> None:
        self.calls = calls

    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        assert params is None
        sizes = {LiveSize.TOKENS: batch.num_tokens, LiveSize.LOGIT_ROWS: batch.num_logit_rows}
        for call, arguments, options in self.calls:
            live = [
                batch if isinstance(value, Batch) else sizes[value] if isinstance(value, LiveSize) else value
                for value in arguments
            ]
            call(*live, **options)
        return None


class RecordingBackend(WrappedOps):
    """A backend whose ops compute nothing while a program is made."""

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        program = _Replay([])
        for name in RECORDED:
            setattr(self, name, partial(self._note, program, getattr(self._inner, name)))
        recorded = replace(batch, num_tokens=LiveSize.TOKENS, num_logit_rows=LiveSize.LOGIT_ROWS)
        program.logits = forward(recorded)
        return program

    def _note(self, program: _Replay, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        assert not any(type(value) is int for value in arguments), "a size that is not the live one"
        program.calls.append((call, arguments, options))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    path = make_qwen2(tmp_path_factory.mktemp("model"))
    files = resolve_model(str(path), home=path.parent / "home", revision=None, progress=QuietProgress())
    return load_weights(files, read_spec(files), progress=QuietProgress())


class _Runs:
    """One decoder on a cache of its own, fed with plans."""

    def __init__(self, weights: ModelWeights, ops: WrappedOps) -> None:
        kv_format = weights.spec.kv_format("int8")
        decoder = Decoder(
            weights, ops, kv_format,
            max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_positions=64, progress=QuietProgress(),
        )  # fmt: skip
        self.cache = allocate_cache(kv_format, MAX_SEQS * MAX_BLOCKS, ops.device)
        self.cache.pools[0].zero_()  # so that what nobody writes can be compared, too
        self.builder = BatchBuilder(
            len(kv_format.groups), max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS
        )
        self.program = ops.record(self.builder.batch, self.cache, partial(decoder.forward, cache=self.cache))

    def run(self, plan: StepPlan) -> torch.Tensor:
        batch = self.builder.fill(plan, torch.zeros(MAX_SEQS, dtype=torch.int64).numpy())
        self.program.run(batch, None)
        return self.program.logits[: batch.num_logit_rows].clone()


def _item(slot: int, start: int, num_tokens: int, *, samples: bool = True) -> PlanItem:
    num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
    table = tuple(range(slot * MAX_BLOCKS, slot * MAX_BLOCKS + num_blocks))
    token_ids = tuple((7 * slot + 3 * position) % 300 for position in range(start, start + num_tokens))
    positions = range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE)
    return PlanItem(f"r{slot}", slot, start, token_ids, (table,), (positions,), samples)


PLANS = [
    [_item(0, 0, 20, samples=False)],
    [_item(0, 20, 1), _item(1, 0, 17)],
    [_item(0, 21, 1), _item(1, 17, 1), _item(2, 0, 9, samples=False), _item(3, 0, 2)],
    [_item(2, 9, 1)],
    [_item(3, 2, 1), _item(2, 10, 1), _item(1, 18, 14)],
]


def test_a_recorded_pass_computes_what_single_calls_do(weights: ModelWeights) -> None:
    eager = _Runs(weights, WrappedOps(create_ops("reference")))
    recorded = _Runs(weights, RecordingBackend(create_ops("reference")))
    assert isinstance(recorded.program, _Replay)
    num_calls = len(recorded.program.calls)
    assert num_calls == 1 + 9 * weights.spec.num_layers + 3
    assert not recorded.cache.pools[0].any(), "recording computes nothing"
    for step_id, items in enumerate(PLANS):
        plan = StepPlan(step_id, tuple(items))
        expected, got = eager.run(plan), recorded.run(plan)
        assert len(expected) == sum(item.samples for item in items)
        assert torch.equal(expected.view(torch.int32), got.view(torch.int32))
    assert torch.equal(eager.cache.pools[0], recorded.cache.pools[0])
    assert len(recorded.program.calls) == num_calls


def test_a_program_refuses_another_batch(weights: ModelWeights) -> None:
    runs = _Runs(weights, WrappedOps(create_ops("reference")))
    with pytest.raises(AssertionError, match="made for"):
        runs.program.run(replace(runs.builder.batch), None)
