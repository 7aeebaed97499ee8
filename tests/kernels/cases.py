"""The one table of cases and tolerances for every op and every implementation.

A tolerance is stated once, here, with its reason, per arithmetic ("a8", "a16"); the Triton kernels have lines of their
own ("triton-fp16", "triton-bf16") where they round more often than a16 has to. Nothing in the tests repeats a
number from this file. `QUICK_…` covers every value of every column at least once; `FULL_…` is the cross product.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from kvd_kernels.kv_format import ElementType
from kvd_kernels.ops import Ops

ROW_COUNTS = (0, 1, 2, 7, 17, 33, 512)
"""Nothing; one row; both sides of small tiles; a size that no tile divides; one step of a full batch."""


@dataclass(frozen=True)
class Tolerance:
    """|value - expected| ≤ absolute + relative · |expected| + of_terms · Σ|terms| (the last where an oracle has it)."""

    absolute: float = 0.0
    relative: float = 0.0
    of_terms: float = 0.0


Tolerances = dict[str, Tolerance]


def tolerance(table: Tolerances, ops: Ops) -> Tolerance:
    """The line of a table that holds for an implementation."""
    if ops.name == "triton":
        line = table.get("triton-fp16" if ops.activation_dtype == torch.float16 else "triton-bf16")
        if line is not None:
            return line
    return table[ops.arithmetic]


LINEAR = {
    # Beside the rounding of x to int8, whose exact worst case the oracle computes for every output: a float32
    # rounding for each of a few operations per group, of partial sums that never exceed Σ|x w|.
    "a8": Tolerance(of_terms=2e-6),
    # x is exact in 16 bits; float32 accumulation of up to 1,000 terms, then one rounding to float16 (2^-11).
    "a16": Tolerance(relative=5e-4, of_terms=2e-6, absolute=1e-7),
    # One rounding to bfloat16 (2^-8). Codes of 4 bits enter as 128 + code and 128 · Σx is taken away again, so float32
    # sums are some 20 times as large as their result, in the mean over codes.
    "triton-bf16": Tolerance(relative=4e-3, of_terms=2e-5, absolute=1e-7),
}
NORM = {
    # Square, tree sum of at most 12 levels, division, addition, root, division, product: under 12 half ulps.
    "a8": Tolerance(relative=1e-6, absolute=1e-7),
    # The same in float32, then one rounding to float16 (2^-11).
    "a16": Tolerance(relative=5e-4, absolute=1e-6),
    # One rounding to bfloat16 (2^-8) instead.
    "triton-bf16": Tolerance(relative=4e-3, absolute=1e-6),
}
ACTIVATION = {
    # exp within 2 ulp, then four roundings; results below the normal range may vanish.
    "a8": Tolerance(relative=6e-7, absolute=1e-30),
    # One rounding to float16, 2^-24 apart at the bottom.
    "a16": Tolerance(relative=5e-4, absolute=6e-8),
    # One rounding to bfloat16 (2^-8), which has float32's range.
    "triton-bf16": Tolerance(relative=4e-3, absolute=1e-30),
}
ROPE = {
    # Two products and a sum, each rounded once: at most 1.5 ulp of the pair's length (|x| up to 6 here).
    "a8": Tolerance(absolute=2e-6),
    # Then one rounding to float16 (2^-11 of up to 6).
    "a16": Tolerance(absolute=2e-6, relative=5e-4),
    # Then one rounding to bfloat16 (2^-8).
    "triton-bf16": Tolerance(absolute=2e-6, relative=4e-3),
}
STORED = {
    # In units of the stored step (the int8 scale, or the ulp of the 16-bit or 8-bit float): half a step for the
    # rounding and a little for the float32 division. ROPE's absolute tolerance, for the value before, is added.
    "a8": Tolerance(absolute=0.51),
    "a16": Tolerance(absolute=0.51),
}
ATTENTION_INT8 = {
    # The oracle rounds the query to int8 as a8 states it. Where float32 and float64 stand on two sides of a tie a
    # code differs by one: 0.02 · |k_d| · scale < 0.01 in a score, and about half as much in an output; else 1e-4.
    "a8": Tolerance(absolute=5e-3),
    # 16-bit query taken as it is; float32 sums; output rounded to float16 (2^-11 of up to 5).
    "a16": Tolerance(absolute=1e-4, relative=5e-4),
    # Weights and the rotated query are rounded to float16 for the products: 2^-12 of Σ weight · |v| and of Σ |q_d k_d|
    # · scale at the utmost, each around 2 here. bfloat16 activations add the output's rounding, 2^-8.
    "triton-fp16": Tolerance(absolute=1e-3, relative=5e-4),
    "triton-bf16": Tolerance(absolute=1e-3, relative=4e-3),
}
ATTENTION_16BIT = {
    # Everything in 22-bit fixed point: 2^-22 · |q| · |k| · scale in a score, and as much in the weights.
    "a8": Tolerance(absolute=2e-5),
    "a16": Tolerance(absolute=1e-4, relative=5e-4),  # as for int8
    # As for int8, without a rotated query.
    "triton-fp16": Tolerance(absolute=5e-4, relative=5e-4),
    # Where K and V are bfloat16 like the activations, so are the weights: each is off by 2^-9 of itself at most, and so
    # is the sum by 2^-9 of the weighted |v|, which is up to 3 where few keys count (6e-3).
    "triton-bf16": Tolerance(absolute=6e-3, relative=4e-3),
}
ATTENTION_GIANT_BIAS = {
    # Scores reach some hundreds through the bias: a few float32 roundings of them (ulp 3e-5) come on top.
    "a8": Tolerance(absolute=6e-3),
    "a16": Tolerance(absolute=2e-3, relative=5e-4),
    "triton-bf16": Tolerance(absolute=2e-3, relative=4e-3),  # output rounding
}
MASS = {
    # Sums of softmax weights over query tokens and heads, relative to that number; score errors as in attention.
    "a8": Tolerance(of_terms=1e-2),
    "a16": Tolerance(of_terms=1e-4),
}
LOGPROBS = {
    # float64.
    "a8": Tolerance(absolute=1e-12),
    "a16": Tolerance(absolute=1e-12),
    # Probabilities of float32 logits relative to the best, cut off at 2^-44, summed exactly: 2^-23 (2 |ln p| + 4) each.
    "triton-fp16": Tolerance(absolute=4e-6),
    "triton-bf16": Tolerance(absolute=4e-6),
}
EXP_ULP = 2.0  # stated in the docstring of exp_nonpositive


@dataclass(frozen=True)
class LinearCase:
    """Parts are (form, group size or 0 for the whole row, outputs)."""

    name: str
    num_inputs: int
    parts: tuple[tuple[str, int, int], ...]
    bias: bool = False
    residual: bool = False


LINEAR_CASES = (
    LinearCase("int4-g32", 160, (("int4", 32, 48),)),
    LinearCase("int4-g64", 192, (("int4", 64, 40),), residual=True),
    LinearCase("int4-g128", 384, (("int4", 128, 33),), bias=True),
    LinearCase("int4-row", 320, (("int4", 0, 24),)),  # cut into 128, 128 and 64, which share one scale
    LinearCase("int4-g36-odd", 108, (("int4", 36, 7),), bias=True, residual=True),
    LinearCase("int4-g192", 384, (("int4", 192, 16),)),  # every weight group ends in a short activation group
    LinearCase("int8-g32", 96, (("int8", 32, 64),)),
    LinearCase("int8-g33-odd", 99, (("int8", 33, 5),), bias=True),
    LinearCase("int8-row", 200, (("int8", 0, 24),), residual=True),
    LinearCase("fp16", 576, (("fp16", 0, 31),), bias=True),
    LinearCase("bf16", 100, (("bf16", 0, 16),), residual=True),
    LinearCase("fp32", 64, (("fp32", 0, 16),)),
    LinearCase("qkv", 128, (("int4", 32, 48), ("int4", 32, 16), ("int4", 32, 16)), bias=True),
    LinearCase("mixed", 128, (("int4", 32, 24), ("fp16", 0, 8), ("int8", 64, 8), ("int4", 64, 8)), bias=True),
)


@dataclass(frozen=True)
class AttentionCase:
    """sequences: (tokens in the cache before the step, tokens of the step) each.

    holes        table entries left out of every sequence's table (as a window or an eviction leaves them)
    shared       the first sequences share the blocks that all of them have filled before the step
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    element: ElementType = "int8"
    rotated: bool = False
    key_bias: float = 0.0
    window: int = 0
    holes: tuple[int, ...] = ()
    shared: bool = False
    block_mass: bool = False
    partial_rotary: bool = False
    only: tuple[str, ...] = field(default=("a8", "a16"))


