"""Launch configurations of paged attention: plain functions of the card and of shapes. Torch-free; stateless."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_kernels.triton.cards import Card

DECODE_ROWS = (8, 16, 32, 64)
"""Rows of queries that the decode kernel is made for; a KV head with more query heads than the last has no kernel."""
MAX_ROWS_OF_SHORT = 32
"""Where all query tokens of a sequence make no more rows than this, they are decoded: splits are worth more than
large tiles."""
MASS_ROWS = 32
PREPARED_ROWS = 8
MIN_SPLIT_SLOTS = 128
"""Splits are multiples of this: two tiles, so that loads of one are under way while the other is computed."""
MAX_SPLITS = 64
PROGRAMS_PER_SM = 8
"""Thread blocks that decoding is split into where the context allows: two rounds of four."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """rows: of queries; num_blocks: table entries per step of the loop; num_stages: of its software pipeline."""

    rows: int
    num_blocks: int
    num_warps: int
    num_stages: int


def decode_config(card: Card, rows: int, padded_dim: int, element_bytes: int, *, biased: bool) -> TileConfig:
    """rows: one of DECODE_ROWS; element_bytes: of K."""
    return TileConfig(rows, 4, 4, 2)


def prefill_config(card: Card, padded_dim: int, element_bytes: int, *, biased: bool) -> TileConfig:
    return TileConfig(64, 4, 4, 2)


def mass_config(card: Card, padded_dim: int) -> TileConfig:
    return TileConfig(MASS_ROWS, 4, 4, 1)


def decode_rows(num_rows: int) -> int:
    """The smallest of DECODE_ROWS that holds num_rows. NotImplementedError where none does."""
    for rows in DECODE_ROWS:
        if num_rows <= rows:
            return rows
    raise NotImplementedError(f"{num_rows} query heads per KV head: the Triton kernels take {DECODE_ROWS[-1]} at most")


def split_count(card: Card, num_seqs: int, num_kv_heads: int, max_slots: int) -> int:
    """Splits of a decode grid: enough to fill the card, none shorter than MIN_SPLIT_SLOTS at max_slots."""
    wanted = -(-PROGRAMS_PER_SM * card.num_sms // (num_seqs * num_kv_heads))
    possible = -(-max_slots // MIN_SPLIT_SLOTS)
    return max(1, min(wanted, possible, MAX_SPLITS))
