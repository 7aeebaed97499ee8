"""Linear layers of the Triton backend: what the shared cases are too small for, or do not name.

Splits of the input channels, weights written out in 16 bits, the matrix-vector kernel, float32 outputs, overflow, and
the packed layout itself.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_kernels.triton import linear_configs as configs
from kvd_kernels.triton.cards import KNOWN_CARDS, Card
from kvd_kernels.triton.linear import LinearKernels
from kvd_kernels.triton.linear_configs import LinearConfig, MatrixShape
from kvd_kernels.triton.packing import PackedDense, PackedInteger
from kvd_kernels.triton.tuning import Tuned, fields_of
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear
from tests.kernels import cases, oracle
from tests.kernels.builders import assert_rest_untouched, generator, make_linear, make_out, make_rows, make_weight
from tests.kernels.cases import LINEAR_CASES, LinearCase, Tolerance
from tests.kernels.compare import assert_within

CPU = torch.device("cpu")
A100, HOPPER = KNOWN_CARDS[0], next(card for card in KNOWN_CARDS if card.architecture == 90)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
FORMS = {
    "int4-g128": LinearCase("int4-g128", 2048, (("int4", 128, 40),), bias=True, residual=True),
    "int4-g32": LinearCase("int4-g32", 2080, (("int4", 32, 65),), residual=True),
    "int8-g64": LinearCase("int8-g64", 1088, (("int8", 64, 130),), bias=True),
}


DEQUANTIZED = [
    (LinearCase("int4-g32", 160, (("int4", 32, 65),), residual=True), None),
    (LinearCase("int4-g128", 384, (("int4", 128, 40),)), None),
    (LinearCase("int8-g64", 192, (("int8", 64, 70),), bias=True), torch.float32),
]


class Only(Tuned):
    """Takes the first candidate of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.chosen: list[LinearConfig] = []

    def choose(self, key, candidates):  # type: ignore[no-untyped-def]
        self.chosen.append(next(form for form in candidates if form.kind == self.kind))
        return self.chosen[-1]


def line(dtype: torch.dtype) -> Tolerance:
    return cases.LINEAR["a16"] if dtype == torch.float16 else cases.LINEAR["triton-bf16"]


def check(
    kernels: LinearKernels, case: LinearCase, n: int, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None
) -> None:
    layer = make_linear(case)
    x = make_rows(n, case.num_inputs, dtype)
    residual = make_rows(n, layer.num_outputs, dtype, seed=2) if case.residual else None
    out = make_out(n, layer.num_outputs, out_dtype or dtype)
    kernels.apply(n, x, kernels.prepare(layer), out, residual)
    added = None if residual is None else residual.double().numpy()
    expected, terms, _ = oracle.linear(x.double().numpy(), layer, added)
    tolerance = line(dtype) if out_dtype is None else Tolerance(of_terms=line(dtype).of_terms)
    assert_within(out[:n], expected, tolerance, terms=terms)
    assert_rest_untouched(out, n)


QUICK_SPLITS = {("int4-g128", 1), ("int4-g128", 16), ("int4-g32", 3), ("int8-g64", 20), ("int4-g128", 40)}
SPLITS = [
    pytest.param(name, n, marks=[] if (name, n) in QUICK_SPLITS else pytest.mark.full)
    for name in FORMS
    for n in (1, 3, 16, 20, 40, 70)
]


