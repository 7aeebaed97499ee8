"""Launch configurations of paged attention: plain functions of the card and of shapes. Torch-free; stateless."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_kernels.triton.cards import Card

DECODE_ROWS = (8, 16, 32)
"""Rows of queries that the decode kernel is made for. Where all query tokens of a sequence make no more than the last,
they are decoded: splits are worth more than large tiles."""
MAX_HEAVY_ROWS = 16
"""The last of them where queries take twice the registers: head_dim above 128, operands of 32 bits, or a key bias."""
MAX_REGISTERS = 255
"""Said to the assembler, which else spills a few of 130 to fit one thread block more onto a multiprocessor."""
MASS_ROWS = 16
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


def is_heavy(padded_dim: int, *, wide: bool, biased: bool) -> bool:
    """See MAX_HEAVY_ROWS. wide: the operands of products have 32 bits."""
    return padded_dim > 128 or wide or biased


def decode_rows(num_rows: int, *, heavy: bool) -> int | None:
    """The smallest of DECODE_ROWS that holds num_rows; None where none does."""
    fitting = [rows for rows in DECODE_ROWS if num_rows <= rows and not (heavy and rows > MAX_HEAVY_ROWS)]
    return min(fitting, default=None)


def decode_config(rows: int, padded_dim: int, *, wide: bool, biased: bool) -> TileConfig:
    """rows: one of DECODE_ROWS.

    Two warps, so that a tile gives a thread enough of K and V to make the work per tile small beside that per element
    (and so that sm_90 takes the matrix instructions that read packed operands as they lie); four where more rows would
    not leave their sums in registers. One choice for all cards: the budgets hold on each.
    """
    heavy = is_heavy(padded_dim, wide=wide, biased=biased)
    num_blocks = 2 if heavy or rows > 16 else 4
    if biased and padded_dim > 128 and rows > 8:
        num_blocks = 1
    num_warps = 2 if rows <= (8 if heavy else 16) else 4
    # The key bias is added in a loop of its own, inside which nothing can be prefetched for the next tile; and wide
    # operands leave no registers for it.
    return TileConfig(rows, num_blocks, num_warps, 1 if biased or wide else 2)


def prefill_config(group_heads: int, padded_dim: int, *, wide: bool, biased: bool) -> TileConfig:
    """group_heads: query heads of a KV head, which a tile holds all of a token; as `decode_rows` takes them."""
    rows = 16 if is_heavy(padded_dim, wide=wide, biased=biased) else 32
    assert group_heads <= rows
    return TileConfig(rows, 2 if padded_dim > 128 or biased else 4, 4, 1 if biased else 2)


def mass_config(padded_dim: int) -> TileConfig:
    return TileConfig(MASS_ROWS, 4 if padded_dim <= 128 else 2, 4, 1)


def split_count(card: Card, num_seqs: int, num_kv_heads: int, max_slots: int) -> int:
    """Splits of a decode grid: enough to fill the card, none shorter than MIN_SPLIT_SLOTS at max_slots."""
    wanted = -(-PROGRAMS_PER_SM * card.num_sms // (num_seqs * num_kv_heads))
    possible = -(-max_slots // MIN_SPLIT_SLOTS)
    return max(1, min(wanted, possible, MAX_SPLITS))
