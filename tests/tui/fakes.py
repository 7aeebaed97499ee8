"""A snapshot source and a control without an engine, for tests and for looking at the dashboard.

    python -m tests.tui.fakes [busy|idle|many|lost]

runs the dashboard on a made-up engine in this terminal.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from dataclasses import replace

from kvd.views import Counters, EngineInfo, Histogram, MemoryBudget, RequestState, RequestView, Snapshot, StepMix

BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, math.inf)
BLOCK_BYTES = 16 * 11_880

INFO = EngineInfo(
    model="smollm2-135m-instruct",
    served_names=("smollm2-135m-instruct",),
    architecture="llama",
    quantization="Q4_1",
    backend="cpu",
    device="cpu (reference, 2 threads)",
    kv_cache_dtype="int8",
    max_model_len=8192,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    vocab_size=49152,
    prefix_caching=True,
    budget=MemoryBudget(
        total_bytes=2 << 30,
        weight_bytes=96 << 20,
        activation_bytes=40 << 20,
        kv_bytes=2048 * BLOCK_BYTES,
        num_blocks=2048,
        block_bytes=BLOCK_BYTES,
        bytes_per_token=11_880.0,
        bytes_per_token_16bit=23_040.0,
    ),
    created=1_700_000_000,
    version="0.1.0",
)


def histogram(values: list[float], bounds: tuple[float, ...] = BOUNDS) -> Histogram:
    """The cumulative histogram of these observations."""
    return Histogram(bounds, tuple(sum(v <= bound for v in values) for bound in bounds), sum(values))


def row(
    number: int, *, state: RequestState = "decode", client: str = "openai-python 10.0.0.7", **fields: object
) -> RequestView:
    view = RequestView(
        request_id=f"chatcmpl-{number:06d}ab",
        client=client,
        endpoint="chat",
        state=state,
        priority=0,
        age_seconds=100.0 - number,
        num_prompt_tokens=1200,
        num_cached_tokens=768,
        num_computed_tokens=516 if state == "prefill" else 0 if state == "waiting" else 1200,
        num_output_tokens=37 if state == "decode" else 0,
        max_tokens=512,
        num_blocks=0 if state == "waiting" else 78,
        num_preemptions=0,
        ttft_seconds=0.182 if state == "decode" else None,
        tokens_per_second=23.4 if state == "decode" else None,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def snapshot(
    *,
    time: float = 1000.0,
    active: int = 0,
    cached: int = 0,
    num_blocks: int = 2048,
    requests: tuple[RequestView, ...] = (),
    counters: Counters | None = None,
    **fields: object,
) -> Snapshot:
    waiting = sum(r.state in ("waiting", "preempted", "swapped") for r in requests)
    view = Snapshot(
        time=time,
        uptime_seconds=754.0,
        info=INFO,
        state="ready",
        num_running=len(requests) - waiting,
        num_waiting=waiting,
        num_blocks=num_blocks,
        num_blocks_active=active,
        num_blocks_cached=cached,
        num_blocks_free=num_blocks - active - cached,
        counters=counters or Counters(),
        last_step=StepMix(),
        requests=requests,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


class FakeSource:
    """Answers with `current`, or raises `error`, or hangs; counts what it was asked."""

    def __init__(self, current: Snapshot) -> None:
        self.current = current
        self.error: Exception | None = None
        self.hangs = False
        self.num_calls = 0
        self.num_detailed_calls = 0

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        self.num_calls += 1
        self.num_detailed_calls += details
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.current if details else replace(self.current, requests=())


class FakeControl:
    """Remembers what the operator did."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.num_resets = 0
        self.error: Exception | None = None
        self.still_runs = True

    async def abort(self, request_id: str) -> bool:
        if self.error is not None:
            raise self.error
        self.aborted.append(request_id)
        return self.still_runs

    async def reset_cache(self) -> int:
        if self.error is not None:
            raise self.error
        self.num_resets += 1
        return 321


