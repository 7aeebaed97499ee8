"""Proof, at start, that an ISA level computes what it should on this very processor.

The levels' instructions differ (and so do compilers, hypervisors and steppings), their bytes must not: a small linear
of every kind, at few rows and at many, and a small attention are computed by the level and by portable C++ and
compared byte for byte. Takes milliseconds. A level that fails is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, GroupFormat, KVFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, Ops, RopeTable
from kvd_kernels.weights import Int4Weight, Int8Weight, Linear

_ROWS = (1, 3, 20)
_INPUTS, _OUTPUTS = 128, 48
_HEADS, _KV_HEADS, _HEAD_DIM, _TOKENS = 6, 2, 64, 37


class MakeOps(Protocol):
    """Makes ops of one level, with one thread."""

    def __call__(self, *, level: str) -> Ops: ...


def _weights(random: torch.Generator) -> list[Linear]:
    layers = []
    for group in (32, 64, 128):
        shape = (_OUTPUTS, _INPUTS // group)
        codes = torch.randint(0, 256, (_OUTPUTS, _INPUTS // 2), generator=random, dtype=torch.uint8)
        scales = (torch.rand(shape, generator=random) * 0.02 + 0.005).half()
        layers.append(Linear((Int4Weight(codes, scales, -8 * scales, group),)))
        wide = torch.randint(-127, 128, (_OUTPUTS, _INPUTS), generator=random, dtype=torch.int8)
        layers.append(Linear((Int8Weight(wide, scales, group),)))
    return layers


def _linears(ops: Ops) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    results = []
    for layer in _weights(random):
        handle = ops.prepare_linear(layer)
        for rows in _ROWS:
            x = torch.randn(rows, _INPUTS, generator=random)
            out = torch.zeros(rows, _OUTPUTS)
            ops.linear(rows, x, handle, out)
            results.append(out)
    return results


def _attention(ops: Ops) -> list[torch.Tensor]:
    """One prompt of some blocks, then one more token over it."""
    random = torch.Generator().manual_seed(1)
    layer = LayerFormat(_KV_HEADS, _HEAD_DIM, "int8", "int8", rotated=True)
    group = GroupFormat(0, 0, ((0, layer),))
    num_blocks = -(-(_TOKENS + 1) // BLOCK_TOKENS)
    cache = KVCache(KVFormat((group,)), (torch.zeros(num_blocks, group.block_bytes, dtype=torch.uint8),))
    spec = AttentionSpec(0, group, _HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM**-0.5)
    angles = torch.rand(_TOKENS + 1, _HEAD_DIM // 2, generator=random)
    rope = RopeTable(angles, 1 - angles)
    results = []
    for start, count in ((0, _TOKENS), (_TOKENS, 1)):
        positions = torch.arange(start, start + count, dtype=torch.int32)
        first = torch.arange(0, num_blocks * BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.int32)[None]
        tables = GroupTables(
            first // BLOCK_TOKENS, first, torch.tensor([start + count], dtype=torch.int32), positions.long()
        )
        batch = Batch(
            positions.long(), positions, torch.tensor([0, count], dtype=torch.int32), torch.tensor([count - 1]),
            (tables,), count, 1, 1,
        )  # fmt: skip
        qkv = torch.randn(count, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, generator=random)
        q, out = torch.zeros(count, _HEADS * _HEAD_DIM), torch.zeros(count, _HEADS * _HEAD_DIM)
        ops.rope_and_write(batch, qkv, rope, cache, spec, q)
        ops.attend(batch, q, rope, cache, spec, out)
        results += [q, out]
    return [*results, cache.pools[0]]


_CHECKS: tuple[tuple[str, Callable[[Ops], list[torch.Tensor]]], ...] = (("linear", _linears), ("attention", _attention))


def failing_op(make_ops: MakeOps, level: str, against: str = "portable") -> str | None:
    """The op of `level` whose bytes differ from those of portable C++, or None when all are equal."""
    checked, trusted = make_ops(level=level), make_ops(level=against)
    for name, compute in _CHECKS:
        for ours, theirs in zip(compute(checked), compute(trusted), strict=True):
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                return name
    return None
