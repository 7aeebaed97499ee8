"""One function per op: run it on a case and compare with the oracle. AssertionError is the verdict.

The suites call them on every implementation, and on implementations with a planted fault, which must fail.
"""

from __future__ import annotations

import numpy as np
import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import Ops
from tests.kernels import cases, oracle
from tests.kernels.builders import (
    EXTRA_ROWS,
    SENTINEL,
    AttentionInputs,
    assert_rest_untouched,
    make_attention,
    make_linear,
    make_out,
    make_rows,
)
from tests.kernels.cases import AttentionCase, LinearCase
from tests.kernels.compare import assert_within


def check_linear(ops: Ops, case: LinearCase, n: int) -> None:
    layer = make_linear(case)
    x = make_rows(n + EXTRA_ROWS, case.num_inputs, ops.activation_dtype)
    out = make_out(n, layer.num_outputs, ops.activation_dtype)
    residual = make_rows(n, layer.num_outputs, ops.activation_dtype, seed=2) if case.residual else None
    ops.linear(n, x, ops.prepare_linear(layer), out, residual)
    expected, terms, slack = oracle.linear(
        x[:n].double().numpy(), layer, None if residual is None else residual.double().numpy()
    )
    tolerance = cases.tolerance(cases.LINEAR, ops)
    if ops.name == "triton":
        slack = oracle.rounding_to_16_bits(x[:n].double().numpy(), layer, ops.activation_dtype)
    elif ops.arithmetic != "a8":
        slack = np.zeros_like(slack)
    assert_within(out[:n], expected, tolerance, terms=terms, slack=slack)
    assert_rest_untouched(out, n)


