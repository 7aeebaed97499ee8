"""The compiled forms of the attention kernels that the ahead-of-time check holds to account. Stateless.

Head sizes are open: these are the ones that models have (64, 128, 256, and 80 for those that are no power of two), and
of the element types K and V share one. At the sizes beside 128 the check takes int8 and float16.

Instructions per element are those of the longest inner loop, all of them: what a thread block executes for one tile of
K and V, times 32 lanes, divided by the tile's elements. For comparison, issue slots per one-byte element at full
bandwidth: H200 6.5, A100 9.5, RTX 3090 19, RTX 4090 41; twice as many for two bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvd_kernels.kv_format import ElementType
from kvd_kernels.triton import attention_configs as configs
from kvd_kernels.triton import attention_kernels as kernels
from kvd_kernels.triton.attention_configs import TileConfig
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.variants import ActivationType, Budget, Variant

POINTERS: dict[ElementType, str] = {
    "int8": "*i8",
    "fp16": "*fp16",
    "bf16": "*bf16",
    "fp8_e4m3": "*u8",
    "fp8_e5m2": "*u8",
}
LAYERS: tuple[tuple[ElementType, int], ...] = (
    ("int8", 64), ("int8", 80), ("int8", 128), ("int8", 256), ("fp16", 64), ("fp16", 128), ("fp16", 256),
    ("bf16", 128), ("fp8_e4m3", 128), ("fp8_e5m2", 128),
)  # fmt: skip
DECODE_BUDGETS: dict[tuple[ElementType, int], float] = {
    ("int8", 64): 4.2, ("int8", 80): 5.1, ("int8", 128): 3.2, ("int8", 256): 2.8,
    ("fp16", 64): 2.8, ("fp16", 128): 2.0, ("fp16", 256): 1.7,
    ("bf16", 128): 2.2, ("fp8_e4m3", 128): 4.0, ("fp8_e5m2", 128): 2.3,
}  # fmt: skip
"""Instructions per element and thread for 8 rows: what triton 3.9 takes on the architecture that needs most, and about
a tenth more. Head 80 pays for the channels up to 128."""
PREFILL_BUDGETS: dict[tuple[ElementType, int], float] = {
    ("int8", 64): 13.0, ("int8", 80): 14.5, ("int8", 128): 8.9, ("int8", 256): 9.1,
    ("fp16", 64): 12.7, ("fp16", 128): 8.3, ("fp16", 256): 9.2,
    ("bf16", 128): 9.2, ("fp8_e4m3", 128): 8.9, ("fp8_e5m2", 128): 10.9,
}  # fmt: skip
"""Likewise for a tile of 32 rows (16 at head 256), in the loop that masks."""
_FLOATS = (
    "row_units", "coefficients", "cos", "sin", "lse", "partial_sums", "partial_stats", "mass", "key_bias",
)  # fmt: skip
_TABLES = ("block_tables", "first_positions", "num_slots", "query_starts", "positions")
_STRIDES = ("key_stride", "value_stride", "scale_stride")


def padded_dim(head_dim: int) -> int:
    """head_dim as a power of two that a product's operand can have."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def padded_half(half: int) -> int:
    """Pairs of channels that RoPE turns, likewise."""
    return max(16, int(triton.next_power_of_2(half)))


def operand_type(k_type: ElementType, v_type: ElementType, dtype: ActivationType) -> Any:
    """What the products' operands are: float32 stands for tf32, which holds float16 and bfloat16 alike."""
    if "bf16" not in (k_type, v_type):
        return tl.float16
    return tl.bfloat16 if dtype == "bf16" and k_type == v_type else tl.float32


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """The same on every card: one table of configurations serves all. bfloat16 has what differs by the type alone."""
    found = [_merge(128, dtype), _prepare(128, dtype, biased=False)]
    for element, head_dim in LAYERS:
        if dtype == "fp16" or head_dim == 128:
            found += [_decode(element, head_dim, dtype, 8), _prefill(element, head_dim, dtype)]
    for element in ("int8", "fp16"):
        found.append(_decode(element, 128, dtype, 8, splits=False))
    if dtype == "bf16":
        # Over K and V in float16 or fp8 the queries change their type, without a rotation.
        return [*found, _prepare(128, dtype, biased=False, rotated=False)]
    for rows in (16, 32):
        found.append(_decode("int8", 128, dtype, rows))
    for rows in (8, 16):
        found += [_decode("int8", 128, dtype, rows, biased=True), _decode("bf16", 256, dtype, rows)]
    found += [
        _decode("int8", 256, dtype, 16),
        _decode("int8", 128, dtype, 8, splits=False, keeps_lse=True),
        _decode("int8", 256, dtype, 8, biased=True),
        _decode("int8", 256, dtype, 16, biased=True),
        _prefill("int8", 128, dtype, keeps_lse=True),
        _prefill("int8", 128, dtype, biased=True),
        _prefill("int8", 256, dtype, biased=True),
        _prefill("bf16", 256, dtype),
        _mass("int8", 128, dtype),
        _mass("int8", 128, dtype, biased=True),
        _mass("bf16", 256, dtype),
        _prepare(128, dtype, biased=True),
        _prepare(256, dtype, biased=True),
        _merge(256, dtype, keeps_lse=True),
    ]
    return found


def _layer_constants(
    element: ElementType, head_dim: int, dtype: ActivationType, config: TileConfig, *, biased: bool
) -> dict[str, Any]:
    """int8 is rotated, as it is by default; the others are not."""
    operand = operand_type(element, element, dtype)
    fits = operand == tl.float32 or operand == (tl.float16 if dtype == "fp16" else tl.bfloat16)
    return {
        "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "HALF": padded_half(head_dim // 2) if biased else 16,
        "ROWS": config.rows, "NUM_BLOCKS": config.num_blocks, "K_TYPE": element, "V_TYPE": element,
        "OPERAND": operand, "PREPARED": element == "int8" or not fits, "BIASED": biased,
    }  # fmt: skip


