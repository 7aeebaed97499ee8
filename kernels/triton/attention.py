"""Paged attention on the GPU: which kernels one call of `Ops.attend` launches, and their workspace. Engine thread only.

Sequences of few query tokens are decoded: their slots are cut into splits, each a thread block per KV head, which a
second kernel adds up. The others are prompts: tiles of query tokens. A step that has both launches both kernels, and
each leaves the other's sequences alone, so that nobody asks the device which is which.

Products work on operands of 16 bits (float32 sums): float16, which holds int8 codes and both 8-bit floats exactly, and
bfloat16 where K, V and activations are bfloat16. Where the activations are of another type, or keys are rotated or have
a bias, a small kernel makes the queries ready first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvd_kernels.kv_format import ELEMENT_BYTES, ElementType, GroupFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, RopeTable
from kvd_kernels.triton import attention_configs as configs
from kvd_kernels.triton import attention_kernels as kernels
from kvd_kernels.triton.attention_variants import padded_dim, padded_half, variants
from kvd_kernels.triton.cards import Card

__all__ = ["AttentionKernels", "variants"]

NO_WINDOW = 2**30
_POINTED: dict[ElementType, torch.dtype] = {
    "int8": torch.int8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
}


def operand_type(layer: LayerFormat, activation_dtype: torch.dtype) -> torch.dtype:
    """What the products' operands are: float32 stands for tf32, which holds float16 and bfloat16 alike."""
    if "bf16" not in (layer.k_type, layer.v_type):
        return torch.float16
    if activation_dtype is torch.bfloat16 and layer.k_type == layer.v_type:
        return torch.bfloat16
    return torch.float32


_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Workspace:
    """Buffers that grow and never shrink. What a graph has recorded stays where it is: outgrown buffers are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of at least num_elements, contents undefined; the same memory at every call that it suffices for."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < num_elements:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"attention's workspace {name} must grow while a graph is recorded: run a step before"
                )
            if buffer is not None:
                self._outgrown.append(buffer)
            # Doubling bounds what outgrown buffers hold by what the last one does.
            size = max(16, 1 << (num_elements - 1).bit_length())
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer


@dataclass(frozen=True, slots=True)
class LayerPointers:
    """One layer's regions in a pool, as flat tensors that begin at block 0; strides from block to block in elements."""

    format: LayerFormat
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    key_stride: int
    value_stride: int
    scale_stride: int


