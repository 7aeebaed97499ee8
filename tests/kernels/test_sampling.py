"""Sampling: the generator's published vectors, order of operations, ties, truncation, and distributions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvd_kernels.ops import Ops, Ragged, SamplingBatch, SamplingResult
from kvd_kernels.reference.philox import philox_4x32, uniform
from kvd_kernels.reference.sampling import best
from tests.kernels.builders import generator
from tests.kernels.cases import LOGPROBS, tolerance
from tests.kernels.conftest import IMPLEMENTATIONS, make_ops
from tests.kernels.interpreter import quick_device_calls


@dataclass
class Row:
    """One row's parameters under the names of the request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    position: int = 0
    prompt: dict[int, int] | None = None
    output: dict[int, int] | None = None
    bias: dict[int, float] | None = None
    banned: list[int] | None = None
    allowed: list[int] | None = None
    num_logprobs: int = -1
    logits: list[float] = field(default_factory=list)


def _counts(values: dict[int, int] | dict[int, float] | None) -> Ragged | None:
    return None if values is None else (torch.tensor(list(values)), torch.tensor(list(values.values())))


def _mask(allowed: list[int] | None, vocab: int) -> torch.Tensor | None:
    if allowed is None:
        return None
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[allowed] = 1
    bits[vocab:] = 1  # what lies behind the vocabulary means nothing
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def sampling_batch(rows: list[Row], max_seqs: int, vocab: int = 0) -> SamplingBatch:
    """The rows at the front of a larger batch whose other rows hold what must not matter.

    vocab: where rows have masks.
    """
    batch = SamplingBatch.allocate(max_seqs)
    names = {"seeds": "seed", "positions": "position"}
    for name in (
        "temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "seeds", "positions",
        "num_logprobs",
    ):  # fmt: skip
        tensor = getattr(batch, name)
        tensor.fill_(99)
        tensor[: len(rows)] = torch.tensor([getattr(row, names.get(name, name)) for row in rows], dtype=tensor.dtype)
    for number, row in enumerate(rows):
        batch.prompt_counts[number] = _counts(row.prompt)
        batch.output_counts[number] = _counts(row.output)
        batch.bias[number] = _counts(row.bias)
        batch.banned[number] = None if row.banned is None else torch.tensor(row.banned)
        batch.masks[number] = _mask(row.allowed, vocab)
    batch.num_rows = len(rows)
    batch.max_logprobs = max((row.num_logprobs for row in rows), default=-1)
    ragged = (batch.prompt_counts, batch.output_counts, batch.bias, batch.banned, batch.masks)
    batch.has_ragged = any(entry is not None for column in ragged for entry in column)
    for column in ragged:
        column[len(rows) :] = [torch.tensor([0])] * (max_seqs - len(rows))  # type: ignore[list-item]
    return batch


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "triton-bf16"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Sampling knows no activations: bfloat16 would run the same Triton kernels again."""
    with quick_device_calls():
        yield make_ops(request.param)


def affordable(ops: Ops, draws: int, interpreted: int) -> int:
    """Draws of one test: fewer where an interpreter takes a tenth of a second for each."""
    return interpreted if ops.name == "triton" else draws


def positions_over_the_unit_interval(seed: int, num_parts: int) -> list[int]:
    """For each of these parts of it, the first position whose uniform number lies there."""
    found: dict[int, int] = {}
    for position in itertools.count():
        found.setdefault(int(uniform(seed, position) * num_parts), position)
        if len(found) == num_parts:
            return list(found.values())
    raise AssertionError


def run(ops: Ops, rows: list[Row], logits: torch.Tensor | None = None) -> SamplingResult:
    if logits is None:
        logits = torch.tensor([row.logits for row in rows])
    # Rows behind the live ones are not looked at.
    logits = torch.cat([logits, torch.full((1, logits.shape[1]), math.nan)]).contiguous()
    before = logits.clone()
    result = ops.sample(logits, sampling_batch(rows, len(rows) + 2, logits.shape[1]))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "sampling changed the logits"
    return result


def greedy(ops: Ops, logits: list[float], **parameters: object) -> int:
    return run(ops, [Row(temperature=0.0, logits=logits, **parameters)]).token_ids[0]  # type: ignore[arg-type]


def support(ops: Ops, logits: list[float], draws: int = 150, **parameters: object) -> set[int]:
    positions = list(range(draws)) if ops.name != "triton" else positions_over_the_unit_interval(1, 12)
    rows = [Row(logits=logits, seed=1, position=i, **parameters) for i in positions]  # type: ignore[arg-type]
    return set(run(ops, rows).token_ids)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    assert philox_4x32(counter, key) == expected


def test_uniform_numbers_fill_the_unit_interval_and_depend_on_every_bit() -> None:
    numbers = np.array([uniform(7, i) for i in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 5 * math.sqrt(1000)
    variants = {uniform(seed, 3) for seed in (0, 1, 2**31, 2**32, 2**62, -1, -(2**63))}
    assert len(variants) == 7
    assert len({uniform(0, position) for position in (0, 1, 2**31, 2**33)}) == 4


def test_greedy_takes_the_lowest_id_among_equals(ops: Ops) -> None:
    assert greedy(ops, [1.0, 3.0, 2.0, 3.0]) == 1
    assert greedy(ops, [0.0, -0.0, 0.0]) == 0
    logits = torch.zeros(1, 49_152)
    logits[0, [300, 40_000]] = 1
    assert run(ops, [Row(temperature=0.0)], logits).token_ids == [300]


def test_order_of_bias_penalties_and_ban(ops: Ops) -> None:
    logits = [2.0, 1.0, 0.0]
    assert greedy(ops, logits, bias={1: 1.5}) == 1
    assert greedy(ops, logits, banned=[0]) == 1
    assert greedy(ops, logits, bias={0: 100.0}, banned=[0, 1]) == 2
    # The repetition penalty divides what the bias has already raised: 1 + 3 = 4, 4 / 4 = 1 < 2.
    assert greedy(ops, logits, bias={1: 3.0}, output={1: 1}, repetition=4.0) == 0
    assert greedy(ops, logits, bias={1: 3.0}) == 1


def test_penalties_count_as_documented(ops: Ops) -> None:
    assert greedy(ops, [2.0, 1.9], presence=0.2, output={0: 5}) == 1
    assert greedy(ops, [2.0, 1.9], presence=0.05, output={0: 5}) == 0  # once, however often the token came
    assert greedy(ops, [2.0, 1.9], frequency=0.05, output={0: 5}) == 1
    assert greedy(ops, [2.0, 1.9], frequency=0.05, output={0: 1}) == 0
    assert greedy(ops, [2.0, 1.9], presence=1.0, frequency=1.0, prompt={0: 5}) == 0  # prompts do not count
    assert greedy(ops, [2.0, 1.9], repetition=1.2, prompt={0: 1}) == 1  # here they do
    assert greedy(ops, [-1.0, -1.1], repetition=1.2, output={0: 1}) == 1  # negative ones are multiplied
    assert greedy(ops, [2.0, 1.9, 1.8], repetition=1.2, prompt={0: 1, 1: 2}, output={0: 3}) == 2
    assert greedy(ops, [-2.0, -1.9], presence=-0.2, output={0: 1}) == 0


def test_truncations_keep_what_they_say(ops: Ops) -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert support(ops, logits) == {0, 1, 2, 3}
    assert support(ops, logits, top_k=2) == {0, 1}
    assert support(ops, logits, top_k=1) == {0}
    assert support(ops, logits, top_k=100) == {0, 1, 2, 3}
    assert support(ops, logits, top_p=0.69) == {0, 1}
    assert support(ops, logits, top_p=0.71) == {0, 1, 2}
    assert support(ops, logits, top_p=1e-6) == {0}
    assert support(ops, logits, min_p=0.6) == {0, 1}
    assert support(ops, logits, min_p=1.0) == {0}
    # top_p counts in what top_k left: 0.4 of 0.7 is 0.57.
    assert support(ops, logits, top_k=2, top_p=0.5) == {0}
    assert support(ops, logits, top_k=2, top_p=0.6) == {0, 1}
    # min_p is relative to the best after temperature: (0.3 / 0.4)² = 0.56.
    assert support(ops, logits, temperature=0.5, min_p=0.6) == {0}
    assert support(ops, logits, banned=[0, 2]) == {1, 3}


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids(ops: Ops) -> None:
    assert support(ops, [0.0, 1.0, 1.0, 1.0, 1.0], top_k=2) == {1, 2}
    assert best(np.array([1.0, 5.0, 5.0, 0.0, 5.0]), 3).tolist() == [1, 2, 4]


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}])
def test_frequencies_follow_the_distribution(ops: Ops, parameters: dict[str, float]) -> None:
    logits = np.log([0.35, 0.05, 0.3, 0.2, 0.1])
    draws = affordable(ops, 1500, 24)
    ids = run(ops, [Row(logits=logits.tolist(), seed=5, position=i, **parameters) for i in range(draws)]).token_ids  # type: ignore[arg-type]
    p = np.exp(logits / parameters.get("temperature", 1.0))
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.ones(5, bool)
    if "top_k" in parameters:
        keep[order[3:]] = False
    if "top_p" in parameters:
        keep[order] = np.cumsum(p[order]) - p[order] < 0.8
    if "min_p" in parameters:
        keep = p >= 0.3 * p.max()
    p = np.where(keep, p, 0) / p[keep].sum()
    seen = np.bincount(ids, minlength=5)
    assert (seen[p == 0] == 0).all()
    assert (np.abs(seen - draws * p) <= 5 * np.sqrt(draws * p * (1 - p)) + 1e-9).all()


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"top_k": 1000}, {"top_p": 0.99}, {"min_p": 1e-4}, {"temperature": 5.0}, {"top_p": 0.999, "min_p": 0.01},
        {"temperature": 1e-6}, {"temperature": 1e-6, "top_k": 1000}, {"temperature": 0.01, "top_k": 300},
    ],
)  # fmt: skip
def test_a_partial_sort_draws_what_a_full_sort_would(ops: Ops, parameters: dict[str, float]) -> None:
    """A large flat vocabulary with many ties, so that draws land far behind the first candidates."""
    logits = (torch.randn(1, 5000, generator=generator(0)) * 4).round() / 4
    rows = [Row(seed=9, position=i, **parameters) for i in range(affordable(ops, 100, 10))]  # type: ignore[arg-type]
    ids = run(ops, rows, logits.expand(len(rows), -1).contiguous()).token_ids
    scaled = logits[0].double().numpy() / float(np.float32(parameters.get("temperature", 1.0)))
    order = np.lexsort((np.arange(5000), -scaled))[: int(parameters.get("top_k", 5000))]
    p = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(p) - p
    keep = before < float(np.float32(parameters.get("top_p", 1.0))) * p.sum()
    keep &= p >= float(np.float32(parameters.get("min_p", 0.0)))
    order, cumulative = order[keep], np.cumsum(p[keep])
    for i, token_id in enumerate(ids):
        position = int(np.searchsorted(cumulative, uniform(9, i) * cumulative[-1], side="right"))
        assert token_id == order[min(position, len(order) - 1)]


def test_a_row_does_not_depend_on_its_company(ops: Ops) -> None:
    logits = torch.randn(20, 3000, generator=generator(0)) * 3
    rows = [Row(seed=i, position=2 * i, top_p=0.9, temperature=0.7 + 0.02 * i, num_logprobs=3) for i in range(20)]
    together = run(ops, rows, logits)
    for i in (0, 7, 19):
        alone = run(ops, [rows[i]], logits[i : i + 1])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs == [together.logprobs[i]]
    assert len({tuple(run(ops, [Row(seed=s)] * 3, logits[:3]).token_ids) for s in range(5)}) > 1


def test_logprobs_are_of_the_raw_distribution(ops: Ops) -> None:
    logits = torch.randn(3, 500, generator=generator(0)) * 3
    rows = [
        Row(temperature=0.0, bias={7: 100.0}, num_logprobs=4),
        Row(temperature=0.3, top_k=5, num_logprobs=0),
        Row(num_logprobs=-1),
    ]
    result = run(ops, rows, logits)
    expected = torch.log_softmax(logits.double(), dim=1)
    first, second, third = result.logprobs
    assert first is not None
    assert second is not None
    assert third is None
    assert result.token_ids[0] == 7
    limit = tolerance(LOGPROBS, ops).absolute
    assert first[0] == pytest.approx(float(expected[0, 7]), abs=limit)
    best_values, best_ids = expected[0].topk(4)
    assert [token_id for token_id, _ in first[1]] == best_ids.tolist()
    assert [value for _, value in first[1]] == pytest.approx(best_values.tolist(), abs=limit)
    assert second == (pytest.approx(float(expected[1, result.token_ids[1]]), abs=limit), [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(ops: Ops, value: float) -> None:
    rows = [Row(logits=[1.0, 2.0]), Row(logits=[1.0, value]), Row(logits=[3.0, 2.0])]
    assert run(ops, rows).token_ids == [1, None, 0]


def test_no_rows(ops: Ops) -> None:
    assert run(ops, [], torch.zeros(0, 10)).token_ids == []


def test_a_mask_leaves_out_what_it_does_not_allow(ops: Ops) -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert greedy(ops, logits, allowed=[1, 3]) == 1
    assert greedy(ops, logits, allowed=[3]) == 3
    assert greedy(ops, logits, allowed=[2, 3], bias={0: 100.0}) == 2
    assert greedy(ops, logits, allowed=[2, 3], bias={3: 5.0}) == 3
    assert greedy(ops, logits, allowed=[0, 2], banned=[0]) == 2
    assert greedy(ops, logits, allowed=[0, 1], output={0: 3}, presence=1.0) == 1
    assert support(ops, logits, allowed=[1, 2, 3]) == {1, 2, 3}
    assert support(ops, logits, allowed=[3]) == {3}
    # Truncations count among what is left.
    assert support(ops, logits, allowed=[1, 2, 3], top_k=2) == {1, 2}
    assert support(ops, logits, allowed=[2, 3], top_k=2) == {2, 3}
    assert support(ops, logits, allowed=[2, 3], top_k=3) == {2, 3}
    assert support(ops, logits, allowed=[1, 2, 3], top_p=0.49) == {1}
    assert support(ops, logits, allowed=[1, 2, 3], top_p=0.6) == {1, 2}
    assert support(ops, logits, allowed=[2, 3], min_p=0.6) == {2}


@pytest.mark.parametrize(
    ("vocab", "parameters"),
    [
        (31, {"temperature": 0.0}), (64, {}), (65, {"top_k": 40}), (2500, {"temperature": 0.0}), (2500, {}),
        (2500, {"top_k": 40}), (2500, {"top_p": 0.9}), (65, {"min_p": 0.02}), (65, {"temperature": 0.01}),
    ],
)  # fmt: skip
def test_masked_tokens_are_those_of_a_shorter_vocabulary(ops: Ops, vocab: int, parameters: dict[str, float]) -> None:
    """One word and many, whole words of either kind, and neighbours without a mask."""
    random_ = random.Random(vocab)
    logits = torch.randn(4, vocab, generator=generator(vocab)) * 2
    sets = [
        sorted(random_.sample(range(vocab), vocab // 3)),
        list(range(vocab // 2)),
        [vocab - 1],
    ]
    rows = [Row(seed=row, position=7, allowed=allowed, **parameters) for row, allowed in enumerate(sets)]  # type: ignore[arg-type]
    rows.append(Row(seed=3, position=7, **parameters))  # type: ignore[arg-type]
    token_ids = run(ops, rows, logits).token_ids
    for row, allowed in enumerate([*sets, list(range(vocab))]):
        short = Row(seed=row, position=7, **parameters)  # type: ignore[arg-type]
        (place,) = run(ops, [short], logits[row : row + 1, allowed]).token_ids
        assert place is not None
        assert token_ids[row] == allowed[place]


def test_logprobs_do_not_know_of_a_mask(ops: Ops) -> None:
    logits = torch.randn(1, 100, generator=generator(1)) * 3
    (free,) = run(ops, [Row(temperature=0.0, num_logprobs=3)], logits).logprobs
    result = run(ops, [Row(temperature=0.0, num_logprobs=3, allowed=[7])], logits)
    assert result.token_ids == [7]
    (masked,) = result.logprobs
    assert masked is not None
    assert free is not None
    assert masked[1] == free[1]
    expected = float(torch.log_softmax(logits.double(), dim=1)[0, 7])
    assert masked[0] == pytest.approx(expected, abs=tolerance(LOGPROBS, ops).absolute)


def test_a_row_that_is_not_finite_where_its_mask_does_not_look_has_no_token(ops: Ops) -> None:
    assert run(ops, [Row(logits=[1.0, math.nan, 2.0], allowed=[0])]).token_ids == [None]
