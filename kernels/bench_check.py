"""Whether the GPU kernels compute what the reference does, before they are timed. Stateless.

Coarse, since rounding differs: it finds the wrong channel, scale or token. The exact comparison is the test suite's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch

from kvd_kernels.bench_inputs import AttentionInputs, Shape, attention_inputs, int8, layer_linears
from kvd_kernels.kv_format import ElementType
from kvd_kernels.ops import KVCache, Ops, RopeTable, SamplingBatch
from kvd_kernels.reference.a16 import ReferenceOps16
from kvd_kernels.weights import Linear

SHAPE = Shape("checked", 256, 384, 4, 2, 64, 1, 64, 512, 64)
ROWS = (1, 3, 20, 70)
COARSE = 2.0**-6
"""Of the greatest value: some roundings to bfloat16 (2^-9) stay below it."""

Outputs = list[torch.Tensor]


def _moved(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    """A copy on a device, the cache included."""
    batch = inputs.batch
    groups = tuple(
        replace(tables, **{field.name: getattr(tables, field.name).to(device) for field in fields(tables)})
        for tables in batch.groups
    )
    names = ("token_ids", "positions", "query_starts", "logit_rows")
    moved = replace(batch, groups=groups, **{name: getattr(batch, name).to(device) for name in names})
    pools = tuple(pool.to(device, copy=True) for pool in inputs.cache.pools)
    rope = RopeTable(inputs.rope.cos.to(device), inputs.rope.sin.to(device))
    return AttentionInputs(moved, KVCache(inputs.cache.format, pools), inputs.spec, rope)


def _linears(ops: Ops) -> Outputs:
    outputs = []
    for layer in (*layer_linears(SHAPE).values(), Linear((int8(SHAPE.vocab, SHAPE.hidden, SHAPE.head_group),))):
        handle = ops.prepare_linear(layer)
        for n in ROWS:
            x = torch.randn(n, layer.num_inputs).to(ops.activation_dtype).to(ops.device)
            out = torch.zeros(n, layer.num_outputs, dtype=ops.activation_dtype, device=ops.device)
            residual = torch.ones_like(out)
            ops.linear(n, x, handle, out, residual)
            outputs.append(out)
    return outputs


def _attention(ops: Ops, element: ElementType) -> Outputs:
    """Tokens written and read again, decoding and in a chunk; and one block copied."""
    outputs = []
    for num_seqs, context, num_new in ((3, 100, 1), (1, 90, 40), (1, 700, 1)):
        inputs = _moved(attention_inputs(SHAPE, num_seqs, context, num_new, element), ops.device)
        batch, spec = inputs.batch, inputs.spec
        n, width = batch.num_tokens, SHAPE.heads * SHAPE.head_dim
        qkv = torch.randn(n, width + 2 * SHAPE.kv_heads * SHAPE.head_dim).to(ops.activation_dtype).to(ops.device)
        q = torch.zeros(n, width, dtype=ops.activation_dtype, device=ops.device)
        out = torch.zeros_like(q)
        ops.rope_and_write(batch, qkv, inputs.rope, inputs.cache, spec, q)
        ops.attend(batch, q, inputs.rope, inputs.cache, spec, out)
        outputs += [q, out]
        pool = inputs.cache.pools[0]
        before = pool[1].clone()
        ops.copy_block(inputs.cache, 0, 0, 1, 5)
        outputs += [(pool[1] != before).float(), (pool[1] == pool[0]).float()]
    return outputs


def _rows(ops: Ops) -> Outputs:
    table = ops.prepare_embedding(int8(SHAPE.vocab, SHAPE.hidden, SHAPE.head_group))
    outputs = []
    for n in ROWS:
        batch = _moved(attention_inputs(SHAPE, n, 16, 1), ops.device).batch
        batch.token_ids.copy_(torch.randint(0, SHAPE.vocab, (n,)))
        embedded = torch.zeros(n, SHAPE.hidden, dtype=ops.activation_dtype, device=ops.device)
        ops.embed(batch, table, embedded)
        normed, gathered, gated = torch.zeros_like(embedded), torch.zeros_like(embedded), embedded.new_zeros(n, 128)
        ops.rms_norm(n, embedded, torch.linspace(0.5, 2, SHAPE.hidden).to(ops.device), 1e-5, normed)
        ops.gather(batch, normed, gathered)
        ops.silu_mul(n, normed, gated)
        outputs += [embedded, normed, gathered, gated]
    return outputs


def _sampling(ops: Ops) -> Outputs:
    outputs = []
    for temperature in (0.0, 0.8):
        logits = torch.randn(7, SHAPE.vocab)
        params = SamplingBatch.allocate(7)
        params.num_rows = 7
        params.num_logprobs.fill_(-1)
        params.repetition.fill_(1.0)
        params.top_p.fill_(0.9)
        params.temperature.fill_(temperature)
        params.seeds.copy_(torch.arange(7))
        chosen = ops.sample(logits.to(ops.device), params).token_ids
        outputs.append(torch.tensor([-1 if token is None else token for token in chosen], dtype=torch.float32))
    return outputs


CHECKS: dict[str, Callable[[Ops], Outputs]] = {
    "linear": _linears,
    "attention over int8": partial(_attention, element="int8"),
    "attention over fp8_e4m3": partial(_attention, element="fp8_e4m3"),
    "attention over fp16": partial(_attention, element="fp16"),
    "a kernel over rows": _rows,
    "sampling": _sampling,
}


@torch.inference_mode()
def failing_op(ops: Ops) -> str | None:
    """What differs from the reference, or None."""
    reference = ReferenceOps16(ops.activation_dtype)
    for name, compute in CHECKS.items():
        outputs = []
        for computed in (reference, ops):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                outputs.append([output.float().cpu() for output in compute(computed)])
        for expected, ours in zip(*outputs, strict=True):
            limit = COARSE * float(expected.abs().max())
            if not bool(((ours - expected).abs() <= limit).all()):
                return name
    return None
