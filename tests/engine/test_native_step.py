"""A step of the native backend: one call, and the bytes of the reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from kvd.cache.store import allocate_cache
from kvd.core import StepPlan
from kvd.engine.batch_builder import BatchBuilder
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.ops import Ops, SamplingBatch
from kvd_kernels.registry import create_ops
from tests.engine.harness import Harness, greedy
from tests.engine.test_step_program import MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, PLANS
from tests.model.checkpoints import make_awq, make_llama, make_qwen2

CHECKPOINTS = {
    "16-bit with key bias": make_qwen2,
    "16-bit": make_llama,
    "4-bit": partial(make_awq, base="llama", group_size=64),
    "4-bit with key bias": partial(make_awq, base="qwen2", group_size=64),
}


def load(path: Path) -> ModelWeights:
    files = resolve_model(str(path), home=path.parent / "home", revision=None, progress=QuietProgress())
    return load_weights(files, read_spec(files), progress=QuietProgress())


class Side:
    """One backend with a decoder and a cache of its own."""

    def __init__(self, weights: ModelWeights, ops: Ops, kv_dtype: str) -> None:
        kv_format = weights.spec.kv_format(kv_dtype)
        decoder = Decoder(
            weights, ops, kv_format,
            max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_positions=64, progress=QuietProgress(),
        )  # fmt: skip
        self.cache = allocate_cache(kv_format, MAX_SEQS * MAX_BLOCKS, ops.device)
        self.cache.pools[0].zero_()
        self.builder = BatchBuilder(
            len(kv_format.groups), max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS
        )
        self.program = ops.record(self.builder.batch, self.cache, partial(decoder.forward, cache=self.cache))
        self.params = SamplingBatch.allocate(MAX_SEQS)
        self.params.temperature.fill_(1.0)
        self.params.top_p.fill_(0.9)
        self.params.repetition.fill_(1.0)
        self.params.num_logprobs.fill_(2)
        self.params.max_logprobs = 2
        self.params.seeds.copy_(torch.arange(MAX_SEQS))

    def run(self, plan: StepPlan):
        batch = self.builder.fill(plan, torch.zeros(MAX_SEQS, dtype=torch.int64).numpy())
        self.params.num_rows = batch.num_logit_rows
        self.params.positions[: batch.num_logit_rows] = batch.positions[batch.logit_rows[: batch.num_logit_rows]] + 1
        result = self.program.run(batch, self.params if batch.num_logit_rows else None)
        return self.program.logits[: batch.num_logit_rows].clone(), result


@pytest.mark.parametrize("kv_dtype", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_step_gives_the_bytes_of_the_reference(name: str, kv_dtype: str, tmp_path: Path) -> None:
    weights = load(CHECKPOINTS[name](tmp_path / "model"))
    native, reference = Side(weights, create_ops("cpu", 2), kv_dtype), Side(weights, create_ops("reference"), kv_dtype)
    for step_id, items in enumerate(PLANS):
        plan = StepPlan(step_id, tuple(items))
        (got, chosen), (expected, wanted) = native.run(plan), reference.run(plan)
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), f"logits of step {step_id}"
        assert (chosen is None) == (wanted is None)
        if chosen is None:
            continue
        assert chosen.token_ids == wanted.token_ids
        for ours, theirs in zip(chosen.logprobs, wanted.logprobs, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
            assert [token_id for token_id, _ in ours[1]] == [token_id for token_id, _ in theirs[1]]
    assert torch.equal(native.cache.pools[0], reference.cache.pools[0])


def test_every_step_is_one_native_call(default_decoder: Decoder) -> None:
    """Prefill, chunks, mixed steps and decoding, sampling included."""
    ops = default_decoder.ops
    assert isinstance(ops, CpuOps)
    harness = Harness(default_decoder, chunk=16)
    steps = 0
    run = harness.runner.run

    def counted(plan: StepPlan):
        nonlocal steps
        steps += bool(plan.items)
        return run(plan)

    harness.runner.run = counted
    before = ops.pool.num_runs
    harness.run([greedy(f"r{i}", list(range(5, 30 + i)), 6) for i in range(3)])
    assert steps > 6
    assert ops.pool.num_runs - before == steps
