"""Synthetic weights, caches and batches of the shapes that the benchmarks time. Stateless."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, ElementType, LayerFormat, build_kv_format
from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, RopeTable
from kvd_kernels.weights import Int4Weight, Int8Weight, Linear

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a decoder. head_group: int8 head in groups of so many channels; 0: no head is timed."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    group: int
    vocab: int
    head_group: int


SMALL = Shape("135M, groups of 32", 576, 1536, 9, 3, 64, 30, 32, 49152, 32)
LARGE = Shape("1.9 GB of 4-bit weights, groups of 128", 4096, 14336, 32, 8, 128, 16, 128, 0, 0)


def int4(num_outputs: int, num_inputs: int, group: int) -> Int4Weight:
    shape = (num_outputs, num_inputs // group)
    codes = torch.randint(0, 256, (num_outputs, num_inputs // 2), dtype=torch.uint8)
    scales = (torch.rand(shape) * 0.02 + 0.005).half()
    return Int4Weight(codes, scales, -8 * scales, group)


def int8(num_outputs: int, num_inputs: int, group: int) -> Int8Weight:
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    return Int8Weight(codes, (torch.rand(num_outputs, num_inputs // group) * 0.01).half(), group)


def layer_linears(shape: Shape) -> dict[str, Linear]:
    """The four linears of one block."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return {
        "qkv": Linear((int4(qkv, shape.hidden, shape.group),)),
        "output": Linear((int4(shape.hidden, shape.heads * shape.head_dim, shape.group),)),
        "gate_up": Linear((int4(2 * shape.intermediate, shape.hidden, shape.group),)),
        "down": Linear((int4(shape.hidden, shape.intermediate, shape.group),)),
    }


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One layer's cache with something in it, and a batch whose tokens are written there."""

    batch: Batch
    cache: KVCache
    spec: AttentionSpec
    rope: RopeTable


def attention_inputs(
    shape: Shape,
    num_seqs: int,
    context: int,
    num_new: int,
    element: ElementType = "int8",
    device: torch.device | None = None,
) -> AttentionInputs:
    """The last num_new tokens of num_seqs sequences over `context` tokens each, in blocks at random places."""
    per_seq = -(-context // BLOCK_TOKENS)
    layer = LayerFormat(shape.kv_heads, shape.head_dim, element, element, rotated=element == "int8")
    kv_format = build_kv_format([(0, layer)])
    group = kv_format.groups[0]
    cache = KVCache(kv_format, (_filled_pool(layer, num_seqs * per_seq, device),))
    tables = torch.randperm(num_seqs * per_seq).int().view(num_seqs, per_seq)
    first = (torch.arange(per_seq, dtype=torch.int32) * BLOCK_TOKENS).expand(num_seqs, per_seq).contiguous()
    positions = torch.arange(context - num_new, context, dtype=torch.int32)
    write_slots = tables[:, positions.long() // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
    total = num_seqs * num_new
    starts = torch.arange(0, total + 1, num_new, dtype=torch.int32)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    groups = GroupTables(
        tables.to(device), first.to(device), lengths.to(device), write_slots.reshape(-1).contiguous().to(device)
    )
    batch = Batch(
        torch.zeros(total, dtype=torch.int64, device=device), positions.repeat(num_seqs).to(device),
        starts.to(device), (starts[1:] - 1).long().to(device), (groups,), total, num_seqs, num_seqs,
        max_query_tokens=num_new, max_slots=per_seq * BLOCK_TOKENS,
    )  # fmt: skip
    angles = torch.rand(context, shape.head_dim // 2, device=device)
    spec = AttentionSpec(0, group, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    return AttentionInputs(batch, cache, spec, RopeTable(angles.cos(), angles.sin()))


def _filled_pool(layer: LayerFormat, num_blocks: int, device: torch.device | None) -> torch.Tensor:
    """Blocks of one layer whose every element and scale is a number of ordinary size."""
    width = build_kv_format([(0, layer)]).block_bytes
    if layer.k_type in ("fp16", "bf16"):
        dtype = torch.float16 if layer.k_type == "fp16" else torch.bfloat16
        return torch.randn((num_blocks, width // 2), device=device).to(dtype).view(torch.uint8)
    pool = torch.randint(0, 256, (num_blocks, width), dtype=torch.uint8, device=device)
    if layer.k_type != "int8":
        return pool & 0xBF  # neither infinite nor NaN: the highest bit of the exponent is 0
    for offset in (layer.k_scale_offset, layer.v_scale_offset):
        pool[:, offset : offset + layer.k_scale_bytes].view(torch.float16).fill_(0.01)
    return pool