def _make(
    name: str,
    kernel: Any,
    element: ElementType,
    dtype: ActivationType,
    constants: dict[str, Any],
    config: TileConfig,
    queries: str,
    budget: float = 0.0,
) -> Variant:
    """Divisible as models have it: all pointers and the strides between blocks."""
    pointers = {
        "q": queries, "prepared": queries, "keys": POINTERS[element], "values": POINTERS[element],
        "key_scales": "*fp16", "value_scales": "*fp16", "out": f"*{dtype}",
        **dict.fromkeys(_FLOATS, "*fp32"), **dict.fromkeys(_TABLES, "*i32"),
    }  # fmt: skip
    if kernel is kernels.prepare_queries:
        pointers["q"] = f"*{dtype}"
    signature = {}
    for argument in kernel.arg_names:
        kind = "fp32" if argument == "score_scale" else "i32"
        signature[argument] = "constexpr" if argument in constants else pointers.get(argument, kind)
    elements = 2 * config.num_blocks * 16 * constants["HEAD_DIM"] if budget else 0
    return Variant(
        name,
        kernel,
        signature,
        constants,
        config.num_warps,
        config.num_stages,
        tuple(argument for argument in kernel.arg_names if argument in pointers or argument in _STRIDES),
        Budget(elements, budget, 8 if budget else 0),
        {"maxnreg": configs.MAX_REGISTERS} if kernel in (kernels.decode, kernels.merge) else {},
    )


def _queries(constants: dict[str, Any], dtype: ActivationType) -> str:
    """The type of the queries that the products take."""
    if not constants["PREPARED"]:
        return f"*{dtype}"
    return "*bf16" if constants["OPERAND"] == tl.bfloat16 else "*fp16"


def _words(**flags: bool) -> str:
    return "".join(f", {word.replace('_', ' ')}" for word, value in flags.items() if value)


def _decode(
    element: ElementType,
    head_dim: int,
    dtype: ActivationType,
    rows: int,
    *,
    biased: bool = False,
    splits: bool = True,
    keeps_lse: bool = False,
) -> Variant:
    wide = operand_type(element, element, dtype) == tl.float32
    config = configs.decode_config(rows, padded_dim(head_dim), wide=wide, biased=biased)
    constants = {
        **_layer_constants(element, head_dim, dtype, config, biased=biased),
        "SPLIT": splits, "KEEPS_LSE": keeps_lse, "MIN_LENGTH": configs.MIN_SPLIT_SLOTS, "STAGES": config.num_stages,
    }  # fmt: skip
    budget = 0.0 if biased or wide or rows > 8 else DECODE_BUDGETS[element, head_dim]
    words = _words(biased=biased, unsplit=not splits, lse=keeps_lse)
    name = f"decode {element}, head {head_dim}, {rows} rows, {dtype}{words}"
    return _make(name, kernels.decode, element, dtype, constants, config, _queries(constants, dtype), budget)


def _prefill(
    element: ElementType, head_dim: int, dtype: ActivationType, *, biased: bool = False, keeps_lse: bool = False
) -> Variant:
    wide = operand_type(element, element, dtype) == tl.float32
    config = configs.prefill_config(1, padded_dim(head_dim), wide=wide, biased=biased)
    constants = {
        **_layer_constants(element, head_dim, dtype, config, biased=biased),
        "KEEPS_LSE": keeps_lse, "STAGES": config.num_stages,
    }  # fmt: skip
    budget = 0.0 if biased or wide else PREFILL_BUDGETS[element, head_dim]
    name = f"prefill {element}, head {head_dim}, {dtype}{_words(biased=biased, lse=keeps_lse)}"
    return _make(name, kernels.prefill, element, dtype, constants, config, _queries(constants, dtype), budget)


def _mass(element: ElementType, head_dim: int, dtype: ActivationType, *, biased: bool = False) -> Variant:
    config = configs.mass_config(padded_dim(head_dim))
    constants = _layer_constants(element, head_dim, dtype, config, biased=biased)
    del constants["V_TYPE"]
    name = f"block mass {element}, head {head_dim}, {dtype}{_words(biased=biased)}"
    return _make(name, kernels.weigh_blocks, element, dtype, constants, config, _queries(constants, dtype))


def _merge(head_dim: int, dtype: ActivationType, *, keeps_lse: bool = False) -> Variant:
    constants = {
        "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "KEEPS_LSE": keeps_lse,
        "MIN_LENGTH": configs.MIN_SPLIT_SLOTS,
    }  # fmt: skip
    config = TileConfig(1, 1, 4, 1)
    return _make(
        f"merge, head {head_dim}, {dtype}{_words(lse=keeps_lse)}",
        kernels.merge,
        "int8",
        dtype,
        constants,
        config,
        "*fp16",
    )


def _prepare(head_dim: int, dtype: ActivationType, *, biased: bool, rotated: bool = True) -> Variant:
    """Into float16; int8 is rotated."""
    rotation = head_dim & -head_dim if rotated else 1
    constants = {
        "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "ROTATION": rotation, "ROTATION_SCALE": rotation**-0.5,
        "ROWS": configs.PREPARED_ROWS, "HALF": padded_half(head_dim // 2) if biased else 16, "BIASED": biased,
    }  # fmt: skip
    config = TileConfig(configs.PREPARED_ROWS, 1, 4, 1)
    name = f"queries, head {head_dim}, {dtype}{_words(biased=biased, plain=not rotated)}"
    return _make(name, kernels.prepare_queries, "int8", dtype, constants, config, "*fp16")