RAGGED = ((0, 1), (15, 1), (16, 1), (17, 1), (254, 1), (255, 1), (256, 1), (700, 1))
"""Decoding at both sides of a block edge and of a split edge, and over three splits."""
MIXED = ((30, 1), (0, 17), (47, 33), (255, 2), (500, 1), (240, 40))
"""Decodes beside prompts: a first chunk, later chunks, and chunks that cross a split edge."""

SCATTERED = tuple(block for block in range(60) if block % 7 and block not in (31, 32, 33))
"""Leaves single blocks, so that every split has empty places."""

QUICK_ATTENTION = (
    AttentionCase("decode-int8", RAGGED),
    AttentionCase("decode-int8-rotated", RAGGED, rotated=True),
    AttentionCase("decode-fp16", RAGGED, element="fp16"),
    AttentionCase("decode-bf16", RAGGED[:6], element="bf16"),
    AttentionCase("mixed-int8-rotated", MIXED, rotated=True),
    AttentionCase("mixed-fp16", MIXED, element="fp16"),
    AttentionCase("mixed-bf16", MIXED[:3], element="bf16"),
    AttentionCase("gqa-1", MIXED[:4], num_heads=2, num_kv_heads=2, element="fp16"),
    AttentionCase("gqa-3", MIXED[:4], num_heads=9, num_kv_heads=3, element="fp16"),
    AttentionCase("gqa-7", MIXED[:4], num_heads=14, num_kv_heads=2, element="fp16"),
    AttentionCase("gqa-8", MIXED[:4], num_heads=8, num_kv_heads=1, element="fp16"),
    AttentionCase("head-80", MIXED[:4], head_dim=80, rotated=True),  # rotation in blocks of 16
    AttentionCase("head-96", MIXED[:4], head_dim=96, rotated=True),  # rotation in blocks of 32
    AttentionCase("head-128", MIXED[:4], head_dim=128, rotated=True),
    AttentionCase("head-256", MIXED[:4], head_dim=256, num_heads=2, num_kv_heads=1, element="fp16"),
    AttentionCase("key-bias", MIXED[:5], rotated=True, key_bias=1.0),
    AttentionCase("key-bias-fp16", MIXED[:4], element="fp16", key_bias=1.0),
    AttentionCase("key-bias-giant", MIXED[:4], rotated=True, key_bias=60.0),
    AttentionCase("key-bias-partial-rotary", MIXED[:4], element="fp16", key_bias=1.0, partial_rotary=True),
    AttentionCase("window-40", MIXED, window=40, element="fp16"),
    AttentionCase("window-1", MIXED[:3], window=1, element="fp16"),  # a query sees itself alone
    AttentionCase("window-holes", ((500, 1), (470, 33), (300, 20)), window=64, holes=(0, 1, 2, 5, 12), rotated=True),
    AttentionCase("holes", ((500, 1), (470, 33), (600, 2)), holes=(1, 2, 7, 20), element="fp16"),
    AttentionCase("freed", ((500, 1), (470, 33), (600, 2)), holes=tuple(range(21)), element="fp16"),
    AttentionCase("freed-window", ((700, 1), (640, 33), (1100, 2)), window=50, holes=tuple(range(36)), rotated=True),
    AttentionCase("sinks", ((700, 1), (1000, 3), (690, 40)), holes=(*range(2, 40), 42), rotated=True, block_mass=True),
    AttentionCase("scattered", ((1200, 1), (990, 20)), holes=SCATTERED, element="fp16", block_mass=True),
    AttentionCase("scattered-bias", ((1200, 1), (990, 20)), holes=SCATTERED, rotated=True, key_bias=1.0),
    AttentionCase("shared", ((64, 1), (64, 5), (70, 1), (64, 33)), shared=True, element="fp16"),
    AttentionCase("mass", MIXED, block_mass=True, element="fp16"),
    AttentionCase("mass-window", ((300, 1), (0, 40)), block_mass=True, window=24, element="fp16"),
    AttentionCase("empty", ()),
    AttentionCase("fp8-e4m3", MIXED[:4], element="fp8_e4m3", only=("a16",)),  # a8 refuses fp8
    AttentionCase("fp8-e5m2", MIXED[:4], element="fp8_e5m2", only=("a16",)),
)

FULL_ATTENTION = tuple(
    AttentionCase(
        f"{element}-gqa{groups}-d{head_dim}-w{window}-b{bias:g}{'-holes' if holes else ''}",
        (*MIXED, RAGGED[-1]),
        num_heads=groups * 2,
        num_kv_heads=2,
        head_dim=head_dim,
        element=element,
        rotated=element == "int8",
        key_bias=bias,
        window=window,
        holes=holes,
        block_mass=True,
    )
    for element, groups, head_dim, window, bias, holes in itertools.product(
        ("int8", "fp16", "bf16"), (1, 3, 4, 7, 8), (64, 80, 96, 128, 256), (0, 40), (0.0, 1.0), ((), (1, 2, 7))
    )
)
