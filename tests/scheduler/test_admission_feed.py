"""What is told of an admission: the final figure, evictions with whom they served, excuses, other formats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.cache.ledger import Eviction
from kvd.cache.manager import CacheManager
from kvd.cache.prefix_index import KeyChain
from kvd.core import BLOCK_SIZE
from kvd.insight import Admission

from .driver import Driver, make_request


def listen(driver: Driver) -> list[Admission]:
    told: list[Admission] = []
    driver.scheduler.admissions.receive = told.extend
    return told


def test_a_hit_is_told_with_the_tokens_of_a_block_that_begins_alike() -> None:
    driver = Driver(max_num_batched_tokens=64)
    told = listen(driver)
    driver.scheduler.add(make_request("a", range(50, 100), max_tokens=1, client="x", salt="s"))
    driver.finish()
    driver.scheduler.add(make_request("b", [*range(50, 90), 7, 8, 9], max_tokens=1, salt="s"))
    driver.finish()
    assert [(each.request_id, each.num_cached_tokens, each.evicted, each.is_excused) for each in told] == [
        ("a", 0, None, ""), ("b", 40, None, ""),
    ]  # fmt: skip
    assert (told[0].client, told[0].cache_salt, told[0].prompt_token_ids) == ("x", "s", tuple(range(50, 100)))


def test_requests_of_one_plan_are_told_together() -> None:
    driver = Driver(max_num_batched_tokens=64)
    calls: list[list[str]] = []
    driver.scheduler.admissions.receive = lambda told: calls.append([each.request_id for each in told])
    driver.scheduler.add(make_request("a", 5, max_tokens=3))
    driver.scheduler.add(make_request("b", 5, max_tokens=3))
    driver.finish()
    assert calls == [["a", "b"]]


def test_who_listens_cannot_stop_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(max_num_batched_tokens=64)

    def fail(*_: object) -> None:
        raise RuntimeError("an observer failed")

    driver.scheduler.admissions.receive = fail
    driver.cache.other_format = fail  # type: ignore[assignment, method-assign]
    driver.scheduler.timelines._clock = fail  # type: ignore[assignment]
    for name in ("a", "b"):
        driver.scheduler.add(make_request(name, 5, max_tokens=3))
    driver.finish()
    assert driver.last_event("b").finish_reason == "length"
    assert driver.scheduler.timelines._live == {}
    assert "the server goes on" in caplog.text
    driver.cache.other_format = lambda *_: ""  # type: ignore[method-assign]
    driver.scheduler.add(make_request("c", 20, max_tokens=3))
    driver.finish()
    assert driver.last_event("c").finish_reason == "length"


def test_who_gave_way_while_blocks_were_fetched_is_told_of_with_what_it_finds_then() -> None:
    driver = Driver(max_num_batched_tokens=64)
    told = listen(driver)
    driver.scheduler.add(make_request("a", range(50, 114), max_tokens=1))
    state = driver.scheduler._roster.states["a"]
    # As a first admission left it, whose blocks were evicted after it had given way.
    state.first_scheduled, state.num_cached_tokens, state.num_preemptions = 0.0, 48, 1
    chain = KeyChain(driver.cache.key_seed, "")
    chain.extend(state.token_ids, BLOCK_SIZE)
    driver.cache.ledger.notes.add(chain.keys[0], Eviction(0.0, "bob", 1.0))
    driver.finish()
    (admission,) = told
    assert admission.num_cached_tokens == driver.last_event("a").num_cached_tokens == 0
    assert admission.evicted is not None
    assert admission.evicted.num_tokens == BLOCK_SIZE


def test_what_comes_from_ram_is_in_the_figure() -> None:
    driver = Driver(
        max_num_batched_tokens=64, num_ram_slots=[40], block_bytes=[1], rates={"prefill_tokens_per_second": 1.0}
    )
    told = listen(driver)
    driver.scheduler.add(make_request("a", range(50, 114), max_tokens=1))
    driver.finish()
    driver.step()  # writes through
    assert driver.cache.drop_cached() == 4
    driver.scheduler.add(make_request("b", range(50, 114), max_tokens=1))
    driver.finish()
    assert [each.num_cached_tokens for each in told] == [0, 63]
    assert driver.last_event("b").num_cached_tokens == 63


def test_evicted_blocks_are_told_with_whom_they_made_room_for() -> None:
    driver = Driver(num_blocks=(8,), max_num_batched_tokens=256)
    told = listen(driver)
    prompt = range(50, 114)
    driver.scheduler.add(make_request("a", prompt, max_tokens=1, client="alice"))
    driver.finish()  # at 1 s
    driver.now = 10.0
    driver.scheduler.add(make_request("b", 100, max_tokens=1, client="bob"))
    driver.finish()  # takes 7 blocks: all that was cached but the first
    driver.now = 20.0
    driver.scheduler.add(make_request("again", prompt, max_tokens=1, client="alice"))
    driver.finish()
    admission = told[-1]
    assert admission.num_cached_tokens == BLOCK_SIZE
    evicted = admission.evicted
    assert evicted is not None
    assert (evicted.evicted_for, evicted.seconds_ago, evicted.age_seconds) == ("bob", 10.0, 10.0)
    assert evicted.num_tokens == 3 * BLOCK_SIZE


def test_what_an_operator_dropped_was_for_nobody() -> None:
    driver = Driver(max_num_batched_tokens=256)
    told = listen(driver)
    driver.scheduler.add(make_request("a", range(50, 115), max_tokens=1))
    driver.finish()
    assert driver.scheduler.drop_prefix("a") == 5  # four whole blocks and one with a single token
    driver.scheduler.add(make_request("again", range(50, 115), max_tokens=1))
    driver.finish()
    assert told[-1].evicted is not None
    assert (told[-1].evicted.evicted_for, told[-1].evicted.num_tokens) == ("", 64)


def test_excuses() -> None:
    driver = Driver(max_num_batched_tokens=256)
    told = listen(driver)
    driver.scheduler.add(replace(make_request("scored", 40, max_tokens=1), num_prompt_logprobs=0))
    long = make_request("forgets", 100, max_tokens=1, kv_eviction="streaming", kv_budget_tokens=64)
    driver.scheduler.add(long)
    driver.scheduler.add(make_request("short", 40, max_tokens=1, kv_eviction="streaming", kv_budget_tokens=64))
    plan = driver.scheduler.plan()
    assert plan is not None
    assert {each.request_id: each.is_excused for each in told} == {
        "scored": "prompt logprobs have to be computed",
        "forgets": "its prompt is longer than its kv_budget_tokens",
        "short": "",
    }
    driver = Driver(enable_prefix_caching=False)
    told = listen(driver)
    driver.scheduler.add(make_request("a", 40, max_tokens=1))
    driver.finish()
    assert [each.is_excused for each in told] == ["prefix caching is off"]


class DiskOf:
    """A slow tier that has some keys and is never asked for more."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = keys

    def contains(self, group_id: int, key: bytes) -> bool:
        return group_id == 0 and key in self.keys


def test_another_format_that_has_the_beginning_is_named() -> None:
    chain = KeyChain(b"model|int4|x", "salt")
    chain.extend(range(32), 32)
    cache = CacheManager(
        (8,), key_seed=b"model|int8|x", other_formats=[(b"model|fp16|x", "fp16"), (b"model|int4|x", "int4 (cpu)")]
    )
    cache.tiers.slow = DiskOf(chain.keys[0])
    assert cache.other_format(range(32), "salt") == "int4 (cpu)"
    assert cache.other_format(range(32), "another salt") == ""
    assert cache.other_format(range(1, 33), "salt") == ""
    assert cache.other_format(range(15), "salt") == ""
