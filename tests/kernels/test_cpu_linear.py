"""The native linear, its rounding of activations and its fused neighbours: the reference's bytes at every ISA level.

Levels that this processor has run as they are built; all of them also run in a build whose instructions are plain C++.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kvd_kernels.cpu.library import Library, NativeUnavailable, installed_library
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.cpu.packing import PackedLinear
from kvd_kernels.cpu.program import Stage
from kvd_kernels.cpu.structs import Kernel, Type
from kvd_kernels.kv_format import build_kv_format
from kvd_kernels.ops import Batch, KVCache, Ops
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear
from tests.kernels.builders import assert_rest_untouched, generator, make_linear, make_out, make_rows, make_weight
from tests.kernels.cases import LINEAR_CASES, LinearCase
from tests.kernels.compare import assert_same_bytes, assert_same_numbers
from tests.kernels.natives import Natives

ODD_CASES = (
    LinearCase("int4-g2", 6, (("int4", 2, 3),)),
    LinearCase("int4-g16", 96, (("int4", 16, 40),), bias=True),
    LinearCase("int4-g10", 70, (("int4", 10, 17),)),  # a pair of channels of one byte falls into two quads
    LinearCase("int4-g96", 288, (("int4", 96, 20),)),
    LinearCase("int4-g256", 512, (("int4", 256, 18),), residual=True),
    LinearCase("int4-long", 9216, (("int4", 128, 16),)),  # more than the scratch memory of unpacked codes holds
    LinearCase("int4-long-g32", 4640, (("int4", 32, 16),)),
    LinearCase("int8-g20", 60, (("int8", 20, 19),)),
    LinearCase("int8-g64", 192, (("int8", 64, 33),), bias=True),
    LinearCase("int8-g128", 256, (("int8", 128, 17),)),
    LinearCase("int8-g256", 512, (("int8", 256, 16),)),
    LinearCase("one-output", 32, (("int4", 32, 1),), bias=True, residual=True),
    LinearCase("fp16-one-channel", 1, (("fp16", 0, 5),)),
    LinearCase("bf16-long", 3001, (("bf16", 0, 20),)),
    LinearCase("fp32-odd", 77, (("fp32", 0, 35),), bias=True),
    LinearCase("ragged-parts", 64, (("int4", 32, 5), ("int4", 32, 23), ("int8", 32, 9), ("int8", 32, 30)), bias=True),
)
CASES = (*LINEAR_CASES, *ODD_CASES)


@pytest.fixture(scope="module")
def reference() -> Ops:
    return create_ops("reference")


@dataclass(frozen=True)
class Results:
    native: torch.Tensor
    expected: torch.Tensor


def run_both(
    ops: Ops, reference: Ops, layer: Linear, x: torch.Tensor, n: int, *, residual: bool = False, handle: object = None
) -> Results:
    """n rows of x through both implementations; `handle`: the native layer where it is packed already."""
    given = make_rows(n, layer.num_outputs, torch.float32, seed=2) if residual else None
    results = []
    for implementation, packed in ((ops, handle), (reference, None)):
        out = make_out(n, layer.num_outputs, torch.float32)
        implementation.linear(n, x, packed or implementation.prepare_linear(layer), out, given)
        assert_rest_untouched(out, n)
        results.append(out[:n])
    return Results(*results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_the_reference(natives: Natives, reference: Ops, case: LinearCase) -> None:
    layer = make_linear(case)
    ops = natives.with_threads(1)
    handle = ops.prepare_linear(layer)
    for n in (0, 1, 2, 3, 5, 7, 17, 33):
        x = make_rows(n + 1, case.num_inputs, torch.float32)
        results = run_both(ops, reference, layer, x, n, residual=case.residual, handle=handle)
        assert_same_bytes(results.native, results.expected, f"{case.name}, {n} rows")


FORMS = (("int4", 32), ("int4", 64), ("int4", 128), ("int8", 32), ("int8", 128), ("fp16", 0))


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_every_number_of_rows(natives: Natives, reference: Ops, form: str, group: int) -> None:
    layer = Linear((make_weight(form, group, 23, 256, generator(4)),))
    x = make_rows(300, 256, torch.float32)
    ops = natives.with_threads(1)
    handle = ops.prepare_linear(layer)
    whole = run_both(ops, reference, layer, x, 300, handle=handle)
    assert_same_bytes(whole.native, whole.expected)
    for n in range(1, 41):
        out = make_out(n, 23, torch.float32)
        ops.linear(n, x[300 - n :].contiguous(), handle, out)
        assert_same_bytes(out[:n], whole.expected[300 - n :], f"{n} rows")
        assert_rest_untouched(out, n)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(natives: Natives, threads: int) -> None:
    for case in (LINEAR_CASES[0], LINEAR_CASES[2], LINEAR_CASES[-1], ODD_CASES[-1]):
        wide = replace(case, parts=tuple((form, group, n * 20 + 1) for form, group, n in case.parts))
        layer = make_linear(wide)
        for n in (1, 9, 150):
            x = make_rows(n, case.num_inputs, torch.float32)
            alone, together = (make_out(n, layer.num_outputs, torch.float32) for _ in range(2))
            for count, out in ((1, alone), (threads, together)):
                ops = natives.with_threads(count)
                ops.linear(n, x, ops.prepare_linear(layer), out)
            assert_same_bytes(together, alone, f"{case.name}, {n} rows")


def test_rows_that_are_not_finite_poison_themselves_alone(natives: Natives, reference: Ops) -> None:
    ops = natives.with_threads(1)
    for case in CASES:
        layer = make_linear(case)
        x = make_rows(20, case.num_inputs, torch.float32)
        clean = run_both(ops, reference, layer, x, 20)
        last = case.num_inputs - 1
        x[3, 0], x[7, last // 2], x[12, last] = torch.nan, torch.inf, -torch.inf
        dirty = run_both(ops, reference, layer, x, 20)
        assert_same_numbers(dirty.native, dirty.expected, case.name)
        others = [row for row in range(20) if row not in (3, 7, 12)]
        assert_same_bytes(dirty.native[others], clean.native[others], case.name)


@pytest.mark.parametrize("length", [32, 64, 128, 40])
def test_the_whole_range_of_codes(natives: Natives, reference: Ops, length: int) -> None:
    """The largest sums there are: every partial sum must fit where it is kept."""
    scales = torch.ones(4, 1, dtype=torch.float16)
    nibbles = torch.tensor([0x00, 0xFF, 0xF0, 0x0F], dtype=torch.uint8)[:, None].expand(4, length // 2).contiguous()
    int4 = Int4Weight(nibbles, scales, scales * -8, length)
    bytes_ = torch.tensor([-128, 127, 0, -127], dtype=torch.int8)[:, None].expand(4, length).contiguous()
    layer = Linear((int4, Int8Weight(bytes_, scales, length)))
    x = torch.ones(21, length)
    x[1::3] = -1
    x[2::3, ::2] = -1
    results = run_both(natives.with_threads(1), reference, layer, x, 21)
    assert_same_bytes(results.native, results.expected)


def test_activations_of_all_magnitudes(natives: Natives, reference: Ops) -> None:
    """Subnormal scales and rows of zeros; ties between codes."""
    layer = Linear((make_weight("int4", 32, 18, 64, generator(0)), make_weight("int8", 64, 5, 64, generator(1))))
    x = make_rows(8, 64, torch.float32)
    for row, power in enumerate((-149, -145, -140, -127, -100, 100, 120)):
        x[row] = x[row + 1] * 2.0**power if row % 2 else torch.arange(-32.0, 32.0).mul(0.5) * 2.0**power
    x[7] = torch.arange(64) % 2 * 127 + torch.arange(64) * 0.5
    results = run_both(natives.with_threads(1), reference, layer, x, 8)
    assert_same_numbers(results.native, results.expected, "magnitudes")


def test_float_weights_of_all_magnitudes(natives: Natives, reference: Ops) -> None:
    random = generator(3)
    powers = torch.randint(-40, 41, (20, 50), generator=random)
    wide = torch.randn(20, 50, generator=random) * 2.0 ** powers.float()
    wide[3], wide[4], wide[5, 7], wide[6, 8] = 0, wide[4] * 2.0**-120, torch.inf, torch.nan
    small = torch.randn(20, 50, generator=random) * 2.0**-18  # subnormal float16
    for values in (wide, wide.bfloat16(), small.half()):
        layer = Linear((FloatWeight(values.contiguous()),))
        x = make_rows(9, 50, torch.float32)
        results = run_both(natives.with_threads(1), reference, layer, x, 9)
        assert_same_numbers(results.native, results.expected, str(values.dtype))


def test_residual_may_be_the_output(natives: Natives, reference: Ops) -> None:
    layer = make_linear(LINEAR_CASES[0])
    x = make_rows(19, layer.num_inputs, torch.float32)
    ops = natives.with_threads(1)
    expected = run_both(ops, reference, layer, x, 19, residual=True).expected
    out = make_rows(19, layer.num_outputs, torch.float32, seed=2)
    ops.linear(19, x, ops.prepare_linear(layer), out, out)
    assert_same_bytes(out, expected)


def recorded(
    ops: CpuOps, num_tokens: int, forward: Callable[[Batch], torch.Tensor]
) -> tuple[torch.Tensor, list[Stage]]:
    """The result of a program and the stages that it was fused into."""
    nothing = torch.zeros(1, dtype=torch.int64)
    batch = Batch(nothing, nothing.int(), nothing.int(), nothing, (), num_tokens=num_tokens)
    program = ops.record(batch, KVCache(build_kv_format([]), ()), forward)
    program.run(batch, None)
    stages: list[Stage] = program._stages  # type: ignore[attr-defined]
    return program.logits, stages


GATED = (
    (("int4", 32, 48), ("int4", 32, 48)),
    (("int4", 32, 21), ("int4", 32, 21)),  # up begins inside a tile of the joined part
    (("int4", 32, 40), ("int8", 64, 40)),
    (("fp16", 0, 9), ("int4", 64, 9)),
    (("int4", 32, 700), ("int4", 32, 700)),
)


@pytest.mark.parametrize("parts", GATED, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_outputs(natives: Natives, reference: Ops, parts: tuple[tuple[str, int, int], ...], bias: bool) -> None:
    layer = make_linear(LinearCase("gated", 128, parts, bias=bias))
    width = layer.num_outputs // 2
    for n in (1, 5, 70):
        x = make_rows(n, 128, torch.float32)
        both, expected = make_out(n, 2 * width, torch.float32), make_out(n, width, torch.float32)
        reference.linear(n, x, reference.prepare_linear(layer), both)
        reference.silu_mul(n, both, expected)
        for threads in (1, 2):
            ops = natives.with_threads(threads)
            handle = ops.prepare_linear(layer)
            between, out = make_out(n, 2 * width, torch.float32), make_out(n, width, torch.float32)

            def forward(batch: Batch) -> torch.Tensor:
                ops.linear(batch.num_tokens, x, handle, between)  # noqa: B023
                ops.silu_mul(batch.num_tokens, between, out)  # noqa: B023
                return out  # noqa: B023

            result, stages = recorded(ops, n, forward)
            assert [stage.kernel for stage in stages if stage.kernel is not Kernel.QUANTIZE] == [Kernel.LINEAR]
            assert_same_bytes(result, expected, f"{n} rows, {threads} threads")


@pytest.mark.parametrize("width", [32, 100, 576, 1000])
def test_norm_in_front(natives: Natives, reference: Ops, width: int) -> None:
    layer = Linear((make_weight("int4", width // 4 * 2 if width % 32 else 32, 17, width, generator(0)),))
    weight = torch.randn(width, generator=generator(1))
    for n in (1, 6, 30):
        x = make_rows(n, width, torch.float32)
        x[n // 2, 5] = torch.nan if n == 6 else 1.0
        expected = make_out(n, 17, torch.float32)
        normalized = torch.empty_like(x)
        reference.rms_norm(n, x, weight, 1e-5, normalized)
        reference.linear(n, normalized, reference.prepare_linear(layer), expected)
        ops = natives.with_threads(2)
        handle = ops.prepare_linear(layer)
        between, out = torch.empty_like(x), make_out(n, 17, torch.float32)

        def forward(batch: Batch) -> torch.Tensor:
            ops.rms_norm(batch.num_tokens, x, weight, 1e-5, between)  # noqa: B023
            ops.linear(batch.num_tokens, between, handle, out)  # noqa: B023
            return out  # noqa: B023

        result, stages = recorded(ops, n, forward)
        assert [stage.kernel for stage in stages] == [Kernel.QUANTIZE, Kernel.LINEAR]
        assert_same_numbers(result, expected, f"{n} rows")


# ---- packing ----


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_matrices_side_by_side_pack_as_one(form: str, emulated_library: Library) -> None:
    parts = [make_weight(form, 32, n, 96, generator(n)) for n in (5, 30, 13)]
    ops = CpuOps(1, "portable", emulated_library)
    joined: Int4Weight | Int8Weight
    first = parts[0]
    tensors = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("codes", "scales", "offsets")
        if hasattr(first, name)
    }
    joined = replace(first, **tensors)  # type: ignore[arg-type, type-var, assignment]
    side_by_side, one = ops.prepare_linear(Linear(tuple(parts))), ops.prepare_linear(Linear((joined,)))
    assert len(side_by_side.packed) == 1
    assert_same_bytes(side_by_side.packed[0], one.packed[0])
    ops.pool.close()


def test_what_cannot_be_packed_is_refused(emulated_library: Library) -> None:
    packed_bytes = emulated_library.functions.kvd_packed_bytes
    assert packed_bytes(Type.U4, 16, 64, 32) > 0
    assert packed_bytes(Type.U4, 16, 64, 48) == -1  # no divisor
    assert packed_bytes(Type.U4, 16, 63, 63) == -1  # half a byte
    assert packed_bytes(Type.F16, 16, 1 << 19, 1 << 19) == -1  # a row that no scratch memory holds
    assert packed_bytes(7, 16, 64, 32) == -1


# ---- planted faults ----


def swap_nibbles(handle: PackedLinear) -> None:
    line = handle.packed[0][64:128]
    line.copy_((line >> 4) | (line << 4))


def take_scales_of_the_next_group(handle: PackedLinear) -> None:
    memory, group = handle.packed[0], 5 * 64
    memory[group - 64 : group - 32] = memory[2 * group - 64 : 2 * group - 32]


def drop_last_channels(handle: PackedLinear) -> None:
    memory = handle.packed[0]
    memory[-128:-64] &= 0x0F  # of the last tile's last group


def drop_last_output(handle: PackedLinear) -> None:
    handle.parts[0].num_outputs -= 1


def forget_the_offsets(handle: PackedLinear) -> None:
    handle.packed[0][5 * 64 - 32 : 5 * 64] = 0


@pytest.mark.parametrize(
    "spoil", [swap_nibbles, take_scales_of_the_next_group, drop_last_channels, drop_last_output, forget_the_offsets]
)
@pytest.mark.parametrize("n", [1, 7, 35])
def test_planted_faults_are_found(
    natives: Natives, reference: Ops, spoil: Callable[[PackedLinear], None], n: int
) -> None:
    layer = Linear((make_weight("int4", 32, 48, 96, generator(0)),))
    ops = natives.with_threads(1)
    handle = ops.prepare_linear(layer)
    x = make_rows(n + 1, 96, torch.float32)[1:]  # without the row of zeros, behind which a fault could hide
    good = run_both(ops, reference, layer, x, n, handle=handle)
    assert_same_bytes(good.native, good.expected)
    spoil(handle)
    bad = run_both(ops, reference, layer, x, n, handle=handle)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bytes(bad.native, bad.expected)


# ---- what the compiler made ----

INSTRUCTIONS = {
    "avx2": ("vpmaddubsw",),
    "avxvnni": ("vpdpbusd",),
    "avx512vnni": ("vpdpbusd",),
    "amx": ("tdpbsud", "tdpbssd", "ldtilecfg", "vpdpbusd"),
}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_levels_use_their_instructions() -> None:
    try:
        library = installed_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    levels = library.functions.kvd_levels().decode().split()
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library.path)], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, set[str]] = {level: set() for level in levels}
    current = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            current = next((level for level in levels if f"kvd::{level}::" in line), "")
        elif current and "\t" in line:
            found[current].update(line.split("\t")[1].split()[:2])  # a prefix such as {vex} may stand first
    for level in levels:
        missing = [name for name in INSTRUCTIONS.get(level, ()) if name not in found[level]]
        assert not missing, f"{level} lacks {missing}"
        assert level != "avx2" or not any("vfmadd" in name and name.endswith("ps") for name in found[level])
