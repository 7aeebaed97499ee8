"""Timelines of requests: what is noted, with which words and numbers, and how much is kept."""

from __future__ import annotations

from kvd.core import BLOCK_SIZE
from kvd.scheduler.planning import _fetched_words
from kvd.scheduler.timeline import MAX_ENDED, MAX_ENTRIES, MERGED_FROM

from .driver import Driver, make_request

RATES = {"prefill_tokens_per_second": 1000.0, "save_bytes_per_second": 1e6, "restore_bytes_per_second": 2e6}


def kinds(driver: Driver, request_id: str) -> list[str]:
    timeline = driver.scheduler.timelines.find(request_id)
    assert timeline is not None
    return [entry.kind for entry in timeline.entries]


def entry(driver: Driver, request_id: str, kind: str) -> tuple[float, int, str]:
    timeline = driver.scheduler.timelines.find(request_id)
    assert timeline is not None
    (found,) = [each for each in timeline.entries if each.kind == kind]
    return found.seconds, found.num_tokens, found.reason


def test_a_request_from_its_arrival_to_its_end() -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.scheduler.add(make_request("a", range(50, 130), max_tokens=3, client="x"))
    driver.finish()
    timeline = driver.scheduler.timelines.find("a")
    assert timeline is not None
    assert [(each.seconds, each.kind, each.num_tokens) for each in timeline.entries] == [
        (0.0, "queued", 80), (1.0, "admitted", 80), (1.0, "chunk", 32), (2.0, "chunk", 32), (3.0, "chunk", 16),
        (3.0, "first_token", 1), (5.0, "finished", 3),
    ]  # fmt: skip
    assert timeline.entries[-1].reason == "length: 80 prompt tokens, 0 cached, 3 generated"
    assert (timeline.client, timeline.num_prompt_tokens, timeline.has_ended) == ("x", 80, True)
    assert driver.scheduler.timelines.find("nobody") is None


def test_what_is_found_in_the_pool_and_in_another_continuation() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.scheduler.add(make_request("a", range(50, 100), max_tokens=1))
    driver.finish()
    driver.scheduler.add(make_request("b", [*range(50, 90), 7, 8, 9], max_tokens=1))
    driver.finish()
    assert kinds(driver, "b") == ["queued", "admitted", "hit", "restored", "chunk", "first_token", "finished"]
    assert entry(driver, "b", "hit")[1:] == (32, "in the KV pool")
    assert entry(driver, "b", "restored")[1:] == (8, "8 of a block that begins alike")
    assert entry(driver, "b", "chunk")[1] == 3


def test_why_a_request_waits_is_noted_when_the_reason_changes() -> None:
    driver = Driver(num_blocks=(8,), max_num_seqs=1, max_num_batched_tokens=128)
    driver.scheduler.add(make_request("first", 20, max_tokens=5))
    driver.scheduler.add(make_request("second", 20, max_tokens=1))
    driver.finish()
    assert kinds(driver, "second").count("waiting") == 1
    assert entry(driver, "second", "waiting")[2] == "1 run, as many as may now"
    assert entry(driver, "second", "queued")[2] == "0 run, 1 wait"


def test_a_request_that_lacks_room_says_how_much() -> None:
    driver = Driver(
        num_blocks=(8,), max_num_batched_tokens=128, expected_growth_factor=0.0, min_expected_growth_tokens=0
    )
    driver.scheduler.add(make_request("first", 90, max_tokens=5))
    driver.scheduler.add(make_request("second", 60, max_tokens=1))
    driver.step()
    assert entry(driver, "second", "waiting")[2].startswith("needs 4 blocks, and 2 can be had")


def test_whoever_waits_for_a_neighbour() -> None:
    driver = Driver(max_num_batched_tokens=40)
    driver.scheduler.add(make_request("a", range(50, 114), max_tokens=1))
    driver.step()
    driver.scheduler.add(make_request("b", range(50, 120), max_tokens=1))
    driver.step()
    assert entry(driver, "b", "waiting")[2] == "another request computes the same beginning"
    driver.finish()
    assert entry(driver, "b", "hit")[1] == 64


def test_whoever_waits_for_its_grammar() -> None:
    driver = Driver(max_num_batched_tokens=40)
    driver.scheduler.add(make_request("a", 5, max_tokens=1))
    driver.scheduler.add(make_request("b", 5, max_tokens=1))
    driver.commit(driver.scheduler.plan({"b"}))
    assert entry(driver, "b", "waiting")[2] == "its grammar is not ready"
    driver.finish()
    assert kinds(driver, "b") == ["queued", "waiting", "admitted", "chunk", "first_token", "finished"]


