"""The arithmetic of attention a8: what one split of a block table contributes to one query, and how splits merge.

Per query token and head (p: position of the query):

1. The query is rotated by the Hadamard matrix where the layer says so and rounded to integers q with one scale
   s_q: int8 for int8 keys; for 16-bit keys fixed-point numbers so wide that float64 holds the dot product exactly.
   16-bit keys and values become fixed-point per token and head as well, so they too have codes and a scale.
2. score[t] = (Σ q·k[t], exact) · (s_q · softmax scale) · s_k[t], each step rounded to float32;
   plus, for bias-free keys, (Σ c·r[t], exact in float64) · (s_c · softmax scale) · s_r[t], where c are the
   query's bias coefficients and r the position's row of the rope table, both in fixed point (see `rope`).
3. The table is cut into splits of 256 slots from its start. In a split: m = max of the visible scores,
   e = exp(score - m), l = tree sum of e, w = e · s_v rounded to integers with one scale per query, head and split
   (15 bits for int8 values, fixed-point width for 16-bit ones), out = (Σ w·v, exact) · s_w.
4. Splits are merged in ascending order: M = max(m_a, m_b), both sides scaled by exp(m - M), l and out added. A
   split in which a query sees nothing changes nothing. At the end out / l, or 0 where nothing was visible.

Nothing here depends on other rows: dot products are exact, everything else is element by element, the tree sum
does not notice zeros behind the last slot. So splits may be computed for one query tile or many sequences at
once, and a short split may be padded to any power of two of slots.

Stateless; engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, ElementType
from kvd_kernels.ops import AttentionSpec, RopeTable
from kvd_kernels.reference.elementary import exp_nonpositive, hadamard, tree_sum
from kvd_kernels.reference.kv_blocks import LayerBlocks, read_blocks, read_scales, to_float
from kvd_kernels.reference.quantize import exact_bits, fixed_point, round_to_levels
from kvd_kernels.reference.rope import bias_coefficients, position_rows

SPLIT_SLOTS = 256
SPLIT_ENTRIES = SPLIT_SLOTS // BLOCK_TOKENS
WEIGHT_LEVELS = 32767.0  # Σ |w·v| < 2^15 · 2^7 · 2^8 < 2^31


@dataclass(slots=True)
class Queries:
    """Queries of B sequences, rows grouped by KV head: row r of a KV head is (query token, head of its group).

    codes         float32 or float64 [B, KVH, R, D], scales float32 [B, KVH, R] times the softmax scale
    bias_codes    float64 [B, KVH, R, D] or None, bias_scales float32 [B, KVH, R] times the softmax scale
    positions     int64 [B, R]
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias_codes: torch.Tensor | None
    bias_scales: torch.Tensor | None
    positions: torch.Tensor

    def select(self, index: torch.Tensor | slice) -> Queries:
        """The queries of some sequences."""
        bias_codes = None if self.bias_codes is None else self.bias_codes[index]
        bias_scales = None if self.bias_scales is None else self.bias_scales[index]
        return Queries(self.codes[index], self.scales[index], bias_codes, bias_scales, self.positions[index])

    def rows(self, rows: slice) -> Queries:
        """Some rows of all sequences."""
        bias_codes = None if self.bias_codes is None else self.bias_codes[:, :, rows]
        bias_scales = None if self.bias_scales is None else self.bias_scales[:, :, rows]
        return Queries(
            self.codes[:, :, rows], self.scales[:, :, rows], bias_codes, bias_scales, self.positions[:, rows]
        )


@dataclass(slots=True)
class Split:
    """What the cache holds for B splits of W slots, as integers.

    k_codes    float32 or float64 [B, KVH, D, W], k_scales float32 [B, KVH, W]
    v_codes    float64 [B, KVH, W, D], v_scales float32 [B, KVH, W]
    positions  int64 [B, W]; exists  bool [B, W]: the slot is in use
    """

    k_codes: torch.Tensor
    k_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor
    positions: torch.Tensor
    exists: torch.Tensor
    bias_rows: torch.Tensor | None
    bias_row_scales: torch.Tensor | None


@dataclass(slots=True)
class Partial:
    """Softmax over some slots: peak and total [B, KVH, R], out [B, KVH, R, D]; peak is -inf where nothing is seen."""

    peak: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


def refuse_unsupported(element: ElementType) -> None:
    """NotImplementedError for an element type that a8 does not compute with."""
    if element not in ("int8", "fp16", "bf16"):
        raise NotImplementedError(f"the a8 reference does not support {element} KV; use int8, fp16 or bf16")


def prepare_queries(
    q: torch.Tensor, positions: torch.Tensor, layer: LayerBlocks, spec: AttentionSpec, half: int
) -> Queries:
    """q float32 [B, T, H, D] after RoPE, positions int64 [B, T] → rows (token, head in group) per KV head."""
    num_seqs, num_tokens, num_heads, head_dim = q.shape
    heads_per_group = num_heads // spec.num_kv_heads

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        x = x.view(num_seqs, num_tokens, spec.num_kv_heads, heads_per_group, *x.shape[3:])
        return x.transpose(1, 2).flatten(2, 3)

    plain = by_kv_head(q)
    rotated = hadamard(plain, layer.format.rotation_size) if layer.format.rotated else plain
    bits, _ = exact_bits(head_dim)
    if layer.format.k_type == "int8":
        codes, scales = round_to_levels(rotated, 127.0)
    else:
        codes, scales = fixed_point(rotated, bits)
        codes = codes.double()
    bias_codes = bias_scales = None
    if spec.key_bias is not None:
        coefficients = bias_coefficients(plain, spec.key_bias.unsqueeze(1), half)
        bias_codes, bias_scales = fixed_point(coefficients, bits)
        bias_codes, bias_scales = bias_codes.double(), bias_scales * spec.scale
    row_positions = positions.repeat_interleave(heads_per_group, dim=1)
    return Queries(codes, scales * spec.scale, bias_codes, bias_scales, row_positions)


