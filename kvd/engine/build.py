"""Builds an engine from a configuration and a resolved model: load, budget, pack, profile, wire.

Every refusal that depends on the machine happens in here, before the first request, with the numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvd import __version__
from kvd.cache.eviction import POLICIES
from kvd.cache.manager import CacheManager
from kvd.cache.sizing import GIB, PoolSize, activation_bytes, rope_bytes, size_pool
from kvd.cache.store import allocate_cache
from kvd.config import Config
from kvd.core import BLOCK_SIZE, EngineInfo, MemoryBudget
from kvd.engine import host_memory, profiling
from kvd.engine.backend import open_ops
from kvd.engine.build_tiers import TierSizes, open_tiers, size_tiers
from kvd.engine.engine import Engine
from kvd.engine.runner import Runner, RunnerObserver
from kvd.engine.sessions import Sessions
from kvd.errors import ConfigError, NotEnoughMemory
from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights
from kvd.model.progress import Progress
from kvd.model.spec import ModelSpec
from kvd.model.weights import ModelWeights
from kvd.scheduler.scheduler import Rates, Scheduler, SchedulerConfig
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import Ops
from kvd_kernels.weights import stored_bytes

AUTO_MAX_NUM_SEQS = 32
AUTO_MAX_BATCHED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Limits:
    """The largest step."""

    max_tokens: int
    max_seqs: int


def build_engine(
    config: Config,
    files: ModelFiles,
    spec: ModelSpec,
    *,
    home: Path,
    progress: Progress,
    log: Callable[[str, str], None],
    observer: RunnerObserver | None = None,
    rates: Rates | None = None,
) -> Engine:
    """Load and wire everything; the engine still has to be started.

    log: receives (level, message). rates: to be used in place of measured ones. Raises StartupError and its children.
    """
    limits = _Limits(
        AUTO_MAX_BATCHED_TOKENS if config.max_num_batched_tokens is None else config.max_num_batched_tokens,
        AUTO_MAX_NUM_SEQS if config.max_num_seqs is None else config.max_num_seqs,
    )
    limits = _Limits(max(limits.max_tokens, limits.max_seqs), limits.max_seqs)
    ops = open_ops(config.backend, config.cpu_threads, log)
    kv_format = spec.kv_format(config.kv_cache_dtype)
    if config.kv_eviction != "none" and all(group.window for group in kv_format.groups):
        raise ConfigError("kv_eviction: every layer of this model has a sliding window already; leave it at none")
    tier_sizes = size_tiers(config, kv_format, log)
    weights = load_weights(files, spec, progress=progress)
    weight_bytes = prepared_weight_bytes(ops, weights)
    pool, total_bytes, step_bytes = _budget(config, spec, kv_format, ops, limits, weight_bytes, tier_sizes)
    if pool.warning:
        log("warning", pool.warning)

    decoder = Decoder(
        weights, ops, kv_format,
        max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, max_positions=pool.max_model_len, progress=progress,
    )  # fmt: skip
    key_seed = "|".join((weights.fingerprint, kv_format.layout_id, ops.arithmetic_id))
    del weights
    cache = allocate_cache(kv_format, pool.num_blocks, ops.device)
    generator = random.Random(config.seed)
    engines: list[Engine] = []  # the one that is made below, for the disk tier's threads to wake
    tiers = open_tiers(config, kv_format, tier_sizes, ops, wake=lambda: wake_all(engines), log=log)
    runner = Runner(
        decoder, cache,
        max_blocks_per_request=-(-pool.max_model_len // BLOCK_SIZE),
        draw_seed=lambda: generator.getrandbits(63), arena=tiers.arena, observer=observer,
    )  # fmt: skip
    plan = profiling.largest_step(
        max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, max_model_len=pool.max_model_len,
        num_blocks=pool.num_blocks, num_groups=len(kv_format.groups),
    )  # fmt: skip
    with progress.task("Profiling the largest step", 1, "step") as task:
        scratch_bytes = profiling.cached_scratch_bytes(
            runner, plan, key=f"{__version__}|{key_seed}|{limits}|{plan.num_tokens}", folder=home / "profiles"
        )
        task.advance(1)
    if scratch_bytes + pool.kv_bytes > host_memory.available_bytes():
        log(
            "warning",
            f"the largest step takes {scratch_bytes / GIB:.2f} GiB beside a KV cache of {pool.kv_bytes / GIB:.2f} GiB, "
            f"more than is free: lower cpu_memory_utilization or max_num_batched_tokens",
        )
    budget = MemoryBudget(
        total_bytes, weight_bytes, step_bytes + scratch_bytes, pool.kv_bytes, pool.num_blocks, kv_format.block_bytes,
        kv_format.bytes_per_token, spec.kv_format("fp16").bytes_per_token,
    )  # fmt: skip
    info = EngineInfo(
        model=config.model,
        served_names=tuple(config.served_model_name) or (config.model,),
        architecture=spec.architecture,
        quantization=spec.quantization,
        backend=ops.label,
        device=str(ops.device),
        kv_cache_dtype="int8" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=pool.max_model_len,
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        vocab_size=spec.vocab_size,
        prefix_caching=config.enable_prefix_caching,
        budget=budget,
        created=int(time.time()),
        version=__version__,
    )
    manager = CacheManager(
        num_blocks=(pool.num_blocks,) * len(kv_format.groups),
        windows=tuple(group.window for group in kv_format.groups),
        enable_prefix_caching=config.enable_prefix_caching,
        key_seed=key_seed.encode(),
        make_policy=POLICIES[config.cache_eviction],
        max_cached_blocks=None if config.max_cached_tokens is None else config.max_cached_tokens // BLOCK_SIZE,
        num_ram_slots=tiers.num_slots,
        slow_tier=tiers.disk,
        block_bytes=[group.block_bytes for group in kv_format.groups],
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_seqs,
            max_num_batched_tokens=limits.max_tokens,
            max_model_len=pool.max_model_len,
            max_waiting=config.max_waiting,
            queue_timeout_seconds=config.queue_timeout,
            target_gap_seconds=config.target_gap_seconds,
            is_auto_num_seqs=config.max_num_seqs is None,
            default_budget_tokens=config.kv_eviction_tokens,
            tool_turn_seconds=config.keep_tool_turns,
        ),
        manager,
        time.monotonic,
        rates,
    )
    sessions = Sessions(config.home_path / "sessions", manager, cache)
    engine = Engine(info, scheduler, runner, log=log, sessions=sessions, disk=tiers.disk)
    engines.append(engine)
    return engine


def wake_all(engines: list[Engine]) -> None:
    """What the disk tier's threads call."""
    for engine in engines:
        engine.wake()


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


