"""Latencies that are counted together come out as if each had been counted on its own."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest

from kvd.core import FinishReason, Request, RequestTiming, SamplingParams, TokenEvent
from kvd.engine.statistics import Statistics
from kvd.histograms import BUCKET_BOUNDS


def test_every_gap_between_tokens_is_counted_once() -> None:
    chance = random.Random(4)
    statistics = Statistics()
    latest: dict[str, float] = {}
    has_token: set[str] = set()
    gaps: dict[str, list[float]] = {"inter_token_latency_seconds": [], "time_to_first_token_seconds": []}
    now = 100.0
    for number in range(300):
        now += chance.choice((0.004, 0.03, 0.3))
        if number % 10 == 0 or not latest:
            request_id = f"r{number}"
            statistics.submitted(Request(request_id, (1,), SamplingParams(9), arrival_time=now))
            latest[request_id] = now
            now += 0.01
        events = []
        for request_id in [one for one in latest if chance.random() < 0.8]:
            name = "inter_token_latency_seconds" if request_id in has_token else "time_to_first_token_seconds"
            gaps[name].append(now - latest[request_id])
            latest[request_id] = now
            has_token.add(request_id)
            reason: FinishReason | None = "stop" if chance.random() < 0.05 else None
            timing = RequestTiming(1.0, 2.0, 3.0, 4.0) if reason else None
            events.append(TokenEvent(request_id, 7, 1, 0, 1, finish_reason=reason, timing=timing))
            if reason:
                del latest[request_id]
        events.append(TokenEvent("nobody", 7, 1, 0, 1))
        events.append(TokenEvent("aborted", None, 1, 0, 1, finish_reason="abort"))
        statistics.step(len(events), events, now)
    histograms = statistics.freeze()
    for name, values in gaps.items():
        assert len(values) > 20
        counts = [0] * (len(BUCKET_BOUNDS[name]) + 1)
        for value in values:
            counts[bisect_left(BUCKET_BOUNDS[name], value)] += 1
        cumulative = [sum(counts[: index + 1]) for index in range(len(counts))]
        assert list(histograms[name].counts) == cumulative
        assert histograms[name].sum == pytest.approx(sum(values))
    assert histograms["iteration_tokens_total"].total == 300
