"""A chain of blocks saved to a file and brought back in a fresh engine: the same bytes, and the same hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.core import BLOCK_SIZE
from kvd.engine.sessions import Sessions
from kvd.errors import SessionError
from kvd.model.decoder import Decoder
from tests.engine.harness import SWAP_IS_CHEAP, Harness, assert_same_bytes, greedy
from tests.engine.small_models import random_tokens, small_decoder
from tests.engine.test_exactness import PROMPT_TEXT
from tests.model.checkpoints import make_qwen2

NUM_TOKENS = 6
WINDOWS = {"make": make_qwen2, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 48}


@pytest.fixture(scope="module", params=["default", "int8", "fp16", "int8 windows"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, list[int]]:
    if request.param == "default":
        decoder = request.getfixturevalue("default_decoder")
        return decoder, request.getfixturevalue("default_tokenizer").encode(PROMPT_TEXT).ids
    dtype, *has_windows = request.param.split()
    config: dict[str, Any] = WINDOWS | {"max_window_layers": 2} if has_windows else {}
    return small_decoder(tmp_path_factory.mktemp("sessions"), "cpu", dtype, **config), random_tokens(1, 200)


def at_once(question: Callable[[], Any]) -> Any:
    return question()


def sessions_of(harness: Harness, folder: Path) -> Sessions:
    return Sessions(folder / "sessions", harness.manager, harness.cache, harness.ops)


def save(harness: Harness, folder: Path, request_id: str) -> Any:
    return sessions_of(harness, folder).save("talk", lambda: harness.scheduler.find_chain(request_id), at_once)


def test_a_session_in_a_fresh_engine(
    model: tuple[Decoder, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.engine.sessions.BLOCKS_AT_ONCE", 3)
    decoder, prompt = model
    first = Harness(decoder)
    first.run([greedy("it", prompt, NUM_TOKENS)])
    alone = first.recorder.rows_of("it")
    num_full = (len(prompt) + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    saved = save(first, tmp_path, "it")
    assert (saved.name, saved.num_tokens) == ("talk", num_full)
    assert first.manager.num_blocks_active == 0

    fresh = Harness(decoder)
    restored = sessions_of(fresh, tmp_path).restore("talk", at_once)
    assert (restored.num_tokens, restored.num_bytes) == (saved.num_tokens, saved.num_bytes)
    assert fresh.manager.num_blocks_active == 0
    num_cached = fresh.run([greedy("it", prompt, NUM_TOKENS)])["it"][-1].num_cached_tokens
    assert num_cached == min(num_full, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert fresh.recorder.num_computed("it") == len(prompt) - num_cached + NUM_TOKENS - 1
    assert_same_bytes(fresh.recorder.rows_of("it"), alone)
    again = Harness(decoder)
    again.run([greedy("before", prompt, NUM_TOKENS)])
    # A session file has whole blocks; the pool also has the tail behind them.
    assert again.run([greedy("it", prompt, NUM_TOKENS)])["it"][-1].num_cached_tokens == len(prompt) - 1


def test_a_restored_session_is_written_through_to_the_tiers(model: tuple[Decoder, list[int]], tmp_path: Path) -> None:
    decoder, prompt = model
    first = Harness(decoder)
    first.run([greedy("it", prompt, NUM_TOKENS)])
    save(first, tmp_path, "it")
    fresh = Harness(decoder, num_blocks=20, num_ram_slots=64, rates=SWAP_IS_CHEAP)
    sessions_of(fresh, tmp_path).restore("talk", at_once)
    fresh.settle()
    fresh.run([greedy("filler", random_tokens(9, 20 * BLOCK_SIZE - 1), 1)])
    num_cached = fresh.run([greedy("it", prompt, NUM_TOKENS)])["it"][-1].num_cached_tokens
    assert num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert fresh.counters.ram_hit_tokens == num_cached
    assert_same_bytes(fresh.recorder.rows_of("it"), first.recorder.rows_of("it"))


def test_a_small_pool_takes_as_much_of_a_session_as_has_room(model: tuple[Decoder, list[int]], tmp_path: Path) -> None:
    decoder, prompt = model
    first = Harness(decoder)
    first.run([greedy("it", prompt[:100], NUM_TOKENS)])
    save(first, tmp_path, "it")
    small = Harness(decoder, num_blocks=4)
    restored = sessions_of(small, tmp_path).restore("talk", at_once)
    assert restored.num_tokens == 4 * BLOCK_SIZE
    assert (small.manager.num_blocks_active, small.manager.num_blocks_cached) == (0, 4)


def test_what_is_not_there_is_said(model: tuple[Decoder, list[int]], tmp_path: Path) -> None:
    harness = Harness(model[0])
    with pytest.raises(SessionError, match="there is no session 'talk'"):
        sessions_of(harness, tmp_path).restore("talk", at_once)
    with pytest.raises(SessionError, match="no such chain"):
        save(harness, tmp_path, "nobody")


def test_a_damaged_file_is_refused_and_what_came_before_the_damage_is_right(
    model: tuple[Decoder, list[int]], tmp_path: Path
) -> None:
    decoder, prompt = model
    first = Harness(decoder)
    first.run([greedy("it", prompt, NUM_TOKENS)])
    save(first, tmp_path, "it")
    file = tmp_path / "sessions" / "talk.kvdsession"
    content = bytearray(file.read_bytes())
    content[len(content) - 700] ^= 1
    file.write_bytes(content)
    fresh = Harness(decoder)
    with pytest.raises(SessionError):
        sessions_of(fresh, tmp_path).restore("talk", at_once)
    assert fresh.manager.num_blocks_active == 0
    fresh.run([greedy("it", prompt, NUM_TOKENS)])
    assert_same_bytes(fresh.recorder.rows_of("it"), first.recorder.rows_of("it"))


def test_a_block_is_put_where_no_copy_reads_any_more(
    default_decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place may be one whose old content is still being saved, beside the steps."""
    first, calls = Harness(default_decoder), []
    first.run([greedy("it", random_tokens(1, 40), NUM_TOKENS)])
    save(first, tmp_path, "it")
    fresh = Harness(default_decoder)
    monkeypatch.setattr(fresh.ops, "settle", lambda: calls.append("settled"))
    monkeypatch.setattr("kvd.engine.sessions.write_block", lambda *_: calls.append("written"))
    assert sessions_of(fresh, tmp_path).restore("talk", at_once).num_tokens == 2 * BLOCK_SIZE
    assert calls == ["settled", "written", "written"]
