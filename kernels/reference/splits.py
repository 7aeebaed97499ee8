"""The arithmetic of attention a8: what one split of the positions contributes to one query, and how splits merge.

Per query token and head (p: position of the query):

1. The query is rotated by the Hadamard matrix where the layer says so and rounded to integers q with one scale
   s_q: int8 for int8 keys; for 16-bit keys fixed-point numbers so wide that float64 holds the dot product exactly.
   16-bit keys and values become fixed-point per token and head as well, so they too have codes and a scale.
2. score[t] = (Σ q·k[t], exact) · (s_q · softmax scale) · s_k[t], each step rounded to float32;
   plus, for bias-free keys, (Σ c·r[t], exact in float64) · (s_c · softmax scale) · s_r[t], where c are the
   query's bias coefficients and r the position's row of the rope table, both in fixed point (see `rope`).
3. Positions are cut into splits of 256: split s holds 256·s … 256·s + 255, and a table entry that begins at f lies
   at place f / 16 % 16 of its split, whatever else the table holds. In a split: m = max of the visible scores,
   e = exp(score - m), l = tree sum of e, w = e · s_v rounded to integers with one scale per query, head and split
   (15 bits for int8 values, fixed-point width for 16-bit ones), out = (Σ w·v, exact) · s_w.
4. Splits are merged in ascending order: M = max(m_a, m_b), both sides scaled by exp(m - M), l and out added. A
   split in which a query sees nothing changes nothing: it brings l = 0, out = 0 and the factors 1 and 0. At the
   end out / l + 0 (so that the sign of a zero is always +), or 0 where nothing was visible.

Nothing here depends on other rows: dot products are exact, everything else is element by element, the tree sum
does not notice zeros behind the last slot. So splits may be computed for one query tile or many sequences at
once, and a short split may be padded to any power of two of slots. A place without an entry counts as a slot that
no query sees: a table that has lost entries which the window hides gives the bytes of the whole table.

Stateless; engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, LayerFormat
from kvd_kernels.ops import AttentionSpec, RopeTable
from kvd_kernels.reference.elementary import exp_nonpositive, hadamard, tree_sum
from kvd_kernels.reference.kv_blocks import LayerBlocks, read_blocks, read_scales
from kvd_kernels.reference.quantize import KV_LEVELS, exact_bits, fixed_point, round_to_levels
from kvd_kernels.reference.rope import bias_coefficients, position_rows

SPLIT_SLOTS = 256
SPLIT_ENTRIES = SPLIT_SLOTS // BLOCK_TOKENS
WEIGHT_LEVELS = 32767.0  # Σ |w·v| < 2^15 · 2^7 · 2^8 < 2^31
LOWEST = torch.finfo(torch.float32).min  # stands in for -inf where -inf - -inf would be NaN
HIDDEN_POSITION = 2**31 - 1  # beyond every query
_NEGATIVE_INFINITY_BITS = -0x800000  # as int32: 0xff800000


@dataclass(slots=True)
class Queries:
    """Queries of B sequences, rows grouped by KV head: row r of a KV head is (query token, head of its group).

    codes         float32 or float64 [B, KVH, R, D], scales float32 [B, KVH, R] times the softmax scale
    bias_codes    float64 [B, KVH, R, D] or None, bias_scales float32 [B, KVH, R] times the softmax scale
    positions     int32 [B, R]
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias_codes: torch.Tensor | None
    bias_scales: torch.Tensor | None
    positions: torch.Tensor

    def select(self, sequences: torch.Tensor) -> Queries:
        """The queries of some sequences, int64 [any]."""
        bias_codes = None if self.bias_codes is None else self.bias_codes[sequences]
        bias_scales = None if self.bias_scales is None else self.bias_scales[sequences]
        return Queries(
            self.codes[sequences], self.scales[sequences], bias_codes, bias_scales, self.positions[sequences]
        )

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

    k_codes    float32 or float64 [B, KVH, W, D], k_scales float32 [B, KVH, W]
    v_codes    float32 (int8 values) or float64 [B, KVH, W, D], v_scales float32 [B, KVH, W]
    bias_rows  float64 [B, W, D] or None: fixed-point rows of the rope table, bias_row_scales float32 [B, W]
    positions  int32 [B, W]; beyond every query where a slot is not in use
    """

    k_codes: torch.Tensor
    k_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor
    bias_rows: torch.Tensor | None
    bias_row_scales: torch.Tensor | None
    positions: torch.Tensor


@dataclass(slots=True)
class Partial:
    """Softmax over some slots: peak and total [B, KVH, R], out [B, KVH, R, D]; peak is -inf where nothing is seen."""

    peak: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor

    def select(self, index: torch.Tensor | slice | int) -> Partial:
        return Partial(self.peak[index], self.total[index], self.out[index])


def refuse_unsupported(layer: LayerFormat) -> None:
    """NotImplementedError for an element type that a8 does not compute with."""
    for element in (layer.k_type, layer.v_type):
        if element not in ("int8", "fp16", "bf16"):
            raise NotImplementedError(f"the a8 reference does not support {element} KV; use int8, fp16 or bf16")


def prepare_queries(
    q: torch.Tensor, positions: torch.Tensor, layer: LayerFormat, spec: AttentionSpec, half: int
) -> Queries:
    """q float32 [B, T, H, D] after RoPE, positions int32 [B, T]; half: rotary_dim / 2."""
    num_seqs, num_tokens, num_heads, head_dim = q.shape
    heads_per_group = num_heads // spec.num_kv_heads
    plain = q.view(num_seqs, num_tokens, spec.num_kv_heads, heads_per_group, head_dim)
    plain = plain.transpose(1, 2).flatten(2, 3)
    rotated = hadamard(plain, layer.rotation_size) if layer.rotated else plain
    bits, _ = exact_bits(head_dim)
    if layer.k_type == "int8":
        codes, scales = round_to_levels(rotated, KV_LEVELS)
    else:
        codes, scales = fixed_point(rotated, bits)
        codes = codes.double()
    bias_codes = bias_scales = None
    if spec.key_bias is not None:
        coefficients = bias_coefficients(plain, spec.key_bias.unsqueeze(1), half)
        bias_codes, bias_scales = fixed_point(coefficients, bits)
        bias_codes, bias_scales = bias_codes.double(), bias_scales.mul_(spec.scale)
    row_positions = positions.repeat_interleave(heads_per_group, dim=1)
    return Queries(codes, scales.mul_(spec.scale), bias_codes, bias_scales, row_positions)


def read_split(
    layer: LayerBlocks, spec: AttentionSpec, rope: RopeTable, entries: torch.Tensor, positions: torch.Tensor
) -> Split:
    """Decode B splits of E places.

    entries: int32 [B, E] block ids, any at all for a place of which no slot is in use. positions: int32 [B, E · 16],
    HIDDEN_POSITION for slots that are not in use.
    """
    unused = positions == HIDDEN_POSITION
    # Places without a block read any that exists. What unused slots hold is cleared before it meets a number, since
    # stale bytes may spell NaN, which even a weight of 0 would let through.
    entries = entries.masked_fill(unused[:, ::BLOCK_TOKENS], 0)
    unused = unused.unsqueeze(1)
    k, v = read_blocks(layer, entries)
    _, bits = exact_bits(spec.head_dim)
    if layer.k_scales is not None:
        k_codes = k
        k_scales = read_scales(layer.k_scales, entries).masked_fill_(unused, 0.0)
    else:
        k_codes, k_scales = fixed_point(k.masked_fill_(unused.unsqueeze(3), 0.0), bits)
        k_codes = k_codes.double()
    if layer.v_scales is not None:
        v_codes = v
        v_scales = read_scales(layer.v_scales, entries).masked_fill_(unused, 0.0)
    else:
        v_codes, v_scales = fixed_point(v.masked_fill_(unused.unsqueeze(3), 0.0), exact_bits(SPLIT_SLOTS)[1])
        v_codes = v_codes.double()
    bias_rows = bias_row_scales = None
    if spec.key_bias is not None:
        known = positions.clamp(max=rope.cos.shape[0] - 1)
        bias_rows, bias_row_scales = fixed_point(position_rows(known, rope, spec.head_dim), bits)
        bias_rows = bias_rows.double()
    return Split(k_codes, k_scales, v_codes, v_scales, bias_rows, bias_row_scales, positions)


def hide(queries: Queries, split: Split, window: int) -> torch.Tensor:
    """What to add to scores: 0 where the query sees the slot, -inf elsewhere; float32 [B, R, W]."""
    key_positions = split.positions.unsqueeze(1)
    query_positions = queries.positions.unsqueeze(2)
    hidden = key_positions > query_positions
    if window:
        hidden |= key_positions <= query_positions - window
    return hidden.to(torch.int32).mul_(_NEGATIVE_INFINITY_BITS).view(torch.float32)


def weighted_sum(weights: torch.Tensor, v_codes: torch.Tensor) -> torch.Tensor:
    """Σ w·v of integers over W slots, exact, then rounded to float32 once.

    weights [B, KVH, R, W], v_codes [B, KVH, W, D]. For int8 values the weights are taken in two digits of base 128,
    whose sums float32 holds exactly: 255 · 127 · 256 < 2^24.
    """
    if v_codes.dtype is torch.float64:
        return torch.matmul(weights.double(), v_codes).float()
    high = torch.floor(weights * (1 / 128))
    low = weights - high * 128
    sums = torch.matmul(torch.cat((high, low), dim=2), v_codes)
    num_rows = weights.shape[2]
    return sums[:, :, :num_rows] * 128 + sums[:, :, num_rows:]


def attend_split(queries: Queries, split: Split, spec: AttentionSpec, v_levels: float) -> tuple[Partial, torch.Tensor]:
    """Softmax inside B splits: (partial result, e float32 [B, KVH, R, W])."""
    scores = torch.matmul(queries.codes, split.k_codes.transpose(2, 3)).float()
    scores *= queries.scales.unsqueeze(3)
    scores *= split.k_scales.unsqueeze(2)
    if split.bias_rows is not None and split.bias_row_scales is not None:
        assert queries.bias_codes is not None
        assert queries.bias_scales is not None
        from_bias = torch.matmul(queries.bias_codes, split.bias_rows.transpose(1, 2).unsqueeze(1)).float()
        from_bias *= queries.bias_scales.unsqueeze(3)
        from_bias *= split.bias_row_scales[:, None, None, :]
        scores += from_bias
    scores += hide(queries, split, spec.group.window).unsqueeze(1)
    peak = scores.amax(3)
    scores -= peak.clamp(min=LOWEST).unsqueeze(3)
    e = exp_nonpositive(scores)
    total = tree_sum(e)
    codes, scales = round_to_levels(e * split.v_scales.unsqueeze(2), v_levels)
    out = weighted_sum(codes, split.v_codes)
    out *= scales.unsqueeze(3)
    return Partial(peak, total, out), e


def merge(state: Partial, new: Partial) -> Partial:
    """Both softmax partials as one; what saw nothing leaves the other's values as they are."""
    peaks = torch.stack((state.peak, new.peak))
    peak = peaks.amax(0)
    factors = exp_nonpositive(peaks - peak.clamp(min=LOWEST))
    total = state.total * factors[0] + new.total * factors[1]
    factors = factors.unsqueeze(-1)
    return Partial(peak, total, state.out * factors[0] + new.out * factors[1])
