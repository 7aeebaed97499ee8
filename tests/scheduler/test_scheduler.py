"""What the scheduler plans and reports, case by case."""

from __future__ import annotations

import pytest

from kvd.core import Sample, StepResult
from kvd.errors import ConfigError, ContextLengthExceeded, RequestError, ServerOverloaded
from kvd.scheduler.admission import expected_growth_blocks, spare_blocks
from kvd.scheduler.budget import UNKNOWN_TOKEN
from kvd.scheduler.config import SchedulerConfig

from .driver import STOP, Driver, make_request, shape
from .invariants import check_everything

# --------------------------------------------------------------------------- one budget per step


def test_decodes_come_first_then_running_prefills_then_admissions() -> None:
    driver = Driver(max_num_batched_tokens=20)
    driver.scheduler.add(make_request("a", 10))
    driver.step()
    driver.scheduler.add(make_request("b", 50))
    assert shape(driver.plan()) == [("a", 10, 1, True), ("b", 0, 19, False)]
    driver.commit(driver.plans[-1])
    driver.scheduler.add(make_request("c", 20))
    assert shape(driver.plan()) == [("a", 11, 1, True), ("b", 19, 19, False)]
    driver.commit(driver.plans[-1])
    # b needs 12 more of the 19 that the decode leaves; c gets what remains in the same step.
    assert shape(driver.plan()) == [("a", 12, 1, True), ("b", 38, 12, True), ("c", 0, 7, False)]


