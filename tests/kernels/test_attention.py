"""Paged attention and the writing of K and V against the dense oracle, over the case table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvd_kernels.ops import Ops
from tests.kernels.builders import SENTINEL, make_attention, make_out
from tests.kernels.cases import FULL_ATTENTION, QUICK_ATTENTION, AttentionCase
from tests.kernels.checks import check_attention, check_rope_and_write
from tests.kernels.compare import assert_same_bytes
from tests.kernels.interpreter import quick_device_calls


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_device_calls():
        yield


def skip_unless_covered(ops: Ops, case: AttentionCase) -> None:
    if ops.arithmetic not in case.only:
        pytest.skip(f"{case.element} KV is not part of {ops.arithmetic}")


@pytest.mark.parametrize("case", QUICK_ATTENTION, ids=lambda case: case.name)
def test_attention(ops: Ops, case: AttentionCase) -> None:
    skip_unless_covered(ops, case)
    check_attention(ops, case)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_ATTENTION, ids=lambda case: case.name)
def test_attention_cross_product(ops: Ops, case: AttentionCase) -> None:
    check_attention(ops, case, seed=1)


WRITES = tuple(case for case in QUICK_ATTENTION if not case.holes and not case.shared)


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_rope_and_write(ops: Ops, case: AttentionCase) -> None:
    skip_unless_covered(ops, case)
    check_rope_and_write(ops, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in FULL_ATTENTION if not c.holes], ids=lambda case: case.name)
def test_rope_and_write_cross_product(ops: Ops, case: AttentionCase) -> None:
    check_rope_and_write(ops, case, seed=1)


@pytest.mark.parametrize("element", ["fp8_e4m3", "fp8_e5m2"])
def test_a8_refuses_fp8_by_name(exact_ops: Ops, element: str) -> None:
    case = next(case for case in QUICK_ATTENTION if case.element == element)
    with pytest.raises(NotImplementedError, match=element):
        check_attention(exact_ops, case)
    with pytest.raises(NotImplementedError, match=element):
        check_rope_and_write(exact_ops, case)


def test_a_query_that_sees_nothing_yields_zero(ops: Ops) -> None:
    """Its window lies in a hole: the last block of the table is before it, and the newest slot does not exist."""
    case = AttentionCase("nothing", ((100, 1), (100, 3)), element="fp16")
    inputs = make_attention(case)
    inputs.batch.positions[: inputs.batch.num_tokens] = -1
    out = make_out(4, inputs.q.shape[1], ops.activation_dtype)
    mass = torch.full((4, 20), SENTINEL)
    q = inputs.q.to(ops.activation_dtype)
    ops.attend(inputs.batch, q, inputs.rope, inputs.cache, inputs.spec, out, mass)
    assert bool((out[:4] == 0).all())
    assert bool((mass[:2] == 0).all())


def test_a_sequence_without_slots_yields_zero(ops: Ops) -> None:
    inputs = make_attention(AttentionCase("none", ((0, 1), (20, 2)), element="fp16"))
    inputs.batch.groups[inputs.spec.group.group_id].num_slots[:2] = 0
    out = make_out(3, inputs.q.shape[1], ops.activation_dtype)
    q = inputs.q.to(ops.activation_dtype)
    ops.attend(inputs.batch, q, inputs.rope, inputs.cache, inputs.spec, out)
    assert bool((out[:3] == 0).all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-9, 1e-3, 60_000.0, 1e9])
def test_int8_scales_stay_finite_at_the_ends_of_float16(exact_ops: Ops, magnitude: float) -> None:
    case = AttentionCase("ends", ((3, 1),))
    inputs = make_attention(case)
    num_heads = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.full((1, num_heads * case.head_dim), magnitude)
    qkv[:, ::2] *= -1
    q = make_out(1, case.num_heads * case.head_dim, torch.float32)
    exact_ops.rope_and_write(inputs.batch, qkv, inputs.rope, inputs.cache, inputs.spec, q)
    _, v = inputs.layer_bytes().read(inputs.batch.groups[inputs.spec.group.group_id].write_slots[:1].numpy() // 16)
    stored = torch.from_numpy(v[3])
    assert bool(stored.isfinite().all())
    if 1e-3 <= magnitude <= 1e6:
        assert torch.allclose(stored, qkv.view(num_heads, -1)[-2:].double(), rtol=0.01)
    if magnitude < 1e-6:
        assert bool((stored == 0).all())
    if magnitude > 1e8:
        assert float(stored.abs().max()) == 65504.0 * 127


@pytest.mark.parametrize("num_tokens", range(17))
@pytest.mark.parametrize("name", ["decode-int8", "decode-fp16", "window-40"])
def test_copy_block_copies_tokens_and_nothing_else(ops: Ops, name: str, num_tokens: int) -> None:
    """Decoded by the index formulas: the first tokens are the source's, and no other byte of any pool changed."""
    case = next(case for case in QUICK_ATTENTION if case.name == name)
    inputs = make_attention(replace(case, sequences=((40, 1),)))
    group = inputs.spec.group
    source, target = inputs.tables[0][0], inputs.tables[0][2]
    before = [pool.clone() for pool in inputs.cache.pools]
    ops.copy_block(inputs.cache, group.group_id, source, target, num_tokens)
    pool, old = inputs.cache.pools[group.group_id], before[group.group_id]
    rebuilt = old.clone()
    for index, layer in group.layers:
        from tests.kernels.oracle import LayerBytes

        access = LayerBytes(rebuilt.numpy(), group, index, layer)
        k_at, v_at, scale_at = access.indices()
        for elements, at in ((access.k_elements(), k_at), (access.v_elements(), v_at)):
            elements[target, at[:num_tokens]] = elements[source, at[:num_tokens]]
        for scales, element in ((access.k_scales(), layer.k_type), (access.v_scales(), layer.v_type)):
            if element == "int8":
                scales[target, scale_at[:num_tokens]] = scales[source, scale_at[:num_tokens]]
    assert_same_bytes(pool, rebuilt)
    for i, other in enumerate(inputs.cache.pools):
        if i != group.group_id:
            assert_same_bytes(other, before[i])
