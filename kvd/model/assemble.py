"""Builds `ModelWeights` from any checkpoint format, in the order in which the decoder uses them.

Purpose: one place that knows which matrices a model has; a format only has to find one by its name.
Owner thread: the one that loads the model.
Invariant: shapes match the spec, every value is finite, and no tensor that the checkpoint holds is dropped
without a rule that says why.

Module and tensor names are Hugging Face's ("model.layers.0.self_attn.q_proj"), whatever the format.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvd.errors import CheckpointError
from kvd.model.config_reader import BiasUse
from kvd.model.progress import Progress
from kvd.model.spec import ModelSpec
from kvd.model.weights import LayerWeights, ModelWeights
from kvd_kernels.weights import FloatWeight, Int8Weight, Linear, WeightMatrix, quantize_int8

HEAD_GROUP_SIZES = (128, 64, 32)
QUANTIZE_ROWS = 8192  # rows of a head that are float32 at one time


class WeightSource(Protocol):
    """A checkpoint that delivers matrices and vectors by Hugging Face's names."""

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        """The weight of a module; CheckpointError naming file and tensor when missing or misshapen."""
        ...

    def vector(self, tensor: str, size: int) -> torch.Tensor:
        """A norm weight or bias as float32 [size]; errors as above."""
        ...

    def has(self, tensor: str) -> bool: ...

    def where(self, tensor: str) -> str:
        """File and tensor, for messages."""
        ...

    def finish(self) -> None:
        """Raise CheckpointError when the checkpoint holds tensors that nobody asked for."""
        ...


def assemble(
    source: WeightSource,
    spec: ModelSpec,
    biases: BiasUse,
    *,
    fingerprint: str,
    head_int8: bool,
    progress: Progress,
) -> ModelWeights:
    """All weights of a model. With `head_int8` an embedding or head in 16 or 32 bits is rounded to int8 per
    group; with tied embeddings the head is the embedding object itself."""
    with progress.task("Loading weights", spec.num_layers + 1, "layers") as task:
        layers = []
        for index in range(spec.num_layers):
            layers.append(_assemble_layer(source, spec, biases, index))
            task.advance(1)
        embedding = source.matrix("model.embed_tokens", spec.vocab_size, spec.hidden_size)
        embedding = _as_head(embedding) if head_int8 else embedding
        head = embedding
        if not spec.tied_embeddings:
            head = source.matrix("lm_head", spec.vocab_size, spec.hidden_size)
            head = _as_head(head) if head_int8 else head
        head_bias = _bias(source, ["lm_head"], [spec.vocab_size], expected=False)
        final_norm = source.vector("model.norm.weight", spec.hidden_size)
        task.advance(1)
    source.finish()
    return ModelWeights(spec, embedding, tuple(layers), final_norm, Linear((head,), head_bias), fingerprint)


def _assemble_layer(source: WeightSource, spec: ModelSpec, biases: BiasUse, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}"
    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def linear(modules: list[str], outputs: list[int], num_inputs: int, has_bias: bool) -> Linear:
        names = [f"{prefix}.{module}" for module in modules]
        parts = tuple(source.matrix(name, size, num_inputs) for name, size in zip(names, outputs, strict=True))
        return Linear(parts, _bias(source, names, outputs, expected=has_bias))

    projections = [f"self_attn.{letter}_proj" for letter in "qkv"]
    return LayerWeights(
        attention_norm=source.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=linear(projections, [queries, keys, keys], hidden, biases.qkv),
        output=linear(["self_attn.o_proj"], [hidden], queries, biases.output),
        mlp_norm=source.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [width, width], hidden, biases.mlp),
        down=linear(["mlp.down_proj"], [hidden], width, biases.mlp),
    )


def _bias(source: WeightSource, modules: list[str], sizes: list[int], *, expected: bool) -> torch.Tensor | None:
    """The biases of a linear, side by side. Quantisers write zeros where a model has no bias: those are
    dropped, and anything else that the config does not mention is refused."""
    names = [f"{module}.bias" for module in modules]
    if expected:
        return torch.cat([source.vector(name, size) for name, size in zip(names, sizes, strict=True)])
    for name, size in zip(names, sizes, strict=True):
        if source.has(name) and bool(source.vector(name, size).any()):
            raise CheckpointError(f"{source.where(name)}: a bias that the config does not mention")
    return None


def head_group_size(hidden_size: int) -> int:
    """Group for an int8 head: 128, 64 or 32, else the largest divisor of at most 128."""
    for group_size in HEAD_GROUP_SIZES:
        if hidden_size % group_size == 0:
            return group_size
    return max(divisor for divisor in range(1, 129) if hidden_size % divisor == 0)


def _as_head(weight: WeightMatrix) -> WeightMatrix:
    """An embedding or head of floats as int8; a quantised one stays as it is."""
    if not isinstance(weight, FloatWeight):
        return weight
    group_size = head_group_size(weight.num_inputs)
    values = weight.values
    pieces = [
        quantize_int8(values[first : first + QUANTIZE_ROWS], group_size)
        for first in range(0, weight.num_outputs, QUANTIZE_ROWS)
    ]
    codes = torch.cat([piece.codes for piece in pieces])
    return Int8Weight(codes, torch.cat([piece.scales for piece in pieces]), group_size)
