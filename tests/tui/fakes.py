"""A console without an engine, for tests and for looking at the dashboard.

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

from kvd.errors import KvdError
from kvd.insight import BlockMap, DoctorReport, MapCell, Reveal, Timeline
from kvd.views import (
    Counters,
    EngineInfo,
    Histogram,
    LogEvent,
    MemoryBudget,
    PrefixView,
    RequestState,
    RequestView,
    SessionInfo,
    Snapshot,
    StepMix,
)

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


def block_map(
    *,
    num_blocks: int = 2048,
    num_cells: int = 512,
    num_active: int = 900,
    num_cached: int = 700,
    owners: tuple[str, ...] = ("claude-code 127.0.0.1", "rag-indexer", "open-webui 192.168.1.23"),
) -> BlockMap:
    """A pool whose lowest blocks are active, then cached, then free, each owner with a run of neighbours."""
    per_cell = max(1, -(-num_blocks // num_cells))
    cells = []
    owned = [0] * len(owners)
    for first in range(0, num_blocks, per_cell):
        last = min(num_blocks, first + per_cell)
        active = max(0, min(last, num_active) - first)
        cached = max(0, min(last, num_active + num_cached) - max(first, num_active))
        owner = (first * 7 // max(1, num_blocks)) % len(owners) if active + cached else -1
        if owner >= 0:
            owned[owner] += active + cached
        idle = 3.0 + 400.0 * first / max(1, num_blocks) if cached else 0.0
        cells.append(MapCell(last - first - active - cached, cached, active, active // 2, cached // 8, owner, idle))
    return BlockMap(0, 1, num_blocks, per_cell, owners, tuple(owned), tuple(cells))


def no_findings() -> DoctorReport:
    """The report of a doctor that has seen nothing."""
    return DoctorReport((), (), 0, 0, 0, 0, 0, 0.0, 0.0, ())


class FakeConsole:
    """Answers what it was told to; what it was asked and told to do is counted.

    `current` is the snapshot. `error` and `hangs` are of the snapshot, `act_error` of what changes something,
    `insight_error` and `insight_hangs` of what explains. Timelines are by request id, reveals by name. `acts` has every
    act with its argument, as ("pin", "ab12"); acts change nothing but `cached_prefixes`. `asked` has every question.
    """

    def __init__(self, current: Snapshot) -> None:
        self.current = current
        self.error: Exception | None = None
        self.hangs = False
        self.act_error: Exception | None = None
        self.insight_error: Exception | None = None
        self.insight_hangs = False
        self.still_runs = True
        self.num_dropped = 321
        self.block_maps: dict[int, BlockMap] = {0: block_map(num_active=0, num_cached=0)}
        self.cached_prefixes: tuple[PrefixView, ...] = ()
        self.known_timelines: dict[str, Timeline] = {}
        self.log: tuple[LogEvent, ...] = ()
        self.report = no_findings()
        self.reveals: dict[str, Reveal] = {}
        self.acts: list[tuple[str, str]] = []
        self.asked: list[tuple[str, object]] = []
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

    # ------------------------------------------------------------------ acts

    def _act(self, name: str, argument: str) -> None:
        if self.act_error is not None:
            raise self.act_error
        self.acts.append((name, argument))

    @property
    def aborted(self) -> list[str]:
        """The requests that were to be ended."""
        return [argument for name, argument in self.acts if name == "abort"]

    async def abort(self, request_id: str) -> bool:
        self._act("abort", request_id)
        return self.still_runs

    async def reset_cache(self) -> int:
        self._act("reset", "")
        return self.num_dropped

    async def drop_prefix(self, chain: str) -> int:
        self._act("drop", chain)
        found = [prefix for prefix in self.cached_prefixes if prefix.prefix_id == chain]
        self.cached_prefixes = tuple(prefix for prefix in self.cached_prefixes if prefix.prefix_id != chain)
        return sum(prefix.num_tokens // 16 for prefix in found)

    async def pin(self, chain: str) -> int:
        self._act("pin", chain)
        return self._set_pinned(chain, is_pinned=True)

    async def unpin(self, chain: str) -> bool:
        self._act("unpin", chain)
        return self._set_pinned(chain, is_pinned=False) > 0

    def _set_pinned(self, chain: str, *, is_pinned: bool) -> int:
        found = sum(prefix.num_tokens // 16 for prefix in self.cached_prefixes if prefix.prefix_id == chain)
        self.cached_prefixes = tuple(
            replace(prefix, is_pinned=is_pinned) if prefix.prefix_id == chain else prefix
            for prefix in self.cached_prefixes
        )
        return found

    async def keep_turn(self, request_id: str) -> int:
        self._act("keep_turn", request_id)
        return 0

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        self._act("save", f"{name} {chain}")
        return SessionInfo(name, 0, 0)

    async def restore_session(self, name: str) -> SessionInfo:
        self._act("restore", name)
        return SessionInfo(name, 0, 0)

    # ------------------------------------------------------------------ insight

    async def _asked(self, name: str, argument: object) -> None:
        self.asked.append((name, argument))
        if self.insight_hangs:
            await asyncio.Event().wait()
        if self.insight_error is not None:
            raise self.insight_error

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        await self._asked("prefixes", limit)
        return self.cached_prefixes[:limit]

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap:
        await self._asked("block_map", (max_cells, group_id))
        return self.block_maps[group_id]

    async def timeline(self, request_id: str) -> Timeline | None:
        await self._asked("timeline", request_id)
        return self.known_timelines.get(request_id)

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        await self._asked("timelines", limit)
        ended = [line for line in self.known_timelines.values() if line.has_ended]
        return tuple(replace(line, entries=line.entries[-1:]) for line in ended[:limit])

    async def events(self, limit: int) -> tuple[LogEvent, ...]:
        await self._asked("events", limit)
        return self.log[-limit:]

    async def doctor(self) -> DoctorReport:
        await self._asked("doctor", None)
        return self.report

    async def reveal(self, name: str) -> Reveal:
        await self._asked("reveal", name)
        if name not in self.reveals:
            raise KvdError(f"nothing is known of {name}")
        return self.reveals[name]


class LivelyConsole(FakeConsole):
    """An engine that is made up as it goes, for a person to look at."""

    _CLIENTS = ("claude-code 127.0.0.1", "rag-indexer", "open-webui 192.168.1.23", "autocomplete", "aider 127.0.0.1")

    def __init__(self, *, num_requests: int, seed: int = 1) -> None:
        super().__init__(snapshot())
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


def main() -> None:
    from kvd.tui.app import Dashboard

    kind = sys.argv[1] if len(sys.argv) > 1 else "busy"
    engine = LivelyConsole(num_requests={"busy": 19, "idle": 0, "many": 500, "lost": 0}[kind])
    engine._lost = kind == "lost"
    dashboard = Dashboard(engine, address="http://127.0.0.1:8000/v1", model="smollm2-135m-instruct", on_quit="ask")
    print(asyncio.run(dashboard.run_async()))


if __name__ == "__main__":
    main()
