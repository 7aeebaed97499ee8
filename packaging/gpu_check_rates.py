"""Rates of single kernels on the shapes of an 8B model, as shares of copy bandwidth and of cuBLAS."""

from __future__ import annotations

import torch
from gpu_check_world import Line, World

from kvd_kernels.bench_cuda import PARTS, Result

SMALL_ROWS = 16
LARGE_ROWS = 512
LONG_CONTEXT = 8192


@torch.inference_mode()
def run(world: World) -> list[Line]:
    """Every op that a step calls."""
    sheet = world.card.bytes_per_second
    copying = world.bench.bandwidth
    lines = [
        Line("rates", "copying on the device", f"{copying / 1e9:.0f} GB/s", f"{sheet / 1e9:.0f} GB/s by data sheet",
             copying, "B/s")
    ]  # fmt: skip
    for part in PARTS.values():
        for result in part(world.bench, world.rates):
            lines += _lines_of(world, result)
    return lines


def _lines_of(world: World, result: Result) -> list[Line]:
    """A product is judged by bandwidth while few rows share the weights, and by cuBLAS where many do."""
    name = f"{result.name}: {result.seconds * 1e6:.1f} µs"
    targets = world.targets
    if result.share_of_matmul is None:
        is_long = result.name.startswith("attention int8, ") and f" at {LONG_CONTEXT}" in result.name
        is_decode = " × 1 tokens" in result.name
        target = targets.attention if is_long and is_decode else None
        return [world.share("rates", name, result.share_of_bandwidth, target)]
    layer = result.name.partition(" ")[0]
    rows = int(result.name.rpartition(", ")[2].partition(" ")[0])
    bandwidth_target = matmul_target = None
    if rows <= SMALL_ROWS and layer != "head":
        bandwidth_target = targets.wide if layer in ("gate_up", "down") else targets.narrow
    if rows == LARGE_ROWS and layer != "head":
        matmul_target = targets.prefill
    return [
        world.share("rates", name, result.share_of_bandwidth, bandwidth_target),
        world.share("rates", f"{result.name}, beside cuBLAS", result.share_of_matmul, matmul_target, "cuBLAS"),
    ]
