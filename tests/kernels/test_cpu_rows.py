"""Native embedding, norm, gated activation and gathering of rows: the reference's bytes at every ISA level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvd_kernels.ops import Batch, Ops
from kvd_kernels.registry import create_ops
from tests.kernels.builders import assert_rest_untouched, generator, make_out, make_rows, make_weight
from tests.kernels.compare import assert_same_bytes, assert_same_numbers
from tests.kernels.natives import Natives

WIDTHS = (1, 7, 64, 100, 576, 2500)
COUNTS = (0, 1, 7, 40)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, -200.0, 3e38, 1e-42)


@pytest.fixture(scope="module")
def reference() -> Ops:
    return create_ops("reference")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activation(natives: Natives, reference: Ops, threads: int, width: int) -> None:
    ops = natives.with_threads(threads)
    for n in COUNTS:
        x = make_rows(n, 2 * width, torch.float32)
        if n > 1:
            x[1, : len(SPECIAL)] = torch.tensor(SPECIAL)[: 2 * width]
        results = make_out(n, width, torch.float32), make_out(n, width, torch.float32)
        for implementation, out in zip((ops, reference), results, strict=True):
            implementation.silu_mul(n, x, out)
            assert_rest_untouched(out, n)
        assert_same_numbers(*results, f"{n} rows")


@pytest.mark.parametrize("width", WIDTHS)
def test_norm(natives: Natives, reference: Ops, threads: int, width: int) -> None:
    ops = natives.with_threads(threads)
    weight = torch.rand(width, generator=generator(1))
    for n in COUNTS:
        x = make_rows(n, width, torch.float32)
        results = make_out(n, width, torch.float32), make_out(n, width, torch.float32)
        for implementation, out in zip((ops, reference), results, strict=True):
            implementation.rms_norm(n, x, weight, 1e-5, out)
            assert_rest_untouched(out, n)
        assert_same_bytes(*results, f"{n} rows")
        in_place = x.clone()
        ops.rms_norm(n, in_place, weight, 1e-5, in_place)
        assert_same_bytes(in_place, results[1][:n], f"{n} rows in place")


TABLES = (
    ("int4", 32, 576), ("int4", 36, 108), ("int4", 0, 2048), ("int8", 33, 99), ("int8", 0, 1500), ("fp16", 0, 77),
    ("bf16", 0, 1100), ("fp32", 0, 1500),
)  # fmt: skip


@pytest.mark.parametrize(("form", "group", "width"), TABLES)
def test_embedding(natives: Natives, reference: Ops, threads: int, form: str, group: int, width: int) -> None:
    ops, vocab = natives.with_threads(threads), 50
    table = make_weight(form, group, vocab, width, generator(3))
    for n in COUNTS:
        token_ids = torch.full((n + 3,), 2**40)
        token_ids[:n] = torch.randint(0, vocab, (n,), generator=generator(n))
        batch = replace(empty_batch(), token_ids=token_ids, num_tokens=n)
        results = make_out(n, width, torch.float32), make_out(n, width, torch.float32)
        for implementation, out in zip((ops, reference), results, strict=True):
            implementation.embed(batch, implementation.prepare_embedding(table), out)
            assert_rest_untouched(out, n)
        assert_same_bytes(*results, f"{n} rows")


@pytest.mark.parametrize("width", WIDTHS)
def test_gathering(natives: Natives, reference: Ops, threads: int, width: int) -> None:
    ops = natives.with_threads(threads)
    x = make_rows(20, width, torch.float32)
    for n in COUNTS:
        rows = torch.randint(0, 20, (n,), generator=generator(n))
        batch = replace(empty_batch(), logit_rows=rows, num_logit_rows=n)
        results = make_out(n, width, torch.float32), make_out(n, width, torch.float32)
        for implementation, out in zip((ops, reference), results, strict=True):
            implementation.gather(batch, x, out)
            assert_rest_untouched(out, n)
        assert_same_bytes(*results, f"{n} rows")


def empty_batch() -> Batch:
    nothing = torch.zeros(1, dtype=torch.int64)
    return Batch(nothing, nothing.int(), nothing.int(), nothing, ())
