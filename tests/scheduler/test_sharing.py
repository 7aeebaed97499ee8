"""The prefix cache as requests see it: what is shared, when, and how it is counted."""

from __future__ import annotations

from kvd.core import Sample, StepResult

from .driver import Driver, make_request, shape
from .invariants import check_everything


def test_case_9_three_chunks_twice() -> None:
    driver = Driver(max_num_batched_tokens=32)
    prompt = range(100, 190)
    driver.scheduler.add(make_request("first", prompt, max_tokens=1))
    driver.finish()
    assert [len(plan.items[0].token_ids) for plan in driver.plans] == [32, 32, 26]
    assert driver.last_event("first").num_cached_tokens == 0
    driver.scheduler.add(make_request("second", prompt, max_tokens=1))
    driver.finish()
    assert driver.last_event("second").num_cached_tokens == 89  # all but the last of 90: beyond chunk one
    assert driver.num_computed("second") == 1
    counters = driver.scheduler.counters()
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (180, 89)
    assert (counters.prompt_tokens, counters.prompt_tokens_cached) == (180, 89)
    assert counters.prefill_tokens_computed == 91


def test_the_last_prompt_token_is_always_computed() -> None:
    driver = Driver()
    for request_id, cached in (("a", 0), ("b", 31)):
        driver.scheduler.add(make_request(request_id, range(50, 82), max_tokens=1))
        driver.finish()
        assert driver.last_event(request_id).num_cached_tokens == cached


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("turn 1", range(50, 70), max_tokens=14))
    driver.finish()
    # 20 + 14 tokens, the last of which was never computed: two full blocks, and one token of a third.
    driver.scheduler.add(make_request("turn 2", [*range(50, 70), *[5] * 14, *range(30)], max_tokens=1))
    driver.finish()
    assert driver.last_event("turn 2").num_cached_tokens == 33


def test_nothing_is_shared_before_its_step_is_committed_and_the_same_prefix_is_waited_for() -> None:
    driver = Driver(max_num_batched_tokens=100)
    driver.scheduler.add(make_request("a", range(50, 90), max_tokens=9))
    driver.scheduler.add(make_request("b", range(50, 90), max_tokens=9))
    driver.scheduler.add(make_request("other", range(150, 190), max_tokens=9))
    first = driver.plan()
    assert shape(first) == [("a", 0, 40, True), ("other", 0, 40, True)]
    check_everything(driver.scheduler)
    driver.commit(first)
    driver.step()
    # Two full blocks are shared; the third is not complete yet, so its tokens are computed.
    assert shape(driver.plans[-1])[-1] == ("b", 32, 8, True)
    assert driver.last_event("b").num_cached_tokens == 32
    assert driver.cache.num_blocks_active == 3 + 3 + 1
    check_everything(driver.scheduler)
    driver.finish()
    driver.scheduler.add(make_request("c", range(50, 90), max_tokens=9))
    driver.step()
    assert driver.last_event("c").num_cached_tokens == 39  # the third block is another's continuation by now
    assert driver.scheduler.counters().partial_hit_tokens == 7


def test_whoever_waits_for_a_prefix_computes_it_when_the_other_ends_without_it() -> None:
    driver = Driver(max_num_batched_tokens=20)
    driver.scheduler.add(make_request("a", range(50, 90), max_tokens=9))
    driver.scheduler.add(make_request("b", range(50, 90), max_tokens=9))
    driver.step()
    assert driver.scheduler.abort("a", "abort") is not None
    driver.step()
    # What `a` completed is shared, and what it computed of its second block is copied.
    assert shape(driver.plans[-1]) == [("b", 20, 20, True)]


def test_the_tail_of_a_turn_gives_way_to_what_continues_it() -> None:
    driver = Driver(max_num_batched_tokens=100)
    prompt = list(range(50, 70))
    for turn in range(4):
        driver.scheduler.add(make_request(f"turn {turn}", prompt, max_tokens=3))
        driver.finish()
        # 20, 26, 32 and 38 tokens were sent; what a turn computed is never computed again, and nothing is kept twice.
        assert driver.num_computed(f"turn {turn}") == (22 if not turn else 6)
        assert driver.cache.num_blocks_cached == -(-(len(prompt) + 2) // 16)
        check_everything(driver.scheduler)
        prompt += [5, 5, 5, *range(100 * turn + 200, 100 * turn + 203)]


def test_a_request_that_failed_leaves_no_tail() -> None:
    driver = Driver(max_num_batched_tokens=100)
    driver.scheduler.add(make_request("a", range(50, 60), max_tokens=3))
    plan = driver.plan()
    driver.scheduler.commit(plan, StepResult(plan.step_id, (Sample("a", None),), 0.1))
    assert driver.cache.num_blocks_cached == 0


def test_case_10_a_shared_prefix_shorter_than_a_block_is_reused_token_by_token() -> None:
    driver = Driver(max_num_batched_tokens=100)
    driver.scheduler.add(make_request("a", [*range(50, 60), *range(100, 130)], max_tokens=1))
    driver.finish()
    driver.scheduler.add(make_request("b", [*range(50, 60), *range(200, 230)], max_tokens=1))
    plan = driver.plan()
    (copy,) = plan.copies
    assert (copy.num_tokens, shape(plan)) == (10, [("b", 10, 30, True)])
    driver.commit(plan)
    assert driver.last_event("b").num_cached_tokens == 10
    counters = driver.scheduler.counters()
    assert (counters.partial_hit_tokens, counters.prefix_hit_tokens) == (10, 10)
    driver.scheduler.add(make_request("salted", [*range(50, 60), *range(300, 330)], max_tokens=1, salt="x"))
    driver.finish()
    assert driver.last_event("salted").num_cached_tokens == 0


def test_case_14_a_side_call_between_two_turns_does_not_cost_the_second_turn_its_prefix() -> None:
    driver = Driver(num_blocks=(64,), max_num_batched_tokens=200)
    chat = list(range(1000, 1160))
    driver.scheduler.add(make_request("turn 1", chat, max_tokens=6))
    driver.finish()
    driver.scheduler.add(make_request("title", [*range(2000, 2060), *chat[:100]], max_tokens=6))
    driver.finish()
    driver.scheduler.add(make_request("turn 2", [*chat, *[5] * 6, *range(3000, 3020)], max_tokens=6))
    driver.finish()
    assert driver.last_event("title").num_cached_tokens == 0
    assert driver.last_event("turn 2").num_cached_tokens == 165


def test_case_11_salts_share_nothing_and_one_salt_shares() -> None:
    driver = Driver()
    cached = []
    for request_id, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
        driver.scheduler.add(make_request(request_id, range(40), max_tokens=1, salt=salt))
        driver.finish()
        cached.append(driver.last_event(request_id).num_cached_tokens)
    assert cached == [0, 0, 0, 39, 39]


def test_without_prefix_caching_nothing_hits_and_nothing_stays() -> None:
    driver = Driver(enable_prefix_caching=False)
    for request_id in "ab":
        driver.scheduler.add(make_request(request_id, range(40), max_tokens=1))
        driver.finish()
        assert driver.last_event(request_id).num_cached_tokens == 0
    assert driver.cache.num_blocks_free == driver.cache.num_blocks
    assert driver.scheduler.counters().prefix_query_tokens == 0
