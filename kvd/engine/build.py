"""Builds an engine from a configuration and a resolved model: load, budget, pack, profile, wire.

Every refusal that depends on the machine happens in here, before the first request, with the numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvd import __version__
from kvd.cache.eviction import POLICIES
from kvd.cache.fitting import choice_of, kv_dtypes_of, limits_of, shape_of
from kvd.cache.manager import CacheManager
from kvd.cache.store import Arena, allocate_cache
from kvd.config import Config
from kvd.config_check import FP8_NEEDS_GPU
from kvd.core import BLOCK_SIZE
from kvd.device_facts import DeviceFacts
from kvd.engine import host_memory, profiling
from kvd.engine.backend import checkpoint_dtype, open_ops
from kvd.engine.build_tiers import open_tiers, size_tiers
from kvd.engine.engine import Engine
from kvd.engine.memory_budget import (
    Demand,
    exhaustion_told,
    find_room,
    gib,
    plan_memory,
    prepared_weight_bytes,
)
from kvd.engine.reporting import OnEvent, ignore
from kvd.engine.runner import Runner, RunnerObserver
from kvd.engine.sessions import Sessions
from kvd.errors import ConfigError
from kvd.geometry import Geometry
from kvd.insight import Admission
from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights
from kvd.model.progress import Progress
from kvd.model.spec import ModelSpec, resolved_kv_dtype
from kvd.model.weights import ModelWeights
from kvd.scheduler.scheduler import Rates, Scheduler, SchedulerConfig
from kvd.views import EngineInfo, MemoryBudget
from kvd_kernels.ops import KVCache, Ops

WatchDevice = Callable[[str], Callable[[], DeviceFacts | None]]


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
    watch: WatchDevice | None = None,
    on_admission: Callable[[Sequence[Admission]], None] | None = None,
    on_event: OnEvent = ignore,
) -> Engine:
    """Load and wire everything; the engine still has to be started.

    log: receives (level, message). rates: to be used in place of measured ones. watch: called with the id of a device;
    gives what reads the latest facts about it. on_admission, on_event: see `Engine`. Raises StartupError and its
    children.
    """
    ops = open_ops(config, checkpoint_dtype(files.config), log)
    return wire_engine(
        config, spec, lambda: load_weights(files, spec, progress=progress), ops,
        home=home, progress=progress, log=log, observer=observer, rates=rates, watch=watch,
        on_admission=on_admission, on_event=on_event,
    )  # fmt: skip


def wire_engine(
    config: Config,
    spec: ModelSpec,
    load: Callable[[], ModelWeights],
    ops: Ops,
    *,
    home: Path,
    progress: Progress,
    log: Callable[[str, str], None],
    observer: RunnerObserver | None = None,
    rates: Rates | None = None,
    watch: WatchDevice | None = None,
    on_admission: Callable[[Sequence[Admission]], None] | None = None,
    on_event: OnEvent = ignore,
) -> Engine:
    """`build_engine` behind the choice of a backend. load: delivers the weights, which nobody else should keep."""
    limits = limits_of(config, ops.default_step_tokens)
    kv_format = spec.kv_format(config.kv_cache_dtype)
    if config.kv_cache_dtype.startswith("fp8") and ops.arithmetic == "a8":
        raise ConfigError(f"kv_cache_dtype: {config.kv_cache_dtype} {FP8_NEEDS_GPU}")
    if config.kv_eviction != "none" and all(group.window for group in kv_format.groups):
        raise ConfigError("kv_eviction: every layer of this model has a sliding window already; leave it at none")
    tier_sizes = size_tiers(config, kv_format, log)
    weights = load()
    weight_bytes = prepared_weight_bytes(ops, weights)
    demand = Demand(spec, kv_format, limits, ops.activation_dtype.itemsize, weight_bytes)
    room = find_room(config, ops, weight_bytes, tier_sizes, log)
    plan = plan_memory(config, demand, room)

    with exhaustion_told(ops.memory, "packing the weights", demand):
        decoder = Decoder(
            weights, ops, kv_format, max_tokens=limits.max_tokens, max_seqs=limits.max_seqs,
            max_positions=plan.pool.max_model_len, progress=progress,
        )  # fmt: skip
    key_seed = "|".join((weights.fingerprint, kv_format.layout_id, ops.arithmetic_id))
    del weights
    generator = random.Random(config.seed)

    def make_runner(cache: KVCache, arena: Arena | None, watching: RunnerObserver | None) -> Runner:
        return Runner(
            decoder, cache, max_blocks_per_request=-(-plan.pool.max_model_len // BLOCK_SIZE),
            draw_seed=lambda: generator.getrandbits(63), arena=arena, observer=watching,
        )  # fmt: skip

    step_limits = {
        "max_tokens": limits.max_tokens, "max_seqs": limits.max_seqs,
        "max_model_len": plan.pool.max_model_len, "num_groups": len(kv_format.groups),
    }  # fmt: skip
    if ops.memory is not None:
        # Graphs and scratch are gone for good before the cache is sized, so they are measured on a small cache first.
        trial_pools: list[torch.Tensor] = []

        def free_trials() -> None:
            for emptied in trial_pools:
                emptied.untyped_storage().resize_(0)  # a backend may remember the pool that it saw last
            trial_pools.clear()

        def make_trial(num_blocks: int) -> tuple[Runner, int]:
            free_trials()  # of one that ran out of memory
            trial = allocate_cache(kv_format, num_blocks, ops.device)
            for zeroed in trial.pools:
                zeroed.zero_()
            trial_pools.extend(trial.pools)
            runner = make_runner(trial, None, None)
            profiling.prepare(runner, "Compiling and profiling steps", progress)
            return runner, num_blocks * kv_format.block_bytes

        with exhaustion_told(ops.memory, "profiling the largest step", demand):
            scratch_bytes = profiling.measure_device_bytes(ops.memory, make_trial, limits=step_limits)
        free_trials()
        demand = replace(demand, scratch_bytes=scratch_bytes)
        plan = plan_memory(config, demand, room)
    pool = plan.pool
    if pool.warning:
        log("warning", pool.warning)
    engines: list[Engine] = []  # the one that is made below, for the disk tier's threads to wake
    with exhaustion_told(ops.memory, "making the KV cache", demand):
        cache = allocate_cache(kv_format, pool.num_blocks, ops.device)
        tiers = open_tiers(
            config, kv_format, tier_sizes, ops, key_seed=key_seed.encode(),
            format_name=f"{resolved_kv_dtype(config.kv_cache_dtype)} ({ops.name})",
            wake=lambda: wake_all(engines), log=log,
        )  # fmt: skip
        runner = make_runner(cache, tiers.arena, observer)
        profiling.prepare(runner, "Recording steps", progress)
    step_bytes = plan.step_bytes
    if ops.memory is None:
        step = profiling.largest_step(**step_limits, num_blocks=pool.num_blocks, is_deep=False)
        with progress.task("Profiling the largest step", 1, "step") as task:
            scratch_bytes = profiling.cached_scratch_bytes(
                runner, step, key=f"{__version__}|{key_seed}|{limits}|{step.num_tokens}", folder=home / "profiles"
            )
            task.advance(1)
        step_bytes += scratch_bytes
        if scratch_bytes + pool.kv_bytes > host_memory.available_bytes():
            log(
                "warning",
                f"the largest step takes {gib(scratch_bytes)} beside a KV cache of {gib(pool.kv_bytes)}, "
                f"more than is free: lower {room.setting} or max_num_batched_tokens",
            )
    budget = MemoryBudget(
        room.limit_bytes, weight_bytes, step_bytes, pool.kv_bytes, pool.num_blocks, kv_format.block_bytes,
        kv_format.bytes_per_token, spec.kv_format("fp16").bytes_per_token, room.setting,
    )  # fmt: skip
    info = EngineInfo(
        model=config.model,
        served_names=tuple(config.served_model_name) or (config.model,),
        architecture=spec.architecture,
        quantization=spec.quantization,
        backend=ops.label,
        device=str(ops.device),
        kv_cache_dtype=resolved_kv_dtype(config.kv_cache_dtype),
        max_model_len=pool.max_model_len,
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        vocab_size=spec.vocab_size,
        prefix_caching=config.enable_prefix_caching,
        budget=budget,
        created=int(time.time()),
        is_auto_num_seqs=config.max_num_seqs is None,
        version=__version__,
        geometry=Geometry(
            shape_of(spec),
            room,
            weight_bytes,
            demand.element_bytes,
            demand.scratch_bytes,
            kv_dtypes_of(ops.arithmetic),
            choice_of(config, limits, room.setting),
        ),
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
        other_formats=tiers.other_formats,
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
    sessions = Sessions(config.home_path / "sessions", manager, cache, ops)
    device_facts = watch(ops.device_id) if watch is not None and ops.device_id else lambda: None
    engine = Engine(
        info, scheduler, runner, log=log, sessions=sessions, disk=tiers.disk, device_facts=device_facts,
        on_admission=on_admission, on_event=on_event,
    )  # fmt: skip
    engines.append(engine)
    return engine


def wake_all(engines: list[Engine]) -> None:
    """What the disk tier's threads call."""
    for engine in engines:
        engine.wake()
