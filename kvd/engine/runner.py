"""Plan in, samples out: the only part of the engine that touches tensors. Engine thread only.

The runner remembers, per request, what sampling needs and the scheduler does not: the generator's key, the token
counts for penalties, and where the output stands in its grammar. It learns of a request from `StepPlan.new_requests`
and forgets it on `ended_request_ids`; a preempted request stays known, so that recomputation cannot change what it
samples.

Where the backend computes beside Python (`Ops.steps_ahead`), a step may be launched before the last one has landed. A
token that nobody knows yet goes into the next step by the name of its slot; a step whose penalties count such a token,
or whose grammars read it, waits for it, and so does every step of which more than tokens is to be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from kvd.cache.store import Arena, restore_blocks, save_blocks
from kvd.core import Logprobs, PlanItem, Sample, StepPlan, StepResult
from kvd.engine.batch_builder import BatchBuilder
from kvd.engine.grammar_masks import GrammarMasks
from kvd.engine.prompt_logprobs import PromptScorer, Scores
from kvd.engine.sampling_rows import RequestSampling, SamplingRows
from kvd.model.decoder import Decoder
from kvd_kernels.ops import Batch, KVCache, PendingStep, SamplingBatch, SamplingResult, StepProgram, Transfer


class RunnerObserver(Protocol):
    """Sees what was computed; tests count work and compare logits with it."""

    def computed(self, request_id: str, start: int, num_tokens: int) -> None: ...

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        """`row` (float32 [vocab]) yields the token at `position`; it is overwritten by the next step."""
        ...


class Runner:
    """Runs plans on one decoder and one cache.

    draw_seed: gives a key to requests without a seed of their own. arena: the RAM tier's memory, where there is one.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_blocks_per_request: int,
        draw_seed: Callable[[], int],
        arena: Arena | None = None,
        observer: RunnerObserver | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._arena = arena
        self._builder = BatchBuilder(
            len(cache.format.groups),
            max_tokens=decoder.max_tokens,
            max_seqs=decoder.max_seqs,
            max_blocks=max_blocks_per_request,
        )
        self._program = decoder.ops.record(self._builder.batch, cache, partial(decoder.forward, cache=cache))
        self._mass_program: _MassProgram | None = None
        self._known: dict[str, RequestSampling] = {}
        self._sampling_rows = SamplingRows(decoder.max_seqs)
        self._scorer = PromptScorer(decoder)
        self._grammars = GrammarMasks()
        self._newest_tokens = [0] * decoder.max_seqs
        self._num_unknown = [0] * decoder.max_seqs  # steps in flight that choose a slot's token
        self._in_flight: list[_Step] = []
        self._last_landed = 0.0
        self._draw_seed = draw_seed
        self._observer = observer

    def prepare(self, report: Callable[[int, int], None]) -> None:
        """See `StepProgram.prepare`."""
        self._program.prepare(report)

    @property
    def steps_ahead(self) -> int:
        """How many steps more may be launched before one is landed."""
        return self._decoder.ops.steps_ahead

    def unready_requests(self) -> frozenset[str]:
        """Requests that the next plan should leave out: what their grammars allow takes long to find out."""
        return self._grammars.unready()

    def await_ready(self, timeout: float) -> None:
        """Wait until one of them may be planned again, or so many seconds."""
        self._grammars.await_one(timeout)

    def close(self) -> None:
        """End the threads that work for it."""
        self._grammars.close()

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not landed."""
        return len(self._in_flight)

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for it, with no other in flight."""
        assert not self._in_flight
        self.launch(plan)
        return self.land()[1]

    def launch(self, plan: StepPlan) -> None:
        """Forget, register, save, copy, restore, compute, sample: order all this, and wait for none of it."""
        assert len(self._in_flight) <= self.steps_ahead
        step = _Step(plan, time.monotonic())
        self._in_flight.append(step)
        for request_id in plan.ended_request_ids:
            self._known.pop(request_id, None)
            self._scorer.forget(request_id)
            self._grammars.forget(request_id)
        for request in plan.new_requests:
            seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
            self._known[request.request_id] = RequestSampling(request, seed, self._grammars.add(request))
            self._scorer.add(request)
        self._move_blocks(step)
        if plan.items:
            self._compute(step)

    def land(self) -> tuple[StepPlan, StepResult]:
        """Wait for the oldest step in flight."""
        step = self._in_flight[0]
        self._wait(step)
        del self._in_flight[0]
        assert step.result is not None
        return step.plan, step.result

    def void(self) -> int:
        """Forget the steps in flight, since one of them has failed; the id of the oldest of them.

        Raises what the device raises where it can compute nothing any more.
        """
        step_id = self._in_flight[0].plan.step_id
        # Their slots of the RAM tier go to others, and their memory goes: nothing may still write there.
        self._decoder.ops.settle()
        self._in_flight.clear()
        self._num_unknown = [0] * len(self._num_unknown)
        return step_id

    def _move_blocks(self, step: _Step) -> None:
        """Saves, copies and restores, in this order."""
        plan, ops, cache, arena = step.plan, self._decoder.ops, self._cache, self._arena
        assert arena is not None or not (plan.saves or plan.restores), "a plan moves blocks where there is no RAM tier"
        if arena is not None and plan.saves:
            step.saves = save_blocks(ops, cache, arena, plan.saves)
        for copy in plan.copies:
            ops.copy_block(cache, copy.group_id, copy.source, copy.target, copy.num_tokens)
        if arena is not None and plan.restores:
            step.restores = restore_blocks(ops, cache, arena, plan.restores)

    def _compute(self, step: _Step) -> None:
        items = step.sampled = [item for item in step.plan.items if item.samples]
        if any(self._known[item.request_id].awaits_output for item in items):
            for older in self._in_flight[:-1]:  # penalties count the tokens that these steps choose, grammars read them
                self._wait(older)
        batch = self._builder.fill(step.plan, self._newest_tokens)
        step.mass = self._with_mass() if any(item.wants_mass for item in step.plan.items) else None
        step.program = self._program if step.mass is None else step.mass.program
        step.pending = step.program.launch(batch, self._sampling_batch(items) if items else None)
        for item in items:
            self._newest_tokens[item.slot] = -1 - item.slot
            self._num_unknown[item.slot] += 1
            run = self._known[item.request_id].grammar
            if run is not None:
                run.num_in_flight += 1
        step.is_scored = any(item.num_scored for item in step.plan.items)
        if step.mass is not None or step.is_scored or self._observer is not None or not self.steps_ahead:
            for launched in self._in_flight:
                self._wait(launched)  # what is to be read beside the tokens, the next step overwrites

    def _wait(self, step: _Step) -> None:
        """Wait for a step and take in what it has chosen. Steps before it were waited for."""
        if step.result is not None:
            return
        samples: tuple[Sample, ...] = ()
        masses: tuple[tuple[float, ...], ...] = ()
        scores: tuple[Scores, ...] = ()
        if step.pending is not None and step.program is not None:
            result = step.pending.result()
            if self._observer is not None:
                self._report(self._observer, step.plan, step.program.logits)
            if result is not None:
                samples = self._accept(step.sampled, result)
            if step.mass is not None:
                masses = step.mass.masses(step.plan.items)
            if step.is_scored:
                scores = self._scorer.score(step.plan.items)
        save_seconds = sum(transfer.seconds() for transfer in step.saves)
        restore_seconds = sum(transfer.seconds() for transfer in step.restores)
        now = time.monotonic()
        seconds = now - max(step.launched, self._last_landed)  # it could not begin before the one before it had ended
        self._last_landed = now
        step.result = StepResult(step.plan.step_id, samples, seconds, save_seconds, restore_seconds, masses, scores)

    def _with_mass(self) -> _MassProgram:
        if self._mass_program is None:
            self._mass_program = _MassProgram(self._decoder, self._cache, self._builder.batch)
        return self._mass_program

    def _sampling_batch(self, items: list[PlanItem]) -> SamplingBatch:
        rows = [self._known[item.request_id] for item in items]
        self._grammars.require(row.grammar for row in rows if row.grammar is not None)
        return self._sampling_rows.fill(rows, [item.start + len(item.token_ids) for item in items])

    def _report(self, observer: RunnerObserver, plan: StepPlan, logits: torch.Tensor) -> None:
        row = 0
        for item in plan.items:
            observer.computed(item.request_id, item.start, item.num_tokens)
            if item.samples:
                observer.logits(item.request_id, item.start + item.num_tokens, logits[row])
                row += 1

    def _accept(self, items: list[PlanItem], result: SamplingResult) -> tuple[Sample, ...]:
        """Note what was sampled, for the steps to come, and report it."""
        samples = []
        for item, token_id, logprobs in zip(items, result.token_ids, result.logprobs, strict=True):
            request_id = item.request_id
            self._num_unknown[item.slot] -= 1
            known = self._known.get(request_id)  # it may have ended while this step was in flight
            run = None if known is None else known.grammar
            if run is not None:
                run.num_in_flight -= 1
            if token_id is None or (run is not None and run.error is not None):
                samples.append(Sample(request_id, None, refusal=None if run is None else run.error))
                continue
            if not self._num_unknown[item.slot]:
                self._newest_tokens[item.slot] = token_id
            if known is not None and known.output_counts is not None:
                known.output_counts.add(token_id)
            is_last = run is not None and token_id in run.end_token_ids
            if run is not None and not is_last:
                self._grammars.accept(run, token_id)
            found = logprobs and Logprobs(logprobs[0], tuple(logprobs[1]))
            samples.append(Sample(request_id, token_id, found, is_last))
        return tuple(samples)


