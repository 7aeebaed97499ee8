"""What fits: worked examples whose figures are known, and that more memory, or less asked for, never fits worse."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from kvd.cache.fitting import (
    Fit,
    device_room,
    fit,
    fits_by_concurrency,
    host_room,
    kv_dtypes_of,
    with_share,
)
from kvd.cache.lengths import Advice, advise, recommended_len, seen_lengths
from kvd.cache.sizing import GIB
from kvd.geometry import Choice, Geometry, ModelShape, Room
from kvd.histograms import BUCKET_BOUNDS, HistogramBuilder
from kvd.model.spec import kv_format_of
from kvd.views import Histogram

QWEN_7B = ModelShape(3584, 18944, 28, 4, 128, 152_064, 131_072, ((0, 28),))
LLAMA_7B = ModelShape(4096, 11008, 32, 32, 128, 32_000, 4096, ((0, 32),))
LLAMA3_8B = ModelShape(4096, 14336, 32, 8, 128, 128_256, 8192, ((0, 32),))
LLAMA31_70B = ModelShape(8192, 28672, 64, 8, 128, 128_256, 131_072, ((0, 80),))
CHOICE = Choice("int8", 0.3)
DTYPES = ("fp8_e4m3", "int8", "fp16")
KIB = 1024


def geometry(shape: ModelShape = QWEN_7B, *, free: float = 16 * GIB, weights: int = 4 * GIB) -> Geometry:
    room = host_room(int(free), 0, CHOICE.share)
    return Geometry(shape, room, weights, 4, 0, kv_dtypes_of("a8"), CHOICE)


def per_token(shape: ModelShape, dtype: str = "fp16") -> float:
    return kv_format_of(shape, dtype).bytes_per_token


# --------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(
    ("shape", "tokens", "num_bytes"),
    [
        (QWEN_7B, 1, 56 * KIB),
        (QWEN_7B, 8192, 469_762_048),
        (QWEN_7B, 32_768, 1.75 * GIB),
        (LLAMA_7B, 1, 512 * KIB),
        (LLAMA_7B, 8 * 4096, 16 * GIB),
        (LLAMA3_8B, 1, 128 * KIB),
        (LLAMA31_70B, 1, 320 * KIB),
        (LLAMA31_70B, 8192, 2.5 * GIB),
        (LLAMA31_70B, 32 * 8192, 80 * GIB),
        (LLAMA31_70B, 32_768, 10 * GIB),
    ],
)
def test_the_bytes_of_well_known_models_in_16_bits(shape: ModelShape, tokens: int, num_bytes: float) -> None:
    assert per_token(shape) * tokens == num_bytes


@pytest.mark.parametrize(
    ("shape", "tokens", "gib_16", "gib_8"),
    [(QWEN_7B, 32_768, 1.75, 0.89), (QWEN_7B, 15_360, 0.82, 0.42), (LLAMA3_8B, 15_360, 1.88, 0.95)],
)
def test_int8_takes_a_little_more_than_half(shape: ModelShape, tokens: int, gib_16: float, gib_8: float) -> None:
    assert per_token(shape, "fp16") * tokens / GIB == pytest.approx(gib_16, abs=0.005)
    assert per_token(shape, "int8") * tokens / GIB == pytest.approx(gib_8, abs=0.005)


@pytest.mark.parametrize("kv_gib", [64, 32])
def test_requests_of_2048_tokens_of_a_model_with_all_heads(kv_gib: int) -> None:
    """At 512 KiB per token one of them takes 1 GiB."""
    choice = replace(CHOICE, kv_cache_dtype="fp16", kv_cache_memory_bytes=kv_gib * GIB)
    found = fit(geometry(LLAMA_7B, free=200 * GIB), choice)
    assert found.requests(2048) == kv_gib
    assert found.requests(4096) == kv_gib // 2


# --------------------------------------------------------------------------- laws


def some_geometry(random_: random.Random) -> Geometry:
    kv_heads = random_.choice((1, 2, 4, 8))
    windows = random_.choice((((0, 12),), ((0, 6), (1024, 6)), ((4096, 12),)))
    shape = ModelShape(
        random_.choice((512, 2048, 4096)), random_.choice((1024, 8192)), kv_heads * random_.choice((1, 4)), kv_heads,
        random_.choice((64, 80, 128)), random_.choice((32_000, 152_064)),
        random_.choice((2048, 32_768, 131_072)), windows,
    )  # fmt: skip
    weights = random_.randrange(GIB // 4, 3 * GIB)
    found = geometry(shape, free=weights + random_.uniform(-0.1, 2) * GIB, weights=weights)
    if random_.random() < 0.5:
        total = int((weights + random_.uniform(0.5, 2.5) * GIB) / 0.9)
        found = replace(found, room=device_of(total), scratch_bytes=random_.randrange(GIB // 2))
        return replace(found, choice=replace(CHOICE, share=0.9))
    return replace(found, choice=replace(CHOICE, share=random_.choice((0.2, 0.9))))


def device_of(total_bytes: int, share: float = 0.9) -> Room:
    return device_room(total_bytes, total_bytes - GIB // 2, share, "gpu_memory_utilization")[0]


def test_the_scenarios_are_of_all_kinds() -> None:
    found = [some_geometry(random.Random(seed)) for seed in range(40)]
    fits = [fit(each, each.choice) for each in found]
    refused = sum(bool(each.refusal) for each in fits)
    cut = sum(0 < each.max_model_len < each.max_positions for each in fits)
    assert min(refused, cut, 40 - refused - cut) >= 4


SEEDS = pytest.mark.parametrize("seed", range(40))


@SEEDS
def test_a_longer_context_never_turns_refused_into_accepted(seed: int) -> None:
    random_ = random.Random(seed)
    found = some_geometry(random_)
    lengths = sorted(random_.sample(range(16, found.shape.max_positions + 4096), 60))
    accepted = [not fit(found, replace(found.choice, max_model_len=length)).refusal for length in lengths]
    assert accepted == sorted(accepted, reverse=True)
    largest = fit(found, found.choice).largest_len
    assert all(ok for ok, length in zip(accepted, lengths, strict=True) if length <= largest)


@SEEDS
def test_the_largest_length_that_is_named_is_accepted(seed: int) -> None:
    found = some_geometry(random.Random(seed))
    unasked = fit(found, found.choice)
    if unasked.refusal:
        assert unasked.num_blocks == unasked.largest_len == unasked.requests(16) == 0
        return
    again = fit(found, replace(found.choice, max_model_len=unasked.largest_len))
    assert not again.refusal
    assert again.max_model_len == unasked.largest_len == unasked.max_model_len


@SEEDS
def test_more_memory_never_fits_less(seed: int) -> None:
    random_ = random.Random(seed)
    found = some_geometry(random_)
    if found.room.setting != "cpu_memory_utilization":
        rooms = [device_of(int(total * GIB)) for total in sorted(random_.uniform(1, 40) for _ in range(30))]
    else:
        rooms = [host_room(int(free * GIB), 0, 0.3) for free in sorted(random_.uniform(0.2, 30) for _ in range(30))]
    fits = [fit(replace(found, room=room), replace(found.choice, share=0.3)) for room in rooms]
    for name in ("num_blocks", "kv_bytes", "largest_len", "max_model_len"):
        values = [getattr(each, name) for each in fits]
        assert values == sorted(values), name


@SEEDS
def test_a_larger_share_never_fits_less(seed: int) -> None:
    found = some_geometry(random.Random(seed))
    blocks = [fit(found, replace(found.choice, share=share / 20)).num_blocks for share in range(1, 21)]
    assert blocks == sorted(blocks)


@SEEDS
def test_smaller_elements_never_fit_less(seed: int) -> None:
    found = some_geometry(random.Random(seed))
    fits = [fit(found, replace(found.choice, kv_cache_dtype=dtype)) for dtype in DTYPES]
    blocks = [each.num_blocks for each in fits]
    assert blocks == sorted(blocks, reverse=True)
    assert fits[0].bytes_per_token < fits[1].bytes_per_token < fits[2].bytes_per_token


@SEEDS
def test_more_requests_or_longer_ones_never_fit_better(seed: int) -> None:
    found = some_geometry(random.Random(seed))
    counts, lengths = (1, 2, 4, 8, 16, 32, 64, 128), [2**power for power in range(6, 18)]
    rows = fits_by_concurrency(found, found.choice, counts)
    grid = [[each.requests(length) >= count for length in lengths] for each, count in zip(rows, counts, strict=True)]
    for row in grid:
        assert row == sorted(row, reverse=True)
    for column in zip(*grid, strict=True):
        assert list(column) == sorted(column, reverse=True)


def test_a_share_that_is_set_again_changes_nothing() -> None:
    for room in (host_room(8 * GIB, GIB, 0.3), device_of(24 * GIB), device_of(24 * GIB, 1.0)):
        share = 0.3 if room.setting == "cpu_memory_utilization" else 1.0 if "hold" in room.words else 0.9
        assert with_share(room, share) == room


def test_an_excess_is_refused_with_the_largest_that_fits() -> None:
    found = geometry(free=6 * GIB)
    largest = fit(found, CHOICE).largest_len
    assert 128 < largest < QWEN_7B.max_positions
    refusal = fit(found, replace(CHOICE, max_model_len=QWEN_7B.max_positions)).refusal
    # The tables of a longer context take a little of the room, so that the advice may be a block or two shorter.
    named = int(refusal.partition("--max-model-len ")[2].partition(";")[0])
    assert largest - 64 <= named <= largest
    assert "cpu_memory_utilization" in refusal


# --------------------------------------------------------------------------- windows


@pytest.mark.parametrize("dtype", ["int8", "fp16", "fp8_e5m2"])
def test_a_block_has_the_bytes_of_all_its_layers(dtype: str) -> None:
    shape = replace(QWEN_7B, head_dim=72, num_kv_heads=3, layer_windows=((0, 5), (4096, 7), (512, 2)))
    found = fit(geometry(shape), replace(CHOICE, kv_cache_dtype=dtype))
    kv_format = kv_format_of(shape, dtype)
    assert found.block_bytes == kv_format.block_bytes
    assert found.bytes_per_token == kv_format.bytes_per_token


def test_where_every_layer_has_a_window_a_long_request_holds_no_more_than_that() -> None:
    windowed = replace(QWEN_7B, layer_windows=((4096, 28),))
    choice = replace(CHOICE, max_num_batched_tokens=256)
    all_windowed, half = (
        fit(geometry(shape), choice) for shape in (windowed, replace(QWEN_7B, layer_windows=((0, 14), (4096, 14))))
    )
    assert all_windowed.most_tokens == 4096 + 256 + 16
    assert all_windowed.requests(32_768) == all_windowed.requests(16_384) == all_windowed.num_blocks // 273
    assert half.most_tokens == 0
    assert half.requests(32_768) == half.num_blocks // 2048
    assert all_windowed.bytes_per_token == half.bytes_per_token


# --------------------------------------------------------------------------- what to choose


def histograms(prompts: list[int], answers: list[int]) -> dict[str, Histogram]:
    made = {}
    for name, values in (("request_prompt_tokens", prompts), ("request_generation_tokens", answers)):
        builder = HistogramBuilder(BUCKET_BOUNDS[name])
        for value in values:
            builder.observe(value)
        made[name] = builder.freeze()
    return made


def test_seen_lengths_lie_in_the_buckets_of_the_true_percentiles() -> None:
    random_ = random.Random(7)
    prompts = [round(random_.lognormvariate(7, 0.7)) for _ in range(1000)]
    answers = [random_.randrange(1, 400) for _ in range(1000)]
    seen = seen_lengths(histograms(prompts, answers))
    assert seen is not None
    assert seen.num_requests == 1000
    for percentiles, values in ((seen.prompt, sorted(prompts)), (seen.answer, sorted(answers))):
        for found, fraction in ((percentiles.p50, 0.5), (percentiles.p90, 0.9), (percentiles.p99, 0.99)):
            true = values[math.ceil(fraction * len(values)) - 1]
            bounds = (0.0, *BUCKET_BOUNDS["request_prompt_tokens"])
            index = next(i for i, bound in enumerate(bounds) if bound >= true)
            assert bounds[index - 1] <= found <= bounds[index]
        assert percentiles.p50 <= percentiles.p90 <= percentiles.p99
    assert seen.total("p99") == seen.prompt.p99 + seen.answer.p99


def test_nothing_is_known_before_the_first_request_has_ended() -> None:
    assert seen_lengths({}) is None
    assert seen_lengths(histograms([10], [])) is None


def test_a_length_beyond_the_last_bucket_is_a_lower_bound() -> None:
    seen = seen_lengths(histograms([10**7], [10]))
    assert seen is not None
    assert seen.prompt.is_at_least
    assert seen.prompt.p99 == 500_000
    assert not seen.answer.is_at_least


@pytest.mark.parametrize(
    ("expected", "positions", "recommended"),
    [(1000, 8192, 1200), (1001, 8192, 1216), (10, 8192, 16), (8000, 8192, 8192), (1, 4, 4)],
)
def test_a_fifth_more_in_whole_blocks(expected: int, positions: int, recommended: int) -> None:
    assert recommended_len(expected, positions) == recommended


def test_as_many_requests_as_the_cache_holds() -> None:
    found = geometry(free=6 * GIB)
    fitted = fit(found, CHOICE)
    assert advise(found, fitted, None) == Advice(None, fitted.requests(2048), 2048)
    assert 1 < fitted.requests(2048) < 32
    assert advise(found, fitted, None, 100) == Advice(128, 32, 100)  # a CPU is busy with so many
    on_card = replace(found, room=device_of(24 * GIB))
    assert advise(on_card, fit(on_card, replace(CHOICE, share=0.9)), None, 100).max_num_seqs == 256
    assert advise(found, fitted, None, 10**9) == Advice(None, 1, 10**9)  # no length will do
    assert advise(found, replace(fitted, num_blocks=0), None).max_num_seqs == 1
    seen = seen_lengths(histograms([1000] * 100, [100] * 100))
    assert seen is not None
    assert advise(found, fitted, seen) == Advice(
        recommended_len(seen.total("p99"), QWEN_7B.max_positions),
        min(32, fitted.requests(seen.total("p90"))),
        seen.total("p90"),
    )


# --------------------------------------------------------------------------- what it is made of


def test_a_geometry_survives_json() -> None:
    found = geometry(replace(QWEN_7B, layer_windows=((0, 14), (4096, 14))))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Geometry) == found
    assert found.shape.windows.count(4096) == 14
    assert found.shape.num_layers == 28


def test_no_numeric_package_is_needed() -> None:
    code = "import kvd.cache.fitting, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_fit_never_raises_for_a_choice_that_is_possible() -> None:
    for share in (0.0001, 1.0):
        for tokens in (16, 2**20):
            found = fit(geometry(free=0.1 * GIB), replace(CHOICE, share=share, max_num_batched_tokens=tokens))
            assert isinstance(found, Fit)
            assert found.refusal
