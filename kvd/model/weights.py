"""The weights of a model as the loaders deliver them and the decoder consumes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd.model.spec import ModelSpec
from kvd_kernels.weights import Linear, WeightMatrix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Norm weights are float32 [hidden].

    `qkv` has the parts q, k, v (bias: q, k, v side by side) and `gate_up` the parts gate, up.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`head` has one part; with tied embeddings it is the embedding matrix itself (same object)."""

    spec: ModelSpec
    embedding: WeightMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    fingerprint: str  # hex digest over the checkpoint's identity: part of every cache key