def _budget(
    config: Config,
    spec: ModelSpec,
    kv_format: KVFormat,
    ops: Ops,
    limits: _Limits,
    weight_bytes: int,
    tier_sizes: TierSizes,
) -> tuple[PoolSize, int, int]:
    """(pool, memory there is in bytes, bytes of step buffers and rope tables)."""
    total = host_memory.available_bytes()
    if tier_sizes.num_bytes > total - weight_bytes:
        raise NotEnoughMemory(
            f"swap_space takes {tier_sizes.num_bytes / GIB:.2f} GiB, but beside the weights only "
            f"{max(0, total - weight_bytes) / GIB:.2f} GiB of memory are free"
        )
    total -= tier_sizes.num_bytes
    wanted_len = config.max_model_len if config.max_model_len is not None else spec.max_positions
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise NotEnoughMemory(
            f"max_model_len {config.max_model_len} exceeds the model's {spec.max_positions} positions"
        )
    step_bytes = activation_bytes(
        spec, max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, element_bytes=ops.activation_dtype.itemsize
    )
    # Rope tables cover the served context, which is never longer than what fits in all that is left.
    most_tokens = int(max(0, total - weight_bytes - step_bytes) / kv_format.bytes_per_token)
    buffer_bytes = step_bytes
    step_bytes += rope_bytes(spec, min(wanted_len, most_tokens))
    left = total - weight_bytes - step_bytes
    if left <= 0:
        raise NotEnoughMemory(
            f"the weights need {weight_bytes / GIB:.2f} GiB and a step {step_bytes / GIB:.2f} GiB, "
            f"but only {total / GIB:.2f} GiB of memory are free"
        )
    if config.kv_cache_memory_bytes is not None:
        kv_bytes, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if kv_bytes > left:
            raise NotEnoughMemory(
                f"kv_cache_memory_bytes asks for {kv_bytes / GIB:.2f} GiB, but beside weights and activations "
                f"only {left / GIB:.2f} GiB are left"
            )
    else:
        kv_bytes, setting = int(left * config.cpu_memory_utilization), "cpu_memory_utilization"
    pool = size_pool(
        kv_format=kv_format, kv_bytes=kv_bytes, model_max_len=spec.max_positions,
        requested_max_len=config.max_model_len, num_blocks_override=config.num_gpu_blocks_override,
        memory_setting=setting, forgets_tokens=config.kv_eviction != "none",
    )  # fmt: skip
    if pool.kv_bytes > left:
        raise NotEnoughMemory(
            f"num_gpu_blocks_override {pool.num_blocks} needs {pool.kv_bytes / GIB:.2f} GiB, "
            f"but {left / GIB:.2f} GiB are left"
        )
    return pool, total, buffer_bytes + rope_bytes(spec, pool.max_model_len)
