"""What the shared suites leave open of the GPU's row kernels and cache writes: bits, ends of ranges, padding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kvd_kernels.kv_format import ELEMENT_BYTES, ElementType, GroupFormat, LayerFormat
from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache
from kvd_kernels.reference import kv_blocks, quantize
from kvd_kernels.reference.a16 import ReferenceOps16
from kvd_kernels.reference.elementary import hadamard
from kvd_kernels.triton import formats, kv_writes, rows
from kvd_kernels.triton.cards import KNOWN_CARDS
from kvd_kernels.triton.variants import ACTIVATION_TYPES
from kvd_kernels.weights import dequantize
from tests.kernels import cases, oracle
from tests.kernels.builders import (
    assert_rest_untouched,
    generator,
    make_attention,
    make_out,
    make_rope,
    make_rows,
    make_weight,
)
from tests.kernels.cases import AttentionCase
from tests.kernels.compare import assert_same_bytes, assert_within
from tests.kernels.conftest import make_ops

CPU = torch.device("cpu")
ELEMENTS = tuple(ELEMENT_BYTES)
DTYPES = (torch.float16, torch.bfloat16)

# --------------------------------------------------------------------------- number formats


@triton.jit
def _apply(source, target, size, function: tl.constexpr, parameter: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + index, mask=index < size, other=0)
    tl.store(target + index, function(value, parameter), mask=index < size)


def apply(function: object, parameter: object, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _apply[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), function, parameter, 4096)
    return out


@pytest.mark.parametrize("name", quantize.MINI_FLOATS)
def test_every_fp8_code_decodes_to_its_number(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = quantize.MINI_FLOATS[name].decode(codes)
    decoded = apply(formats.decode_fp8, name == "fp8_e4m3", codes, torch.float16).float()
    number = ~expected.isnan()
    assert torch.equal(decoded.isnan(), ~number)
    assert_same_bytes(decoded[number], expected[number])


@pytest.mark.parametrize("name", quantize.MINI_FLOATS)
def test_fp8_codes_are_those_of_the_reference(name: str) -> None:
    """All numbers, the points half way between them and just beside those, the ends, and random numbers."""
    form = quantize.MINI_FLOATS[name]
    finite = form.decode(torch.arange(128, dtype=torch.int32).to(torch.uint8))
    finite = finite[finite.isfinite()]
    middle = (finite[1:] + finite[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    random = torch.randn(5000, generator=generator(0)) * torch.exp(torch.randn(5000, generator=generator(1)) * 4)
    ends = torch.tensor([0.0, 1e-20, 1e-42, 1e9, torch.inf, torch.nan, form.largest, form.largest * 1.1])
    x = torch.cat((finite, middle, torch.nextafter(middle, up), torch.nextafter(middle, down), random, ends))
    x = torch.cat((x, -x))
    assert_same_bytes(apply(formats.encode_fp8, name == "fp8_e4m3", x, torch.uint8), form.encode(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_half_to_even_and_saturate(dtype: torch.dtype) -> None:
    """Numbers of the 16-bit type, the points half way between them, and what lies beyond the ends."""
    values = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    step = values.abs() * torch.finfo(dtype).eps
    x = torch.cat((values, values + step / 2, values + step / 4, values + step * 0.51))
    x = torch.cat((x, torch.tensor([1e30, -1e30, 65519.0, 65520.0, torch.inf, -torch.inf, torch.nan])))
    expected = x.clamp(-65504, 65504).to(dtype) if dtype is torch.float16 else x.to(dtype)
    element = tl.float16 if dtype is torch.float16 else tl.bfloat16
    rounded = apply(formats.round_to, element, x, dtype)
    assert torch.equal(rounded.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert_same_bytes(rounded[number], expected[number])


@triton.jit
def _rotate(source, target, SIZE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(target + index, formats.hadamard(tl.load(source + index), SIZE, SCALE, ROWS, WIDTH))


@pytest.mark.parametrize(("width", "size"), [(64, 64), (128, 16), (128, 32), (128, 128), (256, 256), (64, 1)])
def test_hadamard_has_the_bits_of_the_reference(width: int, size: int) -> None:
    x = torch.randn(4, width, generator=generator(0))
    out = torch.empty_like(x)
    _rotate[(1,)](x, out, size, size**-0.5, 4, width)
    assert_same_bytes(out, hadamard(x, size))


# --------------------------------------------------------------------------- embedding, gather


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "group", "width"),
    [
        ("int4", 32, 1600), ("int4", 36, 108), ("int4", 0, 1100), ("int8", 33, 99), ("int8", 64, 1152),
        ("fp16", 0, 1030), ("bf16", 0, 17), ("fp32", 0, 100),
    ],
)  # fmt: skip
def test_embedding_rows_have_the_bits_of_the_table(form: str, group: int, width: int, dtype: torch.dtype) -> None:
    """Rows over several programs with a ragged tail, groups that 16 does not divide, every stored form."""
    weight = make_weight(form, group, 19, width, generator(0))
    ids = torch.tensor([18, 0, 7, 7, 10**6])
    out = make_out(4, width, dtype)
    rows.embed(4, ids, rows.prepare_embedding(weight, CPU), out)
    assert_same_bytes(out[:4], dequantize(weight)[ids[:4]].to(dtype))
    assert_rest_untouched(out, 4)


@pytest.mark.parametrize("form", ["int4", "int8", "fp16"])
def test_a_table_keeps_its_size_on_the_device(form: str) -> None:
    weight = make_weight(form, 32 if form != "fp16" else 0, 64, 128, generator(0))
    table = rows.prepare_embedding(weight, CPU)
    held = [tensor for tensor in (table.values, table.scales, table.offsets) if tensor is not None]
    names = ("values",) if form == "fp16" else ("codes", "scales", "offsets")
    stored = [getattr(weight, name) for name in names if hasattr(weight, name)]
    assert sum(tensor.nbytes for tensor in held) == sum(tensor.nbytes for tensor in stored)


def test_gathered_rows_keep_every_bit() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(32, 2048)
    order = torch.tensor([31, 0, 5, 10**6])
    out = make_out(3, 2048, torch.float16)
    rows.gather(3, order, x, out)
    assert_same_bytes(out[:3].view(torch.int16), x[order[:3]].view(torch.int16))
    assert_rest_untouched(out, 3)


@pytest.mark.parametrize("n", [0, 1, 5, 256, 300])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slots_become_their_newest_tokens(n: int, dtype: torch.dtype) -> None:
    newest = torch.tensor([70, 2**31 - 1, -1, 0], dtype=dtype)
    ids = torch.arange(n + 4) % 6
    ids[::3] = -1 - (torch.arange(len(ids[::3])) % 4)
    before = ids.clone()
    rows.resolve_tokens(n, ids, newest)
    expected = [i if i >= 0 else max(0, int(newest[-1 - i])) for i in before[:n].tolist()]
    assert ids[:n].tolist() == expected
    assert torch.equal(ids[n:], before[n:]), "an id beyond the live ones was changed"


# --------------------------------------------------------------------------- norm, activation


@pytest.mark.parametrize("width", [1, 1024, 1025, 4096, 8192, 16384, 16385, 40000])
def test_norms_of_every_width(width: int) -> None:
    """Both sides of every launch configuration, the looped one included; out is x."""
    x = make_rows(3, width, torch.float16).clamp_(-50, 50)
    weight = torch.rand(width, generator=generator(4)) + 0.5
    expected = oracle.rms_norm(x[:2].double().numpy(), weight.double().numpy(), 1e-5)
    last = x[2].clone()
    rows.rms_norm(2, x, weight, 1e-5, x)
    assert_within(x[:2], expected, cases.NORM["a16"])
    assert_same_bytes(x[2], last)


def test_every_norm_configuration_is_used() -> None:
    chosen = {rows.norm_config(width) for width in (1, 1024, 1025, 4096, 4097, 16384, 16385, 10**6)}
    assert chosen == set(rows.NORM_CONFIGS)


@pytest.mark.parametrize("width", [64, 20000])
def test_norm_overflow_saturates_and_nan_stays(width: int) -> None:
    x = torch.zeros(3, width, dtype=torch.float16)
    x[0, 3], x[1, 5], x[2, 0] = 65504, -65504, torch.nan
    out = torch.empty_like(x)
    rows.rms_norm(3, x, torch.full((width,), 60000.0), 1e-5, out)
    assert float(out[0, 3]) == 65504
    assert float(out[1, 5]) == -65504
    assert bool(out[2].isnan().all())


def test_gated_overflow_saturates_and_nan_stays() -> None:
    gate_up = torch.tensor([[60000.0, -60000.0, 3.0, 1.0], [60000.0, 60000.0, 3.0, torch.nan]], dtype=torch.float16)
    gate_up[0, 2:] = torch.tensor([60000.0, 60000.0])
    out = torch.empty(2, 2, dtype=torch.float16)
    rows.silu_mul(2, gate_up, out)
    assert out[0].tolist() == [65504.0, 0.0]
    assert bool(out[1, 1].isnan())
    assert float(out[1, 0]) == 65504.0


# --------------------------------------------------------------------------- writing K and V


def _stored(case: AttentionCase, ops_name: str, num_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(pool after rope_and_write, q_out, write slots) of one implementation; the last tokens are made padding."""
    inputs = make_attention(case)
    spec, batch = inputs.spec, inputs.batch
    tables = batch.groups[spec.group.group_id]
    n = batch.num_tokens
    slots = tables.write_slots.clone()
    slots[n - num_padding : n] = -1
    groups = tuple(replace(tables, write_slots=slots) if group is tables else group for group in batch.groups)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    ops = make_ops(ops_name)
    # Values that bfloat16 and float16 both hold.
    qkv = make_rows(n, width, torch.bfloat16).clamp_(-6, 6).to(ops.activation_dtype)
    q_out = make_out(n, spec.num_heads * spec.head_dim, ops.activation_dtype)
    live = n if ops_name.startswith("triton") else n - num_padding
    ops.rope_and_write(replace(batch, groups=groups, num_tokens=live), qkv, inputs.rope, inputs.cache, spec, q_out)
    return inputs.cache.pools[spec.group.group_id], q_out, slots[:n].tolist()