class LivelySource:
    """An engine that is made up as it goes, for a person to look at."""

    _CLIENTS = ("claude-code 127.0.0.1", "rag-indexer", "open-webui 192.168.1.23", "autocomplete", "aider 127.0.0.1")

    def __init__(self, *, num_requests: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._start = time.monotonic()
        self._last = self._start
        self._next_id = 0
        self._wanted = num_requests
        self._counters = Counters()
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._requests: list[RequestView] = []
        self._lost = False
        for _ in range(6):
            self._advance(0.5)

    def _new(self) -> RequestView:
        self._next_id += 1
        client = self._random.choice(self._CLIENTS)
        prompt = self._random.choice((180, 900, 2400, 5200)) + self._random.randrange(90)
        hit = int(prompt * self._random.choice((0.0, 0.5, 0.85)))
        return row(
            self._next_id,
            state="waiting",
            client=client,
            request_id=f"chatcmpl-{self._random.getrandbits(40):010x}",
            endpoint="completions" if client == "autocomplete" else "chat",
            age_seconds=0.0,
            num_prompt_tokens=prompt,
            num_cached_tokens=hit,
            max_tokens=self._random.choice((64, 128, 256, 768)),
        )

    def _advance(self, seconds: float) -> None:
        rng, counters = self._random, self._counters
        while len(self._requests) < self._wanted:
            self._requests.append(self._new())
        budget = int(2400 * seconds * rng.uniform(0.5, 1.3))
        prefilled = generated = queried = hits = 0
        used = 0
        alive: list[RequestView] = []
        for request in self._requests:
            state, computed, output = request.state, request.num_computed_tokens, request.num_output_tokens
            if state == "waiting" and used < 1700 and sum(r.state != "waiting" for r in alive) < 16:
                state, computed = "prefill", request.num_cached_tokens
                queried += request.num_prompt_tokens
                hits += request.num_cached_tokens
            if state == "prefill":
                chunk = min(budget, request.num_prompt_tokens - computed)
                budget -= chunk
                prefilled += chunk
                computed += chunk
                if computed == request.num_prompt_tokens:
                    state = "decode"
                    self._ttft.append(request.age_seconds * rng.uniform(0.2, 1) + 0.05)
            elif state == "decode":
                more = int(rng.uniform(18, 34) * seconds + rng.random())
                output += more
                computed += more
                generated += more
                self._itl += [rng.lognormvariate(-3.3, 0.35) for _ in range(min(more, 4))]
            if output >= request.max_tokens:
                continue
            blocks = 0 if state == "waiting" else -(-computed // 16)
            used += blocks
            alive.append(
                replace(
                    request,
                    state=state,
                    age_seconds=request.age_seconds + seconds,
                    num_computed_tokens=computed,
                    num_output_tokens=output,
                    num_blocks=blocks,
                    num_preemptions=request.num_preemptions + (rng.random() < 0.0004),
                    ttft_seconds=0.1 + request.num_prompt_tokens / 2600 if output else None,
                    tokens_per_second=rng.uniform(20, 32) if output else None,
                )
            )
        self._requests = alive
        self._counters = replace(
            counters,
            num_steps=counters.num_steps + int(seconds * 30),
            prompt_tokens=counters.prompt_tokens + queried,
            generation_tokens=counters.generation_tokens + generated,
            prefill_tokens_computed=counters.prefill_tokens_computed + prefilled,
            prefix_query_tokens=counters.prefix_query_tokens + queried,
            prefix_hit_tokens=counters.prefix_hit_tokens + hits,
            num_preemptions=counters.num_preemptions + (rng.random() < 0.01),
            num_evicted_blocks=counters.num_evicted_blocks + (queried - hits) // 40,
            recomputed_tokens=counters.recomputed_tokens + (rng.random() < 0.01) * 900,
        )
        self._mix = StepMix(sum(r.state == "decode" for r in alive), min(496, prefilled), len(alive), 0.034)

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        if self._lost:
            raise ConnectionRefusedError("connection to 127.0.0.1:8000 refused")
        now = time.monotonic()
        self._advance(min(1.0, now - self._last))
        self._last = now
        active = min(2048, sum(r.num_blocks for r in self._requests))
        cached = min(2048 - active, 300 + self._counters.prefix_query_tokens // 60)
        return snapshot(
            time=now,
            uptime_seconds=now - self._start + 754,
            active=active,
            cached=cached,
            requests=tuple(self._requests),
            counters=self._counters,
            last_step=self._mix,
            histograms={
                "time_to_first_token_seconds": histogram(self._ttft),
                "inter_token_latency_seconds": histogram(self._itl),
            },
        )

    async def abort(self, request_id: str) -> bool:
        before = len(self._requests)
        self._requests = [r for r in self._requests if r.request_id != request_id]
        return len(self._requests) < before

    async def reset_cache(self) -> int:
        return 321


def main() -> None:
    from kvd.tui.app import Dashboard

    kind = sys.argv[1] if len(sys.argv) > 1 else "busy"
    engine = LivelySource(num_requests={"busy": 19, "idle": 0, "many": 500, "lost": 0}[kind])
    engine._lost = kind == "lost"
    dashboard = Dashboard(
        engine, engine, address="http://127.0.0.1:8000/v1", model="smollm2-135m-instruct", on_quit="ask"
    )
    print(asyncio.run(dashboard.run_async()))


if __name__ == "__main__":
    main()