@DTYPES
@pytest.mark.parametrize("card", [A100, pytest.param(HOPPER, marks=pytest.mark.full)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize(("name", "n"), SPLITS)
def test_triton_splits_of_the_input_channels(name: str, n: int, card: Card, dtype: torch.dtype) -> None:
    """Every number of rows has another form here; few outputs make several splits of each."""
    case = FORMS[name]
    (part,) = LinearKernels(CPU, card, dtype).prepare(make_linear(case)).parts
    assert isinstance(part, PackedInteger)
    shape = MatrixShape(part.bits, part.group, part.padded_outputs, part.num_chunks)
    form, splits = configs.choose(card, shape, n, Tuned())
    assert form.kind == "tile"
    assert splits > 1
    check(LinearKernels(CPU, card, dtype), case, n, dtype)


@DTYPES
@pytest.mark.parametrize("name", ["int4-g128", "int4-g32"])
def test_triton_vector_kernel(name: str, dtype: torch.dtype) -> None:
    tuned = Only("vector")
    check(LinearKernels(CPU, A100, dtype, tuned), FORMS[name], 1, dtype)
    assert tuned.chosen == [configs.VECTOR]


@DTYPES
@pytest.mark.parametrize("case", [c for c in LINEAR_CASES if c.parts == (("int4", 64, 40),)], ids=lambda c: c.name)
def test_triton_vector_kernel_without_splits(case: LinearCase, dtype: torch.dtype) -> None:
    check(LinearKernels(CPU, A100, dtype, Only("vector")), case, 1, dtype)


@DTYPES
@pytest.mark.parametrize(("case", "out_dtype"), DEQUANTIZED, ids=lambda value: getattr(value, "name", str(value)))
def test_triton_weights_written_out_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, case: LinearCase, out_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """In slices of 32 outputs; each weight is rounded to 16 bits, and that is all that is added to the tolerance."""
    n = 5
    monkeypatch.setattr(configs, "DEQUANTIZE_SLICE_BYTES", 32 * 2 * case.num_inputs)
    monkeypatch.setattr(configs, "row_bucket", lambda n: configs.DEQUANTIZE_ROWS)
    layer = make_linear(case)
    kernels = LinearKernels(CPU, A100, dtype, tuned := Only("dequantize"))
    x = make_rows(n, case.num_inputs, dtype)
    residual = make_rows(n, layer.num_outputs, dtype, seed=2) if case.residual else None
    out = make_out(n, layer.num_outputs, out_dtype or dtype)
    kernels.apply(n, x, kernels.prepare(layer), out, residual)
    assert tuned.chosen
    added = None if residual is None else residual.double().numpy()
    expected, terms, _ = oracle.linear(x.double().numpy(), layer, added)
    values = torch.from_numpy(oracle.dense(layer.parts[0])).float().to(dtype).double().numpy()
    slack = np.abs(x.double().numpy()) @ np.abs(values - oracle.dense(layer.parts[0])).T
    assert_within(out[:n], expected, line(dtype), terms=terms, slack=slack)
    assert_rest_untouched(out, n)


@DTYPES
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "splits"])
def test_triton_logits_are_float32(dtype: torch.dtype, splits: bool) -> None:
    case = LinearCase("head", 1088 if splits else 192, (("int8", 64, 130),))
    check(LinearKernels(CPU, A100, dtype), case, 3, dtype, out_dtype=torch.float32)


@pytest.mark.parametrize("form", ["int4", "int8", "fp16"])
@pytest.mark.parametrize("num_inputs", [128, 2048])
def test_triton_float16_saturates_and_keeps_nan(form: str, num_inputs: int) -> None:
    weight = make_weight(form, 128 if form != "fp16" else 0, 64, num_inputs, generator(0))
    kernels = LinearKernels(CPU, A100, torch.float16)
    x = torch.full((3, num_inputs), 60000.0, dtype=torch.float16)
    x[1] *= torch.where(torch.arange(num_inputs) % 2 == 0, 1.0, -1.0).half()
    x[2, 7] = torch.nan
    out = torch.zeros(3, 64, dtype=torch.float16)
    kernels.apply(3, x, kernels.prepare(Linear((weight,))), out, None)
    expected = x[:2].double() @ torch.from_numpy(oracle.dense(weight)).T
    assert bool((expected.abs() > 70000).any())
    assert torch.allclose(out[:2].double(), expected.clamp(-65504, 65504), rtol=1e-2, atol=40.0)
    assert bool(out[2].isnan().all())
    assert bool(out[:2].isfinite().all())


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_triton_every_code_stands_where_the_layout_says(form: str) -> None:
    """One channel at a time is on: the output is that channel's weight, so a code in another place shows."""
    num_inputs = 256
    weight = make_weight(form, 64, 33, num_inputs, generator(5))
    kernels = LinearKernels(CPU, A100, torch.float16)
    handle = kernels.prepare(Linear((weight,)))
    out = torch.zeros(num_inputs, 33, dtype=torch.float16)
    for start in range(0, num_inputs, 32):
        rows = torch.eye(num_inputs, dtype=torch.float16)[start : start + 32]
        kernels.apply(32, rows, handle, out[start : start + 32], None)
    assert_within(out.T, oracle.dense(weight), cases.LINEAR["a16"])


def test_triton_extreme_codes_and_scales() -> None:
    """All codes 15 and all 0, all int8 codes ±127 and -128; scales at the ends of float16; some groups are zero."""
    scales = torch.tensor([6e-8, 1.0, 4000.0, 0.0]).half().expand(64, 4)
    offsets = torch.tensor([0.0, -15.0, 0.0, 7.0]).half().expand(64, 4)
    four = Int4Weight(torch.randint(0, 2, (64, 256), dtype=torch.uint8) * 255, scales, offsets, 128)
    codes = torch.tensor([-128, -127, 0, 127], dtype=torch.int8)[torch.randint(0, 4, (64, 512))]
    eight = Int8Weight(codes, scales, 128)
    for dtype in (torch.float16, torch.bfloat16):
        kernels = LinearKernels(CPU, A100, dtype)
        for weight in (four, eight):
            for n in (2, 40):
                x = make_rows(n, 512, dtype).mul_(1e-3)
                out = torch.zeros(n, 64, dtype=torch.float32)
                kernels.apply(n, x, kernels.prepare(Linear((weight,))), out, None)
                expected, terms, _ = oracle.linear(x.double().numpy(), Linear((weight,)), None)
                # Scales and offsets partly cancel here, which Σ|terms| does not see.
                assert_within(out, expected, Tolerance(of_terms=2e-5, absolute=1e-4), terms=terms)


