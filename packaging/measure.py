"""Times whole steps of the default model in process: scheduler, runner and ops, without HTTP.

    .venv/bin/python packaging/measure.py [RUNS]

Prints medians of RUNS runs, five unless given. Meant for docs/measurements.md, on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from kvd.openmp import bound_spinning

CONTEXT_TOKENS = 96
DECODE_STEPS = 12
WAITING_STEPS = 60
"""Decode steps of the first stream until the last one decodes, at most."""
PREFILL_TOKENS = 512
CHUNK_TOKENS = 256


def main(num_runs: int = 5) -> None:
    bound_spinning()
    from kvd.config import Config
    from kvd.core import Request, SamplingParams
    from kvd.engine.build import build_engine
    from kvd.model.loading import read_spec, resolve_model
    from kvd.model.progress import QuietProgress

    config = Config(num_gpu_blocks_override=2048, max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False)
    home = Path(config.home_path)
    quiet = QuietProgress()
    started = time.monotonic()
    files = resolve_model(config.model, home=home, revision=None, progress=quiet)
    engine = build_engine(config, files, read_spec(files), home=home, progress=quiet, log=lambda level, message: None)
    print(f"loaded, packed and profiled in {time.monotonic() - started:.1f} s")
    # The parts of the engine without its thread: what is timed is a step, not a hand-over.
    scheduler, runner = engine._scheduler, engine._runner
    numbers = iter(range(10**6))

    def start(num_prompt: int, max_tokens: int) -> None:
        prompt = tuple(17 + (7 * position + 3) % 4000 for position in range(num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        scheduler.add(Request(f"r{next(numbers)}", prompt, sampling, time.monotonic()))

    def step() -> float:
        begun = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, runner.run(plan))
        return time.perf_counter() - begun

    rates = []
    for _ in range(num_runs):
        start(PREFILL_TOKENS, 1)
        rates.append(PREFILL_TOKENS / sum(step() for _ in range(PREFILL_TOKENS // CHUNK_TOKENS)))
        assert not scheduler.has_work
    print(f"prefill {PREFILL_TOKENS}, chunks of {CHUNK_TOKENS}: {_spread(rates)} tok/s")
    for num_streams in (1, 8, 16):
        rates = []
        for _ in range(num_runs):
            for _ in range(num_streams):
                start(CONTEXT_TOKENS, DECODE_STEPS + WAITING_STEPS)
            while scheduler.num_waiting or not scheduler.num_running or scheduler.last_step.num_prefill_tokens:
                step()
            assert scheduler.num_running == num_streams, "some have ended before all of them decode"
            rates.append(num_streams / statistics.median(step() for _ in range(DECODE_STEPS // 2)))
            while scheduler.has_work:
                step()
        print(f"decode, {num_streams:2} streams at {CONTEXT_TOKENS} tokens: {_spread(rates)} tok/s together")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