def open_layer(pool: torch.Tensor, group: GroupFormat, layer_index: int) -> LayerPointers:
    """Where a layer lies in the pool uint8 [num_blocks, block_bytes] of its group."""
    layer = next(layer for index, layer in group.layers if index == layer_index)
    assert pool.is_contiguous()
    flat, base = pool.view(-1), group.layer_offset(layer_index)

    def region(offset: int, dtype: torch.dtype) -> torch.Tensor:
        return flat[base + offset :].view(dtype)

    # Without int8 nobody reads scales, but an argument of their type there must be.
    key_scale_offset = layer.k_scale_offset if layer.k_scale_bytes else 0
    value_scale_offset = layer.v_scale_offset if layer.v_scale_bytes else 0
    return LayerPointers(
        layer,
        region(0, _POINTED[layer.k_type]),
        region(layer.v_offset, _POINTED[layer.v_type]),
        region(key_scale_offset, torch.float16),
        region(value_scale_offset, torch.float16),
        group.block_bytes // ELEMENT_BYTES[layer.k_type],
        group.block_bytes // ELEMENT_BYTES[layer.v_type],
        group.block_bytes // 2,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """What the launches of one `attend` share. queries: as the products take them."""

    batch: Batch
    tables: GroupTables
    layer: LayerPointers
    rope: RopeTable
    spec: AttentionSpec
    out: torch.Tensor
    lse: torch.Tensor
    keeps_lse: bool
    queries: torch.Tensor
    row_units: torch.Tensor
    coefficients: torch.Tensor
    constants: dict[str, Any]

    @property
    def group_heads(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def window(self) -> int:
        return self.spec.group.window or NO_WINDOW

    @property
    def is_wide(self) -> bool:
        return bool(self.constants["OPERAND"] == tl.float32)

    @property
    def score_scale(self) -> float:
        return self.spec.scale * math.log2(math.e)


class AttentionKernels:
    """See the module. dtype: of q and out, float16 or bfloat16."""

    def __init__(self, device: torch.device, card: Card, dtype: torch.dtype) -> None:
        self._card = card
        self._dtype = dtype
        self._workspace = Workspace(device)
        self._layers: dict[tuple[int, int], tuple[torch.Tensor, GroupFormat, LayerPointers]] = {}

    def attend(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None = None,
    ) -> None:
        """As `Ops.attend` states it."""
        if not batch.num_tokens:
            if block_mass is not None:
                block_mass[: batch.num_seqs] = 0
            return
        assert all(tensor.is_contiguous() for tensor in (q, out, rope.cos, rope.sin))
        call = self._prepare(batch, q, rope, cache, spec, out, block_mass is not None)
        max_query_tokens = batch.max_query_tokens or _longest_query(batch)
        heavy = configs.is_heavy(call.constants["PADDED"], wide=call.is_wide, biased=call.constants["BIASED"])
        short_rows = configs.decode_rows(max_query_tokens * call.group_heads, heavy=heavy)
        if short_rows is None:
            short_rows = configs.decode_rows(call.group_heads, heavy=heavy)
        if short_rows is None:
            raise NotImplementedError(f"{call.group_heads} query heads per KV head of {spec.head_dim} channels")
        short_tokens = min(short_rows // call.group_heads, max_query_tokens)
        if max_query_tokens <= short_tokens or batch.num_seqs > 1:
            self._decode(call, short_rows, short_tokens)
        if max_query_tokens > short_tokens:
            self._prefill(call, short_tokens + 1)
        if block_mass is not None:
            self._weigh(call, block_mass)

    def _layer(self, cache: KVCache, spec: AttentionSpec) -> LayerPointers:
        pool = cache.pools[spec.group.group_id]
        key = (spec.group.group_id, spec.layer_index)
        known = self._layers.get(key)
        if known is None or known[0] is not pool or known[1] is not spec.group:
            known = self._layers[key] = (pool, spec.group, open_layer(pool, spec.group, spec.layer_index))
        return known[2]

    def _prepare(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        keeps_lse: bool,
    ) -> _Call:
        layer = self._layer(cache, spec)
        operand = operand_type(layer.format, self._dtype)
        biased = spec.key_bias is not None
        stored = torch.bfloat16 if operand is torch.bfloat16 else torch.float16
        # Every 16-bit number is exact in tf32.
        fits = operand in (self._dtype, torch.float32)
        needs_queries = layer.format.rotated or not fits
        num_rows, half = batch.num_tokens * spec.num_heads, rope.cos.shape[1]
        constants: dict[str, Any] = {
            "HEAD_DIM": spec.head_dim,
            "PADDED": padded_dim(spec.head_dim),
            "HALF": padded_half(half) if biased else 16,
            "K_TYPE": layer.format.k_type,
            "OPERAND": _TRITON_TYPES[operand],
            "PREPARED": needs_queries,
            "BIASED": biased,
        }
        take = self._workspace.take
        lse = take("lse", num_rows if keeps_lse else 1, torch.float32)
        row_units = take("row units", num_rows if needs_queries or biased else 1, torch.float32)
        coefficients = take("coefficients", num_rows * 2 * half if biased else 1, torch.float32)
        queries = q
        rotation = layer.format.rotation_size if layer.format.rotated else 1
        if needs_queries or biased:
            prepared = take("queries", num_rows * spec.head_dim, stored)
            kernels.prepare_queries[(triton.cdiv(num_rows, configs.PREPARED_ROWS),)](
                q, coefficients if spec.key_bias is None else spec.key_bias, prepared, row_units, coefficients,
                num_rows, spec.num_heads, spec.num_heads // spec.num_kv_heads, half,
                HEAD_DIM=spec.head_dim, PADDED=constants["PADDED"],
                ROTATION=rotation, ROTATION_SCALE=rotation**-0.5, ROWS=configs.PREPARED_ROWS, HALF=constants["HALF"],
                BIASED=biased, num_warps=4, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
            if needs_queries:
                queries = prepared
        return _Call(
            batch, batch.groups[spec.group.group_id], layer, rope, spec, out, lse, keeps_lse,
            queries, row_units, coefficients, constants,
        )  # fmt: skip

    def _decode(self, call: _Call, rows: int, max_tokens: int) -> None:
        """Sequences of at most max_tokens query tokens."""
        batch, spec, layer, tables = call.batch, call.spec, call.layer, call.tables
        config = configs.decode_config(
            rows, call.constants["PADDED"], wide=call.is_wide, biased=call.constants["BIASED"]
        )
        max_slots = batch.max_slots or int(tables.num_slots[: batch.num_seqs].max())
        num_splits = configs.split_count(self._card, batch.num_seqs, spec.num_kv_heads, max_slots)
        num_partial_rows = num_splits * batch.num_seqs * max_tokens * spec.num_heads if num_splits > 1 else 1
        sums = self._workspace.take("partial sums", num_partial_rows * call.constants["PADDED"], torch.float32)
        stats = self._workspace.take("partial stats", num_partial_rows * 2, torch.float32)
        kernels.decode[(batch.num_seqs, spec.num_kv_heads, num_splits)](
            call.queries, call.row_units, call.coefficients, layer.keys, layer.values, layer.key_scales,
            layer.value_scales, call.rope.cos, call.rope.sin, tables.block_tables, tables.first_positions,
            tables.num_slots, batch.query_starts, batch.positions, call.out, call.lse, sums, stats,
            layer.key_stride, layer.value_stride, layer.scale_stride, tables.block_tables.stride(0),
            spec.num_heads, call.group_heads, call.rope.cos.shape[1], call.window, max_tokens, call.score_scale,
            **call.constants, ROWS=config.rows, NUM_BLOCKS=config.num_blocks, V_TYPE=layer.format.v_type,
            SPLIT=num_splits > 1, KEEPS_LSE=call.keeps_lse and num_splits == 1, MIN_LENGTH=configs.MIN_SPLIT_SLOTS,
            STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
            maxnreg=configs.MAX_REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip
        if num_splits == 1:
            return
        kernels.merge[(batch.num_seqs, spec.num_heads, max_tokens)](
            sums, stats, tables.num_slots, batch.query_starts, call.out, call.lse,
            spec.num_heads, max_tokens, num_splits,
            HEAD_DIM=spec.head_dim, PADDED=call.constants["PADDED"], KEEPS_LSE=call.keeps_lse,
            MIN_LENGTH=configs.MIN_SPLIT_SLOTS, num_warps=4, num_stages=1, maxnreg=configs.MAX_REGISTERS,
            enable_fp_fusion=True,
        )  # fmt: skip

    def _prefill(self, call: _Call, min_tokens: int) -> None:
        """Sequences of at least min_tokens query tokens."""
        batch, spec, layer, tables = call.batch, call.spec, call.layer, call.tables
        config = configs.prefill_config(
            call.group_heads, call.constants["PADDED"], wide=call.is_wide, biased=call.constants["BIASED"]
        )
        num_tiles = batch.num_tokens // (config.rows // call.group_heads) + batch.num_seqs
        kernels.prefill[(num_tiles, spec.num_kv_heads)](
            call.queries, call.row_units, call.coefficients, layer.keys, layer.values, layer.key_scales,
            layer.value_scales, call.rope.cos, call.rope.sin, tables.block_tables, tables.first_positions,
            tables.num_slots, batch.query_starts, batch.positions, call.out, call.lse,
            layer.key_stride, layer.value_stride, layer.scale_stride, tables.block_tables.stride(0), batch.num_seqs,
            spec.num_heads, call.group_heads, call.rope.cos.shape[1], call.window, min_tokens, call.score_scale,
            **call.constants, ROWS=config.rows, NUM_BLOCKS=config.num_blocks, V_TYPE=layer.format.v_type,
            KEEPS_LSE=call.keeps_lse, STAGES=config.num_stages,
            num_warps=config.num_warps, enable_fp_fusion=True, num_stages=config.num_stages,
        )  # fmt: skip

    def _weigh(self, call: _Call, mass: torch.Tensor) -> None:
        batch, spec, layer, tables = call.batch, call.spec, call.layer, call.tables
        config = configs.mass_config(call.constants["PADDED"])
        width = mass.shape[1]
        assert mass.stride(1) == 1
        kernels.weigh_blocks[(batch.num_seqs, triton.cdiv(width, config.num_blocks))](
            call.queries, call.row_units, call.coefficients, layer.keys, layer.key_scales, call.rope.cos,
            call.rope.sin, tables.block_tables, tables.first_positions, tables.num_slots, batch.query_starts,
            batch.positions, call.lse, mass,
            layer.key_stride, layer.scale_stride, tables.block_tables.stride(0), mass.stride(0), width,
            spec.num_heads, spec.num_kv_heads, call.group_heads, call.rope.cos.shape[1], call.window, call.score_scale,
            **call.constants, ROWS=config.rows, NUM_BLOCKS=config.num_blocks,
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip


def _longest_query(batch: Batch) -> int:
    starts = batch.query_starts[: batch.num_seqs + 1]
    return int((starts[1:] - starts[:-1]).max())