def preempt(**options: object) -> Driver:
    """ "a" and "b" decode until the pool is full, then "b" gives way."""
    driver = Driver(
        num_blocks=(6,), max_num_batched_tokens=64, expected_growth_factor=0.0, min_expected_growth_tokens=0,
        rates=RATES, block_bytes=[1000], **options,
    )  # fmt: skip
    driver.scheduler.add(make_request("a", 30, max_tokens=40))
    driver.scheduler.add(make_request("b", 30, max_tokens=40))
    while not driver.scheduler.num_preemptions:
        driver.step()
    return driver


def test_a_request_that_gives_way_says_for_whom_by_which_way_and_what_either_costs() -> None:
    driver = preempt(num_ram_slots=[8])
    _, num_tokens, words = entry(driver, "b", "preempted")
    # 48 tokens: 3 blocks, which RAM has already, come up at 2 MB/s; or 48 ms of prefill.
    assert num_tokens == 48
    assert words == "for a; kept in RAM (1.5 ms; computing again would take 48.0 ms)"
    assert driver.scheduler.latest_preemption == ("b", words)
    (view,) = [view for view in driver.scheduler.request_views() if view.request_id == "b"]
    assert (view.state, view.num_preemptions, view.num_swaps) == ("swapped", 1, 1)
    driver.finish()
    assert entry(driver, "b", "resumed")[2] == "2 more blocks are being fetched"
    assert _fetched_words(1) == "1 more block is being fetched"
    assert entry(driver, "b", "restored")[1:] == (32, "32 from RAM")  # the first block is in the pool yet
    assert kinds(driver, "b").index("resumed") < kinds(driver, "b").index("restored")
    assert driver.scheduler.timelines.find("b").entries[-1].reason.endswith("preempted 1×")


def test_a_request_that_is_computed_again_says_so() -> None:
    driver = preempt()
    assert entry(driver, "b", "preempted")[2] == "for a; to be computed again (48.0 ms)"
    (view,) = [view for view in driver.scheduler.request_views() if view.request_id == "b"]
    assert (view.state, view.num_swaps, view.num_prefill_tokens) == ("preempted", 0, 49)
    driver = preempt(num_ram_slots=[1])
    assert "since RAM has no room to keep it" in entry(driver, "b", "preempted")[2]


def test_what_is_forgotten_is_noted() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.scheduler.add(make_request("a", 60, max_tokens=60, kv_eviction="streaming", kv_budget_tokens=64))
    driver.finish()
    timeline = driver.scheduler.timelines.find("a")
    forgotten = [each for each in timeline.entries if each.kind == "forgot"]
    assert {each.num_tokens for each in forgotten} == {BLOCK_SIZE}
    assert sum(each.num_tokens for each in forgotten) == driver.last_event("a").num_dropped_tokens
    assert forgotten[0].reason == "kv_eviction: streaming"


def test_chunks_beyond_some_number_are_added_to_the_last() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.scheduler.add(make_request("a", 400, max_tokens=1))
    driver.finish()
    timeline = driver.scheduler.timelines.find("a")
    assert timeline.num_left_out == 100 - (MERGED_FROM - 2)
    assert sum(each.num_tokens for each in timeline.entries if each.kind == "chunk") == 400
    assert [each.kind for each in timeline.entries[-2:]] == ["first_token", "finished"]
    assert len(timeline.entries) <= MAX_ENTRIES


def test_a_decoded_token_leaves_no_trace() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, max_tokens=200))
    driver.step()
    before = driver.scheduler.timelines.find("a")
    for _ in range(100):
        driver.step()
    assert driver.scheduler.timelines.find("a") == before


def test_those_that_ended_last_are_kept() -> None:
    driver = Driver()
    for number in range(MAX_ENDED + 3):
        driver.scheduler.add(make_request(f"r{number}", 3, max_tokens=1))
        driver.scheduler.abort(f"r{number}", "abort")
    timelines = driver.scheduler.timelines
    assert timelines.find("r2") is None
    assert timelines.find("r3") is not None
    first, second = timelines.latest_ended(2)
    assert (first.request_id, second.request_id) == (f"r{MAX_ENDED + 2}", f"r{MAX_ENDED + 1}")
    assert [each.kind for each in first.entries] == ["finished"]
    assert len(timelines.latest_ended(10_000)) == MAX_ENDED
    assert timelines.latest_ended(0) == ()


def test_an_error_stands_in_the_last_entry() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, deadline=0.5))
    driver.now = 2.0
    driver.scheduler.expire()
    assert entry(driver, "a", "finished")[2].startswith(
        "timeout (timed out after 2.0 s in the queue): 20 prompt tokens"
    )
