"""A snapshot as Prometheus text, under vLLM's names where vLLM has one and under `kvd:` otherwise.

Event loop only. Every number is read from one frozen `Snapshot`, so a scrape is consistent in itself; the
only state kept here is what the windowed hit rate needs. Counters are exposed with `_total`, as
prometheus_client does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvd.core import BLOCK_SIZE
from kvd.device_facts import DeviceFacts
from kvd.views import Counters, Histogram, Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
HIT_RATE_WINDOW_SECONDS = 60.0
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error", "refused")

_HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two tokens of one request.",
    "e2e_request_latency_seconds": "Time from arrival to the last token.",
    "request_queue_time_seconds": "Time from arrival to the first step that computes the request.",
    "request_prefill_time_seconds": "Time from the first step to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
    "iteration_tokens_total": "Tokens computed per step.",
    "request_prompt_tokens": "Prompt tokens per finished request.",
    "request_generation_tokens": "Output tokens per finished request.",
}


class HitRateWindow:
    """The prefix cache's hit rate over the last minute, or since the last look if longer ago."""

    def __init__(self, window_seconds: float = HIT_RATE_WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, int, int]] = deque([(-math.inf, 0, 0)])

    def update(self, now: float, hit_tokens: int, query_tokens: int) -> float:
        """Add the cumulative counts as of `now` (monotonic seconds); returns hits ÷ queries, 0 without
        queries.
        """
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_seconds:
            self._samples.popleft()
        _, hits_before, queries_before = self._samples[0]
        if now > self._samples[-1][0]:
            self._samples.append((now, hit_tokens, query_tokens))
        num_queries = query_tokens - queries_before
        return (hit_tokens - hits_before) / num_queries if num_queries > 0 else 0.0


class MetricsExporter(Collector):
    """Renders snapshots; one per server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._window = HitRateWindow()
        self._snapshot: Snapshot | None = None

    def render(self, snapshot: Snapshot) -> bytes:
        """The text exposition of one snapshot; serve it as `CONTENT_TYPE`."""
        self._snapshot = snapshot
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry while rendering."""
        if self._snapshot is None:
            return
        counters = self._snapshot.counters
        hit_rate = self._window.update(self._snapshot.time, counters.prefix_hit_tokens, counters.prefix_query_tokens)
        yield from _vllm_families(self._snapshot)
        yield from _kvd_families(self._snapshot, hit_rate)


def _vllm_families(snapshot: Snapshot) -> Iterator[Metric]:
    names, values = ["model_name", "engine"], [_model_name(snapshot), "0"]
    counters, info = snapshot.counters, snapshot.info
    usage = snapshot.num_blocks_active / snapshot.num_blocks if snapshot.num_blocks else 0.0
    gauges = (
        ("num_requests_running", "Requests in the running batch.", float(snapshot.num_running)),
        ("num_requests_waiting", "Requests waiting to be scheduled.", float(snapshot.num_waiting)),
        ("kv_cache_usage_perc", "Share of KV blocks in use by requests, 0 to 1.", usage),
    )
    yield from _families(GaugeMetricFamily, "vllm", gauges, names, values)
    rows = (
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            counters.prefix_query_tokens,
        ),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hit_tokens),
        ("num_preemptions", "Times a running request was preempted.", counters.num_preemptions),
        ("prompt_tokens", "Prompt tokens of scheduled requests.", counters.prompt_tokens),
        ("prompt_tokens_cached", "Prompt tokens that were not computed.", counters.prompt_tokens_cached),
        ("generation_tokens", "Tokens generated.", counters.generation_tokens),
    )
    yield from _families(CounterMetricFamily, "vllm", rows, names, values)
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by reason.", labels=[*names, "finished_reason"]
    )
    for reason, count in {**dict.fromkeys(FINISH_REASONS, 0), **dict(counters.finished)}.items():
        success.add_metric([*values, reason], count)
    yield success
    for name, histogram in snapshot.histograms.items():
        family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAM_HELP.get(name, name), labels=names)
        family.add_metric(values, _prometheus_buckets(histogram), histogram.sum)
        yield family
    settings = {
        "block_size": str(BLOCK_SIZE),
        "cache_dtype": info.kv_cache_dtype,
        "num_gpu_blocks": str(snapshot.num_blocks),
        "enable_prefix_caching": str(info.prefix_caching),
        "kv_cache_memory_bytes": str(info.budget.kv_bytes),
    }
    cache = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=[*names, *settings])
    cache.add_metric([*values, *settings.values()], 1)
    yield cache


