"""The runner over a backend that computes late: the next step is launched before the last one has landed.

Nothing that a request is answered with may depend on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvd.core import Request, SamplingParams, TokenEvent
from kvd.engine import runner as runner_module
from kvd.model.decoder import Decoder
from kvd.tools.wrapped_ops import WrappedOps
from kvd_kernels.ops import Batch, KVCache, PendingStep, SamplingBatch, SamplingResult, StepProgram
from tests.engine.harness import SWAP_IS_CHEAP, Harness
from tests.engine.small_models import random_tokens, small_decoder


class LateProgram(StepProgram):
    """Takes down what it is to do, and does it when somebody waits. Knows the newest token of each slot by itself."""

    def __init__(self, inner: StepProgram, ops: LateOps, batch: Batch) -> None:
        self.inner, self.ops, self.batch = inner, ops, batch

    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        return self.launch(batch, params).result()

    def launch(self, batch: Batch, params: SamplingBatch | None) -> PendingStep:
        step = LateStep(self, copy.deepcopy(batch), copy.deepcopy(params))
        self.ops.todo.append(step.compute)
        return step


class LateStep(PendingStep):
    def __init__(self, program: LateProgram, batch: Batch, params: SamplingBatch | None) -> None:
        self.program, self.batch, self.params = program, batch, params
        self.tokens: SamplingResult | None = None

    def compute(self) -> None:
        newest, live = self.program.ops.newest, self.program.batch
        for row in range(self.batch.num_tokens):
            slot = -1 - int(self.batch.token_ids[row])
            if slot >= 0:
                self.batch.token_ids[row] = newest[slot]
        for name in ("token_ids", "positions", "query_starts", "logit_rows"):
            getattr(live, name).copy_(getattr(self.batch, name))
        for target, source in zip(live.groups, self.batch.groups, strict=True):
            for name in ("block_tables", "first_positions", "num_slots", "write_slots"):
                getattr(target, name).copy_(getattr(source, name))
        live.num_tokens, live.num_seqs = self.batch.num_tokens, self.batch.num_seqs
        live.num_logit_rows = self.batch.num_logit_rows
        self.tokens = self.program.inner.run(live, self.params)
        self.program.logits = self.program.inner.logits
        if self.tokens is not None:
            assert self.batch.logit_slots is not None
            for slot, token_id in zip(self.batch.logit_slots.tolist(), self.tokens.token_ids, strict=False):
                newest[slot] = token_id or 0

    def result(self) -> SamplingResult | None:
        self.program.ops.flush()
        return self.tokens


class LateOps(WrappedOps):
    """Copies take their place between the steps, as they were asked for."""

    steps_ahead = 1

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.todo: list[Callable[[], None]] = []
        self.newest: dict[int, int] = {}
        self.most_in_flight = 0

    def flush(self) -> None:
        num_steps = sum(isinstance(getattr(call, "__self__", None), LateStep) for call in self.todo)
        self.most_in_flight = max(self.most_in_flight, num_steps)
        todo, self.todo = self.todo, []
        for call in todo:
            call()

    def settle(self) -> None:
        self.flush()

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        inside = copy.deepcopy(batch)  # the batch of the caller is filled anew while a step waits
        return LateProgram(self._inner.record(inside, cache, forward), self, inside)

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        self.todo.append(lambda: self._inner.copy_block(cache, group_id, source, target, num_tokens))

    def copy_rows(self, *arguments: Any) -> Any:
        self.flush()
        return self._inner.copy_rows(*arguments)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return small_decoder(tmp_path_factory.mktemp("late"), "cpu")


LATE_STEP = 14


def late(decoder: Decoder) -> Decoder:
    """The same weights behind a backend that computes late."""
    twin = copy.copy(decoder)
    twin.ops = LateOps(decoder.ops)  # type: ignore[assignment]
    return twin


def drive(harness: Harness, requests: list[Request]) -> dict[str, list[int | None]]:
    """As the engine does it: launch, and land what lies too far back. Token ids by request."""
    answers: dict[str, list[int | None]] = {request.request_id: [] for request in requests}

    def commit() -> None:
        events: list[TokenEvent] = harness.scheduler.commit(*harness.runner.land())
        for event in events:
            assert event.error is None
            answers[event.request_id].append(event.token_id)

    for request in requests[:3]:
        harness.scheduler.add(request)
    for step in range(2000):
        if step == LATE_STEP:
            for request in requests[3:]:
                harness.scheduler.add(replace(request, priority=-1))  # these push others out of a small pool
        if step > LATE_STEP and not harness.scheduler.has_work:
            return answers
        harness.now += 1.0
        plan = harness.scheduler.plan()
        if plan is not None:
            harness.runner.launch(plan)
        if harness.runner.num_in_flight > (harness.runner.steps_ahead if plan is not None else 0):
            commit()
    raise AssertionError("the requests did not end")


def mixed_requests() -> list[Request]:
    shared = random_tokens(1, 70)
    params = [
        SamplingParams(max_tokens=30, temperature=0.0),
        SamplingParams(max_tokens=25, temperature=1.0, seed=3),
        SamplingParams(max_tokens=25, temperature=0.8, seed=4, frequency_penalty=0.7, presence_penalty=0.3),
        SamplingParams(max_tokens=25, temperature=1.0, seed=5, repetition_penalty=1.4),
        SamplingParams(
            max_tokens=12, temperature=1.0, seed=6, min_tokens=5, stop_token_ids=frozenset(range(3, 320, 4))
        ),
        SamplingParams(max_tokens=1, temperature=0.0),
    ]
    return [
        Request(f"r{i}", (*shared, *random_tokens(10 + i, 5 + 9 * i)), each, arrival_time=0.0)
        for i, each in enumerate(params)
    ]


def unobserved(decoder: Decoder, **options: Any) -> Harness:
    harness = Harness(decoder, **options)
    harness.runner._observer = None  # one who looks at logits makes every step wait
    return harness


OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"chunk": 24},
    "few blocks": {"num_blocks": 12, "max_seqs": 4},
    "few blocks and a RAM tier": {"num_blocks": 12, "max_seqs": 4, "num_ram_slots": 64, "rates": SWAP_IS_CHEAP},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_those_of_a_runner_that_waits(decoder: Decoder, options: dict[str, Any]) -> None:
    expected = drive(unobserved(decoder, **options), mixed_requests())
    ahead = late(decoder)
    harness = unobserved(ahead, **options)
    assert drive(harness, mixed_requests()) == expected
    assert ahead.ops.most_in_flight >= 2, "no step was ever in flight beside another"  # type: ignore[attr-defined]
    if "num_blocks" in options:
        assert harness.counters.num_preemptions > 0


def test_penalties_wait_for_the_token_that_they_count(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that wait the answers differ: the planted fault is found."""
    requests = mixed_requests()[2:4]
    expected = drive(unobserved(decoder), requests)
    sampling = runner_module.Runner._sampling_batch

    def without_counts(self: Any, items: Any) -> Any:
        batch = sampling(self, items)
        batch.has_ragged = False
        return batch

    assert drive(unobserved(late(decoder)), requests) == expected
    monkeypatch.setattr(runner_module.Runner, "_sampling_batch", without_counts)
    assert drive(unobserved(late(decoder)), requests) != expected


def test_one_who_observes_makes_every_step_wait(decoder: Decoder) -> None:
    ahead = late(decoder)
    harness = Harness(ahead)
    drive(harness, mixed_requests())
    alone = Harness(decoder)
    drive(alone, mixed_requests())
    assert ahead.ops.most_in_flight == 1  # type: ignore[attr-defined]
    assert alone.recorder.rows.items() <= harness.recorder.rows.items()  # a stop is found a token late


def test_steps_in_flight_are_forgotten_when_one_fails(decoder: Decoder) -> None:
    harness = unobserved(late(decoder))
    harness.scheduler.add(replace(mixed_requests()[0], request_id="first"))
    for _ in range(2):
        plan = harness.scheduler.plan()
        assert plan is not None
        harness.runner.launch(plan)
    assert harness.runner.num_in_flight == 2
    oldest = harness.runner.void()
    assert oldest == plan.step_id - 1
    assert harness.runner.num_in_flight == 0
    assert not harness.ops.todo, "what a step was to write may belong to others from now on"  # type: ignore[attr-defined]
    harness.scheduler.fail_all("broken")
    again = mixed_requests()
    assert drive(harness, again) == drive(unobserved(decoder), mixed_requests())
