"""The promise of a8: a row is the same bytes in every batch, under every chunking, on any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvd_kernels.ops import Batch, Ops
from kvd_kernels.weights import Linear
from tests.kernels.builders import AttentionInputs, make_attention, make_linear, make_out, make_rows, make_weight
from tests.kernels.builders import generator as make_generator
from tests.kernels.cases import LINEAR_CASES, MIXED, QUICK_ATTENTION, RAGGED, AttentionCase, LinearCase
from tests.kernels.compare import assert_same_bytes

COMPANIES = (1, 2, 7, 17, 33, 300)
ATTENTION = tuple(case for case in QUICK_ATTENTION if "a8" in case.only and case.sequences)


def run_linear(ops: Ops, handle: object, x: torch.Tensor, num_outputs: int) -> torch.Tensor:
    out = make_out(len(x), num_outputs, torch.float32)
    ops.linear(len(x), x, handle, out)
    return out[: len(x)]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_linear_rows_do_not_depend_on_company(exact_ops: Ops, case: LinearCase) -> None:
    layer = make_linear(case)
    handle = exact_ops.prepare_linear(layer)
    x = make_rows(max(COMPANIES), case.num_inputs, torch.float32)
    whole = run_linear(exact_ops, handle, x, layer.num_outputs)
    for n in COMPANIES:
        start = len(x) - n
        part = run_linear(exact_ops, handle, x[start:], layer.num_outputs)
        assert_same_bytes(part, whole[start:], f"{n} rows")


@pytest.mark.parametrize("form", ["int4", "fp16"])
def test_linear_rows_do_not_depend_on_threads_or_path(exact_ops: Ops, form: str) -> None:
    """Large enough for threads, and for both ways of summing the groups."""
    layer = Linear((make_weight(form, 32 if form == "int4" else 0, 3072, 576, make_generator(0)),))
    handle = exact_ops.prepare_linear(layer)
    x = make_rows(40, 576, torch.float32)
    whole = run_linear(exact_ops, handle, x, 3072)
    torch.set_num_threads(2)
    assert_same_bytes(run_linear(exact_ops, handle, x, 3072), whole, "two threads")
    assert_same_bytes(run_linear(exact_ops, handle, x[37:38], 3072), whole[37:38], "one row, two threads")


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_norm_and_activation_rows_do_not_depend_on_company(exact_ops: Ops, width: int) -> None:
    x = make_rows(300, 2 * width, torch.float32)
    weight = torch.rand(2 * width, generator=make_generator(1))
    norm, activation = make_out(300, 2 * width, torch.float32), make_out(300, width, torch.float32)
    exact_ops.rms_norm(300, x, weight, 1e-5, norm)
    exact_ops.silu_mul(300, x, activation)
    for n in COMPANIES:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows = x[300 - n :].clone()
            some_norm, some_activation = make_out(n, 2 * width, torch.float32), make_out(n, width, torch.float32)
            exact_ops.rms_norm(n, rows, weight, 1e-5, some_norm)
            exact_ops.silu_mul(n, rows, some_activation)
            assert_same_bytes(some_norm[:n], norm[300 - n : 300], f"norm of {n} rows")
            assert_same_bytes(some_activation[:n], activation[300 - n : 300], f"activation of {n} rows")


def attend(ops: Ops, inputs: AttentionInputs, batch: Batch, q: torch.Tensor) -> torch.Tensor:
    out = make_out(batch.num_tokens, q.shape[1], torch.float32)
    ops.attend(batch, q, inputs.rope, inputs.cache, inputs.spec, out)
    return out[: batch.num_tokens]


def part_of(inputs: AttentionInputs, sequence: int, first: int, count: int) -> tuple[Batch, slice]:
    """The batch of `count` tokens of one sequence alone, from its `first` token of the step on, as if the later
    ones had not come yet; and where those tokens lie in the whole batch."""
    start = int(inputs.batch.query_starts[sequence]) + first
    tokens = slice(start, start + count)
    last_position = int(inputs.batch.positions[tokens.stop - 1])
    whole = inputs.batch.groups[inputs.spec.group.group_id]
    later = int(inputs.batch.query_starts[sequence + 1]) - tokens.stop
    slots = int(whole.num_slots[sequence]) - later
    row = slice(sequence, sequence + 1)
    assert last_position >= 0
    group = replace(
        whole,
        block_tables=whole.block_tables[row],
        first_positions=whole.first_positions[row],
        num_slots=torch.tensor([slots], dtype=torch.int32),
    )
    groups = tuple(group if i == inputs.spec.group.group_id else g for i, g in enumerate(inputs.batch.groups))
    batch = replace(
        inputs.batch,
        positions=inputs.batch.positions[tokens],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        groups=groups,
        num_tokens=count,
        num_seqs=1,
    )
    return batch, tokens


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention_rows_do_not_depend_on_company_or_chunking(exact_ops: Ops, case: AttentionCase) -> None:
    """The whole step, against every sequence alone and cut into chunks that end at different places."""
    inputs = make_attention(case)
    whole = attend(exact_ops, inputs, inputs.batch, inputs.q)
    for sequence, (_, new) in enumerate(case.sequences):
        for chunk in {new, 1, 16, 7}:
            for first in range(0, new, chunk):
                if chunk == 1 and first % 5:
                    continue  # every fifth token alone is enough
                count = min(chunk, new - first)
                batch, tokens = part_of(inputs, sequence, first, count)
                alone = attend(exact_ops, inputs, batch, inputs.q[tokens])
                assert_same_bytes(alone, whole[tokens], f"sequence {sequence}, tokens {first} to {first + count}")


@pytest.mark.parametrize("element", ["int8", "fp16"])
def test_attention_does_not_depend_on_threads(exact_ops: Ops, element: str) -> None:
    case = AttentionCase("threads", (*MIXED, *RAGGED), num_heads=9, num_kv_heads=3, element=element)  # type: ignore[arg-type]
    inputs = make_attention(case)
    whole = attend(exact_ops, inputs, inputs.batch, inputs.q)
    torch.set_num_threads(2)
    assert_same_bytes(attend(exact_ops, inputs, inputs.batch, inputs.q), whole)


def test_attention_does_not_depend_on_stale_bytes(exact_ops: Ops) -> None:
    """Other garbage behind the last slot, other physical blocks: the same bytes."""
    for element in ("int8", "fp16"):
        case = AttentionCase("stale", MIXED, element=element, rotated=element == "int8")  # type: ignore[arg-type]
        inputs = make_attention(case)
        first = attend(exact_ops, inputs, inputs.batch, inputs.q)
        live = {int(slot) for slots in inputs.live_slots() for slot in slots}
        access = inputs.layer_bytes()
        k_at, v_at, _ = access.indices()
        for block in range(access.pool.shape[0]):
            for token in range(16):
                if block * 16 + token not in live:
                    access.k_elements()[block, k_at[token]] = 0
                    access.v_elements()[block, v_at[token]] = 1
        assert_same_bytes(attend(exact_ops, inputs, inputs.batch, inputs.q), first)


@pytest.mark.parametrize("case", [c for c in ATTENTION if not c.holes and not c.shared], ids=lambda case: case.name)
def test_written_bytes_do_not_depend_on_company(exact_ops: Ops, case: AttentionCase) -> None:
    together, apart = make_attention(case), make_attention(case)
    n = together.batch.num_tokens
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = make_rows(n, width, torch.float32)
    q = make_out(n, case.num_heads * case.head_dim, torch.float32)
    exact_ops.rope_and_write(together.batch, qkv, together.rope, together.cache, together.spec, q)
    one = make_out(1, q.shape[1], torch.float32)
    group_id = apart.spec.group.group_id
    for token in range(n):
        groups = list(apart.batch.groups)
        groups[group_id] = replace(groups[group_id], write_slots=groups[group_id].write_slots[token : token + 1])
        batch = replace(
            apart.batch, positions=apart.batch.positions[token : token + 1], groups=tuple(groups), num_tokens=1
        )
        exact_ops.rope_and_write(batch, qkv[token : token + 1], apart.rope, apart.cache, apart.spec, one)
        assert_same_bytes(one[:1], q[token : token + 1], f"q of token {token}")
    assert_same_bytes(apart.cache.pools[group_id], together.cache.pools[group_id], "pool")


def test_one_ulp_is_caught() -> None:
    value = torch.randn(5, 7, generator=make_generator(0))
    planted = value.clone()
    planted[3, 2] = torch.nextafter(planted[3, 2], torch.tensor(torch.inf))
    assert_same_bytes(value.clone(), value)
    with pytest.raises(AssertionError, match="1 of 35 elements differ"):
        assert_same_bytes(planted, value)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


class OneUlpOps:
    """Rows of a large batch off by one unit in the last place, as another order of summation would make them."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def linear(self, n: int, x: torch.Tensor, handle: object, out: torch.Tensor, residual: object = None) -> None:
        self.inner.linear(n, x, handle, out)
        if n > 33:
            out[n - 1, 0] = torch.nextafter(out[n - 1, 0], torch.tensor(torch.inf))

    def attend(self, batch: Batch, *arguments: object) -> None:
        self.inner.attend(batch, *arguments)  # type: ignore[arg-type]
        if batch.num_tokens > 33:
            out = arguments[4]
            assert isinstance(out, torch.Tensor)
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf))


def test_a_planted_ulp_fails_the_tests_of_this_file(exact_ops: Ops) -> None:
    faulty = OneUlpOps(exact_ops)
    with pytest.raises(AssertionError, match="elements differ"):
        test_linear_rows_do_not_depend_on_company(faulty, LINEAR_CASES[0])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="elements differ"):
        test_attention_rows_do_not_depend_on_company_or_chunking(faulty, AttentionCase("mixed", MIXED))  # type: ignore[arg-type]
