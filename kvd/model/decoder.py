"""The generic decoder: one list of op calls for every supported architecture.

Buffers are allocated once for the largest step; a step touches their first live rows only. The call list does
not depend on what is in the batch, so a backend can record it once and replay it. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvd.model.progress import Progress
from kvd.model.rope import build_rope_table
from kvd.model.weights import LayerWeights, ModelWeights
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import AttentionSpec, Batch, KVCache, Ops


@dataclass(slots=True)
class _Layer:
    """Handles of one block, packed for the backend."""

    attention_norm: torch.Tensor
    qkv: Any
    output: Any
    mlp_norm: torch.Tensor
    gate_up: Any
    down: Any
    attention: AttentionSpec


class Decoder:
    """Weights packed for one backend, and the buffers of the largest step.

    max_tokens, max_seqs: the largest step. max_positions: the served context length.
    """

    def __init__(
        self,
        weights: ModelWeights,
        ops: Ops,
        kv_format: KVFormat,
        *,
        max_tokens: int,
        max_seqs: int,
        max_positions: int,
        progress: Progress,
    ) -> None:
        spec = weights.spec
        self.spec = spec
        self.ops = ops
        self.kv_format = kv_format
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self._rope = build_rope_table(spec.rope, spec.head_dim, max_positions, ops.device)
        self._embedding = ops.prepare_embedding(weights.embedding)
        self._final_norm = weights.final_norm.to(ops.device)
        self._layers: list[_Layer] = []
        with progress.task("Packing weights", spec.num_layers + 1, "layers") as task:
            for index, layer in enumerate(weights.layers):
                self._layers.append(self._pack(index, layer))
                task.advance(1)
            self._head = ops.prepare_linear(weights.head)
            task.advance(1)

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.zeros((count, width), dtype=ops.activation_dtype, device=ops.device)

        attention_width = spec.num_heads * spec.head_dim
        self._hidden = rows(max_tokens, spec.hidden_size)
        self._normed = rows(max_tokens, spec.hidden_size)
        self._qkv = rows(max_tokens, attention_width + 2 * spec.num_kv_heads * spec.head_dim)
        self._q = rows(max_tokens, attention_width)
        self._attended = rows(max_tokens, attention_width)
        self._gate_up = rows(max_tokens, 2 * spec.intermediate_size)
        self._gated = rows(max_tokens, spec.intermediate_size)
        self._last = rows(max_seqs, spec.hidden_size)
        self._logits = torch.zeros((max_seqs, spec.vocab_size), dtype=torch.float32, device=ops.device)

    def _pack(self, index: int, layer: LayerWeights) -> _Layer:
        spec = self.spec
        group, layer_format = self.kv_format.locate(index)
        qkv, key_bias = layer.qkv, None
        if layer_format.bias_free:
            # K goes to the cache without its bias, which attention adds back exactly.
            assert qkv.bias is not None
            first = spec.num_heads * spec.head_dim
            last = first + spec.num_kv_heads * spec.head_dim
            key_bias = qkv.bias[first:last].reshape(spec.num_kv_heads, spec.head_dim).clone().to(self.ops.device)
            bias = qkv.bias.clone()
            bias[first:last] = 0
            qkv = replace(qkv, bias=bias)
        attention = AttentionSpec(
            index, group, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, key_bias
        )
        return _Layer(
            layer.attention_norm.to(self.ops.device),
            self.ops.prepare_linear(qkv),
            self.ops.prepare_linear(layer.output),
            layer.mlp_norm.to(self.ops.device),
            self.ops.prepare_linear(layer.gate_up),
            self.ops.prepare_linear(layer.down),
            attention,
        )

    def forward(self, batch: Batch, cache: KVCache, block_mass: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all live tokens, write their K and V, and return the logits buffer, float32 [max_seqs, vocab].

        Rows from num_logit_rows on are undefined, and the next call overwrites the others. Sizes are handed on to the
        ops and not looked at, so that the pass can be recorded (`Ops.record`).
        block_mass: float32 [layers of group 0, max_seqs, max_blocks], when given: `Ops.attend` fills one of its parts
        for each layer of group 0, in their order. The logits stay the same.
        """
        masses = {} if block_mass is None else self._by_layer(block_mass)
        ops, n, eps = self.ops, batch.num_tokens, self.spec.rms_norm_eps
        hidden = self._hidden
        ops.embed(batch, self._embedding, hidden)
        for layer in self._layers:
            ops.rms_norm(n, hidden, layer.attention_norm, eps, self._normed)
            ops.linear(n, self._normed, layer.qkv, self._qkv)
            ops.rope_and_write(batch, self._qkv, self._rope, cache, layer.attention, self._q)
            mass = masses.get(layer.attention.layer_index)
            ops.attend(batch, self._q, self._rope, cache, layer.attention, self._attended, mass)
            ops.linear(n, self._attended, layer.output, hidden, residual=hidden)
            ops.rms_norm(n, hidden, layer.mlp_norm, eps, self._normed)
            ops.linear(n, self._normed, layer.gate_up, self._gate_up)
            ops.silu_mul(n, self._gate_up, self._gated)
            ops.linear(n, self._gated, layer.down, hidden, residual=hidden)
        rows = batch.num_logit_rows
        ops.gather(batch, hidden, self._last)
        ops.rms_norm(rows, self._last, self._final_norm, eps, self._last)
        ops.linear(rows, self._last, self._head, self._logits)
        return self._logits

    @torch.inference_mode()
    def logits_of(self, first: int, num: int) -> torch.Tensor:
        """The logits of tokens `first` … `first + num - 1` of the latest pass, at most max_seqs, whoever wanted them.

        They take the place of the pass's own in the logits buffer, which is returned; more tokens of the same pass may
        be asked for.
        """
        assert num <= self.max_seqs
        hidden = self._hidden[first : first + num]  # nothing behind the last layer writes to it
        self.ops.rms_norm(num, hidden, self._final_norm, self.spec.rms_norm_eps, self._last)
        self.ops.linear(num, self._last, self._head, self._logits)
        return self._logits

    def _by_layer(self, block_mass: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parts of `block_mass` by the layer of group 0 that they belong to."""
        layers = self.kv_format.groups[0].layers
        return {index: part for (index, _), part in zip(layers, block_mass, strict=True)}