def test_priority_then_arrival_and_nobody_is_overtaken() -> None:
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=100)
    for request_id, priority in (("running", 0), ("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        driver.scheduler.add(make_request(request_id, 5, max_tokens=2, priority=priority))
        if request_id == "running":
            driver.step()
    driver.finish()
    order = [request.request_id for plan in driver.plans for request in plan.new_requests]
    assert order == ["running", "urgent", "first", "second", "late"]


def test_a_large_request_at_the_head_is_not_passed_by_a_small_one() -> None:
    driver = Driver(num_blocks=(8,), max_num_batched_tokens=200, min_expected_growth_tokens=0)
    driver.scheduler.add(make_request("a", 60, max_tokens=4))
    driver.step()
    driver.scheduler.add(make_request("large", 100))
    driver.scheduler.add(make_request("small", 4))
    assert [item.request_id for item in driver.plan().items] == ["a"]


def test_admission_leaves_room_for_the_growth_of_those_running() -> None:
    for expected, admitted in ((64, ["a"]), (0, ["a", "b"])):
        driver = Driver(num_blocks=(8,), max_num_batched_tokens=200, min_expected_growth_tokens=expected)
        driver.scheduler.add(make_request("a", 40, max_tokens=200))
        driver.scheduler.add(make_request("b", 40, max_tokens=200))
        assert [item.request_id for item in driver.plan().items] == admitted


def test_growth_is_not_expected_beyond_max_tokens() -> None:
    driver = Driver(num_blocks=(8,), max_num_batched_tokens=200, min_expected_growth_tokens=64)
    driver.scheduler.add(make_request("a", 40, max_tokens=8))
    driver.scheduler.add(make_request("b", 40, max_tokens=8))
    assert len(driver.plan().items) == 2
    driver.commit(driver.plans[-1])
    driver.finish()
    assert driver.scheduler.counters().num_preemptions == 0


def test_tables_cover_exactly_the_tokens_of_each_chunk_in_every_group() -> None:
    driver = Driver(num_blocks=(20, 30), max_num_batched_tokens=20)
    driver.scheduler.add(make_request("a", 50))
    lengths = []
    for _ in range(3):
        driver.step()
        (item,) = driver.plans[-1].items
        assert len(item.block_tables) == len(item.first_positions) == 2
        assert [list(positions) for positions in item.first_positions] == [
            list(range(0, 16 * len(table), 16)) for table in item.block_tables
        ]
        lengths.append([len(table) for table in item.block_tables])
    assert lengths == [[2, 2], [3, 3], [4, 4]]


def test_too_few_tokens_per_step_for_the_requests_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: 7 is less than max_num_seqs \(8\)"):
        SchedulerConfig(8, 7, 100)
    with pytest.raises(ConfigError, match="max_num_seqs: 0"):
        SchedulerConfig(0, 7, 100)
    with pytest.raises(ConfigError, match="max_model_len: 1 "):
        SchedulerConfig(1, 7, 1)


# --------------------------------------------------------------------------- how requests end


def test_stop_length_and_the_exact_counts_of_the_last_event() -> None:
    driver = Driver()
    driver.now = 10.0
    driver.scheduler.add(make_request("a", 20, max_tokens=3, arrival=8.0))
    driver.scheduler.add(make_request("b", 20, max_tokens=30, arrival=9.0))
    driver.step()
    driver.step()
    assert driver.last_event("a").finish_reason is None
    driver.tokens["b"] = STOP
    driver.step()
    a, b = driver.last_event("a"), driver.last_event("b")
    assert (b.finish_reason, b.token_id, b.num_output_tokens) == ("stop", STOP, 2)
    assert (a.finish_reason, a.token_id, a.num_output_tokens) == ("length", 5, 3)
    assert b.num_prompt_tokens == 20
    assert a.timing is not None
    assert (a.timing.arrival, a.timing.first_scheduled, a.timing.first_token, a.timing.last_token) == (8, 11, 11, 13)
    assert b.timing is not None
    assert (b.timing.first_scheduled, b.timing.first_token) == (11, 12)  # its chunk of step one was too short
    assert not driver.scheduler.has_work
    assert dict(driver.scheduler.counters().finished) == {"stop": 1, "length": 1}


def test_case_26_the_whole_context_can_be_used_and_not_more() -> None:
    driver = Driver(max_model_len=40)
    driver.scheduler.add(make_request("exact", 30, max_tokens=10))
    driver.scheduler.add(make_request("rest", 30, max_tokens=1000))
    driver.finish()
    assert driver.last_event("exact").num_output_tokens == 10
    assert driver.last_event("rest").num_output_tokens == 10
    assert driver.last_event("rest").finish_reason == "length"
    driver.scheduler.check(make_request("one left", 39))
    with pytest.raises(
        ContextLengthExceeded, match="maximum context length is 40 tokens, and the prompt has 40"
    ) as error:
        driver.scheduler.check(make_request("full", 40))
    assert error.value.extra == {"n_prompt_tokens": 40, "n_ctx": 40}
    with pytest.raises(RequestError, match="empty"):
        driver.scheduler.check(make_request("empty", 0))


def test_case_16_a_prompt_larger_than_the_pool_is_refused_with_numbers_and_the_next_one_runs() -> None:
    driver = Driver(num_blocks=(4,), max_model_len=512)
    with pytest.raises(
        ContextLengthExceeded, match=r"4 blocks of 16 tokens.*maximum context length is 64 tokens"
    ) as error:
        driver.scheduler.add(make_request("large", 64))
    assert error.value.extra == {"n_prompt_tokens": 64, "n_ctx": 64}
    assert not driver.scheduler.has_work
    driver.scheduler.add(make_request("fits", 63, max_tokens=1))
    driver.scheduler.add(make_request("short", 5, max_tokens=2))
    driver.finish()
    assert driver.last_event("fits").finish_reason == "length"
    assert driver.last_event("short").num_output_tokens == 2


def test_the_smallest_group_decides_what_fits() -> None:
    driver = Driver(num_blocks=(64, 4))
    with pytest.raises(ContextLengthExceeded, match="64 tokens"):
        driver.scheduler.check(make_request("large", 64))


def test_a_lone_request_that_outgrows_the_pool_ends_with_length() -> None:
    driver = Driver(num_blocks=(2,), max_model_len=512)
    driver.scheduler.add(make_request("a", 10, max_tokens=400))
    driver.finish()
    event = driver.last_event("a")
    assert event.finish_reason == "length"
    assert 10 + event.num_output_tokens == 33  # 32 in the pool, and one that was sampled last
    assert driver.cache.num_blocks_active == 0


def test_case_19_a_full_queue_refuses_and_arrivals_on_their_way_count() -> None:
    driver = Driver(max_num_seqs=1, max_waiting=2)
    for number in range(3):
        driver.scheduler.add(make_request(f"r{number}", 5))
    with pytest.raises(ServerOverloaded, match="1 may run at the same time and 2 may wait") as error:
        driver.scheduler.check(make_request("r3", 5))
    assert error.value.status == 503
    assert error.value.retry_after_seconds
    with pytest.raises(ServerOverloaded):
        driver.scheduler.add(make_request("r3", 5))
    driver.scheduler.abort("r1", "abort")
    driver.scheduler.check(make_request("r3", 5))
    with pytest.raises(ServerOverloaded):
        driver.scheduler.check(make_request("r3", 5), num_present=3)


def test_deadline_and_queue_timeout() -> None:
    driver = Driver(max_num_seqs=1, queue_timeout_seconds=10.0)
    driver.scheduler.add(make_request("runs", 5, max_tokens=100))
    driver.scheduler.add(make_request("queued", 5, arrival=2.0))
    driver.scheduler.add(make_request("late", 5, arrival=3.0, deadline=6.0))
    driver.step()
    driver.now = 5.9
    assert driver.scheduler.expire() == []
    driver.now = 6.0
    (late,) = driver.scheduler.expire()
    assert (late.request_id, late.finish_reason, late.token_id) == ("late", "timeout", None)
    assert late.error == "timed out after 3.0 s in the queue"
    assert late.timing is not None
    assert late.timing.last_token == late.timing.arrival == 3.0
    driver.now = 12.0  # the queue timeout of the one that runs has passed as well, and means nothing to it
    (queued,) = driver.scheduler.expire()
    assert queued.request_id == "queued"
    assert driver.scheduler.num_running == 1


def test_a_deadline_ends_a_running_request_too() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 5, max_tokens=100, deadline=2.5))
    driver.step()
    driver.step()
    driver.now = 3.0
    (event,) = driver.scheduler.expire()
    assert (event.finish_reason, event.num_output_tokens) == ("timeout", 2)
    assert driver.cache.num_blocks_active == 0
    assert driver.scheduler.plan() is None


