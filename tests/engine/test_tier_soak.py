"""Random requests through every tier of a small real model at once; each answer is the same bytes as alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.core import BLOCK_SIZE, KVEviction, Request
from kvd.model.decoder import Decoder
from tests.engine.harness import COMPUTING_IS_CHEAP, SWAP_IS_CHEAP, Harness, assert_same_bytes, greedy
from tests.engine.small_models import random_tokens, small_decoder
from tests.model.checkpoints import make_llama, make_qwen2

MODES: list[KVEviction] = ["none", "none", "none", "sliding_window", "streaming"]
COUNTED = ("num_preemptions", "partial_hit_tokens", "ram_hit_tokens", "disk_hit_tokens", "num_dropped_tokens")
PREFIXES = [random_tokens(seed, 90 + 7 * seed) for seed in range(6)]


@pytest.fixture(scope="module", params=["full", "windows"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    make: Callable[..., Path] = make_llama
    config: dict[str, Any] = {}
    if request.param == "windows":
        make = make_qwen2
        config = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}
    return small_decoder(tmp_path_factory.mktemp("soak"), make=make, **config)


def random_request(chance: random.Random, number: int) -> Request:
    prefix = chance.choice(PREFIXES)
    prompt = prefix[: chance.randint(1, len(prefix))] + random_tokens(chance.randrange(4), chance.randint(0, 60))
    request = replace(greedy(str(number), prompt, chance.randint(1, 60)), priority=chance.choice([0, 0, 0, 1]))
    mode = chance.choice(MODES)
    return request if mode == "none" else replace(request, kv_eviction=mode, kv_budget_tokens=8 * BLOCK_SIZE)


def rows_alone(decoder: Decoder, request: Request) -> dict[int, bytes]:
    harness = Harness(decoder, prefix_caching=False)
    harness.run([replace(request, priority=0)])
    return harness.recorder.rows_of(request.request_id)


@pytest.mark.parametrize("seed", [4, *[pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 16)]])
def test_every_answer_is_what_it_is_alone(decoder: Decoder, tmp_path: Path, seed: int) -> None:
    """Two lives of a server with small tiers; a third of what comes is cancelled at some time."""
    chance = random.Random(seed)
    number = 0
    totals: Counter[str] = Counter()
    for _ in range(2):
        harness = Harness(
            decoder,
            num_blocks=chance.choice([18, 24, 40]),
            chunk=chance.choice([16, 48, 200]),
            max_seqs=chance.choice([3, 8]),
            num_ram_slots=chance.choice([12, 30, 80]),
            disk_folder=tmp_path if chance.random() < 0.7 else tmp_path / "other",
            rates=chance.choice([SWAP_IS_CHEAP, SWAP_IS_CHEAP, COMPUTING_IS_CHEAP]),
            depth=chance.choice([0, 1]),
            expected_growth_factor=0.0,
            min_expected_growth_tokens=0,
        )
        sent: dict[str, Request] = {}
        complete: set[str] = set()
        for _ in range(1500):
            if len(sent) < 40 and chance.random() < 0.3:
                request = random_request(chance, number)
                number += 1
                sent[request.request_id] = request
                harness.scheduler.add(request)
            if sent and chance.random() < 0.02:
                harness.scheduler.abort(chance.choice(list(sent)), "abort")
            for event in harness.step():
                assert event.finish_reason in (None, "length")
                if event.finish_reason == "length":
                    complete.add(event.request_id)
            if len(sent) == 40 and not harness.scheduler.has_work:
                break
        assert not harness.scheduler.has_work
        harness.close()
        assert len(complete) > 20
        for request_id in sorted(complete, key=int):
            assert_same_bytes(harness.recorder.rows_of(request_id), rows_alone(decoder, sent[request_id]))
        tiers = harness.manager.tiers
        for group_id, gauge in enumerate(harness.manager.gauges()):
            assert gauge.num_active == 0
            assert tiers.ram.num_available(group_id) == tiers.ram.num_slots[group_id]
        totals.update({name: getattr(harness.counters, name) for name in COUNTED})
    assert totals["num_preemptions"] > 0
    assert totals["partial_hit_tokens"] > 0
    assert totals["ram_hit_tokens"] + totals["disk_hit_tokens"] > 0
    assert totals["num_dropped_tokens"] > 0
