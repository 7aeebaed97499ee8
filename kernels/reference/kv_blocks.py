"""Reading and writing K and V where `kv_format` says they lie.

The pool is bytes; every region of a layer is a strided view of it with the region's element type. Only the
bytes of the tokens that are written change. Engine thread; the pool belongs to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, ElementType, GroupFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, KVCache
from kvd_kernels.reference.elementary import hadamard
from kvd_kernels.reference.quantize import MINI_FLOATS, quantize_kv

_DTYPES: dict[ElementType, torch.dtype] = {
    "int8": torch.int8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One layer's part of a pool as tensors that share its memory.

    k         [blocks, kv_heads, head_dim / 4, 16, 4]
    v         [blocks, kv_heads, 4, head_dim, 4]
    k_scales  float16 [blocks, kv_heads, 16] for int8, else None; v_scales likewise
    """

    format: LayerFormat
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None


def open_layer(pool: torch.Tensor, group: GroupFormat, layer_index: int) -> LayerBlocks:
    """Views of layer `layer_index` in the pool uint8 [num_blocks, block_bytes] of its group."""
    layer = next(layer for index, layer in group.layers if index == layer_index)
    base = group.layer_offset(layer_index)
    num_blocks = pool.shape[0]

    def region(offset: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return pool[:, base + offset : base + offset + num_bytes].view(dtype).view(num_blocks, *shape)

    def scales(offset: int, num_bytes: int) -> torch.Tensor | None:
        if not num_bytes:
            return None
        return region(offset, num_bytes, torch.float16, (layer.num_kv_heads, BLOCK_TOKENS))

    return LayerBlocks(
        layer,
        region(0, layer.k_bytes, _DTYPES[layer.k_type], layer.k_shape),
        region(layer.v_offset, layer.v_bytes, _DTYPES[layer.v_type], layer.v_shape),
        scales(layer.k_scale_offset, layer.k_scale_bytes),
        scales(layer.v_scale_offset, layer.v_scale_bytes),
    )


class LayerViews:
    """The views of one cache, opened once per layer: an op asks for the same ones at every step."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], tuple[torch.Tensor, GroupFormat, LayerBlocks]] = {}

    def of(self, cache: KVCache, spec: AttentionSpec) -> LayerBlocks:
        """The layer that an attention spec speaks of."""
        pool = cache.pools[spec.group.group_id]
        key = (spec.group.group_id, spec.layer_index)
        known = self._layers.get(key)
        if known is None or known[0] is not pool or known[1] is not spec.group:
            known = (pool, spec.group, open_layer(pool, spec.group, spec.layer_index))
            self._layers[key] = known
        return known[2]


def encode(x: torch.Tensor, element: ElementType) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 [..., head_dim] → (stored elements, float16 scales [...] for int8)."""
    if element == "int8":
        return quantize_kv(x)
    if element in MINI_FLOATS:
        return MINI_FLOATS[element].encode(x), None
    return x.to(_DTYPES[element]), None


def write_tokens(layer: LayerBlocks, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k (after RoPE) and v, float32 [tokens, kv_heads, head_dim], at slots int64 [tokens]."""
    blocks, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    if layer.format.rotated:
        k = hadamard(k, layer.format.rotation_size)
    k_elements, k_scales = encode(k, layer.format.k_type)
    v_elements, v_scales = encode(v, layer.format.v_type)
    layer.k[blocks, :, :, tokens] = k_elements.view(*k.shape[:2], -1, 4)
    layer.v[blocks, :, tokens // 4, :, tokens % 4] = v_elements
    if layer.k_scales is not None and k_scales is not None:
        layer.k_scales[blocks, :, tokens] = k_scales
    if layer.v_scales is not None and v_scales is not None:
        layer.v_scales[blocks, :, tokens] = v_scales


def _to_float(elements: torch.Tensor, element: ElementType) -> torch.Tensor:
    """Contiguous float32 of the same shape."""
    if element in MINI_FLOATS:
        return MINI_FLOATS[element].decode(elements).contiguous()
    # One pass that converts and reorders.
    return torch.empty(elements.shape, dtype=torch.float32).copy_(elements)


def read_blocks(layer: LayerBlocks, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored K and V of blocks in token order as float32, exactly; for int8 the codes without their scales.

    entries: integers [B, E] block ids. Returns K and V [B, kv_heads, E · 16, head_dim].
    """
    num_tables, num_entries = entries.shape
    flat = entries.reshape(-1)
    shape = (num_tables, -1, num_entries * BLOCK_TOKENS, layer.format.head_dim)
    # Four channels of a token lie side by side: they move as one integer of their common width.
    k_quads = layer.k.view(torch.int32 if layer.k.element_size() == 1 else torch.int64).squeeze(-1)
    k = k_quads.index_select(0, flat).view(num_tables, num_entries, *k_quads.shape[1:])
    k = k.permute(0, 2, 1, 4, 3).contiguous().view(layer.k.dtype).view(shape)
    v = layer.v.index_select(0, flat).view(num_tables, num_entries, *layer.v.shape[1:])
    v = v.permute(0, 2, 1, 3, 5, 4)
    return _to_float(k, layer.format.k_type), _to_float(v, layer.format.v_type).view(shape)


def read_scales(scales: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """float32 [B, kv_heads, E · 16] scales of the blocks `entries`, integers [B, E]."""
    picked = scales.index_select(0, entries.reshape(-1)).view(*entries.shape, *scales.shape[1:])
    return picked.transpose(1, 2).flatten(2).float()


def copy_block(cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
    """Copy the first num_tokens tokens of a block in every layer of the group; other bytes of target stay."""
    assert 0 <= num_tokens <= BLOCK_TOKENS
    group = cache.format.groups[group_id]
    quads, rest = divmod(num_tokens, 4)
    for layer_index, _ in group.layers:
        layer = open_layer(cache.pools[group_id], group, layer_index)
        layer.k[target, :, :, :num_tokens] = layer.k[source, :, :, :num_tokens]
        layer.v[target, :, :quads] = layer.v[source, :, :quads]
        if rest:
            layer.v[target, :, quads, :, :rest] = layer.v[source, :, quads, :, :rest]
        for scales in (layer.k_scales, layer.v_scales):
            if scales is not None:
                scales[target, :, :num_tokens] = scales[source, :, :num_tokens]