def test_an_alarm_of_an_ended_request_does_not_ring_for_the_next_of_that_name() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 5, deadline=4.0))
    driver.scheduler.abort("a", "abort")
    driver.scheduler.add(make_request("a", 5))
    driver.now = 5.0
    assert driver.scheduler.expire() == []
    assert driver.scheduler.num_waiting == 1


# --------------------------------------------------------------------------- abort at every stage


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "preempted"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_case_17_abort_frees_everything_within_one_step(stage: str, in_flight: bool) -> None:
    driver = Driver(num_blocks=(6,), max_num_seqs=2, min_expected_growth_tokens=0, expected_growth_factor=0)
    if stage in ("waiting", "preempted"):
        driver.scheduler.add(make_request("old", 30, max_tokens=100))
        driver.step()
    if stage == "waiting":
        driver.scheduler.add(make_request("other", 30, max_tokens=100))
    driver.scheduler.add(make_request("a", 40, max_tokens=100))
    stages = []
    while not stages or stages[-1] != stage:
        driver.step()
        stages = [view.state for view in driver.scheduler.request_views() if view.request_id == "a"]
    plan = driver.plan() if in_flight else None
    event = driver.scheduler.abort("a", "abort")
    assert event is not None
    assert event.finish_reason == "abort"
    assert driver.scheduler.abort("a", "abort") is None
    assert driver.scheduler.abort("nobody", "abort") is None
    check_everything(driver.scheduler)
    if plan is not None:
        assert "a" not in {event.request_id for event in driver.commit(plan)}
    check_everything(driver.scheduler)
    assert "a" not in {view.request_id for view in driver.scheduler.request_views()}
    for other in ("old", "other"):
        driver.scheduler.abort(other, "abort")
    assert driver.cache.num_blocks_active == 0
    assert not driver.scheduler.has_work
    # The runner hears of it with the next plan, once.
    driver.scheduler.add(make_request("next", 3, max_tokens=1))
    driver.finish()
    ended = [request_id for plan in driver.plans for request_id in plan.ended_request_ids]
    assert ended.count("a") == (stage != "waiting")
    assert driver.last_event("next").finish_reason == "length"


def test_case_18_cancelling_a_queued_request_changes_nothing_for_the_running_one() -> None:
    def plans(cancels: bool) -> list[object]:
        driver = Driver(max_num_seqs=1)
        driver.scheduler.add(make_request("active", 40, max_tokens=6))
        driver.step()
        if cancels:
            driver.scheduler.add(make_request("queued", 40))
            driver.step()
            assert driver.scheduler.abort("queued", "abort") is not None
        driver.finish()
        return [(plan.items, plan.ended_request_ids) for plan in driver.plans]

    assert plans(cancels=True) == plans(cancels=False)


