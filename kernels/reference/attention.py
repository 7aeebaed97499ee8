"""Attention a8: paged, causal, over what the cache holds, the same bits in every batch and every chunking.

The arithmetic is in `splits`; this file decides which splits and which queries are computed together, which
changes no bit. Sequences with one query go in one batch of splits; sequences with several go one after the other.

Engine thread; temporaries only.
"""

from __future__ import annotations

import itertools

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import AttentionSpec, Batch, KVCache, RopeTable
from kvd_kernels.reference.elementary import TILE_ELEMENTS, exp_nonpositive, tree_sum
from kvd_kernels.reference.kv_blocks import layer_of
from kvd_kernels.reference.quantize import exact_bits
from kvd_kernels.reference.splits import (
    SPLIT_ENTRIES,
    SPLIT_SLOTS,
    WEIGHT_LEVELS,
    Partial,
    Queries,
    Split,
    attend_split,
    merge,
    prepare_queries,
    read_split,
    refuse_unsupported,
)

_NARROW_ENTRIES = 4  # the last split of a short table is padded to a power of two from here on
_PAIRS_AT_ONCE = 64  # splits decoded together; bounds the temporaries of a long decode batch


class _Attention:
    """One call of `attend`: what all sequences share."""

    def __init__(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None,
    ) -> None:
        self.layer = layer_of(cache, spec)
        refuse_unsupported(self.layer.format.k_type)
        refuse_unsupported(self.layer.format.v_type)
        self.spec = spec
        self.rope = rope
        self.tables = batch.groups[spec.group.group_id]
        self.num_slots: list[int] = self.tables.num_slots[: batch.num_seqs].tolist()
        self.q = q[: batch.num_tokens].view(batch.num_tokens, spec.num_heads, spec.head_dim)
        self.out = out[: batch.num_tokens].view(batch.num_tokens, spec.num_heads, spec.head_dim)
        self.positions = batch.positions[: batch.num_tokens].long()
        self.block_mass = block_mass
        is_int8 = self.layer.format.v_type == "int8"
        self.v_levels = WEIGHT_LEVELS if is_int8 else float((1 << exact_bits(SPLIT_SLOTS)[0]) - 1)

    def width(self, sequence: int, split: int) -> int:
        """Table entries to decode for a split: a power of two that covers the slots in use."""
        used = min(SPLIT_SLOTS, self.num_slots[sequence] - split * SPLIT_SLOTS)
        needed = max(_NARROW_ENTRIES, -(-used // BLOCK_TOKENS))
        return 1 << (needed - 1).bit_length()

    def read(self, sequences: list[int], splits: list[int], num_entries: int) -> Split:
        """Decode one split for each pair (sequence, split index), `num_entries` table entries wide."""
        rows = torch.tensor(sequences)[:, None]
        columns = torch.tensor(splits)[:, None] * SPLIT_ENTRIES + torch.arange(num_entries)
        columns.clamp_(max=self.tables.block_tables.shape[1] - 1)
        used = torch.tensor([self.num_slots[s] - j * SPLIT_SLOTS for s, j in zip(sequences, splits, strict=True)])
        return read_split(
            self.layer,
            self.spec,
            self.rope,
            self.tables.block_tables[rows, columns].long(),
            self.tables.first_positions[rows, columns].long(),
            used,
        )

    def queries(self, tokens: torch.Tensor) -> Queries:
        """Queries of tokens int64 [B, T]."""
        half = self.rope.cos.shape[1]
        return prepare_queries(self.q[tokens], self.positions[tokens], self.layer, self.spec, half)

    def empty_state(self, num_seqs: int, num_rows: int) -> Partial:
        shape = (num_seqs, self.spec.num_kv_heads, num_rows)
        return Partial(torch.full(shape, -torch.inf), torch.zeros(shape), torch.zeros(*shape, self.spec.head_dim))

    def finish(self, tokens: torch.Tensor, state: Partial) -> None:
        """Divide and store the rows of tokens int64 [B, T]."""
        num_seqs, num_tokens = tokens.shape
        nothing = state.total == 0
        values = state.out / torch.where(nothing, 1.0, state.total).unsqueeze(-1)
        values = values.view(num_seqs, self.spec.num_kv_heads, num_tokens, -1, self.spec.head_dim)
        self.out[tokens] = values.transpose(1, 2).flatten(2, 3)

    def add_mass(self, sequence: int, split: int, e: torch.Tensor, peak: torch.Tensor, state: Partial) -> None:
        """Add the softmax weights of one split, e [KVH, R, W], peak [KVH, R], to its table entries."""
        assert self.block_mass is not None
        final = torch.where(state.peak == -torch.inf, 0.0, state.peak)
        factor = exp_nonpositive(peak - final) / torch.where(state.total == 0, 1.0, state.total)
        weights = e * factor.unsqueeze(-1)
        weights = weights.view(*factor.shape, -1, BLOCK_TOKENS)
        per_entry = tree_sum(tree_sum(weights).flatten(0, 1).t())
        start = split * SPLIT_ENTRIES
        target = self.block_mass[sequence, start : start + per_entry.shape[0]]
        target += per_entry[: target.shape[0]]

    def decode(self, sequences: list[int], tokens: list[int]) -> None:
        """Sequences with one query each. Their splits are independent, so all of one width go together."""
        token_index = torch.tensor(tokens)[:, None]
        queries = self.queries(token_index)
        num_rows = self.spec.num_heads // self.spec.num_kv_heads
        by_width: dict[int, list[tuple[int, int]]] = {}
        for i, sequence in enumerate(sequences):
            for j in range(-(-self.num_slots[sequence] // SPLIT_SLOTS)):
                by_width.setdefault(self.width(sequence, j), []).append((i, j))
        found: dict[int, list[tuple[int, Partial, torch.Tensor]]] = {}
        for num_entries, pairs in by_width.items():
            for start in range(0, len(pairs), _PAIRS_AT_ONCE):
                some = pairs[start : start + _PAIRS_AT_ONCE]
                split = self.read([sequences[i] for i, _ in some], [j for _, j in some], num_entries)
                chosen = queries.select(torch.tensor([i for i, _ in some]))
                result = attend_split(chosen, split, self.spec, self.v_levels)
                if result is None:
                    continue
                partial, e = result
                for row, (i, j) in enumerate(some):
                    one = Partial(partial.peak[row], partial.total[row], partial.out[row])
                    found.setdefault(j, []).append((i, one, e[row]))
        state = self.empty_state(len(sequences), num_rows)
        for j in sorted(found):
            rows = torch.tensor([i for i, _, _ in found[j]])
            new = Partial(
                torch.stack([one.peak for _, one, _ in found[j]]),
                torch.stack([one.total for _, one, _ in found[j]]),
                torch.stack([one.out for _, one, _ in found[j]]),
            )
            merged = merge(Partial(state.peak[rows], state.total[rows], state.out[rows]), new)
            state.peak[rows], state.total[rows], state.out[rows] = merged.peak, merged.total, merged.out
        self.finish(token_index, state)
        if self.block_mass is not None:
            for j in sorted(found):
                for i, one, e in found[j]:
                    final = Partial(state.peak[i], state.total[i], state.out[i])
                    self.add_mass(sequences[i], j, e, one.peak, final)

    def prefill(self, sequence: int, first_token: int, num_tokens: int) -> None:
        """One sequence with several queries: every split is decoded once and met by tiles of queries."""
        token_index = torch.arange(first_token, first_token + num_tokens)[None]
        queries = self.queries(token_index)
        heads_per_group = self.spec.num_heads // self.spec.num_kv_heads
        tile = max(1, TILE_ELEMENTS // (self.spec.num_heads * SPLIT_SLOTS)) * heads_per_group
        num_rows = num_tokens * heads_per_group
        tiles = [slice(start, min(start + tile, num_rows)) for start in range(0, num_rows, tile)]
        states = [self.empty_state(1, rows.stop - rows.start) for rows in tiles]
        tiled_queries = [queries.rows(rows) for rows in tiles]
        kept: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        for j in range(-(-self.num_slots[sequence] // SPLIT_SLOTS)):
            split = self.read([sequence], [j], self.width(sequence, j))
            for index, some in enumerate(tiled_queries):
                result = attend_split(some, split, self.spec, self.v_levels)
                if result is None:
                    continue
                partial, e = result
                states[index] = merge(states[index], partial)
                if self.block_mass is not None:
                    kept.append((index, j, e[0], partial.peak[0]))
        whole = Partial(
            torch.cat([state.peak for state in states], dim=2),
            torch.cat([state.total for state in states], dim=2),
            torch.cat([state.out for state in states], dim=2),
        )
        self.finish(token_index, whole)
        for index, j, e, peak in kept:
            state = states[index]
            self.add_mass(sequence, j, e, peak, Partial(state.peak[0], state.total[0], state.out[0]))


def attend(
    batch: Batch,
    q: torch.Tensor,
    rope: RopeTable,
    cache: KVCache,
    spec: AttentionSpec,
    out: torch.Tensor,
    block_mass: torch.Tensor | None = None,
) -> None:
    """Causal paged attention as the ops contract states it; see the module for the arithmetic."""
    if block_mass is not None:
        block_mass[: batch.num_seqs] = 0
    if not batch.num_tokens:
        return
    work = _Attention(batch, q, rope, cache, spec, out, block_mass)
    starts: list[int] = batch.query_starts[: batch.num_seqs + 1].tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    decoding = [s for s, length in enumerate(lengths) if length == 1]
    if decoding:
        work.decode(decoding, [starts[s] for s in decoding])
    for sequence, length in enumerate(lengths):
        if length > 1:
            work.prefill(sequence, starts[sequence], length)