def expected_attention(
    inputs: AttentionInputs, q: torch.Tensor, arithmetic: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Oracle over all sequences: out [tokens, heads · head_dim], and mass per table entry of each sequence."""
    case, spec = inputs.case, inputs.spec
    access = inputs.layer_bytes()
    cos, sin = inputs.rope.cos.double().numpy(), inputs.rope.sin.double().numpy()
    outs, masses, start = [], [], 0
    for s, (before, new) in enumerate(case.sequences):
        k, v = access.read(np.array(inputs.tables[s], np.int64))
        key_positions = (np.array(inputs.first_positions[s])[:, None] + np.arange(BLOCK_TOKENS)).ravel()
        used = inputs.num_slots[s]
        bias_keys = None
        if spec.key_bias is not None:
            bias = np.broadcast_to(spec.key_bias.double().numpy(), (used, *spec.key_bias.shape))
            bias_keys = oracle.rope(bias, key_positions[:used], cos, sin)
        queries = q[start : start + new].double().numpy().reshape(new, spec.num_heads, spec.head_dim)
        out, per_slot = oracle.attention(
            queries,
            np.arange(before, before + new),
            k[:used],
            v[:used],
            key_positions[:used],
            scale=spec.scale,
            window=case.window,
            rotation_size=inputs.layer.rotation_size if case.rotated else 0,
            bias_keys=bias_keys,
            rounds_query=arithmetic == "a8" and case.element == "int8",
        )
        outs.append(out.reshape(new, -1))
        padded = np.zeros(len(inputs.tables[s]) * BLOCK_TOKENS)
        padded[:used] = per_slot
        masses.append(padded.reshape(-1, BLOCK_TOKENS).sum(axis=1))
        start += new
    width = spec.num_heads * spec.head_dim
    return np.concatenate(outs) if outs else np.zeros((0, width)), masses


def check_attention(ops: Ops, case: AttentionCase, seed: int = 0) -> None:
    inputs = make_attention(case, seed)
    batch, n = inputs.batch, inputs.batch.num_tokens
    q = make_out(n, inputs.q.shape[1], ops.activation_dtype)
    q[:n] = inputs.q.to(ops.activation_dtype)
    out = make_out(n, inputs.q.shape[1], ops.activation_dtype)
    tables = batch.groups[inputs.spec.group.group_id].block_tables
    mass = torch.full(tables.shape, SENTINEL) if case.block_mass else None
    before = [pool.clone() for pool in inputs.cache.pools]
    ops.attend(batch, q, inputs.rope, inputs.cache, inputs.spec, out, mass)
    for pool, old in zip(inputs.cache.pools, before, strict=True):
        assert torch.equal(pool, old), "attention wrote into the cache"
    expected, masses = expected_attention(inputs, q[:n], ops.arithmetic)
    table = cases.ATTENTION_INT8 if case.element == "int8" else cases.ATTENTION_16BIT
    if case.key_bias > 10:
        table = cases.ATTENTION_GIANT_BIAS
    assert_within(out[:n], expected, cases.tolerance(table, ops))
    assert_rest_untouched(out, n)
    if mass is None:
        return
    for s, per_entry in enumerate(masses):
        count = float(case.sequences[s][1] * case.num_heads)
        assert_within(mass[s, : len(per_entry)], per_entry, cases.tolerance(cases.MASS, ops), terms=count)
        assert bool((mass[s, len(per_entry) :] == 0).all()), "weight on entries that do not exist"
    assert bool((mass[batch.num_seqs :] == SENTINEL).all()), "mass of a sequence that does not live"


def stored_step(values: np.ndarray, scales: np.ndarray | None, element: str) -> np.ndarray:
    """Distance of neighbouring stored numbers around `values`, for each element."""
    if scales is not None:
        return np.broadcast_to(scales[..., None], values.shape)
    mantissa_bits, smallest_exponent = {
        "fp16": (10, -14),
        "bf16": (7, -126),
        "fp8_e4m3": (3, -6),
        "fp8_e5m2": (2, -14),
    }[element]
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))), smallest_exponent)
    return np.exp2(exponent - mantissa_bits)


def check_rope_and_write(ops: Ops, case: AttentionCase, seed: int = 0) -> None:
    """q after RoPE, what was stored for every token of the step, and every other byte of every pool."""
    inputs = make_attention(case, seed)
    batch, spec, n = inputs.batch, inputs.spec, inputs.batch.num_tokens
    num_heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = make_rows(n + EXTRA_ROWS, num_heads * spec.head_dim, ops.activation_dtype).clamp_(-6, 6)
    q_out = make_out(n, spec.num_heads * spec.head_dim, ops.activation_dtype)
    before = [pool.clone() for pool in inputs.cache.pools]
    ops.rope_and_write(batch, qkv, inputs.rope, inputs.cache, spec, q_out)

    heads = qkv[:n].double().numpy().reshape(n, num_heads, spec.head_dim)
    positions = batch.positions[:n].long().numpy()
    cos, sin = inputs.rope.cos.double().numpy(), inputs.rope.sin.double().numpy()
    rotated = oracle.rope(heads[:, : spec.num_heads + spec.num_kv_heads], positions, cos, sin)
    assert_within(q_out[:n], rotated[:, : spec.num_heads].reshape(n, q_out.shape[1]), cases.tolerance(cases.ROPE, ops))
    assert_rest_untouched(q_out, n)

    k = rotated[:, spec.num_heads :]
    if case.rotated:
        k = k @ oracle.hadamard_matrix(spec.head_dim, inputs.layer.rotation_size)
    v = heads[:, spec.num_heads + spec.num_kv_heads :]
    slots = batch.groups[spec.group.group_id].write_slots[:n].numpy()
    access = inputs.layer_bytes()
    k_stored, v_stored = access.read(np.arange(access.pool.shape[0]))
    _, _, scale_at = access.indices()
    for stored, wanted, scales in ((k_stored, k, access.k_scales()), (v_stored, v, access.v_scales())):
        scale = None
        if case.element == "int8":
            scale = scales[slots[:, None] // BLOCK_TOKENS, scale_at[slots % BLOCK_TOKENS]].astype(np.float64)
            absmax = np.abs(wanted).max(axis=2, initial=0.0)
            assert (np.abs(scale - absmax / 127) <= absmax / 127 * 2**-10 + 2**-24).all(), "an int8 scale is off"
        step = stored_step(wanted, scale, case.element)
        step = np.where(step == 0, 1.0, step)
        difference = torch.from_numpy((stored[slots] - wanted) / step)
        before_rounding = cases.tolerance(cases.ROPE, ops).absolute / step
        assert_within(difference, np.zeros(wanted.shape), cases.tolerance(cases.STORED, ops), slack=before_rounding)
    _assert_other_bytes_unchanged(inputs, before, slots)


def _assert_other_bytes_unchanged(inputs: AttentionInputs, before: list[torch.Tensor], slots: np.ndarray) -> None:
    """Restore the bytes of the written tokens by the index formulas; then the pools must be what they were."""
    access = inputs.layer_bytes()
    old_pools = [pool.numpy() for pool in before]
    old = oracle.LayerBytes(old_pools[inputs.spec.group.group_id], inputs.spec.group, access.layer_index, access.format)
    blocks, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    k_at, v_at, scale_at = access.indices()
    rows = blocks[:, None, None]
    access.k_elements()[rows, k_at[tokens]] = old.k_elements()[rows, k_at[tokens]]
    access.v_elements()[rows, v_at[tokens]] = old.v_elements()[rows, v_at[tokens]]
    if access.format.k_type == "int8":
        at = (blocks[:, None], scale_at[tokens])
        access.k_scales()[at] = old.k_scales()[at]
        access.v_scales()[at] = old.v_scales()[at]
    for pool, expected in zip(inputs.cache.pools, old_pools, strict=True):
        assert np.array_equal(pool.numpy(), expected), "bytes of other tokens changed"
