"""What a sequence of polls says, and which alert it raises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.tui.alerts import choose_alert
from kvd.tui.rates import Quantile
from kvd.tui.view import History, Link, View
from kvd.views import Counters, Snapshot
from tests.tui.fakes import INFO, histogram, row, snapshot

LINK = Link("http://127.0.0.1:8000/v1", "smollm2-135m-instruct", 0.5)


def poll(*snapshots: Snapshot) -> View:
    history = History()
    views = [history.add(each, has_details=True) for each in snapshots]
    return views[-1]


def alert_of(*snapshots: Snapshot) -> tuple[str, str]:
    alert = choose_alert(poll(*snapshots), LINK)
    return alert.severity, alert.texts[0]


def test_rates_are_differences_between_polls() -> None:
    view = poll(
        snapshot(time=10.0, counters=Counters(prefill_tokens_computed=100, generation_tokens=10)),
        snapshot(time=12.0, counters=Counters(prefill_tokens_computed=1100, generation_tokens=70)),
    )
    assert view.prefill_rate == 500
    assert view.decode_rate == 30
    assert view.series.prefill == (500,)
    assert view.series.decode == (30,)


def test_two_snapshots_of_one_moment_are_no_rate() -> None:
    view = poll(snapshot(time=10.0), snapshot(time=10.0))
    assert view.decode_rate is None
    assert view.series.decode == ()


def test_a_restart_forgets_everything_before() -> None:
    view = poll(
        snapshot(time=10.0, counters=Counters(num_steps=5, generation_tokens=500), requests=(row(1),)),
        snapshot(time=11.0, counters=Counters(num_steps=9, generation_tokens=900), requests=(row(1),)),
        snapshot(time=3.0, counters=Counters(num_steps=1, generation_tokens=4)),
    )
    assert view.decode_rate is None
    assert view.series.decode == ()
    assert view.requests == ()
    assert view.recent.query_tokens == 0


def test_requests_stay_while_details_are_not_asked_for() -> None:
    history = History()
    history.add(snapshot(time=1.0, requests=(row(1),)), has_details=True)
    assert history.add(snapshot(time=1.1), has_details=False).requests == (row(1),)
    assert history.add(snapshot(time=1.3), has_details=True).requests == ()


def test_requests_are_running_first_and_then_by_age() -> None:
    rows = (row(9), row(4, state="waiting"), row(5, state="prefill"), row(2, state="preempted"), row(7))
    view = poll(snapshot(requests=rows))
    assert [r.request_id[-4:] for r in view.requests] == ["05ab", "07ab", "09ab", "02ab", "04ab"]


def test_latencies_are_recent_ones_else_those_since_start() -> None:
    name = "time_to_first_token_seconds"
    old, new = [0.03] * 50, [5.0, 5.0]
    first = snapshot(time=10.0, histograms={name: histogram(old)})
    view = poll(first, snapshot(time=20.0, histograms={name: histogram(old + new)}))
    assert view.ttft.is_recent
    assert view.ttft.p50 is not None
    assert 2.5 <= view.ttft.p50.value <= 5.0
    later = poll(first, snapshot(time=20.0, histograms={name: histogram(old)}))
    assert not later.ttft.is_recent
    assert later.ttft.p50 == Quantile(0.03)
    assert view.itl.p50 is None


def test_the_recent_window_forgets_after_a_minute() -> None:
    history = History()
    view = history.add(snapshot(time=0.0), has_details=True)
    for second in range(1, 200):
        preemptions = 7 if second >= 10 else 0
        view = history.add(
            snapshot(time=float(second), counters=Counters(num_preemptions=preemptions)), has_details=True
        )
        if second == 60:
            assert view.recent.preemptions == 7
    assert view.recent.preemptions == 0
    assert view.recent.seconds == 60


FULL = snapshot(
    active=2048, requests=tuple(row(i) for i in range(16)) + tuple(row(50 + i, state="waiting") for i in range(12))
)


def test_full_pool_names_the_settings_and_the_number_waiting() -> None:
    assert alert_of(FULL) == (
        "error",
        "KV pool full: 12 waiting; raise cpu_memory_utilization or lower max_model_len",
    )
    on_gpu = replace(FULL, info=replace(INFO, budget=replace(INFO.budget, setting="gpu_memory_utilization")))
    assert "gpu_memory_utilization" in alert_of(on_gpu)[1]


def test_a_pool_full_of_cached_blocks_is_not_full() -> None:
    assert alert_of(replace(FULL, num_blocks_active=1000, num_blocks_cached=1048))[0] == "none"


def test_a_full_pool_with_nobody_waiting_is_well_used() -> None:
    assert alert_of(replace(FULL, num_waiting=0)) == ("none", "All is well")


def test_all_slots_busy() -> None:
    busy = replace(FULL, num_blocks_active=500, num_running=32, num_waiting=3)
    assert alert_of(busy) == ("warning", "All 32 slots busy: 3 waiting; raise max_num_seqs")


@pytest.mark.parametrize(("hits", "severity"), [(0, "warning"), (4_000, "warning"), (6_000, "none")])
def test_low_hit_rate_over_many_tokens(hits: int, severity: str) -> None:
    first = snapshot(time=0.0)
    counters = Counters(prefix_query_tokens=50_000, prefix_hit_tokens=hits)
    found, text = alert_of(first, snapshot(time=10.0, counters=counters))
    assert found == severity
    assert severity == "none" or f"Only {hits // 500}% prefix hits in 50,000 tokens" in text


def test_low_hit_rate_over_few_tokens_is_nothing_to_worry_about() -> None:
    assert alert_of(snapshot(counters=Counters(prefix_query_tokens=1_000)))[0] == "none"


def test_preemptions_alert_only_while_they_rise() -> None:
    before = snapshot(time=0.0, counters=Counters(num_preemptions=40, recomputed_tokens=1_000))
    rising = snapshot(time=30.0, counters=Counters(num_preemptions=45, recomputed_tokens=4_000))
    assert alert_of(before, rising) == (
        "warning",
        "5 preemptions, 3,000 tokens recomputed: lower max_num_seqs or raise cpu_memory_utilization",
    )
    assert alert_of(before)[0] == "none"


@pytest.mark.parametrize(
    ("state", "severity", "word"),
    [("failed", "error", "restart kvd"), ("draining", "warning", "28 still to finish"), ("loading", "info", "503")],
)
def test_states(state: str, severity: str, word: str) -> None:
    found, text = alert_of(replace(FULL, state=state))
    assert found == severity
    assert word in text


def test_prefix_caching_switched_off_is_said_after_many_tokens() -> None:
    info = replace(INFO, prefix_caching=False)
    assert alert_of(snapshot(info=info))[0] == "none"
    severity, text = alert_of(snapshot(info=info, counters=Counters(prompt_tokens=30_000)))
    assert severity == "info"
    assert "enable_prefix_caching" in text


def test_a_lost_source_comes_before_everything() -> None:
    alert = choose_alert(poll(FULL), replace(LINK, problem="connection refused"))
    assert alert.texts[0] == "Disconnected: connection refused; trying again"
    assert alert.texts[-1].startswith("Disconnected, trying again: "), "what is left where the reason is long"
