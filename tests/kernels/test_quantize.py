"""Rounding to integers, fixed point, and the 8-bit floats against torch's own types."""

from __future__ import annotations

import pytest
import torch

from kvd_kernels.reference.quantize import MINI_FLOATS, exact_bits, fixed_point, quantize_kv, round_to_levels
from tests.kernels.builders import generator
from tests.kernels.compare import assert_same_bytes

TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", TYPES)
def test_every_code_decodes_as_the_type_says(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.view(TYPES[name]).float()
    decoded = MINI_FLOATS[name].decode(codes)
    assert torch.equal(decoded.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert_same_bytes(decoded[number], expected[number])


@pytest.mark.parametrize("name", TYPES)
def test_encoding_rounds_to_the_nearest_even_code(name: str) -> None:
    """All finite codes, the points half way between neighbours and just beside them, and random numbers."""
    form = MINI_FLOATS[name]
    finite = form.decode(torch.arange(128, dtype=torch.int32).to(torch.uint8))
    finite = finite[finite.isfinite()]
    middle = (finite[1:] + finite[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    random = torch.randn(20_000, generator=generator(0)) * torch.exp(torch.randn(20_000, generator=generator(1)) * 4)
    x = torch.cat((finite, middle, torch.nextafter(middle, up), torch.nextafter(middle, down), random))
    x = torch.cat((x, -x)).clamp(-form.largest, form.largest)
    assert_same_bytes(form.encode(x), x.to(TYPES[name]).view(torch.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_encoding_saturates_and_keeps_nan(name: str) -> None:
    form = MINI_FLOATS[name]
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, 0.0, -0.0, 1e-20])
    assert form.decode(form.encode(x)).tolist() == [form.largest, -form.largest] * 2 + [0.0, -0.0, 0.0]
    assert bool(form.decode(form.encode(torch.tensor([torch.nan]))).isnan())


@pytest.mark.parametrize("num_terms", [1, 2, 33, 64, 256, 576, 8192, 29568])
def test_fixed_point_dot_products_are_exact_in_float64(num_terms: int) -> None:
    """All codes at their largest, so that one more bit anywhere would round."""
    first, second = exact_bits(num_terms)
    assert num_terms * 2 ** (first + second) <= 2**53
    codes, scales = fixed_point(torch.full((1, num_terms), 2.0), first)
    assert int(codes.max()) <= 2**first
    assert float(codes[0, 0] * scales[0]) == 2.0


@pytest.mark.parametrize("bits", [1, 10, 22])
@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-30, 1.0, 65504.0, 3e38])
def test_fixed_point_error_is_bounded(bits: int, magnitude: float) -> None:
    x = torch.randn(50, 64, generator=generator(0)).clamp(-1, 1) * magnitude
    codes, scales = fixed_point(x, bits)
    assert bool((codes.abs() <= 2**bits).all())
    assert torch.equal(codes, codes.round())
    error = (codes.double() * scales.double()[:, None] - x.double()).abs()
    assert bool((error <= x.double().abs().amax(1, keepdim=True) * 2.0**-bits + 2.0**-126).all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-30, 1.0, 1e30])
def test_levels_hold_at_every_magnitude(magnitude: float) -> None:
    x = torch.randn(50, 64, generator=generator(0)) * magnitude
    codes, scales = round_to_levels(x, 127.0)
    assert bool((codes.abs() <= 127).all())
    assert bool((scales > 0).all())
    if magnitude >= 1e-30:
        assert bool(((codes * scales[:, None] - x).abs() <= scales[:, None] * 0.501).all())


def test_rows_of_kv_keep_their_scale_to_themselves() -> None:
    x = torch.randn(3, 64, generator=generator(0))
    x[1] = 0
    x[2] *= 1e6
    codes, scales = quantize_kv(x)
    assert scales.dtype == torch.float16
    assert codes[1].abs().max() == 0
    assert float(scales[1]) == 0
    alone, scale = quantize_kv(x[:1])
    assert_same_bytes(alone, codes[:1])
    assert_same_bytes(scale, scales[:1])