def _kvd_families(snapshot: Snapshot, hit_rate: float) -> Iterator[Metric]:
    names, values = ["model_name"], [_model_name(snapshot)]
    budget = snapshot.info.budget
    blocks = GaugeMetricFamily("kvd:blocks", "KV blocks by state and tier.", labels=[*names, "state", "tier"])
    for state, tier, num_blocks in (
        ("active", "device", snapshot.num_blocks_active),
        ("cached", "device", snapshot.num_blocks_cached),
        ("free", "device", snapshot.num_blocks_free),
        ("used", "ram", snapshot.num_ram_blocks_used),
        ("free", "ram", snapshot.num_ram_blocks - snapshot.num_ram_blocks_used),
    ):
        blocks.add_metric([*values, state, tier], num_blocks)
    yield blocks
    rows = (
        ("prefix_cache_hit_rate", "Hit tokens ÷ looked-up tokens over the last minute.", hit_rate),
        ("pinned_blocks", "KV blocks that an operator has pinned.", float(snapshot.num_blocks_pinned)),
        ("running_limit", "Requests that may run at the same time, as of now.", float(snapshot.running_limit)),
        ("step_budget_tokens", "Tokens that the latest step was allowed.", float(snapshot.step_budget)),
        ("kv_bytes_per_token", "Bytes that one token takes in the KV cache.", budget.bytes_per_token),
        ("kv_bytes_per_token_16bit", "Bytes that it would take in 16 bits.", budget.bytes_per_token_16bit),
        ("weight_bytes", "Bytes of the model's weights in memory.", float(budget.weight_bytes)),
        ("uptime_seconds", "Seconds since the engine started.", snapshot.uptime_seconds),
    )
    yield from _families(GaugeMetricFamily, "kvd", rows, names, values)
    if snapshot.device is not None:
        yield from _device_families(snapshot.device, names, values)
    yield from _kvd_counters(snapshot.counters, names, values)


def _device_families(facts: DeviceFacts, names: list[str], values: list[str]) -> Iterator[Metric]:
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
    yield from _families(GaugeMetricFamily, "kvd", known, names, values)
    if facts.throttle_reasons is not None:
        family = GaugeMetricFamily(
            "kvd:device_throttled", "1 for each reason why the clocks are lower than they could be.",
            labels=[*names, "reason"],
        )  # fmt: skip
        for reason in facts.throttle_reasons:
            family.add_metric([*values, reason], 1)
        yield family


def _hertz(megahertz: float | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


def _kvd_counters(counters: Counters, names: list[str], values: list[str]) -> Iterator[Metric]:
    rows = (
        ("recomputed_tokens", "Tokens computed again after a preemption.", counters.recomputed_tokens),
        (
            "prefill_tokens_computed",
            "Prompt tokens computed, again or not.",
            counters.prefill_tokens_computed,
        ),
        (
            "partial_hit_tokens",
            "Hit tokens copied out of a block that goes on differently, from whatever source.",
            counters.partial_hit_tokens,
        ),
        ("dropped_tokens", "Tokens forgotten under kv_eviction.", counters.num_dropped_tokens),
        ("saved_blocks", "Blocks written through to the RAM tier.", counters.num_saved_blocks),
        ("unsaved_blocks", "Blocks not written through, since no slot was free.", counters.num_unsaved_blocks),
        ("restored_blocks", "Blocks brought back from the RAM tier.", counters.num_restored_blocks),
        ("steps", "Steps of the engine.", counters.num_steps),
        ("step_seconds", "Seconds spent in steps.", counters.step_seconds),
    )
    yield from _families(CounterMetricFamily, "kvd", rows, names, values)
    num_from_below = counters.ram_hit_tokens + counters.disk_hit_tokens
    for name, help_text, label, parts in (
        (
            "prefix_hit_tokens",
            "Prompt tokens found, by the tier they came from.",
            "source",
            {
                "pool": max(0, counters.prefix_hit_tokens - num_from_below),
                "ram": counters.ram_hit_tokens,
                "disk": counters.disk_hit_tokens,
            },
        ),
        ("evictions", "Cached blocks dropped, by reason.", "reason", {"capacity": counters.num_evicted_blocks}),
        (
            "preemptions",
            "Preemptions, by way.",
            "way",
            {"recompute": counters.num_preemptions - counters.num_swaps, "swap": counters.num_swaps},
        ),
    ):
        family = CounterMetricFamily(f"kvd:{name}", help_text, labels=[*names, label])
        for value, count in parts.items():
            family.add_metric([*values, value], count)
        yield family


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    prefix: str,
    rows: Iterable[tuple[str, str, float]],
    names: list[str],
    values: list[str],
) -> Iterator[Metric]:
    """A family of one sample for each row (name, help, value)."""
    for name, help_text, value in rows:
        family = kind(f"{prefix}:{name}", help_text, labels=names)
        family.add_metric(values, value)
        yield family


def _model_name(snapshot: Snapshot) -> str:
    """The first served name that is a name, as vLLM labels its series."""
    return next((name for name in snapshot.info.served_names if name != "*"), snapshot.info.model)


def _prometheus_buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Pairs (le, cumulative count); the last one is +Inf."""
    return [
        ("+Inf" if math.isinf(bound) else repr(float(bound)), count)
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