@pytest.mark.parametrize("sequences", [((3, 5), (30, 2)), ((30, 1), (0, 17))], ids=["few", "many"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("element", ELEMENTS)
def test_stored_bytes_are_those_of_the_reference(
    element: ElementType, head_dim: int, sequences: tuple[tuple[int, int], ...]
) -> None:
    """Both launch configurations, every type, rotated; q_out too, which float16 rounds from the same float32."""
    case = AttentionCase("bits", sequences, element=element, head_dim=head_dim, rotated=True, num_heads=2)
    pool, q_out, _ = _stored(case, "triton")
    expected_pool, expected_q, _ = _stored(case, "reference-a16")
    assert_same_bytes(pool, expected_pool, "pool")
    assert_same_bytes(q_out, expected_q, "q")


@pytest.mark.parametrize("num_tokens", [4, 20])
@pytest.mark.parametrize("name", ["triton", "triton-bf16"])
def test_padding_is_not_written(name: str, num_tokens: int) -> None:
    case = AttentionCase("padding", ((5, num_tokens),), rotated=True, partial_rotary=True)
    pool, _, slots = _stored(case, name, num_padding=3)
    expected, _, _ = _stored(case, "reference-a16", num_padding=3)
    assert slots[-3:] == [-1, -1, -1]
    assert_same_bytes(pool, expected, "pool")


def _write(
    layer: LayerFormat, qkv: torch.Tensor, num_heads: int = 1
) -> tuple[kv_blocks.LayerBlocks, kv_blocks.LayerBlocks]:
    """One token at position 0 by the kernel and by the reference, into pools of a layer of its own."""
    group = GroupFormat(0, 0, ((0, layer),))
    spec = AttentionSpec(0, group, num_heads, layer.num_kv_heads, layer.head_dim, 1.0)
    nothing = torch.zeros(1, dtype=torch.int32)
    tables = GroupTables(nothing, nothing, nothing, torch.tensor([21]))
    batch = Batch(torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, (tables,), 1, 1, 1)
    layers = []
    for name in ("kernel", "reference"):
        pool = torch.zeros(2, group.block_bytes, dtype=torch.uint8)
        cache = KVCache(None, (pool,))  # type: ignore[arg-type]
        q_out = torch.empty(1, num_heads * layer.head_dim, dtype=qkv.dtype)
        rope = make_rope(layer.head_dim)
        if name == "kernel":
            kv_writes.KVWrites().rope_and_write(batch, qkv, rope, cache, spec, q_out)
        else:
            ReferenceOps16().rope_and_write(batch, qkv, rope, cache, spec, q_out)
        layers.append(kv_blocks.open_layer(pool, group, 0))
    return layers[0], layers[1]


@pytest.mark.parametrize("magnitude", [0.0, 6e-8, 1e-6, 4e-6, 1e-3, 60_000.0, 1e9, 3e38])
def test_int8_at_the_ends_of_its_scale(magnitude: float) -> None:
    """Scales of 0, scales that float16 holds with one bit only, and scales beyond float16."""
    qkv = (torch.rand(1, 3 * 64, generator=generator(0)) * 2 - 1).mul_(magnitude).to(torch.bfloat16)
    layer, expected = _write(LayerFormat(1, 64, "int8", "int8"), qkv)
    for name in ("k", "v", "k_scales", "v_scales"):
        assert_same_bytes(getattr(layer, name), getattr(expected, name), name)


def test_codes_are_rounded_half_to_even() -> None:
    """absmax 127 makes the scale 1, so the halves are exact ties."""
    head = torch.arange(64, dtype=torch.float32) - 31.5
    head[0] = 127
    layer, expected = _write(LayerFormat(1, 64, "int8", "int8"), head.repeat(1, 3).half())
    assert_same_bytes(layer.v, expected.v)
    assert set(layer.v[1, 0, 1, 1:, 1].tolist()) == {2 * i for i in range(-15, 17)}


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_head_that_is_not_finite_stays_so(element: ElementType) -> None:
    """NaN must reach the logits, where it ends the request: whatever reads this head must see it."""
    qkv = torch.ones(1, 3 * 64, dtype=torch.float16)
    qkv[0, 64 + 7] = torch.nan
    layer, _ = _write(LayerFormat(1, 64, element, element), qkv)
    k, v = kv_blocks.read_blocks(layer, torch.tensor([[1]]))
    if layer.k_scales is not None and layer.v_scales is not None:
        k = k * kv_blocks.read_scales(layer.k_scales, torch.tensor([[1]])).unsqueeze(-1)
        v = v * kv_blocks.read_scales(layer.v_scales, torch.tensor([[1]])).unsqueeze(-1)
    assert bool(k[0, 0, 5].isnan().any())
    assert bool((v[0, 0, 5] == 1).all()) if element != "int8" else bool(v.isfinite().all())


def test_fp16_storage_saturates() -> None:
    """The Hadamard matrix may take a head of float16 numbers beyond float16."""
    qkv = torch.full((1, 3 * 64), 60_000.0, dtype=torch.float16)
    layer, _ = _write(LayerFormat(1, 64, "fp16", "fp16", rotated=True), qkv)
    k, _ = kv_blocks.read_blocks(layer, torch.tensor([[1]]))
    assert float(k[0, 0, 5].abs().max()) == 65504.0


def test_layers_of_different_types_side_by_side() -> None:
    """k_type and v_type of their own, and a pool that replaces another under the same layer."""
    for k_type, v_type in itertools.permutations(("int8", "fp16", "fp8_e5m2"), 2):
        qkv = make_rows(1, 4 * 64, torch.float16).clamp_(-6, 6)
        layer, expected = _write(LayerFormat(1, 64, k_type, v_type), qkv, num_heads=2)  # type: ignore[arg-type]
        for name in ("k", "v"):
            assert_same_bytes(getattr(layer, name), getattr(expected, name), f"{name} of {k_type}, {v_type}")


def test_a_new_cache_is_not_mistaken_for_the_old_one() -> None:
    """The same layer of another cache, and of another format of the same cache."""
    writes = kv_writes.KVWrites()
    nothing = torch.zeros(1, dtype=torch.int32)
    tables = GroupTables(nothing, nothing, nothing, torch.tensor([3]))
    batch = Batch(torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, (tables,), 1, 1, 1)
    qkv = torch.ones(1, 3 * 64, dtype=torch.float16)
    for element in ("fp16", "int8", "int8"):
        layer = LayerFormat(1, 64, element, element)  # type: ignore[arg-type]
        group = GroupFormat(0, 0, ((0, layer),))
        pool = torch.zeros(2, group.block_bytes, dtype=torch.uint8)
        spec = AttentionSpec(0, group, 1, 1, 64, 1.0)
        cache = KVCache(None, (pool,))  # type: ignore[arg-type]
        writes.rope_and_write(batch, qkv, make_rope(64), cache, spec, torch.empty(1, 64, dtype=torch.float16))
        blocks = kv_blocks.open_layer(pool, group, 0)
        assert blocks.k[0, 0, 0, 3, 0] == (1 if element == "fp16" else 127)
        writes.copy_block(KVCache(_Format(group), (pool,)), 0, 0, 1, 16)  # type: ignore[arg-type]
        assert_same_bytes(pool[1], pool[0])


class _Format:
    def __init__(self, group: GroupFormat) -> None:
        self.groups = (group,)


@pytest.mark.parametrize("num_tokens", [1, 6, 15, 16])
def test_blocks_of_mixed_layers_are_copied_in_one_launch(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (
        LayerFormat(3, 80, "int8", "fp16"), LayerFormat(1, 64, "bf16", "int8"), LayerFormat(2, 128, "fp8_e4m3", "int8"),
        LayerFormat(5, 64, "int8", "int8"),
    )  # fmt: skip
    group = GroupFormat(0, 0, tuple((index * 2, layer) for index, layer in enumerate(layers)))
    pool = torch.randint(0, 256, (4, group.block_bytes), dtype=torch.uint8, generator=generator(0))
    cache, other = (KVCache(_Format(group), (memory,)) for memory in (pool, pool.clone()))  # type: ignore[arg-type]
    launches = []
    run = kv_writes.kernels.copy_tokens.run
    monkeypatch.setattr(
        kv_writes.kernels.copy_tokens, "run", lambda *args, **kwargs: (launches.append(1), run(*args, **kwargs))
    )
    kv_writes.KVWrites().copy_block(cache, 0, 2, 1, num_tokens)
    kv_blocks.copy_block(other, 0, 2, 1, num_tokens)
    assert_same_bytes(pool, other.pools[0])
    assert len(launches) == 1


# --------------------------------------------------------------------------- forms


@pytest.mark.parametrize("dtype", ACTIVATION_TYPES)
def test_forms_have_names_of_their_own_and_name_every_argument(dtype: str) -> None:
    forms = [
        *rows.variants(KNOWN_CARDS[0], dtype),  # type: ignore[arg-type]
        *kv_writes.variants(KNOWN_CARDS[0], dtype),  # type: ignore[arg-type]
    ]
    assert len({form.name for form in forms}) == len(forms)
    for form in forms:
        assert list(form.signature) == form.kernel.arg_names, form.name
        assert {name for name, kind in form.signature.items() if kind == "constexpr"} == set(form.constants)
