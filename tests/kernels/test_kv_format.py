"""The layout of a block: sizes, alignment, grouping, ids, and index formulas that agree with the shapes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvd_kernels.kv_format import (
    BLOCK_TOKENS,
    ELEMENT_BYTES,
    REGION_ALIGNMENT_BYTES,
    ElementType,
    KVFormat,
    LayerFormat,
    build_kv_format,
    k_index,
    v_index,
)
from kvd_kernels.reference.kv_blocks import open_layer

SHAPES = itertools.product((1, 3, 8), (64, 80, 96, 128, 256), ("int8", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"))
FORMATS = (
    *(LayerFormat(heads, head_dim, element, element) for heads, head_dim, element in SHAPES),
    LayerFormat(1, 4, "int8", "int8"),
    LayerFormat(3, 12, "int8", "fp16"),
    LayerFormat(2, 64, "fp16", "int8"),
)
NAMES = [f"{f.k_type}-{f.v_type}-{f.num_kv_heads}x{f.head_dim}" for f in FORMATS]


@pytest.mark.parametrize("layer", FORMATS, ids=NAMES)
def test_regions_are_aligned_and_do_not_overlap(layer: LayerFormat) -> None:
    regions = [
        (0, layer.k_bytes),
        (layer.v_offset, layer.v_bytes),
        (layer.k_scale_offset, layer.k_scale_bytes),
        (layer.v_scale_offset, layer.v_scale_bytes),
        (layer.section_bytes, 0),
    ]
    for (start, size), (following, _) in itertools.pairwise(regions):
        assert start % REGION_ALIGNMENT_BYTES == 0
        assert start + size <= following < start + size + REGION_ALIGNMENT_BYTES
    assert layer.section_bytes % REGION_ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("layer", FORMATS, ids=NAMES)
def test_sizes_follow_from_the_elements(layer: LayerFormat) -> None:
    per_token = layer.num_kv_heads * layer.head_dim
    assert layer.k_bytes == BLOCK_TOKENS * per_token * ELEMENT_BYTES[layer.k_type]
    assert layer.v_bytes == BLOCK_TOKENS * per_token * ELEMENT_BYTES[layer.v_type]
    scales = BLOCK_TOKENS * layer.num_kv_heads * 2
    assert layer.k_scale_bytes == (scales if layer.k_type == "int8" else 0)
    assert layer.v_scale_bytes == (scales if layer.v_type == "int8" else 0)


@pytest.mark.parametrize("layer", FORMATS, ids=NAMES)
def test_indices_agree_with_the_shapes_and_name_every_element_once(layer: LayerFormat) -> None:
    head, token, channel = np.meshgrid(
        np.arange(layer.num_kv_heads), np.arange(BLOCK_TOKENS), np.arange(layer.head_dim), indexing="ij"
    )
    k = k_index(layer, head, token, channel)  # type: ignore[arg-type]
    v = v_index(layer, head, token, channel)  # type: ignore[arg-type]
    assert np.array_equal(k, np.ravel_multi_index((head, channel // 4, token, channel % 4), layer.k_shape))
    assert np.array_equal(v, np.ravel_multi_index((head, token // 4, channel, token % 4), layer.v_shape))
    every = np.arange(layer.num_kv_heads * BLOCK_TOKENS * layer.head_dim)
    assert np.array_equal(np.sort(np.ravel(k)), every)
    assert np.array_equal(np.sort(np.ravel(v)), every)


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (80, 16), (96, 32), (128, 128), (12, 4)])
def test_rotation_size_is_the_largest_power_of_two_that_divides(head_dim: int, size: int) -> None:
    assert LayerFormat(1, head_dim, "int8", "int8").rotation_size == size


@pytest.mark.parametrize("head_dim", [0, 2, 66])
def test_head_dim_must_fill_quads(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        LayerFormat(1, head_dim, "int8", "int8")


INT8 = LayerFormat(3, 64, "int8", "int8")
HALF = LayerFormat(3, 64, "fp16", "fp16")


def test_layers_of_equal_span_share_a_group_and_full_attention_comes_first() -> None:
    made = build_kv_format([(512, INT8), (0, INT8), (512, HALF), (0, HALF), (128, INT8)])
    assert [(group.group_id, group.window) for group in made.groups] == [(0, 0), (1, 128), (2, 512)]
    assert [[index for index, _ in group.layers] for group in made.groups] == [[1, 3], [4], [0, 2]]
    assert made.block_bytes == 3 * INT8.section_bytes + 2 * HALF.section_bytes
    assert made.bytes_per_token == made.block_bytes / BLOCK_TOKENS
    assert made.groups[0].layer_offset(1) == 0
    assert made.groups[0].layer_offset(3) == INT8.section_bytes
    assert made.locate(2) == (made.groups[2], HALF)
    with pytest.raises(KeyError):
        made.groups[0].layer_offset(4)
    with pytest.raises(KeyError):
        made.locate(5)


def test_an_empty_format_has_no_bytes() -> None:
    assert build_kv_format([]) == KVFormat(())
    assert build_kv_format([]).block_bytes == 0


def test_layout_ids_differ_wherever_bytes_or_their_meaning_do() -> None:
    def layout(layer: LayerFormat, window: int = 0, count: int = 2) -> str:
        return build_kv_format([(window, layer)] * count).layout_id

    elements: tuple[ElementType, ...] = ("int8", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
    ids = [layout(LayerFormat(3, 64, k, v)) for k in elements for v in elements]
    ids += [layout(replace(INT8, rotated=True)), layout(replace(INT8, bias_free=True))]
    ids += [layout(replace(INT8, num_kv_heads=1)), layout(replace(INT8, head_dim=128))]
    ids += [layout(INT8, window=64), layout(INT8, count=3)]
    assert len(set(ids)) == len(ids)
    assert layout(INT8) == build_kv_format([(0, INT8), (0, INT8)]).layout_id


@pytest.mark.parametrize("layer", FORMATS, ids=NAMES)
def test_views_lie_where_the_format_says(layer: LayerFormat) -> None:
    """The strided views that the reference works on, against offsets and index formulas, byte by byte."""
    made = build_kv_format([(0, HALF), (0, layer), (0, INT8)])
    pool = torch.zeros(3, made.block_bytes, dtype=torch.uint8)
    views = open_layer(pool, made.groups[0], 1)
    base = HALF.section_bytes
    head, token, channel = layer.num_kv_heads - 1, 13, layer.head_dim - 3
    for view, index, offset, at in (
        (views.k, (2, head, channel // 4, token, channel % 4), base, k_index(layer, head, token, channel)),
        (
            views.v,
            (2, head, token // 4, channel, token % 4),
            base + layer.v_offset,
            v_index(layer, head, token, channel),
        ),
    ):
        pool.zero_()
        view[index] = 1
        size = view.element_size()
        assert set(pool.nonzero()[:, 0].tolist()) == {2}
        changed = pool[2].nonzero().flatten()
        assert bool((changed >= offset + at * size).all())
        assert bool((changed < offset + (at + 1) * size).all())
    for scales, offset in ((views.k_scales, layer.k_scale_offset), (views.v_scales, layer.v_scale_offset)):
        if scales is not None:
            pool.zero_()
            scales[1, head, token] = 1
            changed = pool[1].nonzero().flatten()
            start = base + offset + (head * BLOCK_TOKENS + token) * 2
            assert bool(((changed >= start) & (changed < start + 2)).all())
