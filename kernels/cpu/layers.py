"""Layers of a cache as the native side sees them. Engine thread."""

from __future__ import annotations

import ctypes

import torch

from kvd_kernels.cpu.structs import Layer, Type
from kvd_kernels.kv_format import ElementType, GroupFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, KVCache

_TYPES: dict[ElementType, Type] = {"int8": Type.I8, "fp16": Type.F16, "bf16": Type.BF16}


MAX_HEAD_DIM = 1024
"""What the kernels' buffers on the stack hold."""


def _fill(target: Layer, pool: torch.Tensor, group: GroupFormat, layer_index: int, layer: LayerFormat) -> None:
    for element in (layer.k_type, layer.v_type):
        if element not in _TYPES:
            raise NotImplementedError(f"the native CPU kernels do not support {element} KV; use int8, fp16 or bf16")
    if layer.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"heads of {layer.head_dim} channels; the native CPU kernels go up to {MAX_HEAD_DIM}")
    target.pool = pool.data_ptr() + group.layer_offset(layer_index)
    target.block_bytes = pool.stride(0)
    target.v_offset = layer.v_offset
    target.k_scale_offset = layer.k_scale_offset
    target.v_scale_offset = layer.v_scale_offset
    target.num_kv_heads = layer.num_kv_heads
    target.head_dim = layer.head_dim
    target.rotation_size = layer.rotation_size if layer.rotated else 0
    target.k_type, target.v_type = _TYPES[layer.k_type], _TYPES[layer.v_type]
    target.group_id, target.window = group.group_id, group.window


class NativeLayers:
    """The structs of one cache, made once per layer: an op asks for the same ones at every step."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], tuple[torch.Tensor, GroupFormat, Layer]] = {}
        self._groups: dict[int, tuple[torch.Tensor, GroupFormat, ctypes.Array[Layer]]] = {}

    def of(self, cache: KVCache, spec: AttentionSpec) -> Layer:
        """The layer that an attention spec speaks of. NotImplementedError for fp8 elements."""
        pool, group = cache.pools[spec.group.group_id], spec.group
        key = (group.group_id, spec.layer_index)
        known = self._layers.get(key)
        if known is None or known[0] is not pool or known[1] is not group:
            layer = next(layer for index, layer in group.layers if index == spec.layer_index)
            made = Layer()
            _fill(made, pool, group, spec.layer_index, layer)
            known = self._layers[key] = (pool, group, made)
        return known[2]

    def of_group(self, cache: KVCache, group_id: int) -> ctypes.Array[Layer]:
        """All layers of a group."""
        pool, group = cache.pools[group_id], cache.format.groups[group_id]
        known = self._groups.get(group_id)
        if known is None or known[0] is not pool or known[1] is not group:
            made = (Layer * len(group.layers))()
            for target, (index, layer) in zip(made, group.layers, strict=True):
                _fill(target, pool, group, index, layer)
            known = self._groups[group_id] = (pool, group, made)
        return known[2]
