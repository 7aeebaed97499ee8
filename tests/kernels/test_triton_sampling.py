"""The Triton sampler beyond what every implementation has to do: its stated distance from float64, launches ahead,
buffers, integer arithmetic, logits put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from kvd_kernels.ops import Ragged, SamplingBatch, SamplingResult
from kvd_kernels.reference import sampling as reference
from kvd_kernels.reference.philox import uniform
from kvd_kernels.triton import sampling
from kvd_kernels.triton.device import HostDevice
from kvd_kernels.triton.sampling import DRAW_DISTANCE, Sampler
from kvd_kernels.triton.sampling_kernels import multiply, uniform_bits
from kvd_kernels.triton.sampling_params import Numbers, fill_numbers
from tests.kernels.builders import generator
from tests.kernels.cases import LOGPROBS
from tests.kernels.interpreter import quick_device_calls
from tests.kernels.test_sampling import Row, sampling_batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_device_calls():
        yield


def possible_tokens(logits: torch.Tensor, params: SamplingBatch, row: int) -> set[int]:
    """The tokens that float64 draws with the uniform number, and with every number and truncation within the stated
    distance of it: one token nearly always.
    """
    values = reference.adjust(logits[row].numpy(), params, row)
    temperature = float(params.temperature[row])
    if temperature == 0.0:
        if not params.has_ragged:
            return {int(np.argmax(values))}
        # Rounding to float32 after each of three adjustments: three half units of the last place for each of two.
        distinct, first_ids = np.unique(values, return_index=True)
        return set(first_ids[distinct >= values.max() - 3 * np.spacing(np.float32(abs(values.max())))].tolist())
    order = np.argsort(-values, kind="stable")
    p = np.exp((values[order] - values.max()) / temperature)
    top_k = int(params.top_k[row])
    if top_k > 0:
        p = p[:top_k]
    cumulative = np.cumsum(p)
    number = uniform(int(params.seeds[row]), int(params.positions[row]))
    tokens = set()
    for top_p_error in (-DRAW_DISTANCE, 0.0, DRAW_DISTANCE):
        for min_p_error in (-DRAW_DISTANCE, 0.0, DRAW_DISTANCE):
            top_p, min_p = float(params.top_p[row]), float(params.min_p[row])
            stays = p >= min_p * (1 + min_p_error)
            if top_p < 1:
                stays &= cumulative - p < (top_p + top_p_error) * cumulative[-1]
            stays[0] = True
            mass = cumulative[stays][-1]
            for error in (-DRAW_DISTANCE, 0.0, DRAW_DISTANCE):
                place = int(np.searchsorted(cumulative, (number + error) * mass, side="right"))
                tokens.add(int(order[min(place, int(stays.sum()) - 1)]))
    return tokens


def check(logits: torch.Tensor, params: SamplingBatch, result: SamplingResult) -> None:
    """Every token is a possible one, and hardly any row has more than one."""
    num_open = 0
    for row, token_id in enumerate(result.token_ids):
        possible = possible_tokens(logits, params, row)
        num_open += len(possible) > 1
        assert token_id in possible, f"row {row}: {token_id} instead of {possible}"
    # Of n even candidates a number is that close to an edge with a chance of 2^-16 n: up to 4 % here.
    assert num_open <= max(2, len(result.token_ids) // 8)


def random_row(random_: random.Random, vocab: int) -> Row:
    row = Row(seed=random_.getrandbits(64) - (1 << 63), position=random_.randrange(1 << 20))
    row.temperature = random_.choice((0.0, 0.3, 0.8, 1.0, 1.0, 1.5, 4.0))
    row.top_k = random_.choice((0, 0, 1, 2, 40, 500, vocab, 2 * vocab))
    row.top_p = random_.choice((1.0, 1.0, 0.2, 0.9, 0.999))
    row.min_p = random_.choice((0.0, 0.0, 0.02, 0.3, 1.0))
    if random_.random() < 0.4:
        ids = random_.sample(range(vocab), 12)
        row.bias = {token: random_.uniform(-5, 5) for token in ids[:4]}
        row.prompt = dict.fromkeys(ids[2:8], 2)
        row.output = {token: random_.randrange(1, 5) for token in ids[5:10]}
        row.banned = ids[9:12]
        row.repetition = random_.choice((1.0, 1.3, 0.7))
        row.presence, row.frequency = random_.choice((0.0, 0.5)), random_.choice((0.0, -0.25))
    if random_.random() < 0.3:
        row.allowed = sorted({*random_.sample(range(vocab), max(4, vocab // random_.choice((2, 20)))), 0, 1, 2, 3, 4})
        row.banned = None
    return row


def mixed_case(seed: int, num_rows: int, vocab: int) -> tuple[torch.Tensor, SamplingBatch]:
    random_ = random.Random(seed)
    widths = torch.tensor([random_.choice((0.3, 1.0, 3.0, 6.0)) for _ in range(num_rows)])
    logits = torch.randn(num_rows, vocab, generator=generator(seed)) * widths[:, None]
    logits[::3] = (logits[::3] * 2).round() / 2  # many ties
    return logits, sampling_batch([random_row(random_, vocab) for _ in range(num_rows)], num_rows + 1, vocab)


@pytest.mark.parametrize(("seed", "num_rows", "vocab"), [(0, 40, 700), (1, 12, 4500), (2, 12, 37)])
def test_tokens_are_those_of_float64(seed: int, num_rows: int, vocab: int) -> None:
    logits, params = mixed_case(seed, num_rows, vocab)
    check(logits, params, Sampler(CPU).launch(logits, params).result())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 120))
def test_thousands_of_tokens_are_those_of_float64(seed: int) -> None:
    logits, params = mixed_case(seed, 120, (300, 2048, 3000, 17)[seed % 4])
    check(logits, params, Sampler(CPU).launch(logits, params).result())


@pytest.mark.full
@pytest.mark.parametrize("width", [0.2, 2.0])
def test_a_large_vocabulary(width: float) -> None:
    """24 tiles; the flat one has more candidates than are listed."""
    logits = torch.randn(3, 49_152, generator=generator(3)) * width
    params = sampling_batch([Row(seed=1), Row(seed=2, top_p=0.95), Row(seed=3, top_k=30_000, min_p=0.01)], 3)
    check(logits, params, Sampler(CPU).launch(logits, params).result())


def test_rows_with_more_candidates_than_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CAPACITY", 16)
    logits, params = mixed_case(4, 16, 2500)
    check(logits, params, Sampler(CPU).launch(logits, params).result())


def test_the_check_notices_a_neighbour_and_a_shifted_number() -> None:
    logits, params = mixed_case(5, 24, 300)
    right = reference.sample(logits, params)
    check(logits, params, right)
    order = [torch.argsort(-torch.from_numpy(reference.adjust(logits[row].numpy(), params, row))) for row in range(24)]
    for row in (row for row in range(24) if params.temperature[row] > 0):
        place = int((order[row] == right.token_ids[row]).nonzero())
        wrong = [*right.token_ids]
        wrong[row] = int(order[row][place + 1])
        with pytest.raises(AssertionError, match="instead of"):
            check(logits, params, SamplingResult(wrong, right.logprobs))
    shifted = mixed_case(5, 24, 300)[1]
    shifted.positions += 1
    with pytest.raises(AssertionError, match="instead of"):
        check(logits, params, Sampler(CPU).launch(logits, shifted).result())


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, high, low):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    product = multiply(tl.load(a + index).to(tl.uint64), tl.load(b + index).to(tl.uint64))
    tl.store(high + index, product[0].to(tl.int64))
    tl.store(low + index, product[1].to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(seeds, positions, out):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    tl.store(out + index, uniform_bits(tl.load(seeds + index), tl.load(positions + index)).to(tl.int64))


def _unsigned(values: torch.Tensor) -> list[int]:
    return [value & (1 << 64) - 1 for value in values.tolist()]


def test_products_of_64_bits_are_exact() -> None:
    random_ = random.Random(0)
    edges = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    a = [*edges, *(random_.getrandbits(64) for _ in range(20))]
    b = [*reversed(edges), *(random_.getrandbits(64) for _ in range(20))]
    a, b = [*a, *edges], [*b, *edges]
    signed = [torch.tensor([x - (1 << 64) if x >> 63 else x for x in side]) for side in (a, b)]
    high, low = torch.zeros(len(a), dtype=torch.int64), torch.zeros(len(a), dtype=torch.int64)
    _multiply[(len(a),)](*signed, high, low)
    assert _unsigned(high) == [x * y >> 64 for x, y in zip(a, b, strict=True)]
    assert _unsigned(low) == [x * y & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]


def test_uniform_numbers_are_those_of_the_reference() -> None:
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    cases = [(seed, position) for seed in seeds for position in (0, 1, 2**31, 262_143, 2**33)]
    out = torch.zeros(len(cases), dtype=torch.int64)
    columns = [torch.tensor(column) for column in zip(*cases, strict=True)]
    _uniform[(len(cases),)](*columns, out)
    assert [bits / 2.0**64 for bits in _unsigned(out)] == [uniform(*case) for case in cases]


def test_the_next_step_may_be_launched_before_the_result_of_one() -> None:
    logits, params = mixed_case(6, 5, 300)
    other_logits, other = mixed_case(7, 5, 300)
    expected = reference.sample(logits, params), reference.sample(other_logits, other)
    sampler = Sampler(CPU)
    first = sampler.launch(logits, params)
    for name in ("temperature", "top_p", "seeds", "positions", "top_k", "min_p", "repetition"):
        getattr(params, name).copy_(getattr(other, name))  # the same buffers, filled anew
    for name in ("bias", "banned", "masks", "prompt_counts", "output_counts"):
        setattr(params, name, getattr(other, name))
    params.has_ragged, params.presence, params.frequency = other.has_ragged, other.presence, other.frequency
    second = sampler.launch(other_logits, params)
    assert first.token_ids.tolist() == expected[0].token_ids
    assert second.token_ids.tolist() == expected[1].token_ids
    assert second.result().token_ids == expected[1].token_ids
    assert first.result().token_ids == expected[0].token_ids
    assert first.result() is first.result()


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_logprobs", "num_rows"]
)
def test_numbers_follow_every_change(name: str) -> None:
    """They are kept from step to step; what was kept must never stand for something else."""
    params = sampling_batch([Row(seed=row, top_p=0.9, min_p=0.1, position=7) for row in range(4)], 4)
    numbers = Numbers()
    numbers.fill(params, np.zeros((4, 8), np.int64))
    if name == "num_rows":
        params.num_rows = 2
    else:
        getattr(params, name)[2] *= 3
        getattr(params, name)[2] += 1
    expected, kept = (np.zeros((params.num_rows, 8), np.int64) for _ in range(2))
    fill_numbers(params, expected)
    numbers.fill(params, kept)
    assert np.array_equal(kept, expected)


class CountingDevice(HostDevice):
    """Counts what is allocated, and remembers the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.num_allocations = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_allocations += 1
        return super().zeros(shape, dtype)

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        self.num_allocations += 1
        return super().pinned_bytes(num_bytes)


