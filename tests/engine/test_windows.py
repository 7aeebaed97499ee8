"""Layers with a sliding window: what left it is freed, and no logit can tell.

A random Qwen2 model, half of whose layers have a window of 48 tokens. What is compared is a request alone whose tables
keep every block, so that the windows are in attention's arithmetic alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd.cache.manager import blocks_for
from kvd.core import BLOCK_SIZE
from kvd.model.decoder import Decoder
from tests.engine.harness import COMPUTING_IS_CHEAP, SWAP_IS_CHEAP, Harness, assert_same_bytes, greedy
from tests.engine.small_models import random_tokens, small_decoder
from tests.model.checkpoints import make_qwen2

WINDOW = 48
PROMPT = random_tokens(1, 150)
NUM_TOKENS = 64
NUM_WHOLE = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
MOST_BLOCKS = WINDOW // BLOCK_SIZE + 1
"""Blocks that a window can lie in."""


@pytest.fixture(scope="module", params=["cpu-int8", "cpu-fp16", "reference-int8"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    backend, dtype = request.param.split("-")
    windows = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    decoder = small_decoder(tmp_path_factory.mktemp("windows"), backend, dtype, make=make_qwen2, **windows)
    assert [(group.window, len(group.layers)) for group in decoder.kv_format.groups] == [(0, 2), (WINDOW, 2)]
    return decoder


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[int, bytes]:
    harness = Harness(decoder, prefix_caching=False, windows=(0, 0))
    harness.run([greedy("it", PROMPT, NUM_TOKENS)])
    last = harness.plans[-1].items[0].block_tables
    assert len(last[0]) == len(last[1]) == (len(PROMPT) + NUM_TOKENS - 1 + 15) // 16
    rows = harness.recorder.rows_of("it")
    assert len(rows) == NUM_TOKENS
    return rows


def check(harness: Harness, alone: dict[int, bytes], num_cached: int) -> None:
    assert_same_bytes(harness.recorder.rows_of("it"), alone)
    assert harness.recorder.num_computed("it") == len(PROMPT) - num_cached + NUM_TOKENS - 1


@pytest.mark.parametrize("chunk", [16, 40, 512])
@pytest.mark.parametrize("depth", [0, 1])
def test_used_blocks_stay_bounded_while_the_sequence_grows(
    decoder: Decoder, alone: dict[int, bytes], chunk: int, depth: int
) -> None:
    harness = Harness(decoder, prefix_caching=False, chunk=chunk, max_seqs=4, depth=depth)
    harness.scheduler.add(greedy("it", PROMPT, NUM_TOKENS))
    most = [0, 0]
    while harness.scheduler.has_work:
        harness.step()
        most = [max(most[gauge.group_id], gauge.num_active) for gauge in harness.manager.gauges()]
    check(harness, alone, 0)
    num_blocks = -(-(len(PROMPT) + NUM_TOKENS - 1) // BLOCK_SIZE)
    assert most[0] == num_blocks
    # Behind the window, those that a step still in flight reads; ahead of it, those of a whole chunk.
    num_chunk_blocks = -(-min(chunk, len(PROMPT)) // BLOCK_SIZE)
    assert most[1] <= MOST_BLOCKS + (1 + depth) * num_chunk_blocks
    tables = harness.plans[-1].items[0].block_tables
    assert (len(tables[0]), len(tables[1])) == (num_blocks, MOST_BLOCKS)


def test_block_hit(decoder: Decoder, alone: dict[int, bytes]) -> None:
    harness = Harness(decoder)
    harness.run([greedy("first", PROMPT, 1)])
    assert harness.run([greedy("it", PROMPT, NUM_TOKENS)])["it"][-1].num_cached_tokens == len(PROMPT) - 1
    check(harness, alone, len(PROMPT) - 1)
    tables = harness.plans[-1].items[0].block_tables
    assert len(tables[1]) == MOST_BLOCKS


def test_partial_block_hit(decoder: Decoder, alone: dict[int, bytes]) -> None:
    num_shared = NUM_WHOLE - BLOCK_SIZE + 5
    harness = Harness(decoder)
    harness.run([greedy("first", PROMPT[:num_shared] + random_tokens(2, 40), 1)])
    assert harness.run([greedy("it", PROMPT, NUM_TOKENS)])["it"][-1].num_cached_tokens == num_shared
    assert harness.counters.partial_hit_tokens == 5
    check(harness, alone, num_shared)


def test_a_hit_needs_what_the_next_token_sees(decoder: Decoder, alone: dict[int, bytes]) -> None:
    """The windowed group has lost the blocks just before the end of the match: the match ends where it has all."""
    harness = Harness(decoder)
    harness.run([greedy("first", PROMPT, 1)])
    chain = harness.manager.open("").chain
    chain.extend(PROMPT, NUM_WHOLE)
    group = harness.manager._groups[1]
    lost = group.index.find(chain.keys[7])
    assert lost is not None
    group.policy.discard(lost)
    group.index.remove(lost)
    group.pool.drop(lost.block_id)
    assert harness.run([greedy("it", PROMPT, NUM_TOKENS)])["it"][-1].num_cached_tokens == 7 * BLOCK_SIZE
    check(harness, alone, 7 * BLOCK_SIZE)


def test_ram_restore(decoder: Decoder, alone: dict[int, bytes]) -> None:
    harness = Harness(decoder, num_blocks=16, num_ram_slots=96, rates=SWAP_IS_CHEAP)
    harness.run([greedy("first", PROMPT, 1)])
    harness.run([greedy("filler", random_tokens(9, 16 * BLOCK_SIZE - 1), 1)])
    assert harness.run([greedy("it", PROMPT, NUM_TOKENS)])["it"][-1].num_cached_tokens == len(PROMPT) - 1
    assert harness.counters.ram_hit_tokens == len(PROMPT) - 1
    check(harness, alone, len(PROMPT) - 1)


def test_disk_restore_after_a_restart(decoder: Decoder, alone: dict[int, bytes], tmp_path: Path) -> None:
    first = Harness(decoder, num_ram_slots=96, disk_folder=tmp_path)
    first.run([greedy("first", PROMPT, 1)])
    first.close()
    harness = Harness(decoder, num_ram_slots=96, disk_folder=tmp_path, rates=SWAP_IS_CHEAP)
    harness.wait_for_disk(2 * blocks_for(len(PROMPT)))
    assert harness.run([greedy("it", PROMPT, NUM_TOKENS)])["it"][-1].num_cached_tokens == len(PROMPT) - 1
    assert harness.counters.disk_hit_tokens == len(PROMPT) - 1
    check(harness, alone, len(PROMPT) - 1)
    harness.close()


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption(decoder: Decoder, alone: dict[int, bytes], way: str, prefix_caching: bool) -> None:
    options: dict[str, Any] = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0}
    options["rates"] = SWAP_IS_CHEAP if way == "swap" else COMPUTING_IS_CHEAP
    harness = Harness(decoder, num_blocks=15, num_ram_slots=96, prefix_caching=prefix_caching, **options)
    harness.run([greedy("first", random_tokens(3, 14), 64), greedy("it", PROMPT, NUM_TOKENS)])
    assert harness.counters.num_preemptions == 1
    assert harness.counters.num_swaps == (way == "swap")
    assert (harness.counters.recomputed_tokens > 0) == (way == "recompute")
    assert_same_bytes(harness.recorder.rows_of("it"), alone)
    assert harness.manager.tiers.ram.num_available(1) == 96
