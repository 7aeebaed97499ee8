"""The gate of the int8 KV cache: KL ≤ 0.002 and perplexity within 0.3% of a 16-bit cache, through the real decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvd.model.files import ModelFiles
from kvd.model.weights import LayerWeights, ModelWeights
from kvd.tools import perplexity
from kvd.tools.eval import LARGEST_MEAN_KL, is_close
from kvd.tools.perplexity import Divergence, build_scorer, kl_divergence
from kvd.tools.wrapped_ops import FloatLinearOps
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import Linear
from tests.model.checkpoints import make_qwen2, rewrite_tensors
from tests.tools.conftest import load

GIANT = 200.0
HEAD_DIM = 64
# Both halves of two slow rotary pairs: there a bias stays nearly constant over positions, as in trained models.
BIASED_CHANNELS = (26, 26 + HEAD_DIM // 2, 31, 31 + HEAD_DIM // 2)


def compare(weights: ModelWeights, token_ids: list[int], kv_cache_dtype: str, *, window: int = 2048) -> Divergence:
    """That format against a 16-bit cache, both with float32 linears."""
    ops = FloatLinearOps(create_ops("cpu"))
    reference, judged = (build_scorer(weights, ops, dtype, window=window) for dtype in ("fp16", kv_cache_dtype))
    return kl_divergence(reference, [judged], token_ids)[0]


def planted_qwen2(path: Path) -> Path:
    """A tiny Qwen2 with key biases of ±200 in four channels of each head.

    Queries are small there, as training makes them, so that scores still depend on the other channels; queries and
    output head are enlarged so that attention decides what is predicted.
    """
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "rope_theta": 1e6}
    make_qwen2(path, seed=11, **shape)
    tensors = load_file(path / "model.safetensors")
    changes = {"lm_head.weight": tensors["lm_head.weight"] * 3}
    for index in range(2):
        prefix = f"model.layers.{index}.self_attn"
        key_bias = tensors[f"{prefix}.k_proj.bias"].view(-1, HEAD_DIM).clone()
        query = (tensors[f"{prefix}.q_proj.weight"] * 2).view(-1, HEAD_DIM, 128)
        query_bias = tensors[f"{prefix}.q_proj.bias"].view(-1, HEAD_DIM).clone()
        for sign, channel in zip((1, -1, 1, -1), BIASED_CHANNELS, strict=True):
            key_bias[:, channel] = sign * GIANT
            query[:, channel] *= 0.01
            query_bias[:, channel] = 0
        changes |= {
            f"{prefix}.k_proj.bias": key_bias.flatten(),
            f"{prefix}.q_proj.weight": query.flatten(0, 1),
            f"{prefix}.q_proj.bias": query_bias.flatten(),
            f"{prefix}.v_proj.weight": tensors[f"{prefix}.v_proj.weight"] * 2,
        }
    rewrite_tensors(path, **{name.replace(".", "__"): value for name, value in changes.items()})
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelWeights, list[int]]:
    folder = tmp_path_factory.mktemp("planted")
    files, weights = load(planted_qwen2(folder / "model"), folder / "home")
    return weights, perplexity.tokenize(files, perplexity.read_text("evaluation"))[:384]


def test_giant_key_biases_pass_with_the_remedy(planted: tuple[ModelWeights, list[int]]) -> None:
    weights, token_ids = planted
    assert weights.spec.kv_format("auto") == weights.spec.kv_format("int8")
    result = compare(weights, token_ids, "auto")
    # Not the perplexity: a random model predicts no text, so that its losses are large and mean nothing.
    assert 0 < result.mean_kl <= LARGEST_MEAN_KL, result


def test_giant_key_biases_fail_without_the_remedy(planted: tuple[ModelWeights, list[int]]) -> None:
    weights, token_ids = planted
    result = compare(weights, token_ids, "int8_plain")
    assert result.mean_kl > 5 * LARGEST_MEAN_KL, result


def test_attention_of_the_planted_model_matters(planted: tuple[ModelWeights, list[int]]) -> None:
    """Without what its heads read, the model predicts something else: the gate above is no formality."""
    weights, token_ids = planted
    silent = tuple(replace(layer, output=_times_zero(layer.output)) for layer in weights.layers)
    ops = create_ops("cpu")
    loud, muted = (build_scorer(model, ops, "fp16", window=384) for model in (weights, replace(weights, layers=silent)))
    (result,) = kl_divergence(loud, [muted], token_ids)
    assert result.mean_kl > 0.5


def _times_zero(linear: Linear) -> Linear:
    return Linear(tuple(replace(part, values=part.values * 0) for part in linear.parts))  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def default_tokens(default_model_files: ModelFiles) -> list[int]:
    return perplexity.tokenize(default_model_files, perplexity.read_text("evaluation"))


def test_default_model_passes(default_weights: ModelWeights, default_tokens: list[int]) -> None:
    result = compare(default_weights, default_tokens[:160], "auto", window=160)
    assert 0 < result.mean_kl <= LARGEST_MEAN_KL, result


@pytest.mark.full
def test_default_model_passes_in_long_contexts(default_weights: ModelWeights, default_tokens: list[int]) -> None:
    result = compare(default_weights, default_tokens[:2048], "auto")
    assert is_close(result), result
    assert result.top1_agreement > 0.97


@pytest.mark.full
def test_default_model_with_giant_key_biases(default_weights: ModelWeights, default_tokens: list[int]) -> None:
    """Real weights and a real text; the biases sit in the slowest rotary pairs, where they hardly change a score."""
    weights = with_key_biases(default_weights)
    token_ids = default_tokens[:512]
    remedied, plain = (compare(weights, token_ids, dtype, window=512) for dtype in ("auto", "int8_plain"))
    assert is_close(remedied), remedied
    assert plain.mean_kl > 5 * LARGEST_MEAN_KL, plain


def with_key_biases(weights: ModelWeights) -> ModelWeights:
    """The same model as a Qwen2: q, k and v have biases, zero but for giant ones in four channels of each key head."""
    spec = weights.spec
    keys = torch.zeros(spec.num_kv_heads, spec.head_dim)
    half = spec.head_dim // 2
    for sign, channel in zip((1, -1, 1, -1), (half - 2, half - 1, spec.head_dim - 2, spec.head_dim - 1), strict=True):
        keys[:, channel] = sign * GIANT
    bias = torch.cat([torch.zeros(spec.num_heads * spec.head_dim), keys.flatten(), torch.zeros(keys.numel())])

    def biased(layer: LayerWeights) -> LayerWeights:
        return replace(layer, qkv=replace(layer.qkv, bias=bias.clone()))

    return replace(
        weights,
        spec=replace(spec, architecture="qwen2", qkv_bias=True),
        layers=tuple(biased(layer) for layer in weights.layers),
    )
