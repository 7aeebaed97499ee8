"""Takes loaded weights apart again, so that tests can compare them by Hugging Face's names."""

from __future__ import annotations

import torch

from kvd.model.weights import ModelWeights
from kvd_kernels.weights import Linear, WeightMatrix, dequantize


def matrices(weights: ModelWeights) -> dict[str, WeightMatrix]:
    """Every matrix by its module name."""
    found: dict[str, WeightMatrix] = {"model.embed_tokens": weights.embedding}
    if not weights.spec.tied_embeddings:
        found["lm_head"] = weights.head.parts[0]
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        for names, linear in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.output),
            (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up),
            (("mlp.down_proj",), layer.down),
        ):
            assert len(names) == len(linear.parts)
            found |= {f"{prefix}.{name}": part for name, part in zip(names, linear.parts, strict=True)}
    return found


def floats(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Every weight, bias and norm as float32 by its tensor name."""
    found = {f"{module}.weight": dequantize(matrix) for module, matrix in matrices(weights).items()}
    found["model.norm.weight"] = weights.final_norm
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        found[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
        found[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        for names, linear in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.output),
            (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up),
            (("mlp.down_proj",), layer.down),
        ):
            found |= _biases(prefix, names, linear)
    return found


def _biases(prefix: str, names: tuple[str, ...], linear: Linear) -> dict[str, torch.Tensor]:
    if linear.bias is None:
        return {}
    sizes = [part.num_outputs for part in linear.parts]
    parts = torch.split(linear.bias, sizes)
    return {f"{prefix}.{name}.bias": part for name, part in zip(names, parts, strict=True)}


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, same shapes, same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
