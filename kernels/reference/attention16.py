"""Attention a16: the plain statement of what the GPU kernels compute. No promise on bits.

Keys and values are decoded to float32, the query keeps its 16 bits, scores, softmax and output accumulate in
float32. One sequence and one head group at a time, dense: an oracle, not a path to serve from. Engine thread.
"""

from __future__ import annotations

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import AttentionSpec, Batch, RopeTable
from kvd_kernels.reference.elementary import hadamard
from kvd_kernels.reference.kv_blocks import LayerBlocks, read_blocks, read_scales
from kvd_kernels.reference.rope import bias_coefficients, position_rows


def _decode(layer: LayerBlocks, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks int32 [E] → K, V float32 [KVH, E · 16, head_dim]."""
    table = entries.unsqueeze(0)
    k, v = read_blocks(layer, table)
    if layer.k_scales is not None:
        k = k * read_scales(layer.k_scales, table).unsqueeze(-1)
    if layer.v_scales is not None:
        v = v * read_scales(layer.v_scales, table).unsqueeze(-1)
    return k[0], v[0]


def attend_dense(
    batch: Batch,
    q: torch.Tensor,
    rope: RopeTable,
    layer: LayerBlocks,
    spec: AttentionSpec,
    out: torch.Tensor,
    block_mass: torch.Tensor | None = None,
) -> None:
    """Causal paged attention as the ops contract states it, for 16-bit q and out."""
    tables = batch.groups[spec.group.group_id]
    starts: list[int] = batch.query_starts[: batch.num_seqs + 1].tolist()
    if block_mass is not None:
        block_mass[: batch.num_seqs] = 0
    for s in range(batch.num_seqs):
        tokens = slice(starts[s], starts[s + 1])
        num_tokens, num_slots = tokens.stop - tokens.start, int(tables.num_slots[s])
        if not num_tokens:
            continue
        if not num_slots:
            out[tokens] = 0
            continue
        num_entries = -(-num_slots // BLOCK_TOKENS)
        k, v = _decode(layer, tables.block_tables[s, :num_entries])
        k, v = k[:, :num_slots], v[:, :num_slots]
        first = tables.first_positions[s, :num_entries].long()
        key_positions = (first[:, None] + torch.arange(BLOCK_TOKENS)).flatten()[:num_slots]
        query_positions = batch.positions[tokens].long()[:, None]
        visible = key_positions <= query_positions
        if spec.group.window:
            visible &= key_positions > query_positions - spec.group.window

        plain = q[tokens].float().view(num_tokens, spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        rotated = hadamard(plain, layer.format.rotation_size) if layer.format.rotated else plain
        scores = rotated @ k.transpose(1, 2).unsqueeze(1)
        if spec.key_bias is not None:
            half = rope.cos.shape[1]
            coefficients = bias_coefficients(plain, spec.key_bias[:, None, None], half)
            scores += coefficients @ position_rows(key_positions, rope, spec.head_dim).t()
        scores = (scores * spec.scale).masked_fill_(~visible, -torch.inf)
        weights = torch.nan_to_num(scores.softmax(-1)) if not visible.any(1).all() else scores.softmax(-1)
        values = weights @ v.unsqueeze(1)
        out[tokens] = values.permute(2, 0, 1, 3).reshape(num_tokens, -1).to(out.dtype)
        if block_mass is not None:
            per_slot = torch.zeros(num_entries * BLOCK_TOKENS)
            per_slot[:num_slots] = weights.sum((0, 1, 2))
            block_mass[s, :num_entries] = per_slot.view(num_entries, BLOCK_TOKENS).sum(1)
