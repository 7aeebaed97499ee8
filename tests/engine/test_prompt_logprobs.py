"""How likely the tokens of a prompt were: the same numbers as those of sampled tokens, whatever happens on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvd.core import BLOCK_SIZE, Logprobs, PlanItem, Request, TokenEvent
from kvd.engine import prompt_logprobs
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd_kernels.registry import create_ops
from tests.engine.harness import COMPUTING_IS_CHEAP, SWAP_IS_CHEAP, Harness, greedy, tokens_of
from tests.engine.small_models import random_tokens, small_decoder
from tests.engine.test_agreement import FLOAT_TOLERANCE
from tests.engine.test_steps_ahead import drive, late, unobserved
from tests.model.checkpoints import load_reference, make_llama, make_qwen2

PROMPT = random_tokens(1, 150)
CARELESS = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0}

Scores = tuple[Logprobs | None, ...]


def scored(request_id: str, prompt: Sequence[int], max_tokens: int = 3, *, top: int = 3, **fields: Any) -> Request:
    """A request that wants its prompt's log probabilities, and those of what it samples."""
    return replace(greedy(request_id, prompt, max_tokens, num_logprobs=top), num_prompt_logprobs=top, **fields)


def scores_of(events: list[TokenEvent]) -> Scores:
    """They come with the first token, once."""
    assert all(event.prompt_logprobs is None for event in events[1:])
    scores = events[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert None not in scores[1:]
    return scores


@pytest.fixture(scope="module", params=["cpu", "reference"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return small_decoder(tmp_path_factory.mktemp("scored"), request.param)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return small_decoder(tmp_path_factory.mktemp("native"), "cpu")


@pytest.fixture(scope="module")
def expected(native: Decoder) -> Scores:
    return scores_of(Harness(native).run([scored("it", PROMPT)])["it"])


def test_they_are_those_of_a_dense_forward(tmp_path: Path) -> None:
    """Of transformers, in float32: the whole prompt at once, and a log-softmax over it."""
    path, quiet = make_llama(tmp_path / "model"), QuietProgress()
    files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=quiet)
    spec = read_spec(files)
    decoder = Decoder(
        load_weights(files, spec, progress=quiet, head_int8=False), create_ops("cpu"), spec.kv_format("fp16"),
        max_tokens=64, max_seqs=4, max_positions=256, progress=quiet,
    )  # fmt: skip
    with torch.inference_mode():
        logits = load_reference(path)(torch.tensor([PROMPT])).logits[0].double()
    dense = torch.log_softmax(logits, dim=-1)
    harness = Harness(decoder, chunk=64, max_seqs=4, max_model_len=256)
    scores = scores_of(harness.run([scored("it", PROMPT)])["it"])
    found = np.array([score.token_logprob for score in scores if score is not None])
    wanted = np.array([float(dense[at - 1, PROMPT[at]]) for at in range(1, len(PROMPT))])
    assert np.sqrt(np.mean((found - wanted) ** 2)) < FLOAT_TOLERANCE * wanted.std()


def test_they_are_what_sampling_reports(decoder: Decoder) -> None:
    """After each beginning of the prompt, ask for the next token's distribution: the very same floats."""
    prompt = PROMPT[:40]
    harness = Harness(decoder, chunk=32, max_seqs=4)
    scores = scores_of(harness.run([scored("it", prompt)])["it"])
    for at in (1, 2, 17, 31, 32, 33, 39):
        (event,) = harness.run([greedy(f"to {at}", prompt[:at], 1, num_logprobs=decoder.spec.vocab_size)])[f"to {at}"]
        score = scores[at]
        assert score is not None
        assert event.logprobs is not None
        assert score.token_logprob == dict(event.logprobs.top)[prompt[at]]
        assert score.top == event.logprobs.top[:3]


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 512])
def test_chunks_and_rows(native: Decoder, expected: Scores, chunk: int) -> None:
    harness = Harness(native, chunk=chunk, max_seqs=1)
    assert scores_of(harness.run([scored("it", PROMPT)])["it"]) == expected
    assert max(plan.num_tokens for plan in harness.plans) == min(chunk, len(PROMPT))


