"""A snapshot as Prometheus text, under vLLM's names where vLLM has one and under `kvd:` (`metrics_own`) otherwise.

Event loop only. Every number is read from one frozen `Snapshot`, so a scrape is consistent in itself; the
only state kept here is what the windowed hit rate needs. Counters are exposed with `_total`, as
prometheus_client does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvd.core import BLOCK_SIZE
from kvd.observe.metrics_families import families, histogram_family, model_name
from kvd.observe.metrics_own import own_families
from kvd.views import Snapshot

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
        self._is_healthy = False

    def render(self, snapshot: Snapshot, *, problem: str | None = None) -> bytes:
        """The text exposition of one snapshot; serve it as `CONTENT_TYPE`. problem: what `/health` has to say."""
        self._snapshot = snapshot
        self._is_healthy = problem is None and snapshot.state == "ready"
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry while rendering."""
        if self._snapshot is None:
            return
        counters = self._snapshot.counters
        hit_rate = self._window.update(self._snapshot.time, counters.prefix_hit_tokens, counters.prefix_query_tokens)
        yield from _vllm_families(self._snapshot)
        yield from own_families(self._snapshot, hit_rate, is_healthy=self._is_healthy)


def _vllm_families(snapshot: Snapshot) -> Iterator[Metric]:
    names, values = ["model_name", "engine"], [model_name(snapshot), "0"]
    counters, info = snapshot.counters, snapshot.info
    usage = snapshot.num_blocks_active / snapshot.num_blocks if snapshot.num_blocks else 0.0
    gauges = (
        ("num_requests_running", "Requests in the running batch.", float(snapshot.num_running)),
        ("num_requests_waiting", "Requests waiting to be scheduled.", float(snapshot.num_waiting)),
        ("kv_cache_usage_perc", "Share of KV blocks in use by requests, 0 to 1.", usage),
    )
    yield from families(GaugeMetricFamily, "vllm", gauges, names, values)
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
    yield from families(CounterMetricFamily, "vllm", rows, names, values)
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by reason.", labels=[*names, "finished_reason"]
    )
    for reason, count in {**dict.fromkeys(FINISH_REASONS, 0), **dict(counters.finished)}.items():
        success.add_metric([*values, reason], count)
    yield success
    for name, histogram in snapshot.histograms.items():
        yield histogram_family(f"vllm:{name}", _HISTOGRAM_HELP.get(name, name), histogram, names, values)
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
