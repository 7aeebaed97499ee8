"""Decode attention over int8 against attention over 16 bits, up to 60K tokens."""

from __future__ import annotations

import torch
from gpu_check_world import INT8_OVER_FP16, Line, World

from kvd_kernels.bench_cuda import attention_runs
from kvd_kernels.kv_format import ElementType

CONTEXTS = (2048, 8192, 32768, 61440)
JUDGED_CONTEXT = 32768
DRY_CONTEXTS = (40,)


@torch.inference_mode()
def run(world: World) -> list[Line]:
    """For each context the time of both, and how much faster int8 is."""
    lines = []
    for num_seqs in (1, 2) if world.is_dry else (1, 8):
        for context in DRY_CONTEXTS if world.is_dry else CONTEXTS:
            seconds: dict[ElementType, float] = {}
            for element in ("int8", "fp16"):
                runs, num_bytes = attention_runs(world.bench, world.shape, num_seqs, context, 1, element)
                seconds[element] = world.bench.meter.seconds(runs)
                name = f"{num_seqs} × {context} tokens, {element}: {seconds[element] * 1e6:.0f} µs"
                share = num_bytes / seconds[element] / world.bench.bandwidth
                is_judged = element == "int8" and context >= 8192
                lines.append(world.share("attention", name, share, world.targets.attention if is_judged else None))
            ratio = seconds["fp16"] / seconds["int8"]
            wanted = INT8_OVER_FP16 if context == JUDGED_CONTEXT else 1.0
            missed = "" if ratio >= wanted or world.is_dry else " (missed)"
            lines.append(
                Line("attention", f"{num_seqs} × {context} tokens, int8 over fp16", f"{ratio:.2f} × as fast",
                     f"{wanted:g} ×{missed}", ratio, "×")
            )  # fmt: skip
    return lines
