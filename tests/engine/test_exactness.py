"""On the CPU the logits of every generated position are the same bytes, whatever else happened.

Real weights, real cache. Each scenario is compared with the same request run alone in one large chunk.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvd.model.decoder import Decoder
from kvd_kernels.cpu.library import Pool, installed_library
from kvd_kernels.ops import Ops
from tests.engine.harness import Harness, assert_same_bytes, greedy, tokens_of

NUM_TOKENS = 6
PROMPT_TEXT = (
    "A cache block holds sixteen tokens. When two requests begin with the same words, the second one need not compute "
    "them again: the keys and values are already there. What was stored must therefore be exactly what would have "
    "been computed, to the last bit, or else an answer would depend on who asked before. This is why every sum in "
    "the processor path has one fixed order, why chunks of a prompt read back what earlier chunks have written, "
    "and why a request that lost its blocks and was computed again goes on as if nothing had happened. "
    "In one sentence, the reason is that"
)
OTHERS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "2 + 2 =",
    "Water boils at",
]


@pytest.fixture(scope="module")
def prompt(default_tokenizer) -> list[int]:
    token_ids = default_tokenizer.encode(PROMPT_TEXT).ids
    assert len(token_ids) > 100
    return token_ids


@pytest.fixture(scope="module")
def alone(default_decoder: Decoder, prompt: list[int]) -> dict[int, bytes]:
    """Logits rows by position, from the request on its own in one chunk."""
    harness = Harness(default_decoder)
    harness.run([greedy("it", prompt, NUM_TOKENS)])
    rows = harness.recorder.rows_of("it")
    assert len(rows) == NUM_TOKENS
    return rows


def test_beside_fifteen_others(default_decoder, default_tokenizer, prompt, alone) -> None:
    harness = Harness(default_decoder, chunk=128)
    others = [greedy(f"other-{i}", default_tokenizer.encode(OTHERS[i % 5] + f" {i}").ids, 12) for i in range(15)]
    harness.run([*others[:7], greedy("it", prompt, NUM_TOKENS), *others[7:]])
    assert max(len(plan.items) for plan in harness.plans) == 16
    assert_same_bytes(harness.recorder.rows_of("it"), alone)


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_chunk_sizes(default_decoder, prompt, alone, chunk: int) -> None:
    harness = Harness(default_decoder, chunk=chunk, max_seqs=4)
    harness.run([greedy("it", prompt, NUM_TOKENS)])
    assert max(plan.num_tokens for plan in harness.plans) == min(chunk, len(prompt))
    assert_same_bytes(harness.recorder.rows_of("it"), alone)


def test_prefix_hit(default_decoder, prompt, alone) -> None:
    harness = Harness(default_decoder)
    harness.run([greedy("first", prompt[:-20], 1)])
    events = harness.run([greedy("it", prompt, NUM_TOKENS)])["it"]
    cached = events[-1].num_cached_tokens
    assert cached >= (len(prompt) - 20) // 16 * 16 - 16
    assert cached > 64
    # Work is counted: a hit computes the missing tokens, once each, and nothing else.
    assert harness.recorder.num_computed("it") == len(prompt) - cached + NUM_TOKENS - 1
    assert_same_bytes(harness.recorder.rows_of("it"), alone)


def test_forced_preemption(default_decoder, default_tokenizer, prompt, alone) -> None:
    """An older request needs one more block than the pool has: this one loses its own and is recomputed."""
    first = greedy("first", default_tokenizer.encode("Once upon a time " * 4).ids[:14], 30)
    num_blocks = 1 + -(-(len(prompt) + NUM_TOKENS) // 16)
    careless = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0}
    harness = Harness(default_decoder, num_blocks=num_blocks, prefix_caching=False, **careless)
    harness.run([first, greedy("it", prompt, NUM_TOKENS)])
    assert harness.scheduler.counters().num_preemptions == 1
    num_rows = len(harness.recorder.rows_of("it"))
    assert harness.recorder.num_computed("it") > len(prompt) + num_rows, "nothing was computed twice"
    assert_same_bytes(harness.recorder.rows_of("it"), alone)


LEVELS = installed_library().levels


@pytest.mark.parametrize(
    ("level", "num_threads"), [(LEVELS[-1], 1), (LEVELS[-1], 3), *[(level, 2) for level in LEVELS[:-1]]]
)
def test_threads_and_isa_levels(default_decoder, prompt, alone, monkeypatch, level: str, num_threads: int) -> None:
    pool = Pool(installed_library(), level, num_threads)
    monkeypatch.setattr(default_decoder.ops, "pool", pool)
    harness = Harness(default_decoder, chunk=64)
    harness.run([greedy("it", prompt, NUM_TOKENS)])
    pool.close()
    assert_same_bytes(harness.recorder.rows_of("it"), alone)


def test_a_planted_fault_of_one_ulp_is_found(default_decoder, prompt, alone, monkeypatch) -> None:
    """The comparison is worth something: one activation, in one layer, off by one ulp when two rows share a step."""
    ops = default_decoder.ops
    original, calls = ops.silu_mul, 0

    def faulty(n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal calls
        original(n, gate_up, out)
        calls += 1
        if n > 1 and calls == 20:
            widest = int(out[n - 1].abs().argmax())
            out[n - 1, widest] = torch.nextafter(out[n - 1, widest], torch.tensor(torch.inf))

    monkeypatch.setattr(ops, "silu_mul", faulty)
    monkeypatch.setattr(ops, "record", partial(Ops.record, ops))  # op by op, so that the fault is met
    harness = Harness(default_decoder)
    harness.run([greedy("it", prompt, NUM_TOKENS)])
    assert calls > 20
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_bytes(harness.recorder.rows_of("it"), alone)


def test_a_seeded_request_ignores_its_neighbours(default_decoder, default_tokenizer) -> None:
    """Seeded sampling beside unseeded neighbours yields the same tokens on every run."""
    ids = default_tokenizer.encode(OTHERS[2]).ids
    seeded = greedy("it", ids, 12, temperature=1.0, seed=7)
    alone_tokens = tokens_of(Harness(default_decoder).run([seeded])["it"])
    harness = Harness(default_decoder)
    neighbours = [greedy(f"other-{i}", ids, 12, temperature=1.0) for i in range(3)]
    assert tokens_of(harness.run([*neighbours, seeded])["it"]) == alone_tokens
    other_seed = greedy("it", ids, 12, temperature=1.0, seed=8)
    assert tokens_of(Harness(default_decoder).run([other_seed])["it"]) != alone_tokens
