"""Where the memory goes: what may be taken in all, and what weights, steps and KV cache get of it.

Figures are bytes. A backend with a memory of its own (`Ops.memory`) is measured and asked; the others share the host's.
Nothing in here knows which backend that is. Every refusal has the numbers, and the largest setting that fits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvd.cache.sizing import GIB, PoolSize, activation_bytes, rope_bytes, size_pool
from kvd.config import SETTINGS, Config
from kvd.engine import host_memory
from kvd.engine.build_tiers import TierSizes
from kvd.errors import NotEnoughMemory
from kvd.model.spec import ModelSpec
from kvd.model.weights import ModelWeights
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import DeviceMemory, Ops
from kvd_kernels.weights import stored_bytes

HEADROOM_BYTES = 256 << 20
"""Of a device's free memory, left alone: what drivers and other processes take after the start is in no formula."""
MIN_KV_TOKENS = 512
"""The KV cache that advice about other settings leaves room for."""
MIN_STEP_TOKENS = 16
HOST_SETTING = "cpu_memory_utilization"
DEVICE_SETTING = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step."""

    max_tokens: int
    max_seqs: int


@dataclass(frozen=True, slots=True)
class Room:
    """What may be taken.

    limit_bytes  by weights, steps and KV cache together
    kv_share     of what weights and steps leave, by the KV cache
    setting      the configuration field that makes it more
    words        the limit for messages, as the end of a sentence that begins with "but"
    most_bytes   the limit at a setting of 1; total_bytes is all that there is
    """

    limit_bytes: int
    kv_share: float
    setting: str
    words: str
    most_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What was settled on. step_bytes: buffers, rope tables and what a step takes beside them."""

    pool: PoolSize
    step_bytes: int


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
        left = host - tier_sizes.num_bytes
        words = f"only {gib(left)} of memory are free"
        if tier_sizes.num_bytes:
            words += f" beside swap_space ({gib(tier_sizes.num_bytes)})"
        return Room(left, config.cpu_memory_utilization, HOST_SETTING, words, left, left)
    total = ops.memory.total_bytes()
    reachable = ops.memory.free_bytes() + ops.memory.held_bytes()
    most = max(0, reachable - HEADROOM_BYTES)
    share = config.gpu_memory_utilization
    limit = min(int(total * share), most)
    words = f"{ops.memory.setting} {share:g} of {gib(total)} is {gib(limit)}"
    if limit < int(total * share):
        words = f"of {gib(total)} the driver and others hold {gib(total - reachable)}, which leaves {gib(limit)}"
        log("warning", f"{ops.memory.setting} {share:g} asks for {gib(int(total * share))}, but {words}")
    return Room(limit, 1.0, ops.memory.setting, words, most, total)


def _announce_idle_settings(config: Config, memory: DeviceMemory | None, log: Callable[[str, str], None]) -> None:
    """Say which setting of the other kind of memory is set and does nothing."""
    idle, reason = (
        (DEVICE_SETTING, f"on the CPU, where {HOST_SETTING} or kv_cache_memory_bytes sizes the KV cache")
        if memory is None
        else (HOST_SETTING, f"on the GPU, where {memory.setting} or kv_cache_memory_bytes sizes the KV cache")
    )
    if getattr(config, idle) != SETTINGS[idle].default:
        log("warning", f"{idle} has no effect {reason}")


def prepared_weight_bytes(ops: Ops, weights: ModelWeights) -> int:
    """Bytes of all packed matrices and norms.

    The embedding is looked up in the form that it was loaded in; a tied head is packed beside it.
    """
    total = stored_bytes(weights.embedding) + ops.prepared_bytes(weights.head)
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            total += ops.prepared_bytes(linear)
        total += 4 * (layer.attention_norm.numel() + layer.mlp_norm.numel())
    return total + 4 * weights.final_norm.numel()


