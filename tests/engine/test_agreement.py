"""The decoder computes what the architecture says: checked against transformers on tiny random checkpoints.

Two ways of computing differ by rounding only, so that every tolerance has one source:
  float checkpoints   16-bit cache (11 significant bits of K and V) and fixed-point linears
  AWQ                 besides, int8 activations per group: a random model averages nothing out, so a step of 1/127 shows
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvd.cache.store import allocate_cache
from kvd.core import BLOCK_SIZE, PlanItem, Request, SamplingParams, StepPlan
from kvd.engine.runner import Runner
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd_kernels.registry import create_ops
from tests.engine.harness import Recorder
from tests.model.checkpoints import (
    load_reference,
    make_awq,
    make_llama,
    make_qwen2,
    reference_tensors,
    rewrite_tensors,
)

NUM_PROMPT, NUM_DECODED = 37, 12
FLOAT_TOLERANCE, QUANTIZED_TOLERANCE = 1e-3, 4e-2


def our_logits(path: Path, tmp_path: Path, token_ids: list[int], *, kv_cache_dtype: str) -> np.ndarray:
    """float32 [NUM_DECODED + 1, vocab]: after a prefill in two chunks, then token by token."""
    quiet = QuietProgress()
    files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=quiet)
    spec = read_spec(files)
    weights = load_weights(files, spec, progress=quiet, head_int8=False)
    decoder = Decoder(
        weights,
        create_ops("cpu"),
        spec.kv_format(kv_cache_dtype),
        max_tokens=64,
        max_seqs=2,
        max_positions=256,
        progress=quiet,
    )
    recorder = Recorder()
    cache = allocate_cache(decoder.kv_format, 16, decoder.ops.device)
    runner = Runner(decoder, cache, max_blocks_per_request=16, draw_seed=lambda: 0, observer=recorder)
    request = Request("it", tuple(token_ids[:NUM_PROMPT]), SamplingParams(max_tokens=99, temperature=0.0), 0.0)
    bounds = [0, 20, *range(NUM_PROMPT, NUM_PROMPT + NUM_DECODED + 1)]
    table = (7, 3, 11, 2)  # scattered on purpose
    for step_id, (start, stop) in enumerate(itertools.pairwise(bounds)):
        blocks = table[: -(-stop // BLOCK_SIZE)]
        positions = range(0, len(blocks) * BLOCK_SIZE, BLOCK_SIZE)
        groups = len(decoder.kv_format.groups)
        item = PlanItem(
            "it", 0, start, tuple(token_ids[start:stop]), (blocks,) * groups, (positions,) * groups, stop >= NUM_PROMPT
        )
        runner.run(StepPlan(step_id, (item,), (request,) if step_id == 0 else ()))
    rows = recorder.rows_of("it")
    return np.stack([np.frombuffer(rows[position], dtype=np.float32) for position in sorted(rows)])


def their_logits(path: Path, token_ids: list[int]) -> np.ndarray:
    model = load_reference(path)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return logits[NUM_PROMPT - 1 : NUM_PROMPT + NUM_DECODED].numpy()


def assert_agree(path: Path, tmp_path: Path, tolerance: float, *, kv_cache_dtype: str = "fp16") -> None:
    vocab_size = 320
    token_ids = np.random.default_rng(3).integers(3, vocab_size, NUM_PROMPT + NUM_DECODED).tolist()
    ours = our_logits(path, tmp_path, token_ids, kv_cache_dtype=kv_cache_dtype)
    theirs = their_logits(path, token_ids)
    assert ours.shape == theirs.shape
    spread = theirs.std()
    assert spread > 0.01, "a model whose logits are all alike proves nothing"
    error = np.sqrt(np.mean((ours - theirs) ** 2)) / spread
    assert error < tolerance, f"the logits differ by {error:.5f} of their spread"


LLAMA3_ROPE = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
FLOAT_MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "llama-tied": (make_llama, {"tie_word_embeddings": True}),
    "llama-rope-llama3": (make_llama, LLAMA3_ROPE),
    "llama-head-dim-48": (make_llama, {"head_dim": 48}),
    "llama-no-gqa": (make_llama, {"num_key_value_heads": 4}),
    "llama-one-kv-head": (make_llama, {"num_key_value_heads": 1}),
    "qwen2": (make_qwen2, {}),
    "qwen2-tied": (make_qwen2, {"tie_word_embeddings": True}),
    "qwen2-window": (make_qwen2, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2-window-off": (make_qwen2, {"use_sliding_window": False, "sliding_window": 16}),
}


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_checkpoints_agree_with_transformers(name: str, tmp_path: Path) -> None:
    make, config = FLOAT_MODELS[name]
    assert_agree(make(tmp_path / "model", **config), tmp_path, FLOAT_TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_int8_keys_and_values_stay_close(name: str, tmp_path: Path) -> None:
    """The int8 cache on top: q, K and V rounded to 8 bits after the rotation; the bias comes back exactly."""
    make, config = FLOAT_MODELS[name]
    assert_agree(make(tmp_path / "model", **config), tmp_path, 1e-2, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("base", "config"),
    [
        ("llama", {"group_size": 32}),
        ("llama", {"group_size": 64}),
        ("llama", {"group_size": 128}),
        ("llama", {"group_size": -1}),
        ("llama", {"group_size": 64, "scale_dtype": torch.bfloat16}),
        ("llama", {"group_size": 64, "skip": ("v_proj", "down_proj")}),
        ("qwen2", {"group_size": 64}),
        ("qwen2", {"group_size": 32, "tie_word_embeddings": True}),
    ],
)
def test_awq_agrees_with_its_own_dequantised_weights(base: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert_agree(make_awq(tmp_path / "model", base=base, **config), tmp_path, QUANTIZED_TOLERANCE)


def test_activations_beyond_sixteen_bits_stay_finite(tmp_path: Path) -> None:
    """Weights that drive a half-precision residual stream beyond 65,504 ("!!!!!"): float32 carries them."""
    path = make_llama(tmp_path / "model")
    huge = {
        f"model__layers__{layer}__mlp__down_proj__weight": 1e6
        * reference_tensors(path)[f"model.layers.{layer}.mlp.down_proj.weight"]
        for layer in range(2)
    }
    rewrite_tensors(path, **huge)
    with torch.inference_mode():
        model = load_reference(path)
        hidden = model.model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    assert max(float(state.abs().max()) for state in hidden[:-1]) > 65504
    assert_agree(path, tmp_path, FLOAT_TOLERANCE)
