"""Kernels for the ahead-of-time check to find fault with, one fault each, and one without."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.variants import ActivationType, Budget, Variant


@triton.jit
def multiply(a, b, out, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One tile of a · b, both stored tile after tile."""
    rows, columns, channels = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a += rows[:, None] * K + channels[None, :]
    b += channels[:, None] * N + columns[None, :]
    total = tl.zeros((M, N), tl.float32)
    for _ in range(depth):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += M * K
        b += K * N
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(tl.float16))


@triton.jit
def remember(source, target, count, SIZE: tl.constexpr):
    """Keeps four tiles in registers at once, which one warp has not."""
    lanes = tl.arange(0, SIZE)
    first = tl.load(source + lanes)
    second = tl.load(source + SIZE + lanes)
    third = tl.load(source + 2 * SIZE + lanes)
    fourth = tl.load(source + 3 * SIZE + lanes)
    for _ in range(count):
        first, second, third, fourth = first + second * third, second + fourth, third * first, fourth + third
    tl.store(target + lanes, first + second * third + fourth)


@triton.jit
def disagree(source, target, SIZE: tl.constexpr):
    """Adds tiles of two sizes, which no compiler accepts."""
    tl.store(target + tl.arange(0, SIZE), tl.load(source + tl.arange(0, SIZE)) + tl.arange(0, 2 * SIZE))


@triton.jit
def double(source, target, SIZE: tl.constexpr):
    tl.store(target + tl.arange(0, SIZE), 2 * tl.load(source + tl.arange(0, SIZE)))


TILE = {"M": 64, "N": 64, "K": 64}
SOUND = Variant(
    "sound",
    multiply,
    {"a": "*fp16", "b": "*fp16", "out": "*fp16", "depth": "i32", **dict.fromkeys(TILE, "constexpr")},
    TILE,
    num_warps=4,
    num_stages=3,
    divisible=("a", "b", "out"),
    budget=Budget(elements_per_iteration=2 * 64 * 64, instructions_per_element=3.0, min_wide_loads=2),
)
TWO_POINTERS = {"source": "*fp32", "target": "*fp32", "SIZE": "constexpr"}


STRAIGHT = Variant("straight", double, TWO_POINTERS, {"SIZE": 64}, 1, 1, (), Budget(elements_per_iteration=1))


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """All of them; on sm_86 one alone, for tests that are not about faults."""
    if card.architecture == 86:
        return [STRAIGHT]
    return [
        SOUND,
        replace(SOUND, name="shared", constants={**TILE, "K": 256}, num_stages=5, budget=Budget()),
        replace(SOUND, name="scalar", divisible=(), options={"enable_fp_fusion": False}),
        replace(SOUND, name="costly", budget=replace(SOUND.budget, instructions_per_element=0.1)),
        Variant("spills", remember, {**TWO_POINTERS, "count": "i32"}, {"SIZE": 2048}, 1, 1, ("source", "target")),
        Variant(
            "spills in a counted loop",
            remember,
            {**TWO_POINTERS, "count": "i32"},
            {"SIZE": 2048},
            1,
            1,
            ("source", "target"),
            Budget(min_wide_loads=1),
        ),
        Variant("refused", disagree, TWO_POINTERS, {"SIZE": 64}, 1, 1, ()),
        replace(SOUND, name="arguments", signature={**SOUND.signature, "other": "i32"}),
        STRAIGHT,
    ]
