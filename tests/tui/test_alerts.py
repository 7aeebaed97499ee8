"""Why is it slow: for each bottleneck, the line that names it and what helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.device_facts import DeviceFacts
from kvd.insight import MissCause
from kvd.tui.alerts import Alert, choose_alert
from kvd.tui.causes import cause_of, worst_cause
from kvd.tui.doctor_panel import CAUSES
from kvd.tui.view import History, Link, View
from kvd.views import Counters, DiskFacts, Snapshot
from tests.tui.fakes import INFO, histogram, row, snapshot

LINK = Link("http://127.0.0.1:8000/v1", "m", 0.5)
AUTO = replace(INFO, is_auto_num_seqs=True)
HOT = DeviceFacts(name="card", sm_clock_mhz=900.0, throttle_reasons=("heat",))


def view_of(*polls: Snapshot) -> View:
    history = History()
    for poll in polls:
        view = history.add(poll, has_details=True)
    return view


def over_time(before: Snapshot, seconds: float = 10.0, **grown: float) -> View:
    """The view after counters grew by this much."""
    counters = {name: getattr(before.counters, name) + value for name, value in grown.items()}
    after = replace(before, time=before.time + seconds, counters=replace(before.counters, **counters))  # type: ignore[arg-type]
    return view_of(before, after)


def waiting(num: int, *, running: int = 4, prompt: int = 200) -> Snapshot:
    rows = tuple(row(i, num_prompt_tokens=prompt, num_computed_tokens=prompt) for i in range(running))
    rows += tuple(row(running + i, state="waiting", num_prompt_tokens=prompt) for i in range(num))
    return snapshot(active=400, requests=rows)


def said(view: View) -> Alert:
    return choose_alert(view, LINK)


PREFILL_BOUND = {"prefill_tokens_computed": 20_000, "generation_tokens": 50, "step_seconds": 9.5}


def test_a_full_pool_that_preempts() -> None:
    full = replace(waiting(3), num_blocks_active=2040, num_blocks_free=8)
    alert = said(over_time(full, num_preemptions=7, recomputed_tokens=9_000))
    assert alert.severity == "error"
    assert alert.texts[0] == (
        "KV pool full: 7 preemptions, 9,000 tokens recomputed; raise cpu_memory_utilization or lower max_model_len"
    )
    assert alert.texts[-1] == "KV pool full: 7 preemptions", "what is left at 40 columns"


def test_a_full_pool_of_wide_blocks_may_be_narrowed() -> None:
    full = replace(waiting(3), num_blocks_active=2040, num_blocks_free=8, info=replace(INFO, kv_cache_dtype="fp16"))
    assert "kv_cache_dtype: int8" in said(view_of(full)).texts[0]


def test_the_limit_of_running_requests() -> None:
    limited = replace(waiting(5, running=32), running_limit=32)
    assert said(view_of(limited)).texts == ("All 32 slots busy: 5 waiting; raise max_num_seqs",)


def test_nobody_is_told_to_change_what_settles_itself() -> None:
    limited = replace(waiting(5, running=8), running_limit=8, info=AUTO)
    alert = said(view_of(limited))
    assert alert.texts[0].startswith("5 waiting: 8 at once is the fastest found here so far")
    assert "max_num_seqs" not in " ".join(alert.texts)
    preempting = over_time(replace(waiting(0), info=AUTO), num_preemptions=5, recomputed_tokens=100)
    alert = said(preempting)
    assert "max_num_seqs" not in " ".join(alert.texts)
    assert "raise cpu_memory_utilization" in alert.texts[0]
    at_the_ceiling = replace(waiting(5, running=32), running_limit=32, info=AUTO)
    assert "raise max_num_seqs" in said(view_of(at_the_ceiling)).texts[0]


def test_prompts_that_miss_are_named_with_the_doctors_cause() -> None:
    missing = replace(waiting(3), misses=(("new", 5, 0), ("volatile_line", 14, 9_000), ("evicted", 2, 300)))
    alert = said(over_time(missing, **PREFILL_BOUND, prefix_query_tokens=20_000, prefix_hit_tokens=1_000))
    assert alert.severity == "warning"
    assert alert.texts[0] == (
        "Prompts take the time, 5% hits: a line that changes each time (14×); move dates and ids to the end"
    )
    assert len(alert.texts[-1]) <= 78, "it fits a line of 80"


def test_long_prompts_are_named_where_nothing_was_lost() -> None:
    long = waiting(3, prompt=5_200)
    alert = said(over_time(long, **PREFILL_BOUND, prefix_query_tokens=20_000, prefix_hit_tokens=2_000))
    assert alert.texts[0].startswith("Long prompts take the time: 5,200 tokens, 10% cached; shorten them")


def test_a_slow_first_token_counts_without_a_queue() -> None:
    slow = waiting(0, prompt=5_200)
    before = replace(slow, histograms={"time_to_first_token_seconds": histogram([0.1])})
    after = replace(
        before,
        time=before.time + 10,
        counters=Counters(prefill_tokens_computed=20_000, generation_tokens=50, step_seconds=9.5),
        histograms={"time_to_first_token_seconds": histogram([0.1, 4.0, 4.0, 4.0])},
    )
    assert said(view_of(before, after)).texts[0].startswith("Long prompts take the time")


@pytest.mark.parametrize(
    "grown",
    [
        {**PREFILL_BOUND, "generation_tokens": 5_000},  # decode is what it does
        {**PREFILL_BOUND, "step_seconds": 2.0},  # it is idle most of the time
    ],
)
def test_prompts_are_not_blamed_without_reason(grown: dict[str, float]) -> None:
    assert "Long prompts" not in said(over_time(waiting(3, prompt=5_200), **grown)).texts[0]


def test_a_hot_card_comes_before_the_queue() -> None:
    hot = replace(waiting(5, running=32), running_limit=32, device=HOT)
    assert said(view_of(hot)).texts[0] == "GPU throttled at 900 MHz (heat): cool the card"
    idle = replace(waiting(0, running=0), device=HOT)
    assert said(view_of(idle)).severity == "none"


def test_a_card_at_its_power_limit_comes_last() -> None:
    capped = replace(HOT, throttle_reasons=("power limit",), sm_clock_mhz=None)
    assert said(view_of(replace(waiting(0), device=capped))).texts[0] == (
        "GPU throttled (power limit): nvidia-smi -pl raises it"
    )
    queued = replace(waiting(5, running=32), running_limit=32, device=capped)
    assert "slots busy" in said(view_of(queued)).texts[0]


def test_an_engine_that_gets_nothing_done() -> None:
    assert said(view_of(replace(waiting(3), stalled_seconds=34.0))).texts[0] == (
        "The engine has got nothing done for 34s: see the log, then restart kvd"
    )
    assert said(view_of(replace(waiting(3), stalled_seconds=4.0))).severity == "none"


def test_a_disk_in_trouble() -> None:
    broken = replace(waiting(0), disk=DiskFacts(1, 1, 2, problem="No space left on device"))
    alert = said(view_of(broken))
    assert alert.severity == "warning"
    assert alert.texts[0].startswith("Disk cache in trouble: No space left on device")
    assert alert.texts[-1] == "Check disk_cache: No space left on device", "what helps comes first where it is narrow"


def test_few_hits_name_the_cause_where_it_is_known() -> None:
    counters = Counters(prefix_query_tokens=100_000, prefix_hit_tokens=1_000)
    unknown = replace(waiting(0), counters=counters)
    assert "do prompts start with a date" in said(view_of(unknown)).texts[0]
    known = replace(unknown, misses=(("reordered", 3, 5_000),))
    assert said(view_of(known)).texts[0] == (
        "Only 1% prefix hits in 100,000 tokens: same passages, another order; keep documents and examples in one order"
    )


def test_those_who_wait_without_reason_say_how_long() -> None:
    alert = said(view_of(replace(waiting(2), oldest_waiting_seconds=3.0)))
    assert alert == Alert("none", ("2 waiting to be admitted, the oldest for 3.00s",))
    long = replace(waiting(2), oldest_waiting_seconds=15.0)
    alert = said(view_of(long))
    assert alert.severity == "warning"
    assert alert.texts[0].startswith("2 waiting, the oldest for 15.0s: the timeline of each says why")
    behind = replace(long, requests=(*long.requests, row(99, state="prefill")))
    assert said(view_of(behind)).texts[1] == "2 waiting, the oldest for 15.0s: prompts before them are computed first"


def test_who_waits_for_blocks_is_not_said_to_wait_for_a_slot() -> None:
    """The limit that settles itself falls after preemptions: what is missing is memory."""
    limited = replace(waiting(5, running=2), running_limit=2, info=AUTO)
    preempting = over_time(limited, num_preemptions=4, recomputed_tokens=340)
    assert said(preempting).texts[0].startswith("4 preemptions, 340 tokens recomputed: raise cpu_memory_utilization")
    requests = (*limited.requests, row(90, state="preempted"), row(91, state="swapped"))
    alert = said(view_of(replace(limited, requests=requests, num_waiting=7)))
    assert alert.texts[0].startswith("2 of 7 waiting had to give up their blocks: raise cpu_memory_utilization")


def test_prompts_that_were_not_looked_up_have_no_hit_rate() -> None:
    alert = said(over_time(waiting(3, prompt=5_200), **PREFILL_BOUND))
    assert alert.texts[0].startswith("Long prompts take the time: 5,200 tokens; shorten them")


@pytest.mark.parametrize("cause", list(CAUSES))
def test_every_cause_has_words_and_advice(cause: MissCause) -> None:
    found = cause_of(cause)
    assert found.short == CAUSES[cause]
    assert found.name
    assert found.advice
    assert len(f"{found.name}: {found.advice}") <= 78, "it fits a line of 80"


def test_a_cause_of_a_newer_server_is_shown_as_it_is() -> None:
    worst = worst_cause(replace(waiting(0), misses=(("moon_phase", 2, 10), ("new", 9, 0))))
    assert worst is not None
    assert (worst.name, worst.num_requests, worst.lost_tokens) == ("moon phase", 2, 10)
    assert worst_cause(replace(waiting(0), misses=(("new", 9, 0),))) is None
