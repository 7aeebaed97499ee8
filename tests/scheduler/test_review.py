"""Where cache, scheduler and operators meet: sessions beside write-through, holds beside requests, priorities."""

from __future__ import annotations

import pytest

from kvd.cache.chains import ChainHold
from kvd.cache.tiers import NoSlowTier
from kvd.core import BLOCK_SIZE
from kvd.errors import RequestError
from kvd.scheduler.preemption import FIRST_QUANTUM

from .driver import Driver, make_request


def test_a_block_from_a_session_never_reaches_ram_under_the_key_of_what_it_replaced() -> None:
    """A session fills its blocks at once: what was published in them, and not saved yet, is gone."""
    driver = Driver(num_blocks=(4,), num_ram_slots=(8,), block_bytes=(1,))
    cache = driver.cache
    driver.scheduler.add(make_request("gone", 2 * BLOCK_SIZE, max_tokens=1))
    driver.step()
    parent = cache.open("").chain.root
    for number in range(3):
        key = bytes([number]) * 16
        inserted = cache.chains.insert(0, key, parent, tuple(range(100 * number, 100 * number + BLOCK_SIZE)))
        assert inserted is not None
        assert inserted[1]
        parent = key
    plan = driver.plan()
    index = cache._groups[0].index
    saved = {save.block_id: cache.tiers.ram.at(0, save.slot).key for save in plan.saves}
    assert len(plan.saves) == 4, "the one block of the request that is left, and the session's"
    assert saved == {block.block_id: block.key for block in index}


def hold_four_blocks(driver: Driver) -> ChainHold:
    """What saving a session does while it lasts."""
    driver.scheduler.add(make_request("kept", 4 * BLOCK_SIZE, max_tokens=1))
    driver.finish()
    key = driver.scheduler.find_chain("kept")
    assert key is not None
    hold = driver.cache.chains.hold_chain(key)
    assert hold is not None
    return hold


def test_a_request_waits_for_blocks_that_are_held() -> None:
    """While a session is written its chain cannot be evicted; nobody else may be there to give way."""
    driver = Driver(num_blocks=(8,))
    scheduler, chains = driver.scheduler, driver.cache.chains
    hold = hold_four_blocks(driver)
    scheduler.add(make_request("waits", 5 * BLOCK_SIZE))
    assert scheduler.plan() is None
    chains.let_go(hold)
    assert not chains.is_holding
    driver.finish()
    assert driver.last_event("waits").finish_reason == "length"


def test_a_request_that_grows_waits_for_blocks_that_are_held() -> None:
    driver = Driver(num_blocks=(8,))
    scheduler, chains = driver.scheduler, driver.cache.chains
    hold = hold_four_blocks(driver)
    scheduler.add(make_request("grows", 3 * BLOCK_SIZE, max_tokens=3 * BLOCK_SIZE))
    while driver.scheduler.request_views()[0].num_computed_tokens < 4 * BLOCK_SIZE:
        driver.step()
    assert scheduler.plan() is None
    chains.let_go(hold)
    driver.finish()
    assert driver.last_event("grows").num_output_tokens == 3 * BLOCK_SIZE


def test_who_gives_way_to_a_better_priority_says_nothing_about_how_many_can_run() -> None:
    driver = Driver(num_blocks=(256,), max_num_seqs=16, max_num_batched_tokens=64, is_auto_num_seqs=True)
    scheduler = driver.scheduler
    limit = scheduler.running_limit
    for number in range(limit):
        scheduler.add(make_request(f"low{number}", 5, max_tokens=100, priority=1))
    while scheduler.num_running < limit:
        driver.step()
    scheduler.add(make_request("high", 5, max_tokens=4))
    while "high" not in {event.request_id for event in driver.events}:
        driver.step()
    assert scheduler.running_limit == limit
    assert scheduler.counters().num_preemptions == 1