@dataclass(frozen=True, slots=True)
class Demand:
    """What stands before the KV cache is sized.

    weight_bytes   packed
    scratch_bytes  what the largest step was seen to take beside its buffers, graphs included; 0 before that was seen
    """

    spec: ModelSpec
    kv_format: KVFormat
    limits: Limits
    element_bytes: int
    weight_bytes: int
    scratch_bytes: int = 0

    def buffer_bytes(self, max_tokens: int | None = None) -> int:
        """Of a step of `max_tokens` tokens, or of the largest; scratch is taken to grow with the tokens."""
        tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        buffers = activation_bytes(
            self.spec, max_tokens=tokens, max_seqs=self.limits.max_seqs, element_bytes=self.element_bytes
        )
        return buffers + self.scratch_bytes * tokens // self.limits.max_tokens

    @property
    def least_kv_bytes(self) -> int:
        """Of a KV cache that is worth starting for."""
        return math.ceil(MIN_KV_TOKENS * self.kv_format.bytes_per_token) + rope_bytes(self.spec, MIN_KV_TOKENS)


def plan_memory(config: Config, demand: Demand, room: Room) -> Plan:
    """Settle the KV cache's size and the served context. Raises NotEnoughMemory."""
    spec, kv_format = demand.spec, demand.kv_format
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise NotEnoughMemory(
            f"max_model_len {config.max_model_len} exceeds the model's {spec.max_positions} positions"
        )
    buffer_bytes = demand.buffer_bytes()
    beside = room.limit_bytes - demand.weight_bytes - buffer_bytes
    # Rope tables cover the served context, which is never longer than what fits in all that is left.
    wanted_len = config.max_model_len if config.max_model_len is not None else spec.max_positions
    left = beside - rope_bytes(spec, min(wanted_len, int(max(0, beside) / kv_format.bytes_per_token)))
    if left <= 0:
        raise NotEnoughMemory(
            f"the weights need {gib(demand.weight_bytes)} and a step of {demand.limits.max_tokens} tokens "
            f"{gib(buffer_bytes)}, but {room.words}{advice(demand, room)}"
        )
    if config.kv_cache_memory_bytes is not None:
        kv_bytes, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if kv_bytes > left:
            raise NotEnoughMemory(
                f"kv_cache_memory_bytes asks for {gib(kv_bytes)}, but beside weights and activations "
                f"only {gib(left)} are left"
            )
    else:
        kv_bytes, setting = int(left * room.kv_share), room.setting
    pool = size_pool(
        kv_format=kv_format, kv_bytes=kv_bytes, model_max_len=spec.max_positions,
        requested_max_len=config.max_model_len, num_blocks_override=config.num_gpu_blocks_override,
        memory_setting=setting, forgets_tokens=config.kv_eviction != "none",
    )  # fmt: skip
    if pool.kv_bytes > left:
        raise NotEnoughMemory(
            f"num_gpu_blocks_override {pool.num_blocks} needs {gib(pool.kv_bytes)}, but {gib(left)} are left; "
            f"the largest that fits is {left // kv_format.block_bytes}"
        )
    return Plan(pool, buffer_bytes + rope_bytes(spec, pool.max_model_len))


def advice(demand: Demand, room: Room) -> str:
    """What to change so that a start succeeds, with numbers: a smaller step, or a larger share of a device."""
    spare = room.limit_bytes - demand.weight_bytes - demand.least_kv_bytes
    least = max(MIN_STEP_TOKENS, demand.limits.max_seqs)
    ways = []
    if demand.limits.max_tokens > least and demand.buffer_bytes(least) <= spare:
        fits, too_many = least, demand.limits.max_tokens
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if demand.buffer_bytes(middle) <= spare else (fits, middle)
        ways.append(f"--max-num-batched-tokens {fits} fits")
    needed = demand.weight_bytes + demand.buffer_bytes() + demand.least_kv_bytes
    if room.setting != HOST_SETTING and needed <= room.most_bytes:
        share = math.ceil(100 * needed / room.total_bytes) / 100
        ways.append(f"--{room.setting.replace('_', '-')} {share:g} would do")
    return "".join(f"; {way}" for way in ways) or "; a smaller model or max_num_seqs is needed"


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


def gib(num_bytes: int) -> str:
    """For messages."""
    return f"{max(0, num_bytes) / GIB:.2f} GiB"