@dataclass(slots=True)
class _Step:
    """A step from its launch to its landing. `launched` is a time of the monotonic clock."""

    plan: StepPlan
    launched: float
    sampled: list[PlanItem] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    restores: list[Transfer] = field(default_factory=list)
    program: StepProgram | None = None
    pending: PendingStep | None = None
    mass: _MassProgram | None = None
    is_scored: bool = False
    result: StepResult | None = None


class _MassProgram:
    """The step program once more, with attention that reports its mass; made when it is first asked for."""

    def __init__(self, decoder: Decoder, cache: KVCache, batch: Batch) -> None:
        num_layers = len(cache.format.groups[0].layers)
        shape = (num_layers, *batch.groups[0].block_tables.shape)
        self._mass = torch.zeros(shape, dtype=torch.float32, device=decoder.ops.device)
        forward = partial(decoder.forward, cache=cache, block_mass=self._mass)
        self.program = decoder.ops.record(batch, cache, forward)

    def masses(self, items: Sequence[PlanItem]) -> tuple[tuple[float, ...], ...]:
        """Of the latest run: for each item that wants it, the mass of its table entries of group 0 over all layers."""
        rows = [row for row, item in enumerate(items) if item.wants_mass]
        lengths = [len(items[row].block_tables[0]) for row in rows]
        by_layer = self._mass[:, rows, : max(lengths)].double().cpu()
        total = torch.zeros_like(by_layer[0])
        for of_layer in by_layer:  # one after the other: a sum over a dimension has an order of torch's own
            total += of_layer
        return tuple(tuple(row[:length]) for row, length in zip(total.tolist(), lengths, strict=True))
