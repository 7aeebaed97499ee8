"""Requests that forget tokens: they go on past the pool, preemption changes nothing, and nobody shares what they made.

Logits after a drop differ from those of a request that forgets nothing; what is compared is the same request
undisturbed, and what came before the first drop with a request that forgets nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.core import BLOCK_SIZE, KVEviction, Request, TokenEvent
from kvd.model.decoder import Decoder
from tests.engine.harness import COMPUTING_IS_CHEAP, SWAP_IS_CHEAP, Harness, assert_same_bytes, greedy, tokens_of
from tests.engine.small_models import random_tokens, small_decoder
from tests.engine.test_exactness import PROMPT_TEXT
from tests.model.checkpoints import make_qwen2

MODES: list[KVEviction] = ["sliding_window", "streaming", "heavy_hitter"]
NUM_PROMPT = 50
NUM_TOKENS = 150
BUDGET = 8 * BLOCK_SIZE
CARELESS = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0}


def forgetful(request_id: str, prompt: list[int], mode: KVEviction, num_tokens: int = NUM_TOKENS) -> Request:
    return replace(greedy(request_id, prompt, num_tokens), kv_eviction=mode, kv_budget_tokens=BUDGET)


@pytest.fixture(scope="module", params=["int8", "fp16", "int8 windows"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    dtype, *has_windows = request.param.split()
    config: dict[str, Any] = {}
    if has_windows:
        config = {"make": make_qwen2, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 48}
        config["max_window_layers"] = 2
    return small_decoder(tmp_path_factory.mktemp("forgetting"), "cpu", dtype, **config)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> KVEviction:
    return request.param


PROMPT = random_tokens(1, NUM_PROMPT)


def ended_well(events: list[TokenEvent], num_tokens: int = NUM_TOKENS) -> None:
    assert events[-1].finish_reason == "length"
    assert len(tokens_of(events)) == num_tokens
    assert events[-1].num_dropped_tokens > 0


def undisturbed(decoder: Decoder, mode: KVEviction, chunk: int = 512) -> Harness:
    harness = Harness(decoder, prefix_caching=False, chunk=chunk)
    ended_well(harness.run([forgetful("it", PROMPT, mode)])["it"])
    return harness


@pytest.mark.parametrize("mode", MODES)
def test_the_default_model_goes_on_past_its_pool(
    default_decoder: Decoder, default_tokenizer: Any, mode: KVEviction
) -> None:
    """Without forgetting the same request ends with the pool; the server lives, and serves the next one."""
    prompt = default_tokenizer.encode(PROMPT_TEXT).ids[:40]
    num_tokens = 60
    harness = Harness(default_decoder, num_blocks=5)
    cut = harness.run([greedy("cut", prompt, num_tokens)])["cut"]
    assert cut[-1].finish_reason == "length"
    assert len(tokens_of(cut)) == 5 * BLOCK_SIZE + 1 - len(prompt) < num_tokens
    assert cut[-1].num_dropped_tokens == 0
    events = harness.run([replace(greedy("on", prompt, num_tokens), kv_eviction=mode)])["on"]
    ended_well(events, num_tokens)
    # Before the first drop nothing differs.
    assert tokens_of(events)[: len(tokens_of(cut))] == tokens_of(cut)
    assert events[-1].num_dropped_tokens == harness.counters.num_dropped_tokens
    assert max(gauge.num_active for gauge in harness.manager.gauges()) == 0
    assert len(tokens_of(harness.run([greedy("next", prompt, 4)])["next"])) == 4


def test_it_holds_no_more_than_its_budget(decoder: Decoder, mode: KVEviction) -> None:
    harness = Harness(decoder, num_blocks=BUDGET // BLOCK_SIZE)
    harness.scheduler.add(forgetful("it", PROMPT, mode))
    most = 0
    events: list[TokenEvent] = []
    while harness.scheduler.has_work:
        events += harness.step()
        most = max(most, harness.manager.num_blocks_active)
    ended_well(events)
    assert most == BUDGET // BLOCK_SIZE
    positions = harness.plans[-1].items[0].first_positions[0]
    assert len(positions) <= BUDGET // BLOCK_SIZE
    assert positions[-1] == (NUM_PROMPT + NUM_TOKENS - 2) // BLOCK_SIZE * BLOCK_SIZE, "positions stay absolute"
    assert (positions[0] == 0) == (mode != "sliding_window"), "the first tokens stay where there are sinks"


def test_what_is_dropped_changes_the_answer_and_what_came_before_is_exact(decoder: Decoder, mode: KVEviction) -> None:
    full = Harness(decoder, prefix_caching=False)
    full.run([greedy("it", PROMPT, NUM_TOKENS)])
    expected, rows = full.recorder.rows_of("it"), undisturbed(decoder, mode).recorder.rows_of("it")
    before = [position for position in rows if position <= BUDGET]
    assert_same_bytes({at: rows[at] for at in before}, {at: expected[at] for at in before})
    assert rows[BUDGET + 1] != expected[BUDGET + 1], "nothing was forgotten"


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_older", [14, 2])
def test_preemption_changes_nothing(
    decoder: Decoder, mode: KVEviction, way: str, prefix_caching: bool, num_older: int
) -> None:
    """It gives way when an older request wants a block: before its first drop or after it."""
    expected = undisturbed(decoder, mode).recorder.rows_of("it")
    older = greedy("older", random_tokens(3, num_older), 120 if num_older == 2 else 60)
    rates = SWAP_IS_CHEAP if way == "swap" else COMPUTING_IS_CHEAP
    # Room for the whole budget and, after the first drop, for seven blocks of the older request; never for an eighth.
    num_blocks = BUDGET // BLOCK_SIZE + (7 if num_older == 2 else 1)
    harness = Harness(
        decoder, num_blocks=num_blocks, num_ram_slots=64, prefix_caching=prefix_caching, rates=rates, chunk=40,
        **CARELESS,
    )  # fmt: skip
    harness.scheduler.add(older)
    harness.scheduler.add(forgetful("it", PROMPT, mode))
    events: list[TokenEvent] = []
    num_dropped_before: set[int] = set()
    while harness.scheduler.has_work:
        dropped = harness.counters.num_dropped_tokens
        events += [event for event in harness.step() if event.request_id == "it"]
        if harness.counters.num_preemptions and not num_dropped_before:
            num_dropped_before.add(dropped)
    ended_well(events)
    assert [number > 0 for number in num_dropped_before] == [num_older == 2]
    assert harness.counters.num_swaps == (harness.counters.num_preemptions if way == "swap" else 0)
    assert_same_bytes(harness.recorder.rows_of("it"), expected)
    assert events[-1].num_dropped_tokens == harness.counters.num_dropped_tokens
    assert harness.manager.tiers.ram.num_available(0) == 64


def test_what_comes_after_a_drop_is_never_published(decoder: Decoder, mode: KVEviction) -> None:
    """A second request with the whole text finds what came before the first drop, and computes the rest right."""
    harness = Harness(decoder, num_ram_slots=64, rates=SWAP_IS_CHEAP)
    text = PROMPT + tokens_of(harness.run([forgetful("it", PROMPT, mode)])["it"])
    events = harness.run([greedy("second", text, 4)])["second"]
    assert events[-1].num_cached_tokens == BUDGET
    harness.settle()
    assert harness.counters.num_saved_blocks <= 2 * (len(text) // BLOCK_SIZE) * len(decoder.kv_format.groups)
    alone = Harness(decoder, prefix_caching=False)
    alone.run([greedy("second", text, 4)])
    assert_same_bytes(harness.recorder.rows_of("second"), alone.recorder.rows_of("second"))


def test_a_forgetful_request_finds_what_others_computed(decoder: Decoder, mode: KVEviction) -> None:
    """As far as nothing of it depends on what it will forget; with attention to count, not beyond what counts."""
    expected = undisturbed(decoder, mode).recorder.rows_of("it")
    harness = Harness(decoder)
    harness.run([greedy("before", PROMPT, 1)])
    events = harness.run([forgetful("it", PROMPT, mode)])["it"]
    assert events[-1].num_cached_tokens == NUM_PROMPT - 1
    assert_same_bytes(harness.recorder.rows_of("it"), expected)


def test_a_prompt_beyond_the_pool(decoder: Decoder, mode: KVEviction) -> None:
    """Chunk sizes do not matter where drops do not depend on sums of attention."""
    prompt = random_tokens(5, 3 * BUDGET + 7)
    answers = []
    for chunk in (512, 24):
        harness = Harness(decoder, num_blocks=BUDGET // BLOCK_SIZE, chunk=chunk, max_seqs=4)
        events = harness.run([forgetful("it", prompt, mode, 10)])["it"]
        ended_well(events, 10)
        answers.append(harness.recorder.rows_of("it"))
    if mode != "heavy_hitter":
        assert_same_bytes(answers[1], answers[0])


def test_blocks_go_to_disk_up_to_the_first_drop_only(tmp_path: Path, decoder: Decoder, mode: KVEviction) -> None:
    harness = Harness(decoder, num_ram_slots=64, disk_folder=tmp_path)
    harness.run([forgetful("it", PROMPT, mode)])
    harness.close()
    assert harness.disk is not None
    assert harness.disk.statistics().num_blocks == BUDGET // BLOCK_SIZE * len(decoder.kv_format.groups)
