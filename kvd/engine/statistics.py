"""Latencies and lengths as cumulative histograms. Engine thread writes; `freeze` hands out frozen copies.

The bucket bounds are those of vLLM's metrics of the same names, so that its dashboards read ours.
"""

from __future__ import annotations

from bisect import bisect_left

from kvd.core import Histogram, Request, TokenEvent

_SECONDS_SHORT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_SECONDS_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_SECONDS_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS_REQUEST = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))

BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _SECONDS_SHORT,
    "inter_token_latency_seconds": _SECONDS_TOKEN,
    "e2e_request_latency_seconds": _SECONDS_REQUEST,
    "request_queue_time_seconds": (0.001, 0.005, 0.01, 0.05, 0.1, *_SECONDS_REQUEST),
    "request_prefill_time_seconds": (0.01, 0.05, 0.1, *_SECONDS_REQUEST),
    "request_decode_time_seconds": (0.01, 0.05, 0.1, *_SECONDS_REQUEST),
    "iteration_tokens_total": _TOKENS_STEP,
    "request_prompt_tokens": _TOKENS_REQUEST,
    "request_generation_tokens": _TOKENS_REQUEST,
}


class HistogramBuilder:
    """Counts observations into fixed buckets; constant work per observation."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # per bucket, the last one is +Inf
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def freeze(self) -> Histogram:
        running, cumulative = 0, []
        for count in self._counts:
            running += count
            cumulative.append(running)
        return Histogram((*self.bounds, float("inf")), tuple(cumulative), self._sum)


class Statistics:
    """What requests and steps took."""

    def __init__(self) -> None:
        self._builders = {name: HistogramBuilder(bounds) for name, bounds in BOUNDS.items()}
        self._latest: dict[str, tuple[float, bool]] = {}  # arrival, then latest token: (time, has a token)

    def submitted(self, request: Request) -> None:
        """A request entered the queue."""
        self._latest[request.request_id] = (request.arrival_time, False)

    def step(self, num_tokens: int, events: list[TokenEvent], now: float) -> None:
        """Record one committed step of `num_tokens` computed tokens."""
        self._builders["iteration_tokens_total"].observe(num_tokens)
        for event in events:
            if event.token_id is not None and event.request_id in self._latest:
                previous, has_token = self._latest[event.request_id]
                name = "inter_token_latency_seconds" if has_token else "time_to_first_token_seconds"
                self._builders[name].observe(now - previous)
                self._latest[event.request_id] = (now, True)
            if event.finish_reason is not None:
                self.ended(event)

    def ended(self, event: TokenEvent) -> None:
        """Record a request that ended, however it did."""
        self._latest.pop(event.request_id, None)
        timing = event.timing
        if timing is None or event.finish_reason not in ("stop", "length"):
            return
        observe = self._builders
        observe["e2e_request_latency_seconds"].observe(timing.last_token - timing.arrival)
        observe["request_queue_time_seconds"].observe(timing.first_scheduled - timing.arrival)
        observe["request_prefill_time_seconds"].observe(timing.first_token - timing.first_scheduled)
        observe["request_decode_time_seconds"].observe(timing.last_token - timing.first_token)
        observe["request_prompt_tokens"].observe(event.num_prompt_tokens)
        observe["request_generation_tokens"].observe(event.num_output_tokens)

    def freeze(self) -> dict[str, Histogram]:
        return {name: builder.freeze() for name, builder in self._builders.items()}
