"""Measures what the engine thread's own Python costs per decode step: everything but the numeric work.

    .venv/bin/python packaging/measure_step.py [--steps 400] [--sequences 16 1] [--context 1000]

Scheduler, cache manager, runner and engine are the real ones; in the place of the model stands a program that does
nothing and says token 7 for every row. Sequences have prompts of different lengths, so that the work of a full block
(hash, publish, next block) falls evenly over the steps. The event loop lives on the same thread and runs between the
steps, outside of what is timed, so that no wait for the GIL is counted.

`whole step` is timed alone, in a run of its own; the parts are timed by wrappers in a second run, which makes each of
them some tenths of a microsecond dearer. The mean includes the rare costly steps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, Request, SamplingParams
from kvd.engine.engine import Engine
from kvd.engine.runner import Runner
from kvd.engine.streams import TokenStream
from kvd.scheduler.scheduler import Scheduler, SchedulerConfig
from kvd.views import EngineInfo, MemoryBudget
from kvd_kernels.kv_format import LayerFormat, build_kv_format
from kvd_kernels.ops import Batch, KVCache, SamplingBatch, SamplingResult, StepProgram

MAX_TOKENS = 2048
WARM_UP_STEPS = 20


class IdleProgram(StepProgram):
    """Computes nothing."""

    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        rows = batch.num_logit_rows
        return None if params is None else SamplingResult([7] * rows, [None] * rows)


class World:
    """An engine whose thread is never started: `step` is one round of its loop."""

    def __init__(self, num_sequences: int, context: int, num_steps: int) -> None:
        longest = context + num_sequences + num_steps + WARM_UP_STEPS
        blocks_per_request = -(-longest // BLOCK_SIZE)
        num_blocks = num_sequences * (blocks_per_request + 8)
        kv_format = build_kv_format([(0, LayerFormat(1, 4, "int8", "int8"))])
        config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=MAX_TOKENS, max_model_len=longest)
        manager = CacheManager((num_blocks,), key_seed=b"measure")
        ops = SimpleNamespace(record=lambda *arguments: IdleProgram(), steps_ahead=0)
        decoder: Any = SimpleNamespace(ops=ops, max_tokens=MAX_TOKENS, max_seqs=16, forward=lambda batch, cache: None)
        self.scheduler = Scheduler(config, manager, time.monotonic)
        self.runner = Runner(
            decoder, KVCache(kv_format, (torch.empty(0),)),
            max_blocks_per_request=blocks_per_request, draw_seed=lambda: 1,
        )  # fmt: skip
        budget = MemoryBudget(0, 0, 0, 0, num_blocks, 0, 0.0, 0.0)
        info = EngineInfo(
            "idle", ("idle",), "none", "none", "none", "cpu", "int8", longest, 16, MAX_TOKENS, 100, True, budget, 0, ""
        )
        self.engine = Engine(info, self.scheduler, self.runner, log=print)
        self.engine._inbox.open()
        self.engine._state = "ready"
        sampling = SamplingParams(max_tokens=num_steps + WARM_UP_STEPS, temperature=0.7, top_p=0.95)
        self.readers = [
            asyncio.create_task(_read(self.engine.submit(_request(number, context + number, sampling))))
            for number in range(num_sequences)
        ]

    def step(self) -> None:
        """What `Engine._run` does in one round."""
        self.engine._inbox.run_all(0)
        self.engine._step()
        self.engine._publish()

    async def warm_up(self) -> None:
        """Until every sequence decodes."""
        while self.scheduler.last_step.num_decode_tokens < len(self.readers):
            self.step()
            await asyncio.sleep(0)


def _request(number: int, num_tokens: int, sampling: SamplingParams) -> Request:
    prompt = tuple(1000 * number + position for position in range(num_tokens))
    return Request(f"chatcmpl-{number:028x}", prompt, sampling, time.monotonic())


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def whole_steps(num_sequences: int, context: int, num_steps: int) -> list[float]:
    """Seconds of each decode step."""
    world = World(num_sequences, context, num_steps)
    await world.warm_up()
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        world.step()
        seconds.append(time.perf_counter() - started)
        for _ in range(3):
            await asyncio.sleep(0)
    _cancel(world)
    return seconds


def _cancel(world: World) -> None:
    for reader in world.readers:
        reader.cancel()


class Parts:
    """Seconds per step of wrapped methods, each without the time of the wrapped ones that it calls."""

    def __init__(self) -> None:
        self.per_step: dict[str, list[float]] = {}
        self._current: dict[str, float] = {}
        self._inner: list[float] = []

    def wrap(self, owner: object, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)
        self.per_step[name] = []
        self._current[name] = 0.0

        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - started
                self._current[name] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        setattr(owner, method, timed)

    def end_step(self) -> None:
        for name, seconds in self._current.items():
            self.per_step[name].append(seconds)
            self._current[name] = 0.0


async def parts_of_steps(num_sequences: int, context: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part of each decode step."""
    world = World(num_sequences, context, num_steps)
    await world.warm_up()
    parts = Parts()
    engine, runner = world.engine, world.runner
    parts.wrap(engine._inbox, "run_all", "take commands")
    parts.wrap(world.scheduler, "expire", "scheduler.expire")
    parts.wrap(world.scheduler, "plan", "scheduler.plan")
    parts.wrap(runner._builder, "fill", "batch fill")
    parts.wrap(runner, "_sampling_batch", "sampling parameters")
    parts.wrap(runner._program, "run", "program (idle)")
    parts.wrap(runner, "_accept", "result to samples")
    parts.wrap(runner, "launch", "runner.launch, the rest")
    parts.wrap(runner, "land", "runner.land, the rest")
    parts.wrap(runner, "unready_requests", "waiting for masks")
    parts.wrap(world.scheduler, "commit", "scheduler.commit")
    parts.wrap(engine._statistics, "step", "statistics")
    parts.wrap(engine, "_deliver", "hand-over to streams")
    parts.wrap(engine, "_publish", "publish a snapshot")
    parts.wrap(world, "step", "step loop, the rest")
    for _ in range(num_steps):
        world.step()
        parts.end_step()
        for _ in range(3):
            await asyncio.sleep(0)
    _cancel(world)
    return parts.per_step


def _line(name: str, seconds: list[float]) -> str:
    microseconds = sorted(1e6 * value for value in seconds)
    ninth = microseconds[len(microseconds) * 9 // 10]
    median, mean = statistics.median(microseconds), statistics.fmean(microseconds)
    return f"  {name:<24}{median:>9.1f}{mean:>9.1f}{ninth:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--context", type=int, default=1000, help="tokens of the shortest prompt")
    options = parser.parse_args()
    for num_sequences in options.sequences:
        print(f"{num_sequences} sequences, {options.steps} steps (µs)")
        print(f"  {'':<24}{'median':>9}{'mean':>9}{'90 %':>9}")
        print(_line("whole step", asyncio.run(whole_steps(num_sequences, options.context, options.steps))))
        parts = asyncio.run(parts_of_steps(num_sequences, options.context, options.steps))
        for name, seconds in parts.items():
            print(_line(name, seconds))


if __name__ == "__main__":
    main()
