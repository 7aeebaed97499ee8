"""Histograms, the event log, the windowed hit rate, and snapshots as JSON."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.device_facts import DeviceFacts, HostFacts
from kvd.histograms import BUCKET_BOUNDS, CACHE_BUCKET_BOUNDS, HistogramBuilder
from kvd.observe.event_log import EventLog
from kvd.observe.metrics import HitRateWindow, MetricsExporter
from kvd.server.snapshot_json import decode_snapshot, encode_snapshot
from kvd.text.text_model import TextModel
from kvd.views import Counters, DiskFacts, Histogram, LogEvent, Snapshot
from tests.server.fakes import FakeEngine

METRICS_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

# --------------------------------------------------------------------------- histograms


def test_counts_are_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    builder = HistogramBuilder((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        builder.observe(value)
    assert builder.freeze() == Histogram((1.0, 2.0, math.inf), (2, 4, 5), 8.0)


def test_a_frozen_histogram_does_not_change() -> None:
    builder = HistogramBuilder((1.0,))
    before = builder.freeze()
    builder.observe(0.5)
    assert before.counts == (0, 0)
    assert builder.freeze().counts == (1, 1)


@given(st.lists(st.floats(0, 1e6)), st.sampled_from(sorted(BUCKET_BOUNDS)))
def test_builder_agrees_with_counting(values: list[float], name: str) -> None:
    builder = HistogramBuilder(BUCKET_BOUNDS[name])
    for value in values:
        builder.observe(value)
    frozen = builder.freeze()
    assert frozen.counts == tuple(sum(value <= bound for value in values) for bound in frozen.bounds)
    assert frozen.total == len(values)
    assert frozen.sum == pytest.approx(sum(values))


# --------------------------------------------------------------------------- hit rate


def test_hit_rate_is_that_of_the_window() -> None:
    window = HitRateWindow(60)
    assert window.update(0, 0, 0) == 0.0
    assert window.update(10, 50, 100) == 0.5
    assert window.update(50, 50, 200) == 0.25
    assert window.update(80, 90, 300) == pytest.approx(40 / 200), "what was before 20 s no longer counts"
    assert window.update(500, 190, 400) == 1.0, "since the last look, longer ago than the window"
    assert window.update(600, 190, 400) == 0.0


# --------------------------------------------------------------------------- metrics


async def test_every_number_of_engine_and_counters_is_exported(text_model: TextModel) -> None:
    """A field that is added and not exported leaves the text as it was."""
    snapshot = await FakeEngine(text_model).snapshot()
    before = MetricsExporter().render(snapshot)
    silent = []
    for field in fields(Counters):
        value: object = (("cap", 77_777),) if isinstance(getattr(snapshot.counters, field.name), tuple) else 77_777
        changed = replace(snapshot, counters=replace(snapshot.counters, **{field.name: value}))
        silent += [field.name] if MetricsExporter().render(changed) == before else []
    for field in fields(Snapshot):
        if isinstance(getattr(snapshot, field.name), int):
            changed = replace(snapshot, **{field.name: 77_777})
            silent += [field.name] if MetricsExporter().render(changed) == before else []
    assert not silent


async def test_the_document_lists_exactly_the_series_that_there_are(text_model: TextModel) -> None:
    snapshot = replace(
        await FakeEngine(text_model).snapshot(),
        device=DeviceFacts("card", 0.5, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, ("heat",)),
        host=HostFacts("cpu", 2, 0.5, 0.5, 1, 1, 1),
        disk=DiskFacts(1, 1, 1),
        cache_histograms={name: HistogramBuilder(bounds).freeze() for name, bounds in CACHE_BUCKET_BOUNDS.items()},
    )
    text = MetricsExporter().render(snapshot).decode()
    exported = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            exported.add((name.removesuffix("_total") if kind == "counter" else name, kind))
    listed = set()
    for line in METRICS_DOCUMENT.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| (`(?:vllm|kvd):.*`) \| (gauge|counter|histogram|info) \| .* \|", line):
            kind = "gauge" if match[2] == "info" else match[2]
            listed |= {(name, kind) for name in re.findall(r"`([a-z]+:[a-z0-9_]+)", match[1])}
    assert listed == exported


# --------------------------------------------------------------------------- event log


def test_ring_keeps_the_newest() -> None:
    log = EventLog(capacity=3)
    for number in range(5):
        log.add("info", "kind", str(number))
    assert [event.message for event in log.recent()] == ["2", "3", "4"]
    assert [event.message for event in log.recent(2)] == ["3", "4"]
    assert log.recent(0) == ()


def test_subscribers_see_every_later_event_once() -> None:
    log, seen = EventLog(), list[LogEvent]()
    log.add("info", "kind", "before")
    unsubscribe = log.subscribe(seen.append)
    event = log.add("error", "kind", "during", "req-1")
    unsubscribe()
    unsubscribe()
    log.add("info", "kind", "after")
    assert seen == [event]


def test_a_subscriber_that_wants_the_latest_ones_misses_none_in_between() -> None:
    """Somebody adds events all the time; what comes is a run of numbers without a gap."""
    log, seen = EventLog(), list[LogEvent]()
    stop = threading.Event()

    def add_for_ever() -> None:
        number = 0
        while not stop.is_set():
            log.add("info", "kind", str(number))
            number += 1

    thread = threading.Thread(target=add_for_ever)
    thread.start()
    for _ in range(50):
        seen.clear()
        log.subscribe(seen.append, recent=3)()
        numbers = [int(event.message) for event in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    stop.set()
    thread.join()
    log.subscribe(seen.append, recent=2)
    last = log.add("info", "kind", "last")
    assert [event.message for event in seen[-3:]] == [*(e.message for e in log.recent(3)[:2]), last.message]


def test_threads_lose_nothing() -> None:
    log, seen = EventLog(capacity=10_000), list[LogEvent]()
    log.subscribe(seen.append)

    def add_many() -> None:
        for number in range(500):
            log.add("debug", threading.current_thread().name, str(number))

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuple(seen) == log.recent()
    assert len(seen) == 2000


def test_a_subscriber_that_raises_is_told_no_more_and_disturbs_nobody() -> None:
    log = EventLog()
    told: list[str] = []

    def fail(event: LogEvent) -> None:
        told.append("faulty")
        raise RuntimeError("its event loop is closed")

    log.subscribe(fail)
    unsubscribe = log.subscribe(lambda event: told.append(event.message))
    log.add("info", "test", "one")
    log.add("info", "test", "two")
    assert told == ["faulty", "one", "two"]
    unsubscribe()
    assert [event.message for event in log.recent()] == ["one", "two"]


# --------------------------------------------------------------------------- JSON


async def test_snapshot_round_trip(text_model: TextModel) -> None:
    engine = FakeEngine(text_model)
    engine.observe("e2e_request_latency_seconds", 0.1, 5.0, 1e9)
    snapshot = await engine.snapshot(details=True)
    data = encode_snapshot(snapshot)
    assert b"null" not in re.sub(rb'"(ttft_seconds|device|disk|host|geometry)":null', b"", data)
    assert decode_snapshot(data) == snapshot
    newer = msgspec.json.encode({**msgspec.json.decode(data), "added_later": {"x": 1}})
    assert decode_snapshot(newer) == snapshot


@pytest.mark.parametrize("data", [b"{}", b"[]", b"x", b'{"time": "now"}'])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_snapshot(data)