def test_fail_all_ends_everybody_and_leaves_a_usable_scheduler() -> None:
    driver = Driver(max_num_seqs=2)
    for request_id in "abc":
        driver.scheduler.add(make_request(request_id, 20))
    driver.step()
    driver.plan()
    events = driver.scheduler.fail_all("the device is gone")
    assert [(event.finish_reason, event.error) for event in events] == [("error", "the device is gone")] * 3
    check_everything(driver.scheduler)
    assert not driver.scheduler.has_work
    assert driver.cache.num_blocks_active == 0
    driver.scheduler.add(make_request("d", 20, max_tokens=2))
    driver.finish()
    assert driver.last_event("d").num_output_tokens == 2


# --------------------------------------------------------------------------- preemption


def test_the_latest_is_preempted_and_its_recomputation_is_not_a_hit() -> None:
    driver = Driver(num_blocks=(5,), max_num_batched_tokens=64, min_expected_growth_tokens=0, expected_growth_factor=0)
    driver.scheduler.add(make_request("old", 30, max_tokens=40))
    driver.scheduler.add(make_request("new", 30, max_tokens=20))
    driver.finish()
    counters = driver.scheduler.counters()
    assert counters.num_preemptions == 1
    assert driver.last_event("old").num_output_tokens == 40
    assert driver.last_event("new").num_output_tokens == 20
    # `new` lost 30 + 3 tokens; the block that `old` had not yet taken was still cached, and that is no hit.
    restart = next(
        item for plan in driver.plans[2:] for item in plan.items if item.request_id == "new" and item.num_tokens > 1
    )
    lost = [item.start for plan in driver.plans for item in plan.items if item.request_id == "new"]
    assert restart.start + restart.num_tokens > 30
    assert driver.last_event("new").num_cached_tokens == 0
    assert counters.prefix_hit_tokens == counters.prompt_tokens_cached == 0
    assert counters.prefix_query_tokens == counters.prompt_tokens == 60
    assert counters.recomputed_tokens == max(lost[: lost.index(restart.start, 1)]) + 1 - restart.start
    assert driver.num_computed("new") == 30 + 20 - 1 + counters.recomputed_tokens
    assert counters.prefill_tokens_computed == 60 + restart.num_tokens
    assert counters.generation_tokens == 60
    assert driver.scheduler.request_views() == ()


def crowded(**options: object) -> Driver:
    """A small pool into which everything is admitted that fits at the moment."""
    settings: dict[str, object] = {"num_blocks": (5,), "max_num_batched_tokens": 64}
    return Driver(**(settings | options), min_expected_growth_tokens=0, expected_growth_factor=0)


def test_the_oldest_asks_first_even_with_the_lowest_priority() -> None:
    driver = crowded()
    driver.scheduler.add(make_request("humble", 30, max_tokens=30, priority=9))
    driver.scheduler.add(make_request("proud", 30, max_tokens=30))
    driver.step()
    assert [item.request_id for item in driver.plans[0].items] == ["proud", "humble"]
    while not driver.scheduler.counters().num_preemptions:
        driver.step()
    # Both needed the last block in the same step.
    assert [item.request_id for item in driver.plans[-1].items] == ["humble"]
    driver.finish()
    assert driver.scheduler.counters().num_preemptions == 1
    finished = [event.request_id for event in driver.events if event.finish_reason]
    assert finished == ["humble", "proud"]


def test_no_admission_in_a_pass_in_which_a_running_request_lacked_blocks() -> None:
    def run(num_steps: int | None) -> Driver:
        driver = crowded()
        driver.scheduler.add(make_request("old", 30, max_tokens=40))
        driver.scheduler.add(make_request("new", 30, max_tokens=40))
        while not driver.scheduler.counters().num_preemptions and len(driver.plans) != num_steps:
            driver.step()
        return driver

    driver = run(len(run(None).plans) - 1)
    driver.scheduler.add(make_request("urgent", 3, priority=-1))
    driver.step()
    assert driver.scheduler.counters().num_preemptions == 1
    assert [item.request_id for item in driver.plans[-1].items] == ["old"]
    driver.step()
    assert [item.request_id for item in driver.plans[-1].items] == ["old", "urgent"]


