"""Measures what cache and scheduler do for a client: over HTTP, on a `kvd serve` of its own, with the default model.

    .venv/bin/python packaging/measure_cache.py [--only warm tiers gap throughput waste] [--rounds 5]

warm        time to first token of a 2,048-token prefix and 32 tokens of one's own: new, and seen before
tiers       the same prefix when it comes back from RAM, and from disk after a restart
gap         the longest gap of a running stream beside one prompt of 8,000 tokens, and beside eight such prompts at once
throughput  output tokens per second of 1 … 32 concurrent requests in a pool that holds 4 of them
waste       slots of KV blocks without a token while 8 requests run

Prompts are token ids, all different unless a row says otherwise. Medians of `--rounds` rounds, and the range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from kvd.tools.bench_child import own_server

MODEL = "smollm2-135m-instruct"
VOCABULARY = 40_000
TARGET_MS = 250
PREFIX, OWN = 2048, 32


class Client:
    """One server; every prompt is drawn from one seeded generator."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1000, VOCABULARY) for _ in range(count)]

    async def stream(self, prompt: list[int], max_tokens: int) -> tuple[list[float], int]:
        """Seconds from sending to each event with text, and the cached tokens that the server reports."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent, times, cached = time.perf_counter(), [], 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    times.append(time.perf_counter() - sent)
                if chunk.get("usage"):
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        return times, cached

    async def snapshot(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/kvd/snapshot") as response:
            return dict(await response.json())


def with_server(
    words: list[str], seed: int, action: Callable[[Client], Awaitable[Any]], *, last_seconds: float = 600
) -> Any:
    async def run(url: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=last_seconds)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            client = Client(session, url, seed)
            await client.stream(client.tokens(100), 8)  # the first request touches fresh memory
            return await action(client)

    with own_server([MODEL, *words]) as url:
        return asyncio.run(run(url))


def say(what: str, values: list[float], unit: str = "ms") -> None:
    digits = 1 if max(values) >= 1 else 4
    median, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    print(f"{what:58} {median:>9} {unit}   ({low} to {high})", flush=True)


async def first_token(client: Client, prompt: list[int], expected_cached: int) -> float:
    times, cached = await client.stream(prompt, 1)
    if cached != expected_cached:
        raise SystemExit(f"{cached} tokens were cached, {expected_cached} were to be")
    return times[0] * 1e3


def measure_warm(rounds: int) -> None:
    async def run(client: Client) -> tuple[list[float], list[float]]:
        cold, warm = [], []
        for _ in range(rounds):
            prefix = client.tokens(PREFIX)
            cold.append(await first_token(client, prefix + client.tokens(OWN), 0))
            warm.append(await first_token(client, prefix + client.tokens(OWN), PREFIX))
        return cold, warm

    cold, warm = with_server([], 1, run)
    say(f"first token, {PREFIX} + {OWN} new tokens", cold)
    say(f"first token, {PREFIX} seen + {OWN} new", warm)
    say("warm / cold", [w / c for w, c in zip(warm, cold, strict=True)], "  ")


def measure_tiers(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--swap-space", "0.5", "--num-gpu-blocks-override", "160", "--max-model-len", "2400"]
        words += ["--disk-cache", f"path={Path(folder) / 'blocks'},size=2GiB"]
        prefixes: list[list[int]] = []

        async def fill(client: Client) -> tuple[list[float], list[float]]:
            cold, ram = [], []
            for _ in range(rounds):
                prefixes.append(client.tokens(PREFIX))
                cold.append(await first_token(client, prefixes[-1] + client.tokens(OWN), 0))
            for prefix in prefixes:  # the pool holds little more than one of them
                ram.append(await first_token(client, prefix + client.tokens(OWN), PREFIX))
            await asyncio.sleep(3)  # what is stored is stored in the background
            return cold, ram

        async def restarted(client: Client) -> list[float]:
            return [await first_token(client, prefix + client.tokens(OWN), PREFIX) for prefix in prefixes]

        cold, ram = with_server(words, 2, fill)
        disk = with_server(words, 3, restarted)
    say("first token, computed", cold)
    say("first token, prefix restored from RAM", ram)
    say("first token, prefix restored from disk after a restart", disk)


def measure_gap(rounds: int) -> None:
    async def run(client: Client, num_prompts: int) -> tuple[float, float]:
        stream = asyncio.create_task(client.stream(client.tokens(64), 300 + 500 * num_prompts))
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        prompts = [client.tokens(8000) for _ in range(num_prompts)]
        await asyncio.gather(*[client.stream(prompt, 1) for prompt in prompts])
        lasted = time.perf_counter() - began
        times, _ = await stream
        gaps = [after - before for before, after in pairwise(times)]
        return max(gaps) * 1e3, lasted

    words = ["--target-itl-ms", str(TARGET_MS), "--num-gpu-blocks-override", "6000"]
    for num_prompts in (1, 8):
        gaps = []
        for number in range(max(1, rounds // 2)):
            gap, lasted = with_server(words, 10 + number, lambda client: run(client, num_prompts))  # noqa: B023
            gaps.append(gap)
        say(f"longest gap beside {num_prompts} x 8,000 tokens ({lasted:.0f} s), target {TARGET_MS} ms", gaps)


def measure_throughput(rounds: int) -> None:
    prompt_tokens, output_tokens = 128, 96
    blocks = 4 * -(-(prompt_tokens + output_tokens) // 16)

    async def run(client: Client) -> dict[int, list[float]]:
        rates: dict[int, list[float]] = {}
        for _ in range(rounds):
            for concurrency in (1, 2, 4, 8, 16, 32):
                num_each = max(2, 24 // concurrency)

                async def lane() -> None:
                    for _ in range(num_each):  # noqa: B023
                        await client.stream(client.tokens(prompt_tokens), output_tokens)

                began = time.perf_counter()
                await asyncio.gather(*[lane() for _ in range(concurrency)])
                rate = concurrency * num_each * output_tokens / (time.perf_counter() - began)
                rates.setdefault(concurrency, []).append(rate)
        return rates

    words = ["--num-gpu-blocks-override", str(blocks), "--max-model-len", "256"]
    for concurrency, values in with_server(words, 20, run, last_seconds=3000).items():
        say(f"{concurrency} concurrent in a pool of {blocks} blocks (4 requests)", values, "tok/s")


def measure_waste(rounds: int) -> None:
    async def run(client: Client) -> list[float]:
        tasks = [asyncio.create_task(client.stream(client.tokens(200 + 37 * n), 200)) for n in range(8)]
        shares = []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.3)
            rows = [row for row in (await client.snapshot())["requests"] if row["state"] == "decode"]
            slots = sum(row["num_blocks"] * 16 for row in rows)
            if slots:
                shares.append(100 * (1 - sum(row["num_computed_tokens"] for row in rows) / slots))
        await asyncio.gather(*tasks)
        return shares

    say("slots of running requests without a token", with_server([], 30, run), "%")


MEASURES = {
    "warm": measure_warm,
    "tiers": measure_tiers,
    "gap": measure_gap,
    "throughput": measure_throughput,
    "waste": measure_waste,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.only:
        MEASURES[name](arguments.rounds)