@pytest.mark.parametrize("has_caching", [False, True])
def test_a_better_priority_gets_room_as_soon_as_a_quantum_is_over(has_caching: bool) -> None:
    """Tokens that are sampled change nothing in the cache, but they change who may be asked to give way."""
    driver = Driver(
        num_blocks=(16,), enable_prefix_caching=has_caching, max_num_batched_tokens=200,
        min_expected_growth_tokens=0, expected_growth_factor=0.0,
    )  # fmt: skip
    scheduler = driver.scheduler
    scheduler.add(make_request("oldest", 16, max_tokens=200, priority=1))
    scheduler.add(make_request("ends", 100, max_tokens=30, priority=1))
    scheduler.add(make_request("victim", 91, max_tokens=120, priority=1))
    while not scheduler.counters().num_preemptions:
        driver.step()
    victim = scheduler._roster.states["victim"]
    assert victim.num_preemptions == 1
    num_output = victim.num_output
    while not victim.num_output > num_output:
        driver.step()
    scheduler.add(make_request("high", 120, max_tokens=3))
    while "high" not in {event.request_id for event in driver.events}:
        driver.step()
    assert victim.num_preemptions == 2
    assert victim.num_output == num_output + FIRST_QUANTUM + 1, "the step that preempts it still computes its token"


class MeasuredTier(NoSlowTier):
    """An empty tier that has measured something."""

    rate = 1000.0

    @property
    def read_bytes_per_second(self) -> float | None:
        return self.rate


def test_what_the_disk_has_measured_is_learnt_once() -> None:
    """Else what is refused for its slowness would look as if it had just been measured, and never be tried again."""
    tier = MeasuredTier()
    driver = Driver(slow_tier=tier)
    rates = driver.scheduler.rates
    driver.scheduler.add(make_request("a", 5, max_tokens=40))
    for _ in range(10):
        driver.step()
    assert rates.disk_bytes_per_second is None, "that was one measurement"
    for tier.rate in (1001.0, 1002.0):
        driver.step()
    assert rates.disk_bytes_per_second == 1001
    for _ in range(32):
        rates.doubt_transfers("disk_bytes_per_second")
    driver.step()
    assert rates.disk_bytes_per_second is None, "it is to be tried anew"


def test_blocks_that_several_pins_hold_count_once() -> None:
    driver = Driver(num_blocks=(32,))
    scheduler, chains = driver.scheduler, driver.cache.chains
    prompt = list(range(100, 100 + 4 * BLOCK_SIZE))
    scheduler.add(make_request("short", prompt[: 2 * BLOCK_SIZE], max_tokens=1))
    driver.finish()
    scheduler.add(make_request("long", prompt, max_tokens=1))
    driver.finish()
    assert scheduler.pin("short") == 2
    assert scheduler.pin("long") == 4
    assert chains.num_pinned_blocks == 4
    assert driver.cache.capacity_tokens == 28 * BLOCK_SIZE
    assert scheduler.unpin("long")
    assert chains.num_pinned_blocks == 2
    assert not chains.is_holding, "pins are no holds: nobody waits for them"


def test_a_pin_is_taken_back_under_the_name_that_pinned_it() -> None:
    """A request's id stands for more blocks when its prompt was computed again after a part of it had left."""
    driver = Driver(num_blocks=(40,), max_num_batched_tokens=256, max_model_len=640)
    prompt = list(range(50, 150))
    driver.scheduler.add(make_request("a", prompt, max_tokens=1))
    driver.finish()
    assert driver.scheduler.pin("a") == 6
    assert driver.scheduler.pin("a") == 6
    driver.cache.chains.unpin(driver.scheduler._pinned_by["a"])
    chain = driver.cache.open("").chain
    chain.extend(prompt, 96)
    group = driver.cache._groups[0]
    while chain.keys[4] in group.index:
        group.evict("cap")
    assert driver.scheduler.pin("a") == 4
    driver.scheduler.add(make_request("again", prompt, max_tokens=1))
    driver.finish()
    assert driver.scheduler.find_chain("a") == chain.keys[5]
    assert driver.scheduler.unpin("a")
    assert not driver.scheduler.unpin("a")
    assert driver.cache.num_blocks_active == 0


def test_forgetting_is_refused_where_every_layer_forgets_by_itself() -> None:
    driver = Driver(num_blocks=(40, 40), windows=(32, 64))
    with pytest.raises(RequestError, match="every layer has a sliding window"):
        driver.scheduler.add(make_request("a", 20, kv_eviction="streaming"))