def test_triton_neighbours_of_one_form_are_one_matrix() -> None:
    random = generator(0)
    parts = [make_weight("int4", 32, 48, 128, random), make_weight("int4", 32, 16, 128, random)]
    parts += [make_weight("int4", 64, 8, 128, random), make_weight("fp16", 0, 8, 128, random)]
    parts += [make_weight("bf16", 0, 8, 128, random), make_weight("int4", 32, 8, 128, random)]
    packed = LinearKernels(CPU, A100, torch.float16).prepare(Linear(tuple(parts)))
    assert [part.num_outputs for part in packed.parts] == [64, 8, 16, 8]
    assert [type(part) for part in packed.parts] == [PackedInteger, PackedInteger, PackedDense, PackedInteger]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_triton_padding_rows_do_not_touch_live_ones(dtype: torch.dtype) -> None:
    """NaN and infinities in rows of a graph's bucket beyond the live ones stay there."""
    case = FORMS["int4-g128"]
    kernels = LinearKernels(CPU, A100, dtype)
    layer = make_linear(case)
    handle = kernels.prepare(layer)
    clean = make_rows(16, case.num_inputs, dtype)
    dirty = clean.clone()
    dirty[5:] = torch.nan
    dirty[9:] = torch.inf
    outs = []
    for x in (clean, dirty):
        out = torch.zeros(16, layer.num_outputs, dtype=dtype)
        with np.errstate(invalid="ignore"):  # 0 · infinity, in the rows that do not matter
            kernels.apply(16, x, handle, out, None)
        outs.append(out[:5])
    assert torch.equal(*outs)


@pytest.mark.parametrize("card", KNOWN_CARDS, ids=lambda card: card.name.replace(" ", "-"))
def test_triton_choices_of_the_table(card: Card) -> None:
    """Whatever a model's shape: a form of the table, no empty split, and a bucket's rows share the choice."""
    for bits, group in ((4, 128), (4, 32), (8, 64)):
        for outputs in (64, 1024, 4096, 6144, 28672, 152064):
            for chunks in (1, 3, 32, 112, 400):
                shape = MatrixShape(bits, group, outputs, chunks)
                for n in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 512, 1023, 1024, 8192):
                    form, splits = configs.choose(card, shape, n, Tuned())
                    assert form in configs.forms(card, bits, group)
                    length = -(-chunks // splits)
                    assert 1 <= splits <= configs.MAX_SPLITS
                    assert (splits - 1) * length < chunks <= splits * length
                    assert configs.choose(card, shape, configs.row_bucket(n), Tuned()) == (form, splits)
                    assert form.kind == "dequantize" or form.block_rows >= min(n, configs.MAX_NARROW_ROWS)


@pytest.mark.parametrize("card", KNOWN_CARDS, ids=lambda card: card.name.replace(" ", "-"))
def test_triton_splits_fill_the_card(card: Card) -> None:
    """A long matrix with few outputs is cut until most SMs have a part; a head, which fills any card, is not."""
    form, splits = configs.choose(card, MatrixShape(4, 128, 1024, 112), 1, Tuned())
    assert splits * 1024 // form.block_outputs >= card.num_sms // 2
    assert configs.choose(card, MatrixShape(4, 128, 152064, 32), 1, Tuned())[1] == 1


def test_triton_a_measurement_goes_before_the_model() -> None:
    shape = MatrixShape(4, 128, 4096, 32)
    choices = {"linear int4 group 128, small, 1 rows": fields_of(configs.VECTOR)}
    assert configs.choose(A100, shape, 1, Tuned(choices))[0] == configs.VECTOR
    assert configs.choose(A100, shape, 2, Tuned(choices))[0].kind == "tile"


def test_triton_16_bit_parts_are_rounded_to_the_activations() -> None:
    values = torch.tensor([[1.0001, 70000.0], [1e-9, -70000.0]])
    packed = LinearKernels(CPU, A100, torch.float16).prepare(Linear((FloatWeight(values),)))
    (part,) = packed.parts
    assert isinstance(part, PackedDense)
    assert part.values.dtype == torch.float16
    assert bool(part.values.isfinite().all())
