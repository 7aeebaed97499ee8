"""`kvd serve` with a disk tier, killed again and again under load: no answer is wrong, the folder does not grow.

Every answer, log probabilities included, is compared with that of a server without any cache. Which prompts are sent
in which order, and after how many answers the server is killed, follows from a seed; clients are in the middle of
requests then, and the disk tier in the middle of its writes.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvd.core import BLOCK_SIZE
from tests.model.checkpoints import make_llama
from tests.test_serve import Process

MODEL = "tiny"
NUM_KILLS = 20
NUM_CLIENTS = 6
NUM_PREFIXES, NUM_SUFFIXES = 12, 10
CAP_BYTES = 16 << 20
NUM_TOKENS = 8


def make_prompts() -> list[tuple[int, ...]]:
    chance = random.Random(1)
    prefixes = [chance.choices(range(3, 320), k=14 * BLOCK_SIZE + 5) for _ in range(NUM_PREFIXES)]
    return [
        (*prefix, *chance.choices(range(3, 320), k=chance.randint(20, 60)))
        for prefix in prefixes
        for _ in range(NUM_SUFFIXES)
    ]


PROMPTS = make_prompts()


def prefix_of(index: int) -> int:
    return index // NUM_SUFFIXES


class Load:
    """Clients of one life of the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[int, str]] = []
        self.num_hits_of_earlier_lives = 0
        self._asked_prefixes: set[int] = set()
        self._enough = asyncio.Event()
        self._wanted = 0

    async def run_until(self, wanted: int, seed: int) -> list[asyncio.Task[None]]:
        """Start clients that ask for ever; returns them when so many answers have come."""
        self._wanted = wanted
        clients = [asyncio.create_task(self._ask_for_ever(random.Random(f"{seed} {n}"))) for n in range(NUM_CLIENTS)]
        waiting = asyncio.create_task(self._enough.wait())
        await asyncio.wait([waiting, *clients], return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), [client.exception() for client in clients if client.done()]
        return clients

    async def _ask_for_ever(self, chance: random.Random) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                await self.ask(session, chance.randrange(len(PROMPTS)))

    async def ask(self, session: aiohttp.ClientSession, index: int) -> None:
        is_new = prefix_of(index) not in self._asked_prefixes
        self._asked_prefixes.add(prefix_of(index))
        body = {"model": MODEL, "prompt": PROMPTS[index], "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
        body["ignore_eos"] = True
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        self.answers.append((index, json.dumps([answer["choices"][0]["text"], answer["choices"][0]["logprobs"]])))
        if is_new:
            self.num_hits_of_earlier_lives += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        if len(self.answers) == self._wanted:
            self._enough.set()

    async def ask_all(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            for index in range(len(PROMPTS)):
                await self.ask(session, index)


def start(folder: Path, model: Path, *words: str) -> Process:
    return Process(
        folder / "home", str(model), "--served-model-name", MODEL, "--port", "0", "--num-gpu-blocks-override", "120",
        "--max-model-len", "1024", "--max-num-seqs", "4", "--no-dashboard", "--cpu-threads", "1", *words,
    )  # fmt: skip


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def live(server: Process, load: Load, chance: random.Random, seed: int) -> None:
    clients = await load.run_until(chance.randint(1, 40), seed)
    await asyncio.sleep(chance.random() * 0.2)
    server.process.kill()
    for ended in await asyncio.gather(*clients, return_exceptions=True):
        assert isinstance(ended, aiohttp.ClientError), repr(ended)


def check(answers: Sequence[tuple[int, str]], expected: dict[int, str]) -> None:
    wrong = [index for index, answer in answers if answer != expected[index]]
    assert not wrong, f"{len(wrong)} of {len(answers)} answers are wrong"


@pytest.mark.full
async def test_killed_again_and_again(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, **shape)
    async with asyncio.timeout(1800):
        plain = start(tmp_path, model, "--no-enable-prefix-caching")
        try:
            reference = Load(await asyncio.to_thread(plain.url))
            await reference.ask_all()
        finally:
            await asyncio.to_thread(plain.stop, signal.SIGTERM)
        expected = dict(reference.answers)
        assert len(set(expected.values())) == len(PROMPTS)
        assert reference.num_hits_of_earlier_lives == 0

        blocks = tmp_path / "blocks"
        disk = ("--disk-cache", f"path={blocks},size={CAP_BYTES >> 20}MiB", "--swap-space", "0.02")
        chance = random.Random(2)
        num_answers, lives_with_hits, largest = 0, 0, 0
        for number in range(NUM_KILLS):
            server = start(tmp_path, model, *disk)
            try:
                load = Load(await asyncio.to_thread(server.url))
                await live(server, load, chance, number)
            finally:
                await asyncio.to_thread(server.stop, signal.SIGKILL)
            check(load.answers, expected)
            num_answers += len(load.answers)
            assert number or not load.num_hits_of_earlier_lives
            lives_with_hits += load.num_hits_of_earlier_lives > 0
            largest = max(largest, folder_bytes(blocks))
            assert largest <= CAP_BYTES, f"{largest / 2**20:.1f} MiB after {number + 1} kills"

        survivor = start(tmp_path, model, *disk)
        try:
            load = Load(await asyncio.to_thread(survivor.url))
            await load.ask_all()
        finally:
            code = await asyncio.to_thread(survivor.stop, signal.SIGTERM)
    check(load.answers, expected)
    assert code == 0
    assert not [line for line in survivor.lines if "error" in line.lower() or "Traceback" in line]
    assert folder_bytes(blocks) <= CAP_BYTES
    assert largest > CAP_BYTES / 2, "the cap was never near"
    assert num_answers > 100
    assert lives_with_hits >= NUM_KILLS // 2, f"{lives_with_hits} lives found what earlier ones had left"
