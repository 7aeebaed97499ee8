"""Checks the memory formula against one real run of the largest step.

The pass computes the largest step that the configuration allows, for as many sequences as may run, and measures what it
took beside weights and buffers. The number is kept per model, limits and version in the cache folder, so
that only the first start pays for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from kvd.core import BLOCK_SIZE, PlanItem, Request, SamplingParams, StepPlan
from kvd.engine import host_memory
from kvd.engine.runner import Runner


def largest_step(*, max_tokens: int, max_seqs: int, max_model_len: int, num_blocks: int, num_groups: int) -> StepPlan:
    """Prefills as long as possible beside single tokens of other sequences; every sequence is sampled."""
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
        table = tuple(range(next_block, next_block + count))
        next_block += count
        request_id = f"profile-{slot}"
        requests.append(Request(request_id, (0,) * num_tokens, sampling, 0.0))
        items.append(
            PlanItem(
                request_id,
                slot,
                0,
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
    result = runner.run(plan)
    if any(sample.token_id is None for sample in result.samples):
        raise FloatingPointError("logits are not finite")
    ended = tuple(item.request_id for item in plan.items)
    runner.run(StepPlan(plan.step_id + 1, (), ended_request_ids=ended))
    return max(0, host_memory.peak_bytes() - before) if can_measure else 0


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