def test_after_the_warm_up_nothing_is_allocated() -> None:
    device = CountingDevice()
    sampler = Sampler(CPU, device)
    sampler.warm_up(torch.zeros(6, 60), 6)
    before = device.num_allocations
    assert before > 0
    for seed, num_rows in ((0, 6), (1, 1), (2, 5)):
        logits, params = mixed_case(seed, num_rows, 60)
        params.num_logprobs[:num_rows] = params.max_logprobs = seed * 8
        pending = [sampler.launch(logits, params), sampler.launch(logits, params)]
        assert pending[0].result() == pending[1].result()
    assert device.num_allocations == before


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        ([Row(temperature=0.0), Row(temperature=0.0)], ["find_peaks", "choose_greedy"]),
        ([Row(temperature=0.0), Row()], ["find_peaks", "measure", "collect", "choose"]),
        ([Row(temperature=0.0, repetition=1.5, output={1: 1})], ["adjust", "find_peaks", "choose_greedy", "restore"]),
        ([Row(temperature=0.0, output={1: 1}, prompt={2: 1})], ["find_peaks", "choose_greedy"]),  # no penalty uses them
        ([Row(temperature=0.0, num_logprobs=0)], ["find_peaks", "choose_greedy", "best_of_tiles", "merge_best"]),
    ],
)
def test_a_step_launches_what_it_needs(rows: list[Row], kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    call = sampling._call

    def note(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        call(kernel, *arguments, **constants)

    monkeypatch.setattr(sampling, "_call", note)
    logits = torch.tensor([[1.0, 3.0, 2.0]] * len(rows))
    Sampler(CPU).launch(logits, sampling_batch(rows, len(rows))).result()
    assert launched == kernels


def test_logprobs_over_several_tiles_and_ties() -> None:
    logits = torch.randn(4, 5000, generator=generator(8)) * 3
    logits[1] = logits[1].round()
    logits[2, [4000, 7, 2500]] = 30.0
    logits[3] = 2.5
    params = sampling_batch([Row(seed=row, num_logprobs=wanted) for row, wanted in enumerate((20, 20, 5, 3))], 4)
    result, expected = Sampler(CPU).launch(logits, params).result(), reference.sample(logits, params)
    assert result.token_ids == expected.token_ids
    limit = LOGPROBS["triton-fp16"].absolute
    for got, wanted in zip(result.logprobs, expected.logprobs, strict=True):
        assert got is not None
        assert wanted is not None
        assert [token for token, _ in got[1]] == [token for token, _ in wanted[1]]
        assert got[0] == pytest.approx(wanted[0], abs=limit)
        assert [value for _, value in got[1]] == pytest.approx([value for _, value in wanted[1]], abs=limit)
    assert result.logprobs[2] is not None
    assert [token for token, _ in result.logprobs[2][1][:3]] == [7, 2500, 4000]


def test_more_logprobs_than_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (only,) = Sampler(CPU).launch(logits, sampling_batch([Row(temperature=0.0, num_logprobs=7)], 1)).result().logprobs
    assert only is not None
    assert [token for token, _ in only[1]] == [1, 2, 0]


def _ids(*ids: int) -> Ragged:
    return torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64)


def test_adjusted_logits_are_put_back_to_the_bit() -> None:
    """Also where a token is in every list, where the row is not finite, and a negative zero."""
    logits = torch.randn(3, 1200, generator=generator(9))
    logits[0, 5] = -0.0
    logits[1, 5] = float("nan")
    logits[2, 900] = float("-inf")
    before: npt.NDArray[np.int32] = logits.numpy().view(np.int32).copy()
    row = {
        "repetition": 1.5,
        "presence": 1.0,
        "bias": {5: 1.0, 900: -2.0},
        "banned": [5, 900, 1199],
        "temperature": 0.0,
    }
    params = sampling_batch([Row(**row, output={5: 2, 900: 1}, prompt={5: 1}) for _ in range(3)], 3)  # type: ignore[arg-type]
    params.prompt_counts[0] = _ids(*range(1100))  # more than one block
    result = Sampler(CPU).launch(logits, params).result()
    assert np.array_equal(logits.numpy().view(np.int32), before)
    assert result.token_ids[1:] == [None, None]
    assert result.token_ids[0] in possible_tokens(logits, params, 0)


def test_a_bias_given_twice_counts_twice() -> None:
    params = sampling_batch([Row(temperature=0.0)], 1)
    params.bias[0] = (torch.tensor([2, 0, 2]), torch.tensor([0.6, 0.1, 0.6]))
    params.has_ragged = True
    assert Sampler(CPU).launch(torch.tensor([[1.0, 0.0, 0.0]]), params).result().token_ids == [2]


def test_extreme_logits_and_temperatures() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -2e38, -3e38], [1e-25, 0.0, -1e-25], [2.0, 1.0, 0.0]])
    rows = [Row(top_p=0.9), Row(), Row(temperature=1e-30), Row(temperature=1e30, top_k=1, num_logprobs=1)]
    result = Sampler(CPU).launch(logits, sampling_batch(rows, 4)).result()
    assert result.token_ids == [0, 1, 0, 0]


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    logits = torch.zeros(1, sampling.MAX_VOCAB + 1)
    with pytest.raises(AssertionError, match="more than the kernels take"):
        Sampler(CPU).launch(logits, sampling_batch([Row()], 1))
