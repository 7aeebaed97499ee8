"""Launches of the kernels over rows of activations. Engine thread; asynchronous on the current stream.

Every function takes n, the number of rows; with n = 0 nothing is launched. Tensors are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvd_kernels.triton import row_kernels as kernels
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.variants import ActivationType, Variant
from kvd_kernels.weights import FloatWeight, Int8Weight, WeightMatrix

_COLUMNS = 1024
"""Channels of one program where a row is cut: 16 bytes of 16-bit activations per thread."""
_WARPS = 4
_TOKENS = 256
"""Token ids of one program of `resolve_tokens`."""


@dataclass(frozen=True, slots=True)
class NormConfig:
    """block: channels that a program holds at a time; is_looped: wider rows are gone through twice."""

    block: int
    is_looped: bool
    num_warps: int


NORM_CONFIGS = (
    NormConfig(1024, False, 4),
    NormConfig(4096, False, 8),
    NormConfig(16384, False, 16),
    NormConfig(16384, True, 16),
)


def norm_config(width: int) -> NormConfig:
    """The narrowest form that takes a row at once; the looped one where none does."""
    return next((config for config in NORM_CONFIGS if width <= config.block), NORM_CONFIGS[-1])


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """A table [vocab_size, width] on the device, in the form that the checkpoint has: rows become floats when taken.

    values: floats, or codes of `bits` (8 or 4; 16 stands for floats of any width); scales and offsets as in `weights`.
    """

    bits: int
    width: int
    group_size: int
    values: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def prepare_embedding(weight: WeightMatrix, device: torch.device) -> PackedEmbedding:
    """Move a table to the device as it is."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device).contiguous()

    width = weight.num_inputs
    if isinstance(weight, FloatWeight):
        return PackedEmbedding(16, width, width, moved(weight.values))
    if isinstance(weight, Int8Weight):
        return PackedEmbedding(8, width, weight.group_size, moved(weight.codes), moved(weight.scales))
    return PackedEmbedding(
        4, width, weight.group_size, moved(weight.codes), moved(weight.scales), moved(weight.offsets)
    )


def _parts(width: int) -> int:
    return -(-width // _COLUMNS)


def resolve_tokens(n: int, token_ids: torch.Tensor, newest_tokens: torch.Tensor) -> None:
    """Put the tokens that were sampled on the device in place of their slots: ids of -1 - slot, int64 [≥ n].

    newest_tokens: integers [slots], the newest token of each; a negative one stands for a row without a token.
    """
    if n:
        kernels.resolve_tokens[(-(-n // _TOKENS),)](
            token_ids, newest_tokens, n, BLOCK=_TOKENS, num_warps=_WARPS, enable_fp_fusion=True
        )


def embed(n: int, token_ids: torch.Tensor, table: PackedEmbedding, out: torch.Tensor) -> None:
    """out[t] = table[token_ids[t]], every value rounded once; ids int64, none of them negative."""
    if not n:
        return
    assert out.shape[1] == table.width
    grid = (n, _parts(table.width))
    if table.bits == 16:
        kernels.take_rows[grid](
            token_ids, table.values, out, table.width, BLOCK=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=True
        )
    elif table.bits == 8:
        kernels.take_int8_rows[grid](
            token_ids, table.values, table.scales, out, table.width, table.group_size,
            BLOCK=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    else:
        kernels.take_int4_rows[grid](
            token_ids, table.values, table.scales, table.offsets, out, table.width, table.group_size,
            BLOCK=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def gather(n: int, rows: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = x[rows[r]], bit for bit; rows int64, x and out of one type."""
    if n:
        width = x.shape[1]
        assert out.shape[1] == width
        assert out.dtype is x.dtype
        kernels.take_rows[(n, _parts(width))](
            rows, x, out, width, BLOCK=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=True
        )


def rms_norm(n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight, row by row, summed in float32; out may be x; weight float32 [width]."""
    if n:
        width = x.shape[1]
        config = norm_config(width)
        kernels.rms_norm[(n,)](
            x, weight, out, width, eps,
            BLOCK=config.block, IS_LOOPED=config.is_looped, num_warps=config.num_warps, enable_fp_fusion=True,
        )  # fmt: skip


def silu_mul(n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) · up; gate_up [rows, 2 F] holds gate, then up; out [rows, F]."""
    if n:
        width = out.shape[1]
        assert gate_up.shape[1] == 2 * width
        kernels.silu_mul[(n, _parts(width))](
            gate_up, out, width, BLOCK=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=True
        )


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """Every form of these kernels, for widths and groups that are multiples of 16; the same on every card."""
    del card
    out = {"out": f"*{dtype}", "width": "i32"}
    scaled = {"scales": "*fp16", **out, "group_size": "i32"}
    block = {"BLOCK": _COLUMNS}

    def form(
        name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any] = block, num_warps: int = _WARPS
    ) -> Variant:
        return Variant(
            f"{name}-{dtype}", kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants, num_warps, 3,
            tuple(key for key, kind in signature.items() if kind[0] == "*" or key in ("width", "group_size")),
        )  # fmt: skip

    forms = [
        form("silu_mul", kernels.silu_mul, {"gate_up": f"*{dtype}", **out}),
        form("take_int8_rows", kernels.take_int8_rows, {"ids": "*i64", "codes": "*i8", **scaled}),
        form(
            "take_int4_rows",
            kernels.take_int4_rows,
            {"ids": "*i64", "codes": "*u8", "scales": "*fp16", "offsets": "*fp16", **out, "group_size": "i32"},
        ),
    ]
    for values in ("fp16", "bf16", "fp32"):
        forms.append(form(f"take_{values}_rows", kernels.take_rows, {"ids": "*i64", "values": f"*{values}", **out}))
    for config in NORM_CONFIGS:
        constants = {"BLOCK": config.block, "IS_LOOPED": config.is_looped}
        signature = {"x": f"*{dtype}", "weight": "*fp32", **out, "eps": "fp32"}
        name = f"rms_norm-{config.block}{'-looped' if config.is_looped else ''}"
        forms.append(form(name, kernels.rms_norm, signature, constants, config.num_warps))
    if dtype == "fp16":  # moves no activations: one form for both types
        signature = {"token_ids": "*i64", "newest_tokens": "*i64", "n": "i32"}
        forms.append(form("resolve_tokens", kernels.resolve_tokens, signature, {"BLOCK": _TOKENS}))
    return forms
