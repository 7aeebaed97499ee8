"""Attention a8: paged, causal, over what the cache holds, the same bits in every batch and every chunking.

The arithmetic is in `splits`; this file decides which splits and which queries are computed together, which
changes no bit. Sequences with one query go in one batch of splits; sequences with several go one after the other.

Engine thread; temporaries only.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import AttentionSpec, Batch, RopeTable
from kvd_kernels.reference.elementary import TILE_ELEMENTS, exp_nonpositive, tree_sum
from kvd_kernels.reference.kv_blocks import LayerBlocks
from kvd_kernels.reference.quantize import exact_bits
from kvd_kernels.reference.splits import (
    HIDDEN_POSITION,
    LOWEST,
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
)

_NARROW_PLACES = 4  # a split of which less is in use is padded to a power of two from here on
_PAIRS_AT_ONCE = 64  # splits decoded together; bounds the temporaries of a long decode batch


class _Part(NamedTuple):
    """The entries first … end - 1 of a sequence's table, which are all those that lie in one split."""

    sequence: int
    split: int
    first: int
    end: int
    num_places: int  # from the start of the split to its last entry


class _Attention:
    """One call of `attend`: what all sequences share."""

    def __init__(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        layer: LayerBlocks,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.rope = rope
        self.tables = batch.groups[spec.group.group_id]
        self.num_slots: list[int] = self.tables.num_slots[: batch.num_seqs].tolist()
        self.q = q[: batch.num_tokens].view(batch.num_tokens, spec.num_heads, spec.head_dim)
        self.out = out[: batch.num_tokens].view(batch.num_tokens, spec.num_heads, spec.head_dim)
        self.positions = batch.positions[: batch.num_tokens]
        self.block_mass = block_mass
        is_int8 = layer.v_scales is not None
        self.v_levels = WEIGHT_LEVELS if is_int8 else float((1 << exact_bits(SPLIT_SLOTS)[0]) - 1)

    def _parts(self, sequence: int) -> list[_Part]:
        """The splits of a sequence that hold anything, in ascending order."""
        num_entries = -(-self.num_slots[sequence] // BLOCK_TOKENS)
        firsts = self.tables.first_positions[sequence, :num_entries]
        assert bool((firsts % BLOCK_TOKENS == 0).all()), "a table entry begins inside a block"
        assert bool((firsts[1:] > firsts[:-1]).all()), "table entries ascend in position"
        splits, counts = torch.unique_consecutive(firsts // SPLIT_SLOTS, return_counts=True)
        ends = counts.cumsum(0)
        num_places = firsts[ends - 1] // BLOCK_TOKENS - splits * SPLIT_ENTRIES + 1
        return [
            _Part(sequence, split, end - count, end, width)
            for split, count, end, width in zip(
                splits.tolist(), counts.tolist(), ends.tolist(), num_places.tolist(), strict=True
            )
        ]

    def read(self, parts: list[_Part], width: int) -> Split:
        """Decode one split for each part, `width` places wide."""
        rows = torch.tensor([part.sequence for part in parts]).unsqueeze(1)
        starts = torch.tensor([part.split * SPLIT_SLOTS for part in parts], dtype=torch.int32).unsqueeze(1)
        columns = torch.tensor([part.first for part in parts]).unsqueeze(1) + torch.arange(SPLIT_ENTRIES)
        is_part = columns < torch.tensor([part.end for part in parts]).unsqueeze(1)
        columns.clamp_(max=self.tables.block_tables.shape[1] - 1)
        places = ((self.tables.first_positions[rows, columns] - starts) // BLOCK_TOKENS).long()
        places.masked_fill_(~is_part, width)  # one column more, for what is no part of the split
        in_use = torch.tensor([self.num_slots[part.sequence] for part in parts]).unsqueeze(1) - columns * BLOCK_TOKENS
        entries = torch.zeros((len(parts), width + 1), dtype=torch.int32)
        entries.scatter_(1, places, self.tables.block_tables[rows, columns])
        used = torch.zeros((len(parts), width + 1), dtype=torch.int64).scatter_(1, places, in_use)
        slots = torch.arange(width * BLOCK_TOKENS, dtype=torch.int32)
        is_unused = slots % BLOCK_TOKENS >= used[:, :width].repeat_interleave(BLOCK_TOKENS, dim=1)
        positions = (starts + slots).masked_fill_(is_unused, HIDDEN_POSITION)
        return read_split(self.layer, self.spec, self.rope, entries[:, :width], positions)

    def queries(self, tokens: torch.Tensor) -> Queries:
        """Queries of tokens int64 [B, T]."""
        half = self.rope.cos.shape[1]
        return prepare_queries(self.q[tokens], self.positions[tokens], self.layer.format, self.spec, half)

    def finish(self, tokens: torch.Tensor, state: Partial) -> None:
        """Divide and store the rows of tokens int64 [B, T]."""
        num_seqs, num_tokens = tokens.shape
        divisor = torch.where(state.total == 0, 1.0, state.total)
        values = (state.out / divisor.unsqueeze(3)).add_(0.0)
        values = values.view(num_seqs, self.spec.num_kv_heads, num_tokens, -1, self.spec.head_dim)
        self.out[tokens] = values.transpose(1, 2).flatten(2, 3)

    def add_mass(self, part: _Part, e: torch.Tensor, peak: torch.Tensor, state: Partial) -> None:
        """Add the softmax weights of one split, e [KVH, R, W] with its peak [KVH, R], to its table entries."""
        assert self.block_mass is not None
        factor = exp_nonpositive(peak - state.peak.clamp(min=LOWEST))
        factor /= torch.where(state.total == 0, 1.0, state.total)
        per_place = tree_sum((e * factor.unsqueeze(2)).view(*factor.shape, -1, BLOCK_TOKENS))
        firsts = self.tables.first_positions[part.sequence, part.first : part.end]
        places = firsts // BLOCK_TOKENS - part.split * SPLIT_ENTRIES
        self.block_mass[part.sequence, part.first : part.end] += tree_sum(per_place.flatten(0, 1).t())[places]

    def decode(self, sequences: list[int], tokens: list[int]) -> None:
        """Sequences with one query each. Their splits are independent, so all of one width go together."""
        parts_of = {sequence: self._parts(sequence) for sequence in sequences}
        # Longest first: those that have a j-th split are then the first ones of the list.
        order = sorted(range(len(sequences)), key=lambda i: -len(parts_of[sequences[i]]))
        sequences = [sequences[i] for i in order]
        token_index = torch.tensor([tokens[i] for i in order]).unsqueeze(1)
        queries = self.queries(token_index)
        by_width: dict[int, list[tuple[int, int]]] = {}
        for i, sequence in enumerate(sequences):
            for j, part in enumerate(parts_of[sequence]):
                by_width.setdefault(_width(part), []).append((i, j))
        done: list[tuple[int, int]] = []
        partials: list[Partial] = []
        weights: list[torch.Tensor] = []
        for width, pairs in by_width.items():
            for start in range(0, len(pairs), _PAIRS_AT_ONCE):
                some = pairs[start : start + _PAIRS_AT_ONCE]
                split = self.read([parts_of[sequences[i]][j] for i, j in some], width)
                partial, e = attend_split(
                    queries.select(torch.tensor([i for i, _ in some])), split, self.spec, self.v_levels
                )
                done += some
                partials.append(partial)
                if self.block_mass is not None:
                    weights += e.unbind()
        flat = _concatenate(partials, dim=0)
        row_of = {pair: row for row, pair in enumerate(done)}
        state = flat.select(torch.tensor([row_of[i, 0] for i in range(len(sequences))]))
        for j in range(1, len(parts_of[sequences[0]])):
            rows = [row_of[i, j] for i in range(len(sequences)) if (i, j) in row_of]
            merged = merge(state.select(slice(len(rows))), flat.select(torch.tensor(rows)))
            state.peak[: len(rows)], state.total[: len(rows)] = merged.peak, merged.total
            state.out[: len(rows)] = merged.out
        self.finish(token_index, state)
        for (i, j), e, peak in zip(done, weights, flat.peak, strict=False):
            self.add_mass(parts_of[sequences[i]][j], e, peak, state.select(i))

    def prefill(self, sequence: int, first_token: int, num_tokens: int) -> None:
        """One sequence with several queries: every split is decoded once and met by tiles of queries."""
        token_index = torch.arange(first_token, first_token + num_tokens).unsqueeze(0)
        queries = self.queries(token_index)
        heads_per_group = self.spec.num_heads // self.spec.num_kv_heads
        tile_tokens = max(1, TILE_ELEMENTS // (self.spec.num_heads * SPLIT_SLOTS))
        tiles = []
        states: list[Partial | None] = []
        for start in range(0, num_tokens, tile_tokens):
            stop = min(start + tile_tokens, num_tokens)
            bounds = self.positions[first_token + start : first_token + stop].aminmax()
            rows = slice(start * heads_per_group, stop * heads_per_group)
            tiles.append((queries.rows(rows), int(bounds.min), int(bounds.max)))
            states.append(None)
        kept: list[tuple[int, _Part, torch.Tensor, torch.Tensor]] = []
        for part in self._parts(sequence):
            split = self.read([part], _width(part))
            first_key, end_key = part.split * SPLIT_SLOTS, part.split * SPLIT_SLOTS + part.num_places * BLOCK_TOKENS
            for index, (some, first_query, last_query) in enumerate(tiles):
                state = states[index]
                is_behind = self.spec.group.window and end_key <= first_query - self.spec.group.window + 1
                if state is not None and (first_key > last_query or is_behind):
                    continue  # no query of the tile sees a slot
                partial, e = attend_split(some, split, self.spec, self.v_levels)
                states[index] = partial if state is None else merge(state, partial)
                if self.block_mass is not None:
                    kept.append((index, part, e[0], partial.peak[0]))
        final = [state for state in states if state is not None]
        self.finish(token_index, _concatenate(final, dim=2))
        for index, part, e, peak in kept:
            self.add_mass(part, e, peak, final[index].select(0))


def _width(part: _Part) -> int:
    """Places to decode for a split: a power of two that covers those in use."""
    return 1 << (max(_NARROW_PLACES, part.num_places) - 1).bit_length()


def _concatenate(partials: list[Partial], dim: int) -> Partial:
    if len(partials) == 1:
        return partials[0]
    return Partial(
        torch.cat([partial.peak for partial in partials], dim),
        torch.cat([partial.total for partial in partials], dim),
        torch.cat([partial.out for partial in partials], dim),
    )


def attend(
    batch: Batch,
    q: torch.Tensor,
    rope: RopeTable,
    layer: LayerBlocks,
    spec: AttentionSpec,
    out: torch.Tensor,
    block_mass: torch.Tensor | None = None,
) -> None:
    """Causal paged attention as the ops contract states it; see `splits` for the arithmetic."""
    if block_mass is not None:
        block_mass[: batch.num_seqs] = 0
    work = _Attention(batch, q, rope, layer, spec, out, block_mass)
    starts: list[int] = batch.query_starts[: batch.num_seqs + 1].tolist()
    decoding: list[int] = []
    for sequence, (start, stop) in enumerate(itertools.pairwise(starts)):
        if not work.num_slots[sequence]:
            out[start:stop] = 0
        elif stop - start == 1:
            decoding.append(sequence)
        elif stop > start:
            work.prefill(sequence, start, stop - start)
    if decoding:
        work.decode(decoding, [starts[sequence] for sequence in decoding])