def read_split(
    layer: LayerBlocks,
    spec: AttentionSpec,
    rope: RopeTable,
    entries: torch.Tensor,
    first_positions: torch.Tensor,
    num_slots: torch.Tensor,
) -> Split:
    """Decode B splits of E table entries: entries, first_positions int64 [B, E]; num_slots int64 [B] in use."""
    num_splits, num_entries = entries.shape
    width = num_entries * BLOCK_TOKENS
    head_dim = spec.head_dim
    exists = torch.arange(width) < num_slots[:, None]
    in_block = torch.arange(BLOCK_TOKENS)
    positions = (first_positions[:, :, None] + in_block).view(num_splits, width).masked_fill_(~exists, 0)
    # Unused entries name no block; any block will do, since what it holds is masked before it meets a number.
    entries = torch.where(exists[:, ::BLOCK_TOKENS], entries, 0)
    k, v = read_blocks(layer, entries)
    missing = None if bool(exists.all()) else ~exists[:, None, :]
    _, bits = exact_bits(head_dim)
    if layer.k_scales is not None:
        k_codes = torch.empty(k.shape, dtype=torch.float32).copy_(k)
        k_codes = k_codes.view(num_splits, -1, head_dim, width)
        k_scales = read_scales(layer.k_scales, entries)
    else:
        values = to_float(k, layer.format.k_type).reshape(num_splits, -1, head_dim, width).transpose(2, 3)
        k_codes, k_scales = fixed_point(values, bits)
        k_codes = k_codes.double().transpose(2, 3)
    if layer.v_scales is not None:
        v_codes = torch.empty(v.shape, dtype=torch.float64).copy_(v).view(num_splits, -1, width, head_dim)
        v_scales = read_scales(layer.v_scales, entries)
    else:
        values = to_float(v, layer.format.v_type).reshape(num_splits, -1, width, head_dim)
        if missing is not None:  # stale bytes may be NaN, which even a weight of 0 would let through
            values = values.masked_fill(missing.unsqueeze(-1), 0.0)
        v_codes, v_scales = fixed_point(values, exact_bits(SPLIT_SLOTS)[1])
        v_codes = v_codes.double()
    bias_rows = bias_row_scales = None
    if spec.key_bias is not None:
        bias_rows, bias_row_scales = fixed_point(position_rows(positions, rope, head_dim), bits)
        bias_rows = bias_rows.double().transpose(1, 2).unsqueeze(1)
        bias_row_scales = bias_row_scales[:, None, None, :]
    return Split(k_codes, k_scales, v_codes, v_scales, positions, exists, bias_rows, bias_row_scales)


def attend_split(
    queries: Queries, split: Split, spec: AttentionSpec, v_levels: float
) -> tuple[Partial, torch.Tensor] | None:
    """Softmax inside splits: (partial result, e float32 [B, KVH, R, W]); None when no query sees a slot."""
    visible = split.positions[:, None, :] <= queries.positions[:, :, None]
    if spec.group.window:
        visible &= split.positions[:, None, :] > queries.positions[:, :, None] - spec.group.window
    visible &= split.exists[:, None, :]
    if not bool(visible.any()):
        return None
    hidden = None if bool(visible.all()) else ~visible[:, None]
    scores = torch.matmul(queries.codes, split.k_codes).float()
    scores *= queries.scales.unsqueeze(-1)
    scores *= split.k_scales.unsqueeze(2)
    if queries.bias_codes is not None and split.bias_rows is not None:
        assert queries.bias_scales is not None
        assert split.bias_row_scales is not None
        from_bias = torch.matmul(queries.bias_codes, split.bias_rows).float()
        from_bias *= queries.bias_scales.unsqueeze(-1)
        from_bias *= split.bias_row_scales
        scores += from_bias
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    peak = scores.amax(-1)
    scores -= torch.where(peak == -torch.inf, 0.0, peak).unsqueeze(-1)
    e = exp_nonpositive(scores)
    total = tree_sum(e)
    weights = e * split.v_scales.unsqueeze(2)
    if hidden is not None:
        weights.masked_fill_(hidden, 0.0)
    codes, scales = round_to_levels(weights, v_levels)
    out = torch.matmul(codes.double(), split.v_codes).float()
    out *= scales.unsqueeze(-1)
    return Partial(peak, total, out), e


def merge(state: Partial, new: Partial) -> Partial:
    """Both softmax partials as one; rows in which `new` saw nothing keep their bits."""
    peak = torch.maximum(state.peak, new.peak)
    reference = torch.where(peak == -torch.inf, 0.0, peak)
    keep = exp_nonpositive(state.peak - reference)
    add = exp_nonpositive(new.peak - reference)
    skipped = new.peak == -torch.inf
    total = torch.where(skipped, state.total, state.total * keep + new.total * add)
    out = state.out * keep.unsqueeze(-1) + new.out * add.unsqueeze(-1)
    return Partial(peak, total, torch.where(skipped.unsqueeze(-1), state.out, out))
