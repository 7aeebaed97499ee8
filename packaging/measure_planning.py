"""Times what the scheduler and the cache do in Python, without a model, and counts wasted blocks.

    python packaging/measure_planning.py

Prints medians and the slowest of many rounds: planning and committing one decode step with 256 requests running and
1,000 waiting; hashing and matching a prompt of 32K tokens; slots of KV blocks that hold no token, over all running
requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvd.cache.eviction import POLICIES
from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, Request, Sample, SamplingParams, StepPlan, StepResult
from kvd.scheduler.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING, NUM_WAITING = 256, 1000


def milliseconds(seconds: list[float]) -> str:
    return (
        f"median {statistics.median(seconds) * 1e3:.3f} ms, slowest {max(seconds) * 1e3:.3f} ms ({len(seconds)} rounds)"
    )


def timed(action: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    value = action()
    return time.perf_counter() - started, value


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, tuple(Sample(item.request_id, 5) for item in plan.items if item.samples), 0.01)


def measure_steps(num_clients: int, prompt_tokens: int, policy: str) -> None:
    cache = CacheManager((40_000,), key_seed=b"measure", make_policy=POLICIES[policy])
    config = SchedulerConfig(NUM_RUNNING, 512, 8192, max_waiting=NUM_WAITING, min_expected_growth_tokens=0)
    scheduler = Scheduler(config, cache, time.monotonic)
    for number in range(NUM_RUNNING + NUM_WAITING):
        # A shared beginning, then a text of one's own: as behind one system prompt.
        prompt = (*range(500), *range(1000 * number, 1000 * number + prompt_tokens - 500))
        sampling = SamplingParams(max_tokens=4000)
        scheduler.add(Request(f"r{number}", prompt, sampling, 0.0, client=f"c{number % num_clients}"))
    while scheduler.num_running < NUM_RUNNING or scheduler.last_step.num_prefill_tokens:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, result_of(plan))
    planning, committing, used, wasted = [], [], 0, 0
    for _ in range(200):
        seconds, plan = timed(scheduler.plan)
        assert isinstance(plan, StepPlan)
        assert len(plan.items) == NUM_RUNNING
        planning.append(seconds)
        result = result_of(plan)
        seconds, _ = timed(lambda: scheduler.commit(plan, result))  # noqa: B023
        committing.append(seconds)
        for view in scheduler.request_views()[:NUM_RUNNING]:
            used += view.num_computed_tokens
            wasted += view.num_blocks * BLOCK_SIZE - view.num_computed_tokens
    where = f"{NUM_RUNNING} running, {NUM_WAITING} waiting of {num_clients} clients"
    print(f"plan:   {milliseconds(planning)}; {where}, {policy}")
    print(f"commit: {milliseconds(committing)}")
    print(f"slots without a token: {wasted / (used + wasted):.2%} at {prompt_tokens}+ tokens a request")


def measure_matching() -> None:
    tokens = tuple(range(32 * 1024))
    cache = CacheManager((4096,), key_seed=b"measure")
    scheduler = Scheduler(SchedulerConfig(1, 8192, 40_000), cache, time.monotonic)
    scheduler.add(Request("first", tokens, SamplingParams(max_tokens=1), 0.0))
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, result_of(plan))
    hashing, looking, matching, again = [], [], [], []
    for _ in range(50):
        sequence = cache.open("")
        seconds, _ = timed(lambda: sequence.chain.extend(tokens, len(tokens)))  # noqa: B023
        hashing.append(seconds)
        seconds, _ = timed(lambda: cache._finder.match(sequence, tokens, 2047))  # noqa: B023
        looking.append(seconds)
        seconds, num_cached = timed(lambda: cache.allocate(sequence, tokens))  # noqa: B023
        assert isinstance(num_cached, int)
        assert num_cached >= 32 * 1024 - BLOCK_SIZE
        matching.append(seconds)
        seconds, _ = timed(lambda: cache.free(sequence))  # noqa: B023
        again.append(seconds)
    print(f"32K prompt, hashing:                  {milliseconds(hashing)}")
    print(f"32K prompt, matching:                 {milliseconds(looking)}")
    print(f"32K prompt, matching and sharing all: {milliseconds(matching)}")
    print(f"32K prompt, giving it up:             {milliseconds(again)}")


if __name__ == "__main__":
    for policy in POLICIES:
        measure_steps(1, 600, policy)
        measure_steps(300, 600, policy)
    measure_matching()
