"""What both reference backends share: moving rows and blocks, sampling, writing K and V. Engine thread."""

from __future__ import annotations

import torch

from kvd_kernels.ops import AttentionSpec, Batch, KVCache, Ops, RopeTable, SamplingBatch, SamplingResult
from kvd_kernels.reference import kv_blocks, norm, sampling
from kvd_kernels.reference.linear import gather_rows
from kvd_kernels.reference.rope import rotate
from kvd_kernels.weights import WeightMatrix


class ReferenceBase(Ops):
    """Ops whose statement is the same in every arithmetic: computed in float32, stored in `activation_dtype`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.views = kv_blocks.LayerViews()

    def prepare_embedding(self, weight: WeightMatrix) -> WeightMatrix:
        return weight

    def embed(self, batch: Batch, table: WeightMatrix, out: torch.Tensor) -> None:
        n = batch.num_tokens
        out[:n] = gather_rows(table, batch.token_ids[:n]).to(out.dtype)

    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        norm.rms_norm(n, x, weight, eps, out)

    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        norm.silu_mul(n, gate_up, out)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        n = batch.num_tokens
        if not n:
            return
        heads = qkv[:n].view(n, -1, spec.head_dim).float()
        last_k_head = spec.num_heads + spec.num_kv_heads
        rotated = rotate(heads[:, :last_k_head], batch.positions[:n].long(), rope)
        q_out[:n] = rotated[:, : spec.num_heads].flatten(1).to(q_out.dtype)
        slots = batch.groups[spec.group.group_id].write_slots[:n]
        layer = self.views.of(cache, spec)
        kv_blocks.write_tokens(layer, slots, rotated[:, spec.num_heads :], heads[:, last_k_head:])

    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        n = batch.num_logit_rows
        out[:n] = x[batch.logit_rows[:n]].to(out.dtype)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        return sampling.sample(logits, params)

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        kv_blocks.copy_block(cache, group_id, source, target, num_tokens)
