"""Where the memory goes when an engine starts: what may be taken in all is measured, the rest is arithmetic.

The arithmetic is that of `kvd.cache.fitting`, which `kvd plan` and the dashboard use as well. A backend with a memory
of its own (`Ops.memory`) is measured and asked; the others share the host's. Nothing in here knows which backend that
is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kvd.cache.fitting import HEADROOM_BYTES as HEADROOM_BYTES
from kvd.cache.fitting import Demand as Demand
from kvd.cache.fitting import Limits as Limits
from kvd.cache.fitting import Plan as Plan
from kvd.cache.fitting import advice as advice
from kvd.cache.fitting import device_room, host_room
from kvd.cache.fitting import gib as gib
from kvd.cache.fitting import plan_memory as plan_memory
from kvd.config import SETTINGS, Config
from kvd.engine import host_memory
from kvd.engine.build_tiers import TierSizes
from kvd.errors import NotEnoughMemory
from kvd.geometry import DEVICE_SETTING, HOST_SETTING
from kvd.geometry import Room as Room
from kvd.model.weights import ModelWeights
from kvd_kernels.ops import DeviceMemory, Ops
from kvd_kernels.weights import Linear, stored_bytes


def find_room(
    config: Config, ops: Ops, weight_bytes: int, tier_sizes: TierSizes, log: Callable[[str, str], None]
) -> Room:
    """Ask when weights are loaded and not packed. Raises NotEnoughMemory where the RAM tier alone is too much."""
    host = host_memory.available_bytes()
    beside = host - weight_bytes if ops.memory is None else host
    if tier_sizes.num_bytes > beside:
        raise NotEnoughMemory(
            f"swap_space takes {gib(tier_sizes.num_bytes)}, but beside the weights only {gib(beside)} of memory "
            "are free"
        )
    _announce_idle_settings(config, ops.memory, log)
    if ops.memory is None:
        return host_room(host, tier_sizes.num_bytes, config.cpu_memory_utilization)
    reachable = ops.memory.free_bytes() + ops.memory.held_bytes()
    room, warning = device_room(
        ops.memory.total_bytes(), reachable, config.gpu_memory_utilization, ops.memory.setting
    )  # fmt: skip
    if warning:
        log("warning", warning)
    return room


def _announce_idle_settings(config: Config, memory: DeviceMemory | None, log: Callable[[str, str], None]) -> None:
    """Say which setting of the other kind of memory is set and does nothing."""
    idle, reason = (
        (DEVICE_SETTING, f"on the CPU, where {HOST_SETTING} or kv_cache_memory_bytes sizes the KV cache")
        if memory is None
        else (HOST_SETTING, f"on the GPU, where {memory.setting} or kv_cache_memory_bytes sizes the KV cache")
    )
    if getattr(config, idle) != SETTINGS[idle].default:
        log("warning", f"{idle} has no effect {reason}")


class Packs(Protocol):
    """A backend, or what knows how large its packed layers are."""

    def prepared_bytes(self, linear: Linear, /) -> int: ...


def prepared_weight_bytes(ops: Packs, weights: ModelWeights) -> int:
    """Bytes of all packed matrices and norms. Looks at shapes alone: tensors of the meta device will do.

    The embedding is looked up in the form that it was loaded in; a tied head is packed beside it.
    """
    total = stored_bytes(weights.embedding) + ops.prepared_bytes(weights.head)
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            total += ops.prepared_bytes(linear)
        total += 4 * (layer.attention_norm.numel() + layer.mlp_norm.numel())
    return total + 4 * weights.final_norm.numel()


def is_exhaustion(error: RuntimeError) -> bool:
    """Whether memory ran out: torch has a type for that, but graphs, kernels that are loaded and cuBLAS only say so."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


@contextlib.contextmanager
def exhaustion_told(memory: DeviceMemory | None, doing: str, demand: Demand) -> Iterator[None]:
    """Turn torch's out-of-memory error into one line with the numbers. doing: "packing the weights" and the like."""
    try:
        yield
    except RuntimeError as error:
        if not is_exhaustion(error):
            raise
        state = (
            "" if memory is None else f" (kvd holds {gib(memory.held_bytes())}, {gib(memory.free_bytes())} are free)"
        )
        raise NotEnoughMemory(
            f"the memory ran out while {doing}{state}: the weights need {gib(demand.weight_bytes)} and a step of "
            f"{demand.limits.max_tokens} tokens {gib(demand.buffer_bytes())}; lower max_num_batched_tokens or "
            f"max_num_seqs, or end what else uses the device"
        ) from None
