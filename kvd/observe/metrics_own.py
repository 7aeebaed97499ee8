"""What vLLM has no name for, as Prometheus families under `kvd:`. Pure functions of one snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvd.core import BLOCK_SIZE
from kvd.device_facts import DeviceFacts, HostFacts
from kvd.insight import MissCause
from kvd.observe.metrics_families import by_label, families, histogram_family, model_name
from kvd.views import Counters, DiskFacts, Snapshot

EVICTION_REASONS = ("capacity", "cap", "dropped", "reset")
MISS_CAUSES: tuple[str, ...] = get_args(MissCause)

_HISTOGRAM_HELP = {
    "block_lifetime_seconds": "Of an evicted block: time since it was filled.",
    "block_idle_before_eviction_seconds": "Of an evicted block: time since it was used last.",
    "block_reuse_gap_seconds": "Of a block that was found: time since it was used last.",
}


def own_families(snapshot: Snapshot, hit_rate: float, *, is_healthy: bool) -> Iterator[Metric]:
    """Every `kvd:*` family. hit_rate: of the last minute, 0 to 1."""
    names, values = ["model_name"], [model_name(snapshot)]
    yield _blocks(snapshot, names, values)
    yield from families(GaugeMetricFamily, "kvd", _gauges(snapshot, hit_rate, is_healthy), names, values)
    yield _info(snapshot, names, values)
    yield from _counters(snapshot.counters, names, values)
    yield from _misses(snapshot, names, values)
    for name, histogram in snapshot.cache_histograms.items():
        yield histogram_family(f"kvd:{name}", _HISTOGRAM_HELP.get(name, name), histogram, names, values)
    if snapshot.disk is not None:
        yield from _disk(snapshot.disk, names, values)
    if snapshot.host is not None:
        yield from _host(snapshot.host, names, values)
    if snapshot.device is not None:
        yield from _device(snapshot.device, names, values)


def _blocks(snapshot: Snapshot, names: list[str], values: list[str]) -> Metric:
    blocks = GaugeMetricFamily("kvd:blocks", "KV blocks by state and tier.", labels=[*names, "state", "tier"])
    rows = [
        ("active", "device", snapshot.num_blocks_active),
        ("cached", "device", snapshot.num_blocks_cached),
        ("free", "device", snapshot.num_blocks_free),
        ("used", "ram", snapshot.num_ram_blocks_used),
        ("free", "ram", snapshot.num_ram_blocks - snapshot.num_ram_blocks_used),
    ]
    if snapshot.disk is not None:
        rows.append(("used", "disk", snapshot.disk.num_blocks))
    for state, tier, num_blocks in rows:
        blocks.add_metric([*values, state, tier], num_blocks)
    return blocks


def _gauges(snapshot: Snapshot, hit_rate: float, is_healthy: bool) -> list[tuple[str, str, float]]:
    budget = snapshot.info.budget
    room = snapshot.num_blocks_active * BLOCK_SIZE
    return [
        ("healthy", "1 while requests are served, as /health says; 0 while loading, draining, wedged or dead.",
         float(is_healthy)),
        ("stalled_seconds", "Time since the engine got anything done, while requests wait for it.",
         snapshot.stalled_seconds),
        ("oldest_waiting_seconds", "Age of the request that waits longest for its first step.",
         snapshot.oldest_waiting_seconds),
        ("prefix_cache_hit_rate", "Hit tokens ÷ looked-up tokens over the last minute.", hit_rate),
        ("pinned_blocks", "KV blocks that an operator has pinned.", float(snapshot.num_blocks_pinned)),
        ("ram_blocks_held", "Slots of the RAM tier that cannot be given up: swapped-out requests, and moves under way.",
         float(snapshot.num_ram_blocks_held)),
        ("waste_tokens", "Room in the blocks of running requests that holds no token.",
         float(snapshot.num_waste_tokens)),
        ("fragmentation", "That room ÷ all room in active blocks, 0 to 1.",
         min(1.0, snapshot.num_waste_tokens / room) if room else 0.0),
        ("running_limit", "Requests that may run at the same time, as of now.", float(snapshot.running_limit)),
        ("step_budget_tokens", "Tokens that the latest step was allowed.", float(snapshot.step_budget)),
        ("prefill_tokens_per_second", "Rate of prefill as measured; 0: not yet.", snapshot.prefill_tokens_per_second),
        ("kv_bytes_per_token", "Bytes that one token takes in the KV cache.", budget.bytes_per_token),
        ("kv_bytes_per_token_16bit", "Bytes that it would take in 16 bits.", budget.bytes_per_token_16bit),
        ("kv_bytes", "Bytes of the KV cache.", float(budget.kv_bytes)),
        ("weight_bytes", "Bytes of the model's weights in memory.", float(budget.weight_bytes)),
        ("activation_bytes", "Bytes set aside for the largest step.", float(budget.activation_bytes)),
        ("uptime_seconds", "Seconds since the engine started.", snapshot.uptime_seconds),
    ]  # fmt: skip


def _info(snapshot: Snapshot, names: list[str], values: list[str]) -> Metric:
    about = snapshot.info
    facts = {
        "version": about.version,
        "architecture": about.architecture,
        "quantization": about.quantization,
        "backend": about.backend,
        "device": about.device,
        "kv_cache_dtype": about.kv_cache_dtype,
        "max_model_len": str(about.max_model_len),
    }
    family = GaugeMetricFamily("kvd:info", "What is served, and on what.", labels=[*names, *facts])
    family.add_metric([*values, *facts.values()], 1)
    return family


def _counters(counters: Counters, names: list[str], values: list[str]) -> Iterator[Metric]:
    rows = (
        ("recomputed_tokens", "Tokens computed again after a preemption.", counters.recomputed_tokens),
        ("prefill_tokens_computed", "Prompt tokens computed, again or not.", counters.prefill_tokens_computed),
        ("partial_hit_tokens", "Hit tokens copied out of a block that goes on differently, from whatever source.",
         counters.partial_hit_tokens),
        ("dropped_tokens", "Tokens forgotten under kv_eviction.", counters.num_dropped_tokens),
        ("saved_blocks", "Blocks written through to the RAM tier.", counters.num_saved_blocks),
        ("unsaved_blocks", "Blocks not written through, since no slot was free.", counters.num_unsaved_blocks),
        ("restored_blocks", "Blocks brought back from the RAM tier.", counters.num_restored_blocks),
        ("saved_bytes", "Bytes moved to the RAM tier, swapped-out blocks included.", counters.num_saved_bytes),
        ("restored_bytes", "Bytes moved back from the RAM tier.", counters.num_restored_bytes),
        ("save_seconds", "Seconds spent in moving blocks to the RAM tier.", counters.save_seconds),
        ("restore_seconds", "Seconds spent in moving blocks back.", counters.restore_seconds),
        ("steps", "Steps of the engine.", counters.num_steps),
        ("step_seconds", "Seconds spent in steps.", counters.step_seconds),
    )  # fmt: skip
    yield from families(CounterMetricFamily, "kvd", rows, names, values)
    num_from_below = counters.ram_hit_tokens + counters.disk_hit_tokens
    sources = {
        "pool": max(0, counters.prefix_hit_tokens - num_from_below),
        "ram": counters.ram_hit_tokens,
        "disk": counters.disk_hit_tokens,
    }
    # An older server says only how many blocks had to give way.
    evictions = dict(counters.evicted_blocks) or {"capacity": counters.num_evicted_blocks}
    ways = {"recompute": counters.num_preemptions - counters.num_swaps, "swap": counters.num_swaps}
    for name, help_text, label, parts in (
        ("prefix_hit_tokens", "Prompt tokens found, by the tier they came from.", "source", sources),
        ("evictions", "Cached blocks that left the pool, by reason.", "reason",
         dict.fromkeys(EVICTION_REASONS, 0) | evictions),
        ("preemptions", "Preemptions, by way.", "way", ways),
    ):  # fmt: skip
        yield by_label(CounterMetricFamily, f"kvd:{name}", help_text, label, parts, names, values)


def _misses(snapshot: Snapshot, names: list[str], values: list[str]) -> Iterator[Metric]:
    """By cause, each of which has a sample from the start, so that a rate sees the first one."""
    requests = dict.fromkeys(MISS_CAUSES, 0) | {cause: number for cause, number, _ in snapshot.misses}
    tokens = dict.fromkeys(MISS_CAUSES, 0) | {cause: number for cause, _, number in snapshot.misses}
    for name, help_text, parts in (
        ("kvd:misses", "Requests of which the cache did not have all that it could have, by cause.", requests),
        ("kvd:reuse_lost_tokens", "Prompt tokens computed although equal ones had been before, by cause.", tokens),
    ):
        yield by_label(CounterMetricFamily, name, help_text, "cause", parts, names, values)


def _disk(facts: DiskFacts, names: list[str], values: list[str]) -> Iterator[Metric]:
    gauges = (
        ("disk_bytes", "Bytes of the files of the disk tier.", float(facts.num_bytes)),
        ("disk_max_bytes", "What they may take.", float(facts.max_bytes)),
        ("disk_problem", "1 while the disk tier cannot be used.", float(bool(facts.problem))),
    )
    yield from families(GaugeMetricFamily, "kvd", gauges, names, values)
    counters = (
        ("disk_written_bytes", "Bytes of blocks written to the disk tier.", facts.num_written_bytes),
        ("disk_read_bytes", "Bytes of blocks read from the disk tier.", facts.num_read_bytes),
        ("disk_corrupt_blocks", "Blocks that were not as they had been written, and were not used.",
         facts.num_corrupt_blocks),
    )  # fmt: skip
    yield from families(CounterMetricFamily, "kvd", counters, names, values)


def _host(facts: HostFacts, names: list[str], values: list[str]) -> Iterator[Metric]:
    """What the system tells; what it does not tell has no sample."""
    rows = (
        ("host_cpus", "Processors that kvd may run on.", facts.num_cpus),
        ("host_utilization", "Share of all processors' time that was not idle, 0 to 1.", facts.utilization),
        ("host_own_utilization", "Share of the processors' time that kvd used, 0 to 1.", facts.own_utilization),
        ("host_memory_total_bytes", "Memory of the machine, or what kvd may have of it.", facts.memory_total_bytes),
        ("host_memory_available_bytes", "Of it, what can still be taken.", facts.memory_available_bytes),
        ("host_memory_own_bytes", "Of it, what kvd holds.", facts.memory_own_bytes),
    )
    known = [(name, text, float(value)) for name, text, value in rows if value is not None]
    yield from families(GaugeMetricFamily, "kvd", known, names, values)


def _device(facts: DeviceFacts, names: list[str], values: list[str]) -> Iterator[Metric]:
    """What the driver tells; what it does not tell has no sample."""
    rows = (
        ("device_utilization", "Share of the last period in which a kernel ran, 0 to 1.", facts.utilization),
        ("device_memory_total_bytes", "The device's memory.", facts.memory_total_bytes),
        ("device_memory_used_bytes", "Of it, what all processes hold.", facts.memory_used_bytes),
        ("device_memory_own_bytes", "Of it, what kvd holds.", facts.memory_own_bytes),
        ("device_power_watts", "What the device draws.", facts.power_watts),
        ("device_power_limit_watts", "What it may draw.", facts.power_limit_watts),
        ("device_temperature_celsius", "Its temperature.", facts.temperature_celsius),
        ("device_sm_clock_hertz", "Clock of its multiprocessors.", _hertz(facts.sm_clock_mhz)),
        ("device_memory_clock_hertz", "Clock of its memory.", _hertz(facts.memory_clock_mhz)),
    )
    known = [(name, text, float(value)) for name, text, value in rows if value is not None]
    yield from families(GaugeMetricFamily, "kvd", known, names, values)
    if facts.throttle_reasons is not None:
        reasons = dict.fromkeys(facts.throttle_reasons, 1)
        help_text = "1 for each reason why the clocks are lower than they could be."
        yield by_label(GaugeMetricFamily, "kvd:device_throttled", help_text, "reason", reasons, names, values)


def _hertz(megahertz: float | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6
