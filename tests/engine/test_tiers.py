"""Whatever way a block takes to its request, the logits of every generated position are the same bytes.

Each route is asserted by counters to have been taken, alone in one chunk with steps planned ahead, and in small chunks
beside other requests. What is compared is one request alone, in one chunk, without a cache.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import kvd.engine.runner as runner_module
from kvd.cache.disk_folder import DATABASE_NAME
from kvd.cache.manager import blocks_for
from kvd.config import Config, DiskCache
from kvd.core import BLOCK_SIZE, BlockTransfer, Request, TokenEvent
from kvd.engine.build import build_engine
from kvd.engine.engine import Engine
from kvd.model.decoder import Decoder
from kvd.model.loading import read_spec, resolve_model
from kvd.model.progress import QuietProgress
from tests.engine.harness import COMPUTING_IS_CHEAP, SWAP_IS_CHEAP, Harness, Recorder, assert_same_bytes, greedy
from tests.engine.small_models import random_tokens, small_decoder
from tests.engine.test_exactness import PROMPT_TEXT
from tests.model.checkpoints import make_llama

NUM_TOKENS = 8
CARELESS = {"expected_growth_factor": 0.0, "min_expected_growth_tokens": 0}


@dataclass(frozen=True)
class Case:
    """A model, a prompt, and the rows that every route must yield."""

    decoder: Decoder
    prompt: list[int]
    alone: dict[int, bytes]

    @property
    def num_known(self) -> int:
        """Tokens that a second request with the prompt can find: all but the last, which is computed."""
        return len(self.prompt) - 1

    @property
    def num_whole(self) -> int:
        """Of these, the tokens in full blocks."""
        return (len(self.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return blocks_for(len(self.prompt) + NUM_TOKENS)


@pytest.fixture(scope="module", params=["default", "cpu-int8", "cpu-fp16", "reference-int8", "reference-fp16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "default":
        decoder = request.getfixturevalue("default_decoder")
        prompt = request.getfixturevalue("default_tokenizer").encode(PROMPT_TEXT).ids
    else:
        backend, kv_cache_dtype = request.param.split("-")
        decoder = small_decoder(tmp_path_factory.mktemp("tiers"), backend, kv_cache_dtype)
        prompt = random_tokens(1, 150)
    return Case(decoder, prompt, run_alone(decoder, prompt))


def run_alone(decoder: Decoder, prompt: list[int]) -> dict[int, bytes]:
    harness = Harness(decoder, prefix_caching=False)
    harness.run([greedy("it", prompt, NUM_TOKENS)])
    rows = harness.recorder.rows_of("it")
    assert len(rows) == NUM_TOKENS
    assert harness.recorder.num_computed("it") == len(prompt) + NUM_TOKENS - 1
    return rows


@dataclass(frozen=True)
class Way:
    """How a route is run.

    chunk, depth   tokens per step, and steps planned ahead
    num_others     requests beside it
    num_older      prompt tokens of an older request, such that it wants its second block while this one decodes
    """

    chunk: int
    num_others: int
    depth: int
    num_older: int

    def harness(self, case: Case, **options: Any) -> Harness:
        options = {"num_blocks": 128, "rates": SWAP_IS_CHEAP} | options
        return Harness(case.decoder, chunk=self.chunk, max_seqs=8, depth=self.depth, **options)

    def others(self) -> list[Request]:
        """Requests of two blocks each, from their first token to their last."""
        return [
            greedy(f"other {index}", random_tokens(90 + index, 17 + index), 15 - index)
            for index in range(self.num_others)
        ]

    def ask(self, harness: Harness, case: Case) -> list[TokenEvent]:
        others = self.others()
        return harness.run([*others[:1], greedy("it", case.prompt, NUM_TOKENS), *others[1:]])["it"]

    def check(self, harness: Harness, case: Case, num_cached: int) -> None:
        """The bytes are right, and nothing was computed that was at hand."""
        assert_same_bytes(harness.recorder.rows_of("it"), case.alone)
        assert harness.recorder.num_computed("it") == len(case.prompt) - num_cached + NUM_TOKENS - 1
        if self.num_others:
            assert max(len(plan.items) for plan in harness.plans) > 1


@pytest.fixture(params=[Way(512, 0, 1, 14), Way(48, 3, 0, 9)], ids=["alone ahead", "beside"])
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def fill_pool(harness: Harness) -> None:
    """One prompt as large as the pool: nothing else stays in it."""
    evicted = harness.counters.num_evicted_blocks
    num_tokens = harness.manager.num_blocks * BLOCK_SIZE - 1
    harness.run([greedy(f"filler {evicted}", random_tokens(1000, num_tokens), 1)])
    assert harness.counters.num_evicted_blocks > evicted


def test_cold_cache(case: Case, way: Way) -> None:
    harness = way.harness(case, num_ram_slots=64)
    assert way.ask(harness, case)[-1].num_cached_tokens == 0
    assert harness.counters.prefix_hit_tokens == 0
    way.check(harness, case, 0)


def test_block_hit(case: Case, way: Way) -> None:
    num_shared = case.num_whole - BLOCK_SIZE
    harness = way.harness(case)
    harness.run([greedy("first", case.prompt[:num_shared], 1)])
    assert way.ask(harness, case)[-1].num_cached_tokens == num_shared
    counters = harness.counters
    assert (counters.prefix_hit_tokens, counters.partial_hit_tokens, counters.num_restored_blocks) == (num_shared, 0, 0)
    way.check(harness, case, num_shared)


@pytest.mark.parametrize("num_matching", [1, 15])
def test_partial_block_hit(case: Case, way: Way, num_matching: int) -> None:
    num_shared = case.num_whole - 2 * BLOCK_SIZE + num_matching
    differing = [token_id + 1 for token_id in case.prompt[num_shared : case.num_whole]]
    harness = way.harness(case)
    harness.run([greedy("first", case.prompt[:num_shared] + differing, 1)])
    assert way.ask(harness, case)[-1].num_cached_tokens == num_shared
    counters = harness.counters
    assert (counters.prefix_hit_tokens, counters.partial_hit_tokens) == (num_shared, num_matching)
    way.check(harness, case, num_shared)


def test_ram_restore(case: Case, way: Way) -> None:
    harness = way.harness(case, num_blocks=24, num_ram_slots=96)
    harness.run([greedy("first", case.prompt, 1)])
    fill_pool(harness)
    assert way.ask(harness, case)[-1].num_cached_tokens == case.num_known
    counters = harness.counters
    assert (counters.ram_hit_tokens, counters.disk_hit_tokens) == (case.num_known, 0)
    assert counters.num_restored_blocks == blocks_for(case.num_known)
    way.check(harness, case, case.num_known)


def test_partial_block_from_ram(case: Case, way: Way) -> None:
    num_shared = case.num_whole - BLOCK_SIZE + 5
    differing = [token_id + 1 for token_id in case.prompt[num_shared : case.num_whole]]
    harness = way.harness(case, num_blocks=24, num_ram_slots=96)
    harness.run([greedy("first", case.prompt[:num_shared] + differing, 1)])
    fill_pool(harness)
    assert way.ask(harness, case)[-1].num_cached_tokens == num_shared
    counters = harness.counters
    assert (counters.ram_hit_tokens, counters.partial_hit_tokens) == (num_shared, 5)
    way.check(harness, case, num_shared)


def leave_on_disk(case: Case, folder: Path) -> Harness:
    """Run the prompt in a server of its own that writes to `folder`, and end it."""
    harness = Harness(case.decoder, num_ram_slots=64, disk_folder=folder)
    harness.run([greedy("first", case.prompt, 1)])
    harness.close()
    assert harness.disk is not None
    assert harness.disk.statistics().num_stored == blocks_for(len(case.prompt))
    return harness


def after_restart(case: Case, way: Way, folder: Path) -> Harness:
    harness = way.harness(case, num_ram_slots=64, disk_folder=folder)
    harness.wait_for_disk(blocks_for(len(case.prompt)))
    return harness


def test_disk_restore_after_a_restart(case: Case, way: Way, tmp_path: Path) -> None:
    leave_on_disk(case, tmp_path)
    harness = after_restart(case, way, tmp_path)
    assert way.ask(harness, case)[-1].num_cached_tokens == case.num_known
    counters = harness.counters
    assert (counters.disk_hit_tokens, counters.ram_hit_tokens) == (case.num_known, 0)
    way.check(harness, case, case.num_known)
    harness.close()
    assert not harness.log


def preempt(case: Case, way: Way, **options: Any) -> Harness:
    """An older request needs one more block than the pool has: the one that is compared must give way to it.

    Others are of a better priority, so that none of them is chosen in its place.
    """
    num_blocks = 1 + case.num_blocks + 2 * way.num_others
    harness = way.harness(case, num_blocks=num_blocks, **{**CARELESS, **options})
    others = [replace(other, priority=-1) for other in way.others()]
    first = greedy("first", random_tokens(3, way.num_older), 40)
    harness.run([first, greedy("it", case.prompt, NUM_TOKENS), *others])
    assert harness.counters.num_preemptions == 1
    assert_same_bytes(harness.recorder.rows_of("it"), case.alone)
    return harness


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_swap_preemption(case: Case, way: Way, prefix_caching: bool) -> None:
    harness = preempt(case, way, num_ram_slots=64, prefix_caching=prefix_caching)
    counters = harness.counters
    assert (counters.num_swaps, counters.recomputed_tokens, counters.prefix_hit_tokens) == (1, 0, 0)
    assert counters.num_restored_blocks > 0
    times = [number for (owner, _), number in harness.recorder.computed_times.items() if owner == "it"]
    assert set(times) == {1}
    assert harness.manager.tiers.ram.num_available(0) == 64, "a slot is held though nobody is left"


@pytest.mark.parametrize(("prefix_caching", "num_ram_slots"), [(True, 64), (False, 0)])
def test_recompute_preemption(case: Case, way: Way, prefix_caching: bool, num_ram_slots: int) -> None:
    options = {"prefix_caching": prefix_caching, "num_ram_slots": num_ram_slots, "rates": COMPUTING_IS_CHEAP}
    counters = preempt(case, way, **options).counters
    assert (counters.num_swaps, counters.num_restored_blocks, counters.prefix_hit_tokens) == (0, 0, 0)
    assert counters.recomputed_tokens >= (1 if prefix_caching else len(case.prompt))


# --------------------------------------------------------------------------- faults


ONE = Way(512, 0, 0, 14)


def restored_from_ram(case: Case, spoil: Callable[[Harness], None]) -> Harness:
    harness = ONE.harness(case, num_blocks=24, num_ram_slots=96)
    harness.run([greedy("first", case.prompt, 1)])
    fill_pool(harness)
    spoil(harness)
    ONE.ask(harness, case)
    assert harness.counters.ram_hit_tokens == case.num_known
    return harness


def test_one_flipped_byte_in_a_ram_slot_is_found(case: Case) -> None:
    """The comparison is worth something."""

    def spoil(harness: Harness) -> None:
        chain = harness.manager.open("").chain
        chain.extend(case.prompt, 2 * BLOCK_SIZE)
        block = harness.manager.tiers.ram.find(0, chain.keys[1])
        assert block is not None
        assert harness.arena is not None
        memory = harness.arena.memory(0, block.slot)
        memory[1] ^= 0x40

    harness = restored_from_ram(case, spoil)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_bytes(harness.recorder.rows_of("it"), case.alone)


def test_a_restore_of_the_wrong_slot_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    restore_blocks = runner_module.restore_blocks

    def confused(ops: Any, cache: Any, arena: Any, transfers: tuple[BlockTransfer, ...]) -> Any:
        slots = [transfer.slot for transfer in transfers]
        moved = zip(transfers, [slots[1], slots[0], *slots[2:]], strict=True)  # of whole blocks: a tail is half empty
        return restore_blocks(ops, cache, arena, [transfer._replace(slot=slot) for transfer, slot in moved])

    monkeypatch.setattr(runner_module, "restore_blocks", confused)
    harness = restored_from_ram(case, lambda _: None)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_bytes(harness.recorder.rows_of("it"), case.alone)


def test_one_flipped_byte_on_disk_is_a_miss(case: Case, tmp_path: Path) -> None:
    """The blocks before it are used, the logits are right, and what is computed instead replaces it."""
    first = leave_on_disk(case, tmp_path)
    chain = first.manager.open("").chain
    chain.extend(case.prompt, 3 * BLOCK_SIZE)
    block = first.manager.tiers.ram.find(0, chain.keys[2])
    assert block is not None
    assert first.arena is not None
    middle = bytes(first.arena.memory(0, block.slot)[1024:1088])
    file = tmp_path / DATABASE_NAME
    content = file.read_bytes()
    assert middle in content
    content = content.replace(middle, middle[:5] + bytes([middle[5] ^ 1]) + middle[6:])
    file.write_bytes(content)

    harness = after_restart(case, ONE, tmp_path)
    assert ONE.ask(harness, case)[-1].num_cached_tokens == 2 * BLOCK_SIZE
    assert harness.counters.disk_hit_tokens == 2 * BLOCK_SIZE
    ONE.check(harness, case, 2 * BLOCK_SIZE)
    harness.close()

    harness = after_restart(case, ONE, tmp_path)
    assert ONE.ask(harness, case)[-1].num_cached_tokens == case.num_known
    ONE.check(harness, case, case.num_known)
    harness.close()


CAP_BYTES = 36 << 20
"""More than malloc ever takes from memory that it has kept: every page of the tier is a new one."""
SLACK_BYTES = 8 << 20
"""Requests, plans, the index, the recorded logits, and what the allocator keeps."""


def test_a_ram_tier_grows_by_no_more_than_its_cap(tmp_path: Path) -> None:
    """Prompts larger than the tier, one after the other; what else a step needs is there before."""
    shape = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "num_hidden_layers": 4}
    decoder = small_decoder(tmp_path, "cpu", "fp16", **shape)
    block_bytes = decoder.kv_format.block_bytes
    num_slots = CAP_BYTES // block_bytes
    num_prompt_blocks = num_slots + 8
    harness = Harness(decoder, num_blocks=num_prompt_blocks + 8, num_ram_slots=num_slots, rates=SWAP_IS_CHEAP)
    for pool in harness.cache.pools:
        pool.zero_()
    Harness(decoder, num_blocks=8, prefix_caching=False).run([greedy("warm", random_tokens(0, 100), 2)])
    before = resident_bytes()
    for index in range(3):
        harness.run([greedy(str(index), random_tokens(index, num_prompt_blocks * BLOCK_SIZE), 1)])
    harness.settle()
    grown = resident_bytes() - before
    tiers = harness.manager.tiers
    assert tiers.num_saved + tiers.num_unsaved == 3 * num_prompt_blocks
    assert tiers.num_saved > 2 * num_slots
    assert tiers.ram.num_used(0) == num_slots
    assert CAP_BYTES / 2 < grown <= CAP_BYTES + SLACK_BYTES, f"{grown / 2**20:.1f} MiB"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_a_server_that_is_told_to_stop_during_its_last_step_keeps_the_blocks_of_that_step(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=QuietProgress())
    blocks = DiskCache(str(tmp_path / "blocks"), 64 << 20)
    config = Config(model=str(path), home=str(tmp_path / "home"), num_gpu_blocks_override=32, disk_cache=blocks)

    class Stopping(Recorder):
        engine: Engine | None = None

        def computed(self, request_id: str, start: int, num_tokens: int) -> None:
            if self.engine is not None:
                self.engine._inbox.put(self.engine._stop_thread)

    observer = Stopping()
    engine = build_engine(
        config, files, read_spec(files),
        home=tmp_path / "home", progress=QuietProgress(), log=lambda level, line: None, observer=observer,
    )  # fmt: skip
    await engine.start()
    observer.engine = engine
    stream = engine.submit(replace(greedy("it", random_tokens(1, 100), 1), arrival_time=time.monotonic()))
    assert [event.finish_reason async for events in stream for event in events] == ["length"]
    await engine.stop(10)
    disk = engine._disk
    assert disk is not None
    assert disk.statistics().num_blocks == blocks_for(100)