def test_cold_and_cached(native: Decoder, expected: Scores) -> None:
    """A cached prompt is computed all the same; what it computes, later requests find."""
    harness = Harness(native)
    plain = harness.run([greedy("before", PROMPT, 3)])["before"]
    for request_id in ("first", "second"):
        events = harness.run([scored(request_id, PROMPT)])[request_id]
        assert scores_of(events) == expected
        assert events[0].num_cached_tokens == 0
        assert harness.recorder.num_computed(request_id) == len(PROMPT) + 2
        assert tokens_of(events) == tokens_of(plain)
    assert harness.run([greedy("after", PROMPT, 3)])["after"][0].num_cached_tokens == len(PROMPT) - 1
    assert harness.manager.num_blocks_cached == -(-(len(PROMPT) + 2) // BLOCK_SIZE), "a block is kept twice"


def test_its_blocks_are_found_by_others(native: Decoder) -> None:
    harness = Harness(native)
    harness.run([scored("it", PROMPT)])
    assert harness.run([greedy("after", PROMPT, 3)])["after"][0].num_cached_tokens == len(PROMPT) - 1


def test_choices_of_one_prompt_wait_for_the_one_that_scores_it(native: Decoder, expected: Scores) -> None:
    harness = Harness(native, chunk=64)
    others = [greedy(f"choice {n}", PROMPT, 3, temperature=1.0, seed=n) for n in range(3)]
    events = harness.run([scored("it", PROMPT), *others])
    assert scores_of(events["it"]) == expected
    assert all(events[other.request_id][0].num_cached_tokens >= 9 * BLOCK_SIZE for other in others)


def test_beside_others(native: Decoder, expected: Scores) -> None:
    """Decodes before it, another that is scored behind it, with other wishes."""
    harness = Harness(native, chunk=48)
    decodes = [greedy(f"decode {n}", random_tokens(20 + n, 8), 40) for n in range(3)]
    late_prompt = random_tokens(30, 100)
    requests = [*decodes, scored("it", PROMPT), scored("other", late_prompt, top=0)]
    events = harness.run(requests)
    assert scores_of(events["it"]) == expected
    other = scores_of(events["other"])
    assert all(score is not None and score.top == () for score in other[1:])
    alone = scores_of(Harness(native).run([scored("other", late_prompt, top=0)])["other"])
    assert other == alone
    assert any(sum(bool(item.num_scored) for item in plan.items) > 1 for plan in harness.plans)


@pytest.mark.parametrize("rates", [COMPUTING_IS_CHEAP, SWAP_IS_CHEAP], ids=["computed again", "swapped"])
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted(native: Decoder, expected: Scores, rates: dict[str, float], depth: int) -> None:
    """Requests that were there before it outgrow the pool while it is scored, and then decodes."""
    harness = Harness(
        native, num_blocks=16, chunk=20, max_seqs=4, num_ram_slots=64, rates=rates, depth=depth, **CARELESS
    )
    older = [greedy(f"older {n}", random_tokens(40 + n, 14), 150) for n in range(2)]
    events = harness.run([*older, scored("it", PROMPT, 40)])
    assert harness.counters.num_preemptions > 0
    assert scores_of(events["it"]) == expected
    undisturbed = Harness(native).run([scored("it", PROMPT, 40)])["it"]
    assert tokens_of(events["it"]) == tokens_of(undisturbed)


def test_preempted_before_it_is_scored_to_the_end(native: Decoder, expected: Scores) -> None:
    """A request of a higher priority takes its place in the middle of the prompt; what was scored is kept."""
    harness = Harness(native, chunk=30, max_seqs=2)
    harness.scheduler.add(scored("it", PROMPT))
    for _ in range(3):
        assert harness.step() == []
    state = harness.scheduler._roster.states["it"]
    harness.scheduler._roster.preempt(state, num_kept_tokens=0)
    events = []
    while harness.scheduler.has_work:
        events += harness.step()
    assert scores_of(events) == expected
    assert events[0].num_cached_tokens <= 90
    assert harness.recorder.num_computed("it") < len(PROMPT) + 90, "what was scored was computed again"


def test_forgetful_requests_have_all_their_scores(native: Decoder) -> None:
    harness = Harness(native, chunk=40)
    for mode in ("sliding_window", "streaming", "heavy_hitter"):
        request = scored(mode, PROMPT, kv_eviction=mode, kv_budget_tokens=4 * BLOCK_SIZE)
        events = harness.run([request])[mode]
        assert len(scores_of(events)) == len(PROMPT)
        assert events[-1].num_dropped_tokens > 0


def test_windows(tmp_path: Path) -> None:
    config = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    decoder = small_decoder(tmp_path, "cpu", make=make_qwen2, **config)
    alone = scores_of(Harness(decoder).run([scored("it", PROMPT)])["it"])
    harness = Harness(decoder, chunk=32)
    harness.run([greedy("before", PROMPT, 3)])
    assert scores_of(harness.run([scored("it", PROMPT)])["it"]) == alone


def test_a_prompt_of_one_token(native: Decoder) -> None:
    harness = Harness(native)
    events = harness.run([scored("it", PROMPT[:1])])["it"]
    assert events[0].prompt_logprobs == (None,)
    assert not any(item.num_scored for plan in harness.plans for item in plan.items)


def test_aborted_while_it_is_scored(native: Decoder) -> None:
    for depth in (0, 1):
        harness = Harness(native, chunk=30, depth=depth)
        harness.scheduler.add(scored("it", PROMPT))
        harness.step()
        event = harness.scheduler.abort("it", "abort")
        assert event is not None
        assert event.prompt_logprobs is None
        harness.settle()
        events = harness.run([greedy("next", PROMPT[::-1], 2)])["next"]
        assert len(tokens_of(events)) == 2
        assert not harness.runner._scorer._prompts, "the prompt of a request that ended is kept"


def test_logits_that_are_not_finite_end_the_request(native: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the prompt, so that nothing else would tell."""
    look = Decoder.logits_of

    def broken(self: Decoder, first: int, num: int) -> torch.Tensor:
        logits = look(self, first, num)
        logits[num - 1, 5] = math.nan
        return logits

    monkeypatch.setattr(Decoder, "logits_of", broken)
    harness = Harness(native)
    events = harness.run([scored("it", PROMPT), greedy("other", PROMPT[::-1], 2)])
    assert events["it"][-1].finish_reason == "error"
    assert "not finite" in (events["it"][-1].error or "")
    assert events["other"][-1].finish_reason == "length"


def test_where_the_next_step_is_launched_ahead(native: Decoder, expected: Scores) -> None:
    """A scored step is waited for behind those before it: neither its rows nor their tokens are lost."""
    harness = unobserved(late(native), chunk=24)
    found: list[Scores] = []
    commit = harness.scheduler.commit

    def watched(*arguments: Any) -> list[TokenEvent]:
        events = commit(*arguments)
        found.extend(event.prompt_logprobs for event in events if event.prompt_logprobs is not None)
        return events

    harness.scheduler.commit = watched  # type: ignore[method-assign]
    decodes = [greedy(f"decode {n}", random_tokens(20 + n, 8), 60, temperature=1.0, seed=n) for n in range(3)]
    requests = [*decodes, scored("it", PROMPT, 8)]  # it arrives while the others decode
    answers = drive(harness, requests)
    assert found == [expected]
    assert answers == drive(unobserved(native, chunk=24), requests)


def test_the_pool_full_and_all_that_can_be_asked(native: Decoder) -> None:
    """The largest prompt that the pool holds, with the most alternatives; then the next request is served."""
    harness = Harness(native, num_blocks=64, chunk=256)
    prompt = random_tokens(9, 63 * BLOCK_SIZE)
    scores = scores_of(harness.run([scored("it", prompt, 1, top=20)])["it"])
    assert len(scores) == len(prompt)
    assert all(len(score.top) == 20 for score in scores if score is not None)
    assert len(tokens_of(harness.run([greedy("next", PROMPT, 3)])["next"])) == 3


@pytest.mark.parametrize("fault", ["wrong row", "wrong target", "one too few"])
def test_planted_faults_are_found(
    native: Decoder, expected: Scores, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    scorer = prompt_logprobs.PromptScorer
    if fault == "wrong row":
        look = Decoder.logits_of
        monkeypatch.setattr(Decoder, "logits_of", lambda self, first, num: look(self, max(0, first - 1), num))
    elif fault == "wrong target":
        look_up = scorer._look_up
        monkeypatch.setattr(scorer, "_look_up", lambda self, logits, ids, top: look_up(self, logits, ids.roll(1), top))
    else:
        score = scorer._score

        def short(self: prompt_logprobs.PromptScorer, item: PlanItem, row: int) -> Scores:
            return score(self, item, row)[: item.num_scored - 1]

        monkeypatch.setattr(scorer, "_score", short)
    harness = Harness(native, chunk=40)
    with pytest.raises(AssertionError):
        assert scores_of(harness.run([scored("it", PROMPT)])["it"]) == expected
