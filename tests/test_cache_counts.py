"""What the cache saves on the real server, by counts: real weights, real sockets, a real HTTP client.

The speeds of prefill and of copies are given to the engine, so that no clock decides what is restored. An observer of
the runner counts every token that is computed. What is never saved: the last token of a prompt, which has to be
computed to go on from, and tokens that do not fill a block of 16 when their request ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from kvd.config import Config, DiskCache
from kvd.core import BLOCK_SIZE
from kvd.engine.build import build_engine
from kvd.engine.engine import Engine
from kvd.model.files import ModelFiles
from kvd.model.loading import read_spec
from kvd.model.progress import QuietProgress
from kvd.scheduler.scheduler import Rates
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.text.text_model import TextModel
from kvd.tools.serve import server_settings

RATES = {
    "prefill_tokens_per_second": 1000.0,
    "decode_base_seconds": 0.01,
    "decode_seconds_per_request": 0.001,
    "save_bytes_per_second": 1e10,
    "restore_bytes_per_second": 1e10,
    "disk_bytes_per_second": 1e9,
}
POOL_BLOCKS = 40
MODEL = "smollm2-135m-instruct"


class Count:
    """A RunnerObserver: how often each position of each request was computed."""

    def __init__(self) -> None:
        self.times: Counter[tuple[str, int]] = Counter()

    def computed(self, request_id: str, start: int, num_tokens: int) -> None:
        self.times.update((request_id, position) for position in range(start, start + num_tokens))

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        """Not looked at."""

    def take(self) -> int:
        """Tokens computed since the last call, each of them once."""
        assert set(self.times.values()) <= {1}, "a request computed a token twice"
        total = self.times.total()
        self.times.clear()
        return total


class Server:
    """A running server as a client sees it, and what was computed for that."""

    def __init__(self, url: str, engine: Engine, session: aiohttp.ClientSession, count: Count) -> None:
        self.url, self.engine, self.session, self.count = url, engine, session, count

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def complete(self, prompt: list[int] | list[list[int]], max_tokens: int = 1, **fields: Any) -> Any:
        """The usage of a completion that only its length ends."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return (await self.post("/v1/completions", body | fields))["usage"]

    async def cached(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> int:
        usage = await self.complete(prompt, max_tokens, **fields)
        assert usage["prompt_tokens"] == len(prompt)
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    async def counters(self) -> Any:
        """As of now; a snapshot is up to 50 ms old."""
        return await self.engine._inbox.ask(self.engine._scheduler.counters)


@asynccontextmanager
async def running(files: ModelFiles, home: Path, **settings: Any) -> AsyncIterator[Server]:
    """The default model behind a loopback socket; ends like `kvd serve` does."""
    config = Config(**{
        "model": MODEL, "home": str(home), "max_num_seqs": 16, "max_num_batched_tokens": 256, "cpu_threads": 1,
        "max_model_len": 4096, **settings,
    })  # fmt: skip
    count = Count()
    engine = build_engine(
        config, files, read_spec(files),
        home=home, progress=QuietProgress(), log=lambda level, line: None, observer=count, rates=Rates(RATES),
    )  # fmt: skip
    count.times.clear()  # of the step that was profiled
    text = TextModel(
        files.tokenizer_json,
        chat_template=files.chat_template,
        adds_bos=files.adds_bos,
        bos_token_id=files.bos_token_id,
        special_tokens=files.special_tokens,
    )
    await engine.start()
    server = await serve(build_app(engine, text, config=server_settings(config, engine.info, files)), "127.0.0.1", 0)
    try:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            yield Server(server.url, engine, session, count)
    finally:
        await engine.stop(10)
        await server.close()


def tokens(seed: int, count: int) -> list[int]:
    """Ids of words; no special one."""
    return random.Random(seed).choices(range(1000, 40000), k=count)


def whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


async def test_what_one_server_computes(default_model_files: ModelFiles, kvd_home: Path) -> None:
    async with running(default_model_files, kvd_home, num_gpu_blocks_override=300) as server:
        await _shared_prefix(server)
        await _token_level_reuse(server)
        await _salts(server)
        await _side_call(server)
        await _agent_loop(server)
        await _choices(server)
        await _same_instant(server)


async def _shared_prefix(server: Server) -> None:
    """The second request of a shared prefix of 2K tokens computes only its own tokens."""
    prefix = tokens(1, 2048)
    assert await server.cached(prefix + tokens(2, 50), 4) == 0
    assert server.count.take() == 2048 + 50 + 3
    assert await server.cached(prefix + tokens(3, 37), 4) == 2048
    assert server.count.take() == 37 + 3


async def _token_level_reuse(server: Server) -> None:
    """A shared prefix shorter than a block, and one that ends within a block."""
    before = (await server.counters()).partial_hit_tokens
    for num_shared in (5, 16 * 3 + 9):
        prefix = tokens(10 + num_shared, num_shared)
        assert await server.cached([*prefix, *tokens(11, 30)]) == 0
        assert server.count.take() == num_shared + 30
        assert await server.cached([*prefix, *tokens(12, 21)]) == num_shared
        assert server.count.take() == 21
    assert (await server.counters()).partial_hit_tokens - before == 5 + 9


async def _salts(server: Server) -> None:
    """Nothing is shared between two salts, or with none; under the same salt everything is."""
    prompt = tokens(20, 70)
    for salt in ("ours", "theirs"):
        assert await server.cached(prompt, cache_salt=salt) == 0
        assert server.count.take() == 70
    assert await server.cached(prompt) == 0
    assert server.count.take() == 70
    assert await server.cached(prompt, cache_salt="ours") == 69
    assert server.count.take() == 1


async def _side_call(server: Server) -> None:
    """A title is generated between two turns: the second turn finds the first all the same."""
    first = tokens(30, 300)
    assert await server.cached(first, 5) == 0
    assert await server.cached(tokens(31, 40) + first[:60], 5) == 0
    server.count.take()
    # The last block of the prompt was filled by the answer, so it is there too.
    assert await server.cached(first + tokens(32, 20)) == 300
    assert server.count.take() == 20


async def _agent_loop(server: Server) -> None:
    """Twenty turns, each of which sends all that was said: every token is computed in one turn only."""
    messages = [{"role": "system", "content": "You are an agent that lists files and reads them, one at a time."}]
    num_known = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"Tool result {turn}: {turn * 37 % 101} files, none of them read."})
        answer = await server.post(
            "/v1/chat/completions",
            {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True},
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= num_known
        assert server.count.take() == usage["prompt_tokens"] - cached + usage["completion_tokens"] - 1
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        num_known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert num_known > 500


async def _choices(server: Server) -> None:
    """Four choices of one prompt, which the engine sees as four requests, compute it once.

    Full blocks are waited for; the last token is everybody's own.
    """
    prompt = tokens(40, 20 * BLOCK_SIZE + 1)
    usage = await server.complete([prompt] * 4, 4, temperature=1.0)
    assert usage["completion_tokens"] == 16
    assert server.count.take() == len(prompt) + 3 * 1 + 4 * 3


async def _same_instant(server: Server) -> None:
    """Eight requests with one prefix arrive in the same instant: it is computed once."""
    prefix = tokens(50, 30 * BLOCK_SIZE)
    prompts = [prefix + tokens(51 + index, 10 + index) for index in range(8)]
    num_cached = await asyncio.gather(*(server.cached(prompt, 2) for prompt in prompts))
    assert sorted(num_cached) == [0, *[len(prefix)] * 7]
    assert server.count.take() == len(prefix) + sum(10 + index + 1 for index in range(8))


async def test_a_working_set_of_three_times_the_pool(
    default_model_files: ModelFiles, kvd_home: Path, tmp_path: Path
) -> None:
    """It is computed once: the second time it comes from RAM, and after a restart from disk."""
    prompts = [tokens(100 + index, 15 * BLOCK_SIZE + 3) for index in range(8)]
    num_found = 15 * BLOCK_SIZE + 2  # all but the last token, which is always computed
    assert len(prompts) * 15 >= 3 * POOL_BLOCKS
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": POOL_BLOCKS,
        "max_model_len": POOL_BLOCKS * BLOCK_SIZE,
        "swap_space": 0.05,
        "disk_cache": DiskCache(str(tmp_path / "blocks"), 256 << 20),
    }
    async with running(default_model_files, kvd_home, **settings) as server:
        for prompt in prompts:
            assert await server.cached(prompt) == 0
        assert server.count.take() == sum(map(len, prompts))
        for prompt in prompts:
            assert await server.cached(prompt) == num_found
        assert server.count.take() == len(prompts)
        counters = await server.counters()
        assert counters.ram_hit_tokens > 0
        assert counters.disk_hit_tokens == 0
        assert counters.num_unsaved_blocks == 0

    async with running(default_model_files, kvd_home, **settings) as server:
        disk = server.engine._disk
        assert disk is not None
        for _ in range(3000):
            if disk.statistics().num_blocks >= 8 * 16:
                break
            await asyncio.sleep(0.01)
        for prompt in prompts:
            assert await server.cached(prompt) == num_found
        assert server.count.take() == len(prompts)
        assert (await server.counters()).disk_hit_tokens == num_found * len(prompts)