def test_one_victim_is_enough_while_its_blocks_are_on_their_way() -> None:
    driver = crowded(num_blocks=(8,), max_num_batched_tokens=100)
    for request_id in "abcd":
        driver.scheduler.add(make_request(request_id, 30, max_tokens=40))
    ahead = driver.plan()
    while not driver.scheduler.counters().num_preemptions:
        plan = driver.plan()
        driver.commit(ahead)
        ahead = plan
        if driver.scheduler.num_running == 4 and len(ahead.items) == 4 and ahead.items[0].start == 31:
            break
    # Position 32 needs a block, all eight are in use, and the step before it is in flight.
    assert driver.scheduler.plan() is None
    assert driver.scheduler.counters().num_preemptions == 1
    assert driver.scheduler.num_running == 3
    check_everything(driver.scheduler)
    driver.commit(ahead)
    assert [item.request_id for item in driver.plan().items] == ["a", "b"]


def test_a_refused_request_is_tried_again_when_blocks_come_back() -> None:
    driver = crowded(num_blocks=(7,), max_num_batched_tokens=100)
    driver.scheduler.add(make_request("long", 10, max_tokens=60))
    driver.scheduler.add(make_request("brief", 30, max_tokens=3))
    driver.step()
    driver.scheduler.add(make_request("large", 80, max_tokens=3))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.step()
    assert driver.last_event("brief").finish_reason == "length"
    driver.step()
    assert [item.request_id for item in driver.plans[-1].items] == ["long", "large"]


def test_expected_growth() -> None:
    driver = Driver(num_blocks=(64,), max_num_batched_tokens=100, min_expected_growth_tokens=20)
    driver.scheduler.add(make_request("a", 10, max_tokens=200))
    driver.scheduler.add(make_request("b", 10, max_tokens=7))  # may grow to 16 stored tokens: no further block
    driver.scheduler.add(make_request("c", 10, max_tokens=8))
    config = driver.scheduler.config
    a, b, c = (driver.scheduler._roster.states[request_id] for request_id in "abc")
    assert [expected_growth_blocks(state, config) for state in (a, b, c)] == [1, 0, 1]
    assert [spare_blocks(running, a, config) for running in ([], [b], [b, a])] == [0, 1, 2]
    driver.step()
    for _ in range(49):
        driver.step()
    # 60 tokens, 50 of them generated: 110 are expected, three blocks more than it has.
    assert a.num_output == 50
    assert expected_growth_blocks(a, config) == 3


# --------------------------------------------------------------------------- planning ahead


def test_the_newest_token_is_named_by_slot_and_a_late_stop_discards_one() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, max_tokens=50))
    first = driver.plan()
    second = driver.plan()
    assert shape(second) == [("a", 20, 1, True)]
    assert second.items[0].last_from_slot
    assert second.items[0].token_ids == (UNKNOWN_TOKEN,)
    driver.tokens["a"] = STOP
    (event,) = driver.commit(first)
    assert (event.finish_reason, event.num_output_tokens) == ("stop", 1)
    assert driver.cache.num_blocks_active == 2  # the second step still writes there
    assert driver.scheduler.has_work
    assert driver.scheduler.plan() is None
    assert driver.commit(second) == []
    assert driver.cache.num_blocks_active == 0
    assert driver.scheduler.counters().generation_tokens == 1
    assert not driver.scheduler.has_work


def test_nothing_is_planned_beyond_max_tokens() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, max_tokens=1))
    first = driver.plan()
    assert driver.scheduler.plan() is None
    assert driver.commit(first)[0].finish_reason == "length"


def test_a_slot_is_the_smallest_free_one_and_not_reused_in_flight() -> None:
    driver = Driver(max_num_seqs=2)
    driver.scheduler.add(make_request("a", 5, max_tokens=50))
    driver.scheduler.add(make_request("b", 5, max_tokens=50))
    driver.scheduler.add(make_request("c", 5, max_tokens=50))
    driver.commit(driver.plan())
    ahead = driver.plan()
    driver.scheduler.abort("a", "abort")
    assert {item.request_id: item.slot for item in driver.plan().items} == {"b": 1}
    driver.commit(ahead)
    plan = driver.plan()
    assert {item.request_id: item.slot for item in plan.items} == {"b": 1, "c": 0}
    assert [request.request_id for request in plan.new_requests] == ["c"]


# --------------------------------------------------------------------------- numbers


