"""Launches of the kernels that write into the KV cache. Engine thread; asynchronous on the current stream."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, ELEMENT_BYTES, SCALE_BYTES, ElementType, GroupFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, Batch, KVCache, RopeTable
from kvd_kernels.triton import kv_kernels as kernels
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.variants import ActivationType, Variant

ELEMENT_CODES: dict[ElementType, int] = {
    "int8": kernels.INT8.value,
    "fp16": kernels.FP16.value,
    "bf16": kernels.BF16.value,
    "fp8_e4m3": kernels.FP8_E4M3.value,
    "fp8_e5m2": kernels.FP8_E5M2.value,
}
HEAD_DIMS = (64, 80, 96, 128, 256)
"""Those of common models, for which the kernel is proven ahead of time; others are compiled when they are met."""
_COPY_BYTES = 4096
_COPY_WARPS = 4


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """tokens: how many of them a program takes, one head of each."""

    tokens: int
    num_warps: int


WRITE_CONFIGS = (WriteConfig(1, 1), WriteConfig(16, 4))


def write_config(num_tokens: int) -> WriteConfig:
    """Few tokens spread over the card, one warp for each head; of many, those of a block are written together."""
    return WRITE_CONFIGS[num_tokens > 16]


def head_constants(head_dim: int) -> dict[str, Any]:
    """The compile-time constants of `rope_and_write`."""
    rotation = head_dim & -head_dim
    return {
        "HEAD_DIM": head_dim,
        "BLOCK": 1 << (head_dim - 1).bit_length(),
        "ROTATION": rotation,
        "ROTATION_SCALE": rotation**-0.5,
    }


def copy_regions(group: GroupFormat) -> list[tuple[int, int, int, int, int]]:
    """Rows of the table that `kv_kernels.copy_tokens` reads, for all layers of a group.

    Where a region has one order of tokens only, `outer` is the whole region, so that its term is 0.
    """
    regions = []
    for index, layer in group.layers:
        base = group.layer_offset(index)
        k_unit = 4 * ELEMENT_BYTES[layer.k_type]
        regions.append((base, layer.k_bytes, k_unit, BLOCK_TOKENS, layer.k_bytes))
        v_unit = ELEMENT_BYTES[layer.v_type]
        regions.append((base + layer.v_offset, layer.v_bytes, v_unit, 4, 4 * layer.head_dim * v_unit))
        for offset, num_bytes in (
            (layer.k_scale_offset, layer.k_scale_bytes),
            (layer.v_scale_offset, layer.v_scale_bytes),
        ):
            if num_bytes:
                regions.append((base + offset, num_bytes, SCALE_BYTES, BLOCK_TOKENS, num_bytes))
    return regions


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """What a launch for one layer of one cache takes beside the step's tensors: found once, used at every step.

    offsets: block_bytes and the offsets of the layer's regions; elements: types of K and V, and whether K is rotated.
    """

    pool: torch.Tensor
    group: GroupFormat
    offsets: tuple[int, ...]
    elements: tuple[int, int, int]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _CopyPlan:
    """regions: `copy_regions` on the device; parts: programs that the largest of them takes."""

    pool: torch.Tensor
    regions: torch.Tensor
    parts: int


class KVWrites:
    """Writes tokens into, and copies them inside, the cache that it is called with."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], _LayerPlan] = {}
        self._copies: dict[int, _CopyPlan] = {}

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        """See `Ops.rope_and_write`. A token whose write slot is negative is padding: the cache is left alone."""
        if not batch.num_tokens:
            return
        group_id = spec.group.group_id
        plan = self._layers.get((group_id, spec.layer_index))
        if plan is None or plan.pool is not cache.pools[group_id] or plan.group is not spec.group:
            plan = self._layers[group_id, spec.layer_index] = _plan_layer(cache.pools[group_id], spec)
        config = write_config(batch.num_tokens)
        kernels.rope_and_write[(-(-batch.num_tokens // config.tokens), spec.num_heads + 2 * spec.num_kv_heads)](
            qkv, q_out, rope.cos, rope.sin, batch.positions, batch.groups[group_id].write_slots, plan.pool,
            batch.num_tokens, *plan.offsets, spec.num_heads, spec.num_kv_heads, rope.cos.shape[1], *plan.elements,
            **plan.constants, TOKENS=config.tokens, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        """See `Ops.copy_block`: one launch for all layers of the group."""
        assert 0 <= num_tokens <= BLOCK_TOKENS
        if not num_tokens:
            return
        pool = cache.pools[group_id]
        plan = self._copies.get(group_id)
        if plan is None or plan.pool is not pool:
            rows = copy_regions(cache.format.groups[group_id])
            regions = torch.tensor(rows, dtype=torch.int32).to(pool.device)
            plan = self._copies[group_id] = _CopyPlan(pool, regions, max(-(-row[1] // _COPY_BYTES) for row in rows))
        kernels.copy_tokens[(plan.regions.shape[0], plan.parts)](
            pool, plan.regions, pool.shape[1], source, target, num_tokens,
            BLOCK=_COPY_BYTES, num_warps=_COPY_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _plan_layer(pool: torch.Tensor, spec: AttentionSpec) -> _LayerPlan:
    layer: LayerFormat = next(layer for index, layer in spec.group.layers if index == spec.layer_index)
    assert (layer.head_dim, layer.num_kv_heads) == (spec.head_dim, spec.num_kv_heads)
    assert pool.shape[1] == spec.group.block_bytes
    base = spec.group.layer_offset(spec.layer_index)
    offsets = (0, layer.v_offset, layer.k_scale_offset, layer.v_scale_offset)
    return _LayerPlan(
        pool,
        spec.group,
        (pool.shape[1], *(base + offset for offset in offsets)),
        (ELEMENT_CODES[layer.k_type], ELEMENT_CODES[layer.v_type], int(layer.rotated)),
        head_constants(layer.head_dim),
    )


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """Two forms per head_dim, whatever the types of K and V; the same on every card."""
    del card
    pointers = {
        "qkv": f"*{dtype}", "q_out": f"*{dtype}", "cos": "*fp32", "sin": "*fp32", "positions": "*i32",
        "write_slots": "*i64", "pool": "*u8",
    }  # fmt: skip
    offsets = ("block_bytes", "k_offset", "v_offset", "k_scale_offset", "v_scale_offset")
    numbers = ("num_heads", "num_kv_heads", "half", "k_element", "v_element", "is_rotated")
    integers = dict.fromkeys(("num_tokens", *offsets, *numbers), "i32")
    unfused = {"enable_fp_fusion": False}
    forms = []
    for head_dim, config in itertools.product(HEAD_DIMS, WRITE_CONFIGS):
        constants = {**head_constants(head_dim), "TOKENS": config.tokens}
        forms.append(
            Variant(
                f"rope_and_write-d{head_dim}-{config.tokens}-{dtype}", kernels.rope_and_write,
                {**pointers, **integers, **dict.fromkeys(constants, "constexpr")}, constants, config.num_warps, 3,
                (*pointers, *offsets), options=unfused,
            )
        )  # fmt: skip
    if dtype == "fp16":  # moves bytes: one form for both types
        signature = {"pool": "*u8", "regions": "*i32", "block_bytes": "i32", "source": "i32", "target": "i32"}
        signature |= {"num_tokens": "i32", "BLOCK": "constexpr"}
        forms.append(
            Variant(
                "copy_tokens", kernels.copy_tokens, signature, {"BLOCK": _COPY_BYTES}, _COPY_WARPS, 3,
                ("pool", "regions", "block_bytes"), options=unfused,
            )
        )  # fmt: skip
    return forms
