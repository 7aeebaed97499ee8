"""Drives a scheduler by hand: a settable clock, and samples that the test chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.manager import CacheManager
from kvd.core import KVEviction, Request, Sample, SamplingParams, StepPlan, StepResult, TokenEvent
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.scheduler import Rates, Scheduler

STOP = 9


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    *,
    max_tokens: int = 8,
    priority: int = 0,
    salt: str = "",
    deadline: float | None = None,
    arrival: float = 0.0,
    client: str = "",
    kv_eviction: KVEviction = "none",
    kv_budget_tokens: int | None = None,
) -> Request:
    """`prompt` is the token ids, or how many of them (then no other request has the same first token)."""
    if isinstance(prompt, int):
        first = 1000 + 7919 * sum(map(ord, request_id)) + int.from_bytes(request_id.encode()[:2], "little")
        prompt = range(first, first + prompt)
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({STOP})),
        arrival,
        client=client,
        priority=priority,
        cache_salt=salt,
        deadline=deadline,
        kv_eviction=kv_eviction,
        kv_budget_tokens=kv_budget_tokens,
    )


class Driver:
    """A scheduler and its cache; every sample is token 5 unless `tokens` says otherwise."""

    def __init__(
        self,
        *,
        num_blocks: Sequence[int] = (64,),
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 512,
        **options: object,
    ) -> None:
        names = ("enable_prefix_caching", "windows", "num_ram_slots", "slow_tier", "block_bytes", "max_cached_blocks")
        caching = {name: options.pop(name) for name in names if name in options}
        rates = Rates(fixed=options.pop("rates")) if "rates" in options else None
        self.now = 0.0
        self.cache = CacheManager(num_blocks, key_seed=b"seed", clock=lambda: self.now, **caching)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, **options),
            self.cache,
            lambda: self.now,
            rates,
        )
        self.tokens: dict[str, int] = {}
        self.events: list[TokenEvent] = []
        self.plans: list[StepPlan] = []

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[TokenEvent]:
        samples = tuple(
            Sample(item.request_id, self.tokens.get(item.request_id, 5)) for item in plan.items if item.samples
        )
        events = self.scheduler.commit(plan, StepResult(plan.step_id, samples, 0.25))
        self.events += events
        return events

    def step(self) -> list[TokenEvent]:
        self.now += 1.0
        return self.commit(self.plan())

    def finish(self) -> list[TokenEvent]:
        """Run until nothing is left; returns the events of the way."""
        first = len(self.events)
        while self.scheduler.has_work:
            self.step()
        return self.events[first:]

    def last_event(self, request_id: str) -> TokenEvent:
        return [event for event in self.events if event.request_id == request_id][-1]

    def num_computed(self, request_id: str) -> int:
        return sum(item.num_tokens for plan in self.plans for item in plan.items if item.request_id == request_id)


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(request id, start, tokens, samples) of every item."""
    return [(item.request_id, item.start, item.num_tokens, item.samples) for item in plan.items]
