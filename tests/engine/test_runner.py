"""Sampling through runner and scheduler, with a decoder whose logits depend on token and position only."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvd.core import Request, SamplingParams, TokenEvent
from kvd_kernels.kv_format import LayerFormat, build_kv_format
from kvd_kernels.ops import Batch, KVCache
from kvd_kernels.registry import create_ops
from tests.engine.harness import Harness, tokens_of

VOCAB_SIZE = 40
STOP = 3
PROMPT = (11, 5, 8, 5, 11, 22, 5, 9, 30, 31)


class ToyDecoder:
    """What a Runner needs of a Decoder; has no weights and touches no cache."""

    def __init__(self) -> None:
        self.ops = create_ops("reference")
        self.kv_format = build_kv_format([(0, LayerFormat(1, 4, "int8", "int8"))])
        self.max_tokens = 64
        self.max_seqs = 4
        self.table = torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(1)) * 2
        self.table[:, STOP] += 8  # nearly always the best where it is not banned
        self.drift = torch.randn((512, VOCAB_SIZE), generator=torch.Generator().manual_seed(2))
        self.logits = torch.zeros((self.max_seqs, VOCAB_SIZE))

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        rows = batch.logit_rows[: batch.num_logit_rows]
        self.logits[: len(rows)] = self.table[batch.token_ids[rows]] + self.drift[batch.positions[rows].long()]
        return self.logits


def make_harness(**options: Any) -> Harness:
    """Admits whoever fits now, so that a small pool means preemptions."""
    options = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0, "chunk": 64} | options
    return Harness(ToyDecoder(), max_seqs=4, max_model_len=256, **options)  # type: ignore[arg-type]


SAMPLINGS = {
    "greedy": SamplingParams(60, temperature=0.0),
    "seeded": SamplingParams(60, temperature=1.0, seed=5, top_p=0.9, top_k=20, min_p=0.01),
    "seedless": SamplingParams(60, temperature=1.0),
    "penalties": SamplingParams(
        60, temperature=0.8, seed=1, presence_penalty=0.4, frequency_penalty=0.7, repetition_penalty=1.3
    ),
    "bias and logprobs": SamplingParams(60, temperature=1.0, seed=2, logit_bias=((7, 4.0),), num_logprobs=3),
    "min tokens": SamplingParams(60, temperature=0.0, min_tokens=40, stop_token_ids=frozenset({STOP})),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_preempted_request_samples_what_it_would_have_sampled(name: str) -> None:
    """Seeds, penalties over earlier output, and the floor under the length survive recomputation."""
    it = Request("it", PROMPT, SAMPLINGS[name], arrival_time=0.0)
    expected = make_harness().run([it])["it"]
    elder = Request("elder", tuple(range(20, 40)), SamplingParams(90, temperature=0.0), arrival_time=0.0)
    harness = make_harness(num_blocks=7, prefix_caching=False)
    got = harness.run([elder, it])["it"]
    assert any(times > 1 for (owner, _), times in harness.recorder.computed_times.items() if owner == "it")
    assert [(event.token_id, event.logprobs) for event in got] == [
        (event.token_id, event.logprobs) for event in expected
    ]
    assert got[-1].finish_reason == expected[-1].finish_reason


def test_a_penalty_sees_every_earlier_output_token_also_after_a_preemption() -> None:
    sampling = SamplingParams(VOCAB_SIZE - 1, temperature=0.0, presence_penalty=1000.0)
    elder = Request("elder", tuple(range(20, 40)), SamplingParams(90, temperature=0.0), arrival_time=0.0)
    harness = make_harness(num_blocks=7, prefix_caching=False)
    tokens = tokens_of(harness.run([elder, Request("it", PROMPT * 3, sampling, 0.0)])["it"])
    assert harness.scheduler.counters().num_preemptions
    assert len(set(tokens)) == len(tokens) == VOCAB_SIZE - 1


def test_min_tokens_holds_and_then_lets_go() -> None:
    sampling = SAMPLINGS["min tokens"]
    tokens = tokens_of(make_harness().run([Request("it", PROMPT, sampling, 0.0)])["it"])
    assert tokens[-1] == STOP
    assert len(tokens) == sampling.min_tokens + 1, "the stop token comes as soon as it may"
    free = dataclasses.replace(sampling, min_tokens=0)
    assert len(tokens_of(make_harness().run([Request("it", PROMPT, free, 0.0)])["it"])) < sampling.min_tokens


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampling = SAMPLINGS["bias and logprobs"]
    harness = make_harness()
    events = harness.run([Request("it", PROMPT, sampling, 0.0)])["it"]
    rows = harness.recorder.rows_of("it")
    for offset, event in enumerate(events):
        row = torch.frombuffer(bytearray(rows[len(PROMPT) + offset]), dtype=torch.float32)
        distribution = torch.log_softmax(row.double(), 0)
        assert event.logprobs is not None
        assert event.logprobs.token_logprob == pytest.approx(float(distribution[event.token_id]))
        best = torch.topk(distribution, 3)
        assert [token_id for token_id, _ in event.logprobs.top] == best.indices.tolist()


def test_the_runner_forgets_who_has_ended_at_whatever_stage() -> None:
    harness = make_harness(num_blocks=8)
    scheduler = harness.scheduler

    def add(name: str, num_prompt: int) -> None:
        prompt = tuple((ord(name[0]) * number) % VOCAB_SIZE for number in range(num_prompt))
        scheduler.add(Request(name, prompt, SamplingParams(50, temperature=0.0), 0.0))

    for name in "abcdef":
        add(name, 30)
    assert scheduler.abort("f", "abort") is not None  # never scheduled
    harness.step()
    assert scheduler.abort("a", "abort") is not None  # running
    for _ in range(40):
        harness.step()
    assert scheduler.counters().num_preemptions
    for name in "bcde":
        scheduler.abort(name, "abort")
    add("last", 5)
    events: list[TokenEvent] = []
    while scheduler.has_work:
        events += harness.step()
    add("very last", 5)
    harness.step()
    assert list(harness.runner._known) == ["very last"]
    assert events[-1].finish_reason == "length"


def test_a_request_that_outgrows_the_pool_ends_with_length() -> None:
    harness = make_harness(num_blocks=2)
    events = harness.run([Request("it", PROMPT, SamplingParams(200, temperature=0.0), 0.0)])["it"]
    assert events[-1].finish_reason == "length"
    assert len(PROMPT) + len(events) == 2 * 16 + 1, "every block is full; the last token is sampled and not stored"
    assert harness.manager.num_blocks_active == 0


def test_a_prompt_that_is_cached_to_its_end_still_computes_its_last_token() -> None:
    harness = make_harness()
    prompt = tuple(range(32))
    harness.run([Request("first", prompt, SamplingParams(2, temperature=0.0), 0.0)])
    event = harness.run([Request("it", prompt, SamplingParams(1, temperature=0.0), 0.0)])["it"][-1]
    assert event.num_cached_tokens == 31
    assert harness.recorder.num_computed("it") == 1
