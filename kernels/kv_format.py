"""How a block of the KV cache is laid out. The one place that knows; needs no torch.

A block holds 16 consecutive tokens of one layer group, all layers of that group one after the other:

    block = [layer section] * num_layers_of_group
    layer section = K | V | K scales | V scales, each region padded to 64 bytes

    K         [kv_head][head_dim / 4][16 tokens][4]   the 16 scores of a block come from contiguous lanes
    V         [kv_head][4 token quads][head_dim][4]   four tokens of a channel side by side: the operand of an
                                                      integer dot product over tokens
    scales    [kv_head][16 tokens] float16            only for int8; x ≈ scale · q

Both orders hold for every element type, so that one set of index formulas serves all kernels. Layers of
equal span (full attention, or a window of the same length) form a group; each group has a pool of its own.

`rotated` says that K was multiplied by a Hadamard matrix per head after RoPE (queries are rotated alike, so
scores do not change); where head_dim is no power of two the rotation works on equal blocks of the largest
power of two that divides it. `bias_free` says that K is stored without RoPE(bias), which attention adds back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

BLOCK_TOKENS = 16
REGION_ALIGNMENT_BYTES = 64

ElementType = Literal["int8", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
ELEMENT_BYTES: dict[ElementType, int] = {"int8": 1, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
SCALE_BYTES = 2


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """K and V of one layer inside a block."""

    num_kv_heads: int
    head_dim: int
    k_type: ElementType
    v_type: ElementType
    rotated: bool = False
    bias_free: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 4 or self.head_dim < 4:
            raise ValueError(f"head_dim {self.head_dim}: a KV block needs a multiple of 4")

    @property
    def rotation_size(self) -> int:
        """Side of the Hadamard blocks: the largest power of two that divides head_dim."""
        return self.head_dim & -self.head_dim

    @property
    def k_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * BLOCK_TOKENS * ELEMENT_BYTES[self.k_type]

    @property
    def v_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * BLOCK_TOKENS * ELEMENT_BYTES[self.v_type]

    @property
    def k_scale_bytes(self) -> int:
        return self.num_kv_heads * BLOCK_TOKENS * SCALE_BYTES if self.k_type == "int8" else 0

    @property
    def v_scale_bytes(self) -> int:
        return self.num_kv_heads * BLOCK_TOKENS * SCALE_BYTES if self.v_type == "int8" else 0

    @property
    def v_offset(self) -> int:
        """Bytes from the start of the layer section; K is at 0."""
        return _padded(self.k_bytes)

    @property
    def k_scale_offset(self) -> int:
        return self.v_offset + _padded(self.v_bytes)

    @property
    def v_scale_offset(self) -> int:
        return self.k_scale_offset + _padded(self.k_scale_bytes)

    @property
    def section_bytes(self) -> int:
        return self.v_scale_offset + _padded(self.v_scale_bytes)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        return (self.num_kv_heads, self.head_dim // 4, BLOCK_TOKENS, 4)

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        return (self.num_kv_heads, BLOCK_TOKENS // 4, self.head_dim, 4)


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """The layers that share a block table: `layers[i]` is (index in the model, format)."""

    group_id: int
    window: int  # tokens that a query sees, itself included; 0 means all
    layers: tuple[tuple[int, LayerFormat], ...]

    @property
    def block_bytes(self) -> int:
        return sum(layer.section_bytes for _, layer in self.layers)

    def layer_offset(self, layer_index: int) -> int:
        """Bytes from the start of a block to the section of a layer; KeyError for a foreign layer."""
        offset = 0
        for index, layer in self.layers:
            if index == layer_index:
                return offset
            offset += layer.section_bytes
        raise KeyError(layer_index)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """All layer groups of a model."""

    groups: tuple[GroupFormat, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes that 16 tokens take over all groups."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / BLOCK_TOKENS

    def locate(self, layer_index: int) -> tuple[GroupFormat, LayerFormat]:
        """The group and the format of a layer; KeyError for an unknown one."""
        for group in self.groups:
            for index, layer in group.layers:
                if index == layer_index:
                    return group, layer
        raise KeyError(layer_index)

    @property
    def layout_id(self) -> str:
        """Equal for equal layouts only: part of every cache key."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


def build_kv_format(layers: Iterable[tuple[int, LayerFormat]]) -> KVFormat:
    """Group layers by span. `layers` yields (window, format) in model order; window 0 means all tokens."""
    by_window: dict[int, list[tuple[int, LayerFormat]]] = {}
    for index, (window, layer) in enumerate(layers):
        by_window.setdefault(window, []).append((index, layer))
    # The full-attention group comes first: its blocks are the ones that prefix caching is about.
    return KVFormat(
        tuple(
            GroupFormat(group_id, window, tuple(by_window[window])) for group_id, window in enumerate(sorted(by_window))
        )
    )


def k_index(layer: LayerFormat, kv_head: int, token: int, channel: int) -> int:
    """Element index of one K value inside the K region."""
    return ((kv_head * (layer.head_dim // 4) + channel // 4) * BLOCK_TOKENS + token) * 4 + channel % 4


def v_index(layer: LayerFormat, kv_head: int, token: int, channel: int) -> int:
    """Element index of one V value inside the V region."""
    return ((kv_head * (BLOCK_TOKENS // 4) + token // 4) * layer.head_dim + channel) * 4 + token % 4
