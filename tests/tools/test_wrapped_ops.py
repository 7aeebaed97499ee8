"""What the recording backend sees, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from kvd.tools.perplexity import build_scorer
from kvd.tools.wrapped_ops import FloatLinearOps, RecordingOps
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import Linear, dequantize
from tests.model.checkpoints import make_awq, make_llama
from tests.tools.conftest import load

TOKENS = [(11 * index * index + index) % 317 + 3 for index in range(61)]


def test_every_input_is_counted_whatever_the_chunks(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_llama(tmp_path / "model"), home)
    seen = []
    for chunk in (7, 60):
        ops = RecordingOps(create_ops("cpu"), sample_stride=4)
        scorer = build_scorer(weights, ops, "fp16", window=64, chunk=chunk)
        scorer.score(TOKENS)
        ops.recording = True
        scorer.score(TOKENS)
        seen.append([ops.block_statistics(index) for index in range(2)])
    for few, many in zip(*seen, strict=True):
        for place in ("qkv", "output", "gate_up", "down"):
            first, second = getattr(few, place), getattr(many, place)
            assert first.rows.shape[0] == 15
            assert torch.equal(first.rows, second.rows)
            torch.testing.assert_close(first.mean_abs, second.mean_abs, rtol=1e-6, atol=0)
    assert seen[0][0].down.mean_abs.shape == (weights.spec.intermediate_size,)
    assert not torch.equal(seen[0][0].qkv.rows, seen[0][1].qkv.rows)


def test_the_first_input_is_the_normed_embedding(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_llama(tmp_path / "model"), home)
    ops = RecordingOps(create_ops("cpu"), sample_stride=1)
    scorer = build_scorer(weights, ops, "fp16", window=64, chunk=16)
    ops.recording = True
    scorer.score(TOKENS)
    rows = dequantize(weights.embedding)[TOKENS[:-1]]
    spec = weights.spec
    expected = (
        rows / (rows.square().mean(1, keepdim=True) + spec.rms_norm_eps).sqrt() * weights.layers[0].attention_norm
    )
    statistics = ops.block_statistics(0).qkv
    torch.testing.assert_close(statistics.rows, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics.mean_abs, expected.abs().mean(0), rtol=1e-4, atol=1e-5)


def test_recording_changes_no_bit(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_awq(tmp_path / "model"), home)
    ops = RecordingOps(create_ops("cpu"), sample_stride=1)
    recorded = build_scorer(weights, ops, "int8", window=64)
    ops.recording = True
    plain = build_scorer(weights, create_ops("cpu"), "int8", window=64)
    assert torch.equal(recorded.score(TOKENS).nll, plain.score(TOKENS).nll)


def test_float_linears_are_prepared_once(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_awq(tmp_path / "model"), home)
    ops = FloatLinearOps(create_ops("cpu"))
    down = weights.layers[0].down
    assert ops.prepare_linear(down) is ops.prepare_linear(down)
    assert ops.prepare_linear(down) is not ops.prepare_linear(Linear(down.parts))
    assert ops.prepared_bytes(down) > create_ops("cpu").prepared_bytes(down)
