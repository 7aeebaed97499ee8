"""Sampling parameters that are kept from step to step are those that would be written anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from kvd.core import Request, SamplingParams
from kvd.engine.grammar_masks import GrammarRun
from kvd.engine.sampling_rows import RequestSampling, SamplingRows, TokenCounts
from kvd_kernels.ops import Ragged, SamplingBatch

MAX_SEQS = 6
COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "seeds", "positions",
    "num_logprobs",
)  # fmt: skip


class HalfAllowed:
    """A grammar of 32 tokens, of which every other one may come first."""

    end_token_ids = frozenset((1,))
    first_mask = b"\xaa\xaa\xaa\xaa"
    error = None

    def start(self) -> HalfAllowed:
        return self

    def accept(self, token_id: int) -> None:
        raise AssertionError("nothing is sampled here")

    def mask(self) -> bytes:
        return self.first_mask


def random_sampling(chance: random.Random, number: int) -> RequestSampling:
    params = SamplingParams(
        max_tokens=50,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        top_k=chance.choice((0, 20)),
        top_p=chance.choice((0.9, 1.0)),
        min_p=chance.choice((0.0, 0.1)),
        presence_penalty=chance.choice((0.0, 0.0, 0.5)),
        frequency_penalty=chance.choice((0.0, 0.0, 0.25)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.25)),
        logit_bias=chance.choice(((), (), ((3, 2.0), (9, -1.0)))),
        min_tokens=chance.choice((0, 0, 5)),
        stop_token_ids=frozenset(chance.choice(((), (2, 7)))),
        num_logprobs=chance.choice((None, None, 0, 4)),
    )
    prompt = tuple(chance.randrange(30) for _ in range(10))
    request = Request(f"r{number}", prompt, params, 0.0, choice_index=number % 3)
    grammar = GrammarRun(request, HalfAllowed()) if chance.random() < 0.3 else None
    return RequestSampling(request, number, grammar)


def ragged_as_values(entry: Ragged | torch.Tensor | None) -> object:
    if entry is None or isinstance(entry, torch.Tensor):
        return None if entry is None else entry.tolist()
    return {
        token_id: (value, str(entry[1].dtype)) for token_id, value in zip(*map(torch.Tensor.tolist, entry), strict=True)
    }


def as_values(batch: SamplingBatch) -> object:
    rows = range(batch.num_rows)
    columns = [getattr(batch, name)[: batch.num_rows].tolist() for name in COLUMNS]
    lists = (batch.prompt_counts, batch.output_counts, batch.bias, batch.banned, batch.masks)
    ragged = [[ragged_as_values(column[row]) for row in rows] for column in lists]
    return columns, ragged, batch.num_rows, batch.max_logprobs, batch.has_ragged


@pytest.mark.parametrize("seed", range(30))
def test_rows_that_are_kept_equal_rows_that_are_written(seed: int) -> None:
    chance = random.Random(seed)
    kept = SamplingRows(MAX_SEQS)
    rows: list[RequestSampling] = []
    positions: dict[RequestSampling, int] = {}
    has_been_ragged = set()
    for number in range(120):
        if len(rows) < MAX_SEQS and chance.random() < 0.2:
            rows.insert(chance.randrange(len(rows) + 1), random_sampling(chance, number))
        if rows and chance.random() < 0.15:
            rows.pop(chance.randrange(len(rows)))
        if chance.random() < 0.1:
            chance.shuffle(rows)
        sampling = [one for one in rows if chance.random() < 0.95]
        for one in sampling:
            positions[one] = positions.get(one, 9) + 1
        wanted = [positions[one] for one in sampling]
        batch = kept.fill(list(sampling), wanted)
        has_been_ragged.add(batch.has_ragged)
        assert as_values(batch) == as_values(SamplingRows(MAX_SEQS).fill(list(sampling), wanted))
        columns = (batch.bias, batch.banned, batch.masks)
        assert all(entry is None for column in columns for entry in column[len(sampling) :])
        for one in sampling:
            if one.output_counts is not None:
                one.output_counts.add(chance.randrange(30))
    assert True in has_been_ragged


def test_the_same_requests_in_the_same_rows_cost_their_positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SamplingRows(MAX_SEQS)
    written = []
    write = SamplingRows._write
    monkeypatch.setattr(
        SamplingRows, "_write", lambda self, row, sampling: (written.append(row), write(self, row, sampling))
    )
    chance = random.Random(1)
    first, second, third = (random_sampling(chance, number) for number in range(3))
    rows.fill([first, second], [10, 20])
    rows.fill([first, second], [11, 21])
    assert written == [0, 1]
    rows.fill([first, second, third], [12, 22, 30])
    rows.fill([first, third], [13, 31])
    assert written == [0, 1, 2, 1]
    assert rows.batch.positions[:2].tolist() == [13, 31]


def test_bans_end_with_the_floor_under_the_length() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=frozenset({7, 2}))
    one = RequestSampling(Request("it", (1, 2, 3, 4), params, 0.0), seed=0)
    rows = SamplingRows(1)
    for position, is_banned in ((4, True), (6, True), (7, False), (8, False)):
        batch = rows.fill([one], [position])
        assert batch.has_ragged is is_banned
        assert ragged_as_values(batch.banned[0]) == ([2, 7] if is_banned else None)


def test_token_counts_grow_and_count() -> None:
    chance = random.Random(3)
    counts, expected = TokenCounts(), Counter[int]()
    assert counts.view() is None
    for _ in range(3000):
        token_id = int(chance.expovariate(0.004))
        counts.add(token_id)
        expected[token_id] += 1
        if chance.random() < 0.05:
            view = counts.view()
            assert view is not None
            assert dict(zip(*(tensor.tolist() for tensor in view), strict=True)) == expected
            assert all(tensor.is_contiguous() for tensor in view)
            assert view[0].dtype == view[1].dtype == torch.int64
    assert len(expected) > 500
