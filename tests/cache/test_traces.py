"""The traces are what they say, and the default eviction policy does on them what docs/eviction.md says."""

from __future__ import annotations

import itertools

import pytest
from replay_policies import S3Fifo, SegmentedLru
from replay_traces import Replay, Trace, compared, cost_of, table
from traces import MIXES, TracedRequest, TraceWriter, make_trace, scans

from kvd.cache.eviction import POLICIES
from kvd.core import BLOCK_SIZE

MOST_LOST = 0.015
"""Share of the prompt tokens by which the default may fall behind LRU on one mix at one pool size."""


@pytest.mark.parametrize("name", list(MIXES))
def test_traces_are_deterministic_and_in_order(name: str) -> None:
    trace = make_trace(name, 1, 200.0)
    assert trace == make_trace(name, 1, 200.0)
    assert trace != make_trace(name, 2, 200.0)
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals)
    assert len(trace) > 10
    assert all(request.prompt and request.output and request.seconds > 0 for request in trace)


def test_a_scan_shares_its_instruction_alone() -> None:
    prompts = [request.prompt for request in scans(TraceWriter(1, itertools.count()), 600.0)]
    assert len(prompts) > 5
    for one, other in itertools.combinations(prompts, 2):
        assert set(one) & set(other) == set(one[:60])


def test_histories_grow_by_their_answers() -> None:
    """In a chat, most prompts continue an earlier prompt and its answer."""
    trace = make_trace("chat", 1, 600.0)
    whole = {tuple(request.prompt + request.output) for request in trace}
    num_continued = sum(
        any(tuple(request.prompt[:length]) in whole for length in range(len(request.prompt))) for request in trace
    )
    assert num_continued > len(trace) / 2


def test_a_replay_counts_every_hit_of_an_endless_pool() -> None:
    def request(arrival: float, prompt: list[int], num_output: int) -> TracedRequest:
        return TracedRequest(arrival, prompt, list(range(9000, 9000 + num_output)), 1.0)

    first = list(range(100))
    second = first + list(range(9000, 9030)) + list(range(500, 520))
    trace = Trace([request(0.0, first, 30), request(10.0, second, 10)])
    saved = Replay(trace, 1000, POLICIES["lru"]).run()
    # 130 tokens of history; the last one's K and V were never computed, but its block is not full anyway.
    assert saved.tokens == pytest.approx(128 / 250)
    assert saved.cost == pytest.approx(cost_of(128) / (cost_of(100) + cost_of(150)))


@pytest.fixture(scope="module")
def mix() -> Trace:
    return Trace(make_trace("mix", 21, 400.0))


@pytest.mark.parametrize("num_blocks", [1500, 3000])
def test_the_default_does_not_lose_to_lru_on_the_mix(mix: Trace, num_blocks: int) -> None:
    value = Replay(mix, num_blocks, POLICIES["value"]).run()
    lru = Replay(mix, num_blocks, POLICIES["lru"]).run()
    best = Replay(mix, num_blocks, None).run()
    assert value.tokens > lru.tokens - MOST_LOST
    assert value.cost > lru.cost - MOST_LOST
    assert best.tokens > max(value.tokens, lru.tokens)


def test_every_compared_policy_evicts_leaves_only(mix: Trace) -> None:
    """The manager asserts it; here each policy has to keep a small pool going."""
    for make_policy in (SegmentedLru, S3Fifo):
        replay = Replay(mix, 1500, make_policy)
        assert 0.1 < replay.run().tokens < 1.0
        assert replay.cache.num_evicted_blocks > 1000
        assert replay.cache.num_blocks_active == 0


def test_a_hot_prefix_survives_a_scan() -> None:
    """A prefix of 640 tokens is used twice; then 40 prompts of 1,600 tokens pass through a pool of 300 blocks."""
    counter = itertools.count()
    writer = TraceWriter(1, counter)
    prefix = writer.text(40 * BLOCK_SIZE)
    requests = [writer.request(float(second), prefix + writer.text(20), 20) for second in range(2)]
    requests += [writer.request(10.0 + 2 * number, writer.text(1600), 20) for number in range(40)]
    requests += [writer.request(200.0, prefix + writer.text(20), 20)]
    trace = Trace(requests)
    num_prompt = sum(len(request.prompt) for request in requests)
    found = {
        name: round(Replay(trace, 300, make_policy).run().tokens * num_prompt) for name, make_policy in POLICIES.items()
    }
    assert found == {"value": 2 * len(prefix), "lru": len(prefix)}


def test_the_table_has_a_row_per_policy() -> None:
    text = table("rag", [Trace(make_trace("rag", 1, 200.0))])
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines()[4:]] == list(compared())
