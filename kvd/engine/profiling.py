"""Checks the memory formula against one real run of the largest step.

The pass computes the largest step that the configuration allows, for as many sequences as may run, and measures what it
took beside weights and buffers. On the host that is a warning at most, and the number is kept per model, limits and
version in the cache folder, so that only the first start pays for it. On a device it is measured at every start,
before the KV cache is sized: what a step takes there is gone for good.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvd.cache.sizing import GIB
from kvd.core import BLOCK_SIZE, PlanItem, Request, SamplingParams, StepPlan
from kvd.engine import host_memory
from kvd.engine.memory_budget import is_exhaustion
from kvd.engine.runner import Runner
from kvd.errors import NotEnoughMemory
from kvd.model.progress import Progress, Task
from kvd_kernels.ops import DeviceMemory


def largest_step(
    *, max_tokens: int, max_seqs: int, max_model_len: int, num_blocks: int, num_groups: int, is_deep: bool = False
) -> StepPlan:
    """Prefills as long as possible beside single tokens of other sequences; every sequence is sampled.

    is_deep: the sequences end where the served context ends, in tables that name the blocks again and again: what they
    read means nothing, but it is as much as a step may have to read.
    """
    lengths = [1] * min(max_seqs, max_tokens, num_blocks)
    tokens_left, blocks_left = max_tokens - len(lengths), num_blocks - len(lengths)
    for index in range(len(lengths)):
        # The sequence's first token came out of the totals already, and so did the block that it lies in.
        more = min(max_model_len - 1, tokens_left, blocks_left * BLOCK_SIZE + BLOCK_SIZE - 1)
        lengths[index] += more
        tokens_left -= more
        blocks_left -= -(-lengths[index] // BLOCK_SIZE) - 1
    sampling = SamplingParams(max_tokens=1, temperature=1.0, seed=0)
    items, requests, next_block = [], [], 0
    for slot, num_tokens in enumerate(lengths):
        count = -(-num_tokens // BLOCK_SIZE)
        start = max(0, max_model_len - 1 - num_tokens) if is_deep else 0
        if is_deep:
            count = -(-(start + num_tokens) // BLOCK_SIZE)
            table = tuple(index % num_blocks for index in range(count))
        else:
            table = tuple(range(next_block, next_block + count))
            next_block += count
        request_id = f"profile-{slot}"
        requests.append(Request(request_id, (0,) * num_tokens, sampling, 0.0))
        items.append(
            PlanItem(
                request_id,
                slot,
                start,
                (0,) * num_tokens,
                (table,) * num_groups,
                (range(0, count * BLOCK_SIZE, BLOCK_SIZE),) * num_groups,
                samples=True,
            )
        )
    return StepPlan(-2, tuple(items), tuple(requests))


def measure_scratch_bytes(runner: Runner, plan: StepPlan) -> int:
    """Bytes that the step took beyond what was resident before, at its peak; 0 where the kernel does not tell.

    Raises FloatingPointError when the model's weights drive its logits beyond float32.
    """
    can_measure = host_memory.reset_peak()
    before = host_memory.resident_bytes()
    _run(runner, plan)
    return max(0, host_memory.peak_bytes() - before) if can_measure else 0


def prepare(runner: Runner, label: str, progress: Progress) -> None:
    """What the first steps would take long for, with a progress bar where there is something to do."""
    with contextlib.ExitStack() as stack:
        tasks: list[Task] = []
        seen = 0

        def report(done: int, total: int) -> None:
            nonlocal seen
            if not tasks and done < total:
                tasks.append(stack.enter_context(progress.task(label, total, "sizes")))
            if tasks:
                tasks[0].advance(done - seen)
            seen = done

        runner.prepare(report)


def measure_device_bytes(
    memory: DeviceMemory, make_runner: Callable[[int], tuple[Runner, int]], *, limits: dict[str, int]
) -> int:
    """Bytes that a runner and its largest step take on the device, KV cache apart; everything is given back.

    make_runner: (number of blocks) → a runner on a cache of zeros of that size, and the cache's bytes.
    limits: of `largest_step`, without num_blocks. Raises FloatingPointError as `measure_scratch_bytes` does, and
    NotEnoughMemory with the largest step that was seen to fit where the whole one does not.
    """
    num_blocks = limits["max_seqs"] + -(-limits["max_tokens"] // BLOCK_SIZE)
    before, max_tokens = memory.held_bytes(), limits["max_tokens"]
    reachable = before + memory.free_bytes()
    memory.reset_peak()

    def try_steps() -> tuple[int, int] | None:
        """The cache's bytes, and those that are out of reach since; None where a step of max_tokens does not fit."""
        try:
            runner, cache_bytes = make_runner(num_blocks)
            for is_deep in (False, True):
                _run(
                    runner,
                    largest_step(**{**limits, "max_tokens": max_tokens}, num_blocks=num_blocks, is_deep=is_deep),
                )
        except RuntimeError as error:
            if not is_exhaustion(error):
                raise
            return None
        # Loaded kernels and the nodes of graphs are held by the driver, in nobody's name.
        return cache_bytes, max(0, reachable - memory.held_bytes() - memory.free_bytes())

    while (taken := try_steps()) is None:
        gc.collect()
        if max_tokens == limits["max_seqs"]:
            raise NotEnoughMemory(
                f"beside {before / GIB:.2f} GiB of weights and buffers not even a step of {max_tokens} tokens fits "
                f"({memory.free_bytes() / GIB:.2f} GiB are free): lower max_num_seqs, or end what else uses the device"
            )
        max_tokens = max(limits["max_seqs"], max_tokens // 2)
    gc.collect()
    if max_tokens < limits["max_tokens"]:
        raise NotEnoughMemory(
            f"a step of {limits['max_tokens']} tokens does not fit beside {before / GIB:.2f} GiB of weights and "
            f"buffers ({memory.free_bytes() / GIB:.2f} GiB are free); one of {max_tokens} does: "
            f"--max-num-batched-tokens {max_tokens}"
        )
    cache_bytes, driver_bytes = taken
    return max(0, memory.peak_bytes() - before - cache_bytes) + driver_bytes


def _run(runner: Runner, plan: StepPlan) -> None:
    """One step, and forget its requests."""
    result = runner.run(plan)
    if any(sample.token_id is None for sample in result.samples):
        raise FloatingPointError("logits are not finite")
    ended = tuple(item.request_id for item in plan.items)
    runner.run(StepPlan(plan.step_id + 1, (), ended_request_ids=ended))


def cached_scratch_bytes(runner: Runner, plan: StepPlan, *, key: str, folder: Path) -> int:
    """`measure_scratch_bytes`, remembered in `folder` under `key`.

    A damaged record is measured again; where none can be written, every start measures.
    """
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"
    try:
        record = json.loads(path.read_text())
        if record["key"] == key and isinstance(record["scratch_bytes"], int):
            return int(record["scratch_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = measure_scratch_bytes(runner, plan)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"key": key, "scratch_bytes": measured}))
        temporary.replace(path)
    except OSError:  # then the next start measures again
        with contextlib.suppress(OSError):
            temporary.unlink()
    return measured
