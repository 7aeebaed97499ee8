"""Latencies and lengths of requests and steps. Engine thread writes; `freeze` hands out frozen copies."""

from __future__ import annotations

from kvd.core import Request, TokenEvent
from kvd.histograms import BUCKET_BOUNDS, HistogramBuilder
from kvd.views import Histogram


class Statistics:
    """What requests and steps took."""

    def __init__(self) -> None:
        self._builders = {name: HistogramBuilder(bounds) for name, bounds in BUCKET_BOUNDS.items()}
        self._latest: dict[str, tuple[float, bool]] = {}  # arrival, then latest token: (time, has a token)

    def submitted(self, request: Request) -> None:
        """A request entered the queue."""
        self._latest[request.request_id] = (request.arrival_time, False)

    def step(self, num_tokens: int, events: list[TokenEvent], now: float) -> None:
        """Record one committed step of `num_tokens` computed tokens."""
        self._builders["iteration_tokens_total"].observe(num_tokens)
        latest, newest = self._latest, (now, True)
        between: dict[float, int] = {}  # requests by the time of their previous token, which most have in common
        for event in events:
            if event.token_id is not None:
                before = latest.get(event.request_id)
                if before is not None:
                    previous, has_token = before
                    latest[event.request_id] = newest
                    if has_token:
                        between[previous] = between.get(previous, 0) + 1
                    else:
                        self._builders["time_to_first_token_seconds"].observe(now - previous)
            if event.finish_reason is not None:
                self.ended(event)
        for previous, times in between.items():
            self._builders["inter_token_latency_seconds"].observe(now - previous, times)

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
