"""Native attention, the writing of K and V, and the copying of blocks: the reference's bytes at every ISA level.

Levels that this processor has run as they are built; all of them also run in a build whose instructions are plain C++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from kvd_kernels.cpu.library import Library
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.cpu.structs import AttendArgs, Kernel, Layer
from kvd_kernels.kv_format import ElementType, LayerFormat, build_kv_format
from kvd_kernels.ops import KVCache, Ops
from kvd_kernels.registry import create_ops
from tests.kernels.builders import SENTINEL, AttentionInputs, make_attention, make_out, make_rows
from tests.kernels.cases import MIXED, QUICK_ATTENTION, SCATTERED, AttentionCase
from tests.kernels.compare import assert_same_bytes, assert_same_numbers
from tests.kernels.natives import Natives

EDGES = ((0, 1), (0, 3), (255, 1), (256, 2), (511, 1), (512, 5), (13, 77), (1000, 9))
"""Both sides of a block and of a split, tiles that are not full, and over four splits."""
ODD_CASES = (
    AttentionCase("head-4", EDGES, num_heads=2, head_dim=4),
    AttentionCase("head-20-gqa-5", EDGES, num_heads=10, head_dim=20, rotated=True, key_bias=1.0),
    AttentionCase("head-36-partial", EDGES, head_dim=36, rotated=False, partial_rotary=True, window=30),
    AttentionCase("head-12-fp16", EDGES, num_heads=6, head_dim=12, element="fp16", key_bias=1.0, partial_rotary=True),
    AttentionCase("head-44-gqa-40", EDGES[:6], num_heads=40, num_kv_heads=1, head_dim=44, element="bf16", window=300),
    AttentionCase("head-72-gqa-71", EDGES[:4], num_heads=71, num_kv_heads=1, head_dim=72, rotated=True),
    AttentionCase("head-128-giant-bias", EDGES, num_heads=8, head_dim=128, rotated=True, key_bias=60.0),
    AttentionCase("head-256-gqa-9", EDGES[:6], num_heads=9, num_kv_heads=1, head_dim=256, rotated=True, window=17),
    AttentionCase("head-512-fp16", EDGES[:4], num_heads=2, num_kv_heads=1, head_dim=512, element="fp16"),
    AttentionCase("mass-gqa-3", (*MIXED, (600, 130)), num_heads=9, num_kv_heads=3, rotated=True, block_mass=True),
    AttentionCase("mass-holes", MIXED[4:], holes=(1, 2, 7), rotated=True, block_mass=True, key_bias=1.0, window=90),
)
CASES = tuple(case for case in (*QUICK_ATTENTION, *ODD_CASES) if "a8" in case.only)
LONG = AttentionCase("long", ((1500, 1), (3, 1), (700, 6), (1023, 1)), num_heads=9, num_kv_heads=3, rotated=True)
"""Sequences that several threads share split by split."""


@pytest.fixture(scope="module")
def reference() -> Ops:
    return create_ops("reference")


@dataclass(frozen=True)
class Outputs:
    """out and, where the case wants it, block_mass; rows beyond the live ones included."""

    out: torch.Tensor
    mass: torch.Tensor | None


def attend(ops: Ops, inputs: AttentionInputs) -> Outputs:
    out = make_out(inputs.batch.num_tokens, inputs.q.shape[1], torch.float32)
    tables = inputs.batch.groups[inputs.spec.group.group_id].block_tables
    mass = torch.full(tables.shape, SENTINEL) if inputs.case.block_mass else None
    before = [pool.clone() for pool in inputs.cache.pools]
    ops.attend(inputs.batch, inputs.q, inputs.rope, inputs.cache, inputs.spec, out, mass)
    for pool, old in zip(inputs.cache.pools, before, strict=True):
        assert_same_bytes(pool, old, "pool")
    return Outputs(out, mass)


@cache
def expected_attention(case: AttentionCase) -> Outputs:
    return attend(create_ops("reference"), make_attention(case))


def assert_same_outputs(native: Outputs, expected: Outputs, what: str) -> None:
    assert_same_bytes(native.out, expected.out, what)
    if expected.mass is not None:
        assert native.mass is not None
        assert_same_bytes(native.mass, expected.mass, f"{what}, mass")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_bytes_are_those_of_the_reference(natives: Natives, case: AttentionCase) -> None:
    inputs = make_attention(case)
    for threads in (1, 3):
        native = attend(natives.with_threads(threads), inputs)
        assert_same_outputs(native, expected_attention(case), f"{threads} threads")


WRITES = tuple(case for case in CASES if not case.holes and not case.shared)


def write(ops: Ops, inputs: AttentionInputs) -> torch.Tensor:
    case, n = inputs.case, inputs.batch.num_tokens
    qkv = make_rows(n, (case.num_heads + 2 * case.num_kv_heads) * case.head_dim, torch.float32)
    q = make_out(n, case.num_heads * case.head_dim, torch.float32)
    ops.rope_and_write(inputs.batch, qkv, inputs.rope, inputs.cache, inputs.spec, q)
    return q


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_written_bytes_are_those_of_the_reference(natives: Natives, reference: Ops, case: AttentionCase) -> None:
    """q, and every byte of every pool, those that nobody should touch included."""
    expected = make_attention(case)
    expected_q = write(reference, expected)
    for threads in (1, 2):
        inputs = make_attention(case)
        assert_same_bytes(write(natives.with_threads(threads), inputs), expected_q, "q")
        for pool, wanted in zip(inputs.cache.pools, expected.cache.pools, strict=True):
            assert_same_bytes(pool, wanted, f"pool, {threads} threads")


def with_elements(inputs: AttentionInputs, k: ElementType, v: ElementType) -> AttentionInputs:
    """The same batch over an empty cache whose keys and values have these types."""
    case = inputs.case
    layer = LayerFormat(case.num_kv_heads, case.head_dim, k, v, rotated=True)
    kv_format = build_kv_format([(0, layer)] * 2)
    spec = replace(inputs.spec, group=kv_format.groups[0], layer_index=1)
    batch = replace(inputs.batch, groups=(inputs.batch.groups[inputs.spec.group.group_id],))
    pool = torch.full((inputs.cache.pools[0].shape[0], kv_format.block_bytes), 0xFF, dtype=torch.uint8)
    return replace(inputs, batch=batch, spec=spec, layer=layer, cache=KVCache(kv_format, (pool,)))


@pytest.mark.parametrize("k", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("v", ["int8", "fp16", "bf16"])
def test_keys_and_values_of_different_types(natives: Natives, reference: Ops, k: ElementType, v: ElementType) -> None:
    """Written, attended to and copied, in a cache whose other bytes are NaN."""
    case = AttentionCase("types", ((0, 33), (0, 5), (0, 260)), head_dim=32)
    results = []
    for ops in (reference, natives.with_threads(2)):
        inputs = with_elements(make_attention(case), k, v)
        q = write(ops, inputs)
        out = attend(ops, inputs).out
        for num_tokens in (0, 1, 4, 7, 16):
            ops.copy_block(inputs.cache, 0, inputs.tables[2][num_tokens // 2], inputs.tables[0][1], num_tokens)
        results.append((q, out, inputs.cache.pools[0]))
    for native, expected, what in zip(results[1], results[0], ("q", "out", "pool"), strict=True):
        assert_same_bytes(native, expected, what)


@pytest.mark.parametrize("element", ["int8", "fp16"])
@pytest.mark.parametrize(
    ("window", "holes"),
    [(0, ()), (100, ()), (0, tuple(range(21))), (0, (*range(1, 20), 33, *range(40, 60))), (0, SCATTERED)],
    ids=["whole", "window", "freed", "holes", "scattered"],
)
def test_cutting_chains_changes_no_bit(
    natives: Natives, element: ElementType, window: int, holes: tuple[int, ...]
) -> None:
    """However many threads share a sequence, with room for all results, for some, or for none; and again, since
    a step leaves the counters of `partials` as it found them."""
    case = replace(LONG, element=element, rotated=element == "int8", window=window, holes=holes)
    inputs = make_attention(case)
    expected = expected_attention(case)
    for threads in (2, 3, 4):
        ops = natives.with_threads(threads)
        for share in (1.0, 0.4, 0.0):
            partials, room = torch.zeros(1 << 18), int(10_000 * share)
            ops._workspace.partials = lambda *_, buffer=partials, room=room: buffer[:room]  # type: ignore[method-assign]
            try:
                for _ in range(3):
                    assert_same_outputs(attend(ops, inputs), expected, f"{threads} threads, {share} of the room")
            finally:
                del ops._workspace.partials  # type: ignore[method-assign]
            assert bool((partials[room:] == 0).all()), "results were written beyond the room for them"
            assert not partials[:1024].any(), "a counter was left behind"
            assert bool(partials[1024:].any()) == (share > 0 and threads > 1), "no chain was cut where one should be"


BAD = (float("nan"), float("inf"), -float("inf"), 3e38, 1e-42)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("element", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_numbers_at_the_ends_of_float32(
    natives: Natives, reference: Ops, element: ElementType, where: str, bad: float
) -> None:
    """In the newest token of one sequence: its own rows are the reference's, and nobody else's change."""
    case = AttentionCase("bad", ((40, 1), (300, 1), (0, 1), (9, 3)), element=element, rotated=element == "int8")
    victim = 1
    results = []
    for ops in (reference, natives.with_threads(2)):
        inputs = make_attention(case)
        width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
        qkv = make_rows(inputs.batch.num_tokens, width, torch.float32)
        start = {"q": 0, "k": case.num_heads, "v": case.num_heads + case.num_kv_heads}[where] * case.head_dim
        qkv[victim, start + 3] = bad
        q = make_out(inputs.batch.num_tokens, inputs.q.shape[1], torch.float32)
        ops.rope_and_write(inputs.batch, qkv, inputs.rope, inputs.cache, inputs.spec, q)
        inputs.q = q[: inputs.batch.num_tokens]
        results.append(attend(ops, inputs).out)
    assert_same_numbers(results[1], results[0])
    others = torch.arange(len(results[1])) != victim
    assert bool(results[1][others].isfinite().all())


@pytest.mark.parametrize("element", ["int8", "fp16"])
def test_a_token_that_is_not_finite_spoils_only_those_who_see_it(natives: Natives, element: ElementType) -> None:
    """Rows before it, in one tile with it, stay what they were without it."""
    case = AttentionCase("spoiled", ((270, 8),), element=element)
    inputs = make_attention(case)
    ops = natives.with_threads(1)
    clean = attend(ops, inputs).out
    access = inputs.layer_bytes()
    slot = 270 + 5
    block, token = inputs.tables[0][slot // 16], slot % 16
    _, v_at, scale_at = access.indices()
    if element == "int8":
        access.v_scales()[block, scale_at[token]] = float("nan")
    else:
        access.v_elements()[block, v_at[token]] = float("inf")
    spoiled = attend(ops, inputs).out
    assert_same_bytes(spoiled[:5], clean[:5], "rows before")
    assert not spoiled[5:8].isfinite().any()


def test_giant_keys(natives: Natives, reference: Ops) -> None:
    """Scores beyond float32: infinities, and NaN where two of them meet."""
    case = AttentionCase("giant", ((40, 1), (300, 2)))
    inputs = make_attention(case)
    inputs.q[0] *= 1e37
    inputs.q[1] *= 1e4
    access = inputs.layer_bytes()
    access.k_scales()[inputs.tables[0][1], :] = 6e4
    access.k_scales()[inputs.tables[1][2], :] = 6e4
    expected = attend(reference, inputs).out
    assert bool(expected[0].isnan().any())
    assert bool(expected[1].isfinite().all())
    assert_same_numbers(attend(natives.with_threads(2), inputs).out, expected)


def change_layer(**changes: Callable[[Layer], int]) -> Callable[[AttendArgs, Layer], None]:
    def apply(_args: AttendArgs, layer: Layer) -> None:
        for name, value in changes.items():
            setattr(layer, name, value(layer))

    return apply


def change_scale(args: AttendArgs, _layer: Layer) -> None:
    args.scale *= 1 + 2**-22


FAULTS: dict[str, Callable[[AttendArgs, Layer], None]] = {
    "scale off by two ulp": change_scale,
    "values of the next four tokens": change_layer(v_offset=lambda layer: layer.v_offset + layer.head_dim * 4),
    "scales of the next key": change_layer(k_scale_offset=lambda layer: layer.k_scale_offset + 2),
    "scales of the next value": change_layer(v_scale_offset=lambda layer: layer.v_scale_offset + 2),
    "no rotation": change_layer(rotation_size=lambda _: 0),
    "half the rotation": change_layer(rotation_size=lambda layer: layer.rotation_size // 2),
    "window one too small": change_layer(window=lambda layer: layer.window - 1),
    "window one too large": change_layer(window=lambda layer: layer.window + 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(emulated_library: Library, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wrong kernel would read or compute changes bytes that the tests above compare."""
    case = AttentionCase("fault", MIXED, rotated=True, window=40)
    inputs = make_attention(case)
    for level in ("avx2", "avx512vnni"):
        ops = CpuOps(1, level, emulated_library)
        assert_same_outputs(attend(ops, inputs), expected_attention(case), "sound")
        emit = ops._emit

        def spoil(kernel: Kernel, args: Any, *rest: Any, emit: Callable[..., None] = emit, **more: Any) -> None:
            layer = Layer.from_buffer_copy(Layer.from_address(args.layer))
            args.layer = ctypes.addressof(layer)
            FAULTS[fault](args, layer)
            emit(kernel, args, *rest, **more)

        monkeypatch.setattr(ops, "_emit", spoil)
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_same_outputs(attend(ops, inputs), expected_attention(case), fault)
        ops.pool.close()