def test_case_35_gauges_count_what_runs_and_what_stays() -> None:
    driver = Driver(num_blocks=(64, 32))
    driver.scheduler.add(make_request("a", 40, max_tokens=3))
    driver.step()
    assert driver.scheduler.last_step.num_prefill_tokens == 32
    driver.step()
    assert (driver.cache.num_blocks_active, driver.cache.num_blocks_free) == (3, 61)
    (view,) = driver.scheduler.request_views()
    assert (view.state, view.num_blocks, view.num_computed_tokens, view.num_output_tokens) == ("decode", 3, 40, 1)
    assert view.ttft_seconds == 2.0
    driver.finish()
    assert (driver.cache.num_blocks_active, driver.cache.num_blocks_cached) == (0, 3)
    assert [(gauges.num_cached, gauges.num_free) for gauges in driver.cache.gauges()] == [(3, 61), (3, 29)]
    assert driver.scheduler.last_step.num_decode_tokens == 1
    assert driver.scheduler.counters().step_seconds == 1.0
    assert driver.scheduler.reset_cache() == 6
    assert driver.cache.num_blocks_free == 64


def test_validated_parameters_are_asserted_not_trusted() -> None:
    driver = Driver()
    request = make_request("a", 3)
    driver.scheduler.add(request)
    with pytest.raises(AssertionError, match="already here"):
        driver.scheduler.add(request)
    with pytest.raises(AssertionError, match="max_tokens"):
        driver.scheduler.add(make_request("b", 3, max_tokens=0))


def test_a_pin_leaves_every_request_the_blocks_that_it_may_hold() -> None:
    """One that forgets tokens gives blocks up that stay pinned, and must find others."""
    for mode, num_pinned in (("sliding_window", 0), ("none", 0)):
        driver = Driver(num_blocks=(8,), max_num_batched_tokens=128, max_model_len=129 if mode == "none" else 512)
        driver.scheduler.add(make_request("a", 64, max_tokens=150, kv_eviction=mode))
        driver.step()
        assert driver.scheduler.pin("a") == num_pinned
        driver.finish()
        assert driver.last_event("a").finish_reason == "length"
        assert driver.scheduler.pin("a") == 0, "more than half of the pool"
    driver = Driver(num_blocks=(8,), max_num_batched_tokens=128)
    driver.scheduler.add(make_request("a", 48, max_tokens=1))
    driver.finish()
    assert driver.scheduler.pin("a") == 3
    driver.scheduler.add(make_request("b", 48, max_tokens=200, kv_eviction="sliding_window"))
    driver.finish()
    assert driver.last_event("b").num_dropped_tokens > 0
    assert driver.scheduler.unpin("a")
    assert driver.cache.num_blocks_active == 0


# --------------------------------------------------------------------------- requests that are not ready


def test_a_request_that_is_not_ready_is_left_out_and_keeps_what_it_holds() -> None:
    driver = Driver(max_num_batched_tokens=40)
    for request_id in ("a", "b"):
        driver.scheduler.add(make_request(request_id, 10, max_tokens=5))
    driver.step()
    plan = driver.scheduler.plan({"a"})
    assert plan is not None
    assert shape(plan) == [("b", 10, 1, True)]
    driver.commit(plan)
    assert driver.scheduler.plan({"a", "b"}) is None
    assert driver.scheduler.counters().num_preemptions == 0
    assert shape(driver.plan()) == [("a", 10, 1, True), ("b", 11, 1, True)]
    driver.commit(driver.plans[-1])
    driver.finish()
    assert [event.finish_reason for event in driver.events if event.finish_reason] == ["length"] * 2


def test_the_end_of_a_grammar_is_a_stop_also_with_the_last_token_that_was_asked_for() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=1))
    plan = driver.plan()
    result = StepResult(plan.step_id, (Sample("a", 7, is_last=True),), 0.1)
    (event,) = driver.scheduler.commit(plan, result)
    assert (event.token_id, event.finish_reason) == (7, "stop")


def test_a_sample_may_say_why_there_can_be_no_token() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10))
    plan = driver.plan()
    result = StepResult(plan.step_id, (Sample("a", None, refusal="the grammar grew too large"),), 0.1)
    (event,) = driver.scheduler.commit(plan, result)
    assert (event.finish_reason, event.error) == ("refused", "the grammar grew too large")
    assert not driver.scheduler.has_work
