"""Kernels that keep what outlives a step on the device: the newest tokens by slot, and the block tables."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.variants import ActivationType, Variant

TOKENS_PER_PROGRAM = 256
ENTRIES_PER_PROGRAM = 1024
NUM_WARPS, NUM_STAGES = 4, 1


@triton.jit(do_not_specialize=["num_rows"])
def _keep_tokens(slots, token_ids, newest_tokens, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_live = row < num_rows
    slot = tl.load(slots + row, mask=is_live, other=0)
    token = tl.load(token_ids + row, mask=is_live, other=0)
    # -1 says that the row is not finite. Its request ends, but a step that was launched before that is known still
    # looks the token up.
    tl.store(newest_tokens + slot, tl.maximum(token, 0), mask=is_live)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _store_table_rows(rows, packed, tables, num_rows, width, max_seqs, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_live = column < width
    row = tl.load(rows + index)
    for part in tl.static_range(2):
        value = tl.load(packed + (part * num_rows + index) * width + column, mask=is_live)
        tl.store(tables + (part * max_seqs + row) * stride + column, value, mask=is_live)


def keep_tokens(num_rows: int, slots: torch.Tensor, token_ids: torch.Tensor, newest_tokens: torch.Tensor) -> None:
    """newest_tokens[slots[r]] = token_ids[r], or 0 where that is -1, for r < num_rows; all int64."""
    if num_rows:
        grid = (triton.cdiv(num_rows, TOKENS_PER_PROGRAM),)
        _keep_tokens[grid](
            slots, token_ids, newest_tokens, num_rows,
            BLOCK=TOKENS_PER_PROGRAM, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip


def store_table_rows(rows: torch.Tensor, packed: torch.Tensor, tables: torch.Tensor) -> None:
    """tables[:, rows[i], :width] = packed[:, i] for i < R.

    rows int32 [R]; packed int32 [2, R, width]; tables int32 [2, max_seqs, at least width]; all contiguous. Indices into
    `tables` fit into 32 bits: it is much smaller than what it describes.
    """
    _, num_rows, width = packed.shape
    _, max_seqs, stride = tables.shape
    grid = (num_rows, triton.cdiv(width, ENTRIES_PER_PROGRAM))
    _store_table_rows[grid](
        rows, packed, tables, num_rows, width, max_seqs, stride,
        BLOCK=ENTRIES_PER_PROGRAM, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """Every form of these kernels; they depend neither on the card nor on the activations."""
    keep: dict[str, str] = {"slots": "*i64", "token_ids": "*i64", "newest_tokens": "*i64", "num_rows": "i32"}
    store: dict[str, str] = {
        "rows": "*i32", "packed": "*i32", "tables": "*i32", "num_rows": "i32", "width": "i32", "max_seqs": "i32",
        "stride": "i32",
    }  # fmt: skip

    def variant(name: str, kernel: Any, signature: dict[str, str], block: int, divisible: tuple[str, ...]) -> Variant:
        return Variant(
            name, kernel, {**signature, "BLOCK": "constexpr"}, {"BLOCK": block}, NUM_WARPS, NUM_STAGES, divisible
        )

    return [
        variant("keep_tokens", _keep_tokens, keep, TOKENS_PER_PROGRAM, ("slots", "token_ids", "newest_tokens")),
        variant(
            "store_table_rows", _store_table_rows, store, ENTRIES_PER_PROGRAM, ("rows", "packed", "tables", "stride")
        ),
    ]
