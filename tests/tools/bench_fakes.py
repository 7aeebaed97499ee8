"""OpenAI-compatible servers in a thread, whose every answer is known beforehand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvd.core import BLOCK_SIZE


@dataclass
class FakeServer:
    """What it says about itself and how it answers; what it was asked is in `bodies` and in the shared `log`.

    A prompt of n words has `tokens_per_word` · n + 3 tokens. `stops_after`: tokens after which every answer ends.
    `reports_cache`: whether usage says how much of the prompt began like an earlier one. `never_answers`: prompts that
    want more than one token wait until the client goes away.

    `has_snapshots`: it tells of itself what a kvd tells. An answer that somebody looked forward to, by asking for a
    snapshot just before, waits until it has been seen in one.
    """

    name: str = "fake"
    log: list[str] = field(default_factory=list)
    owned_by: str = "somebody"
    context: int | None = 8192
    tokens_per_word: int = 2
    tokens_per_chunk: int = 1
    stops_after: int | None = None
    has_usage: bool = True
    reports_cache: bool = False
    api_key: str | None = None
    fails: Callable[[dict[str, Any]], web.Response | None] = lambda body: None
    breaks_off: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    num_running: int = 0
    most_running: int = 0
    num_aborted: int = 0
    never_answers: bool = False
    has_snapshots: bool = False
    info: dict[str, Any] = field(default_factory=lambda: kvd_info("int8", bytes_per_token=100.0))
    num_blocks_of_others: int = 0
    num_blocks_active: int = 0
    _is_awaited: bool = False
    _was_seen: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: list[list[str]] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        entry: dict[str, Any] = {"id": f"{self.name}-model", "owned_by": self.owned_by}
        if self.context is not None and self.owned_by != "llamacpp":
            entry["max_model_len"] = self.context
        return web.json_response({"object": "list", "data": [entry]})

    async def properties(self, request: web.Request) -> web.Response:
        settings = {"n_ctx": self.context}
        return web.json_response(
            {"default_generation_settings": settings, "total_slots": 16, "build_info": "b1234-abcd"}
        )

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.9.9"})

    async def snapshot(self, request: web.Request) -> web.Response:
        if not self.has_snapshots:
            return error(404, "no such route")
        if self.num_running:
            self._was_seen.set()
        else:
            self._is_awaited = True
        return web.json_response(
            {
                "num_blocks_active": self.num_blocks_active + self.num_blocks_of_others,
                "num_running": self.num_running + bool(self.num_blocks_of_others),
                "info": self.info,
            }
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.log.append(self.name)
        refusal = self.fails(body)
        if refusal is not None:
            return refusal
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        num_tokens = len(body["prompt"].split()) * self.tokens_per_word + 3 + body["max_tokens"]
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.num_blocks_active += num_blocks
        is_awaited, self._is_awaited = self._is_awaited and body["max_tokens"] > 1, False
        self._was_seen.clear()
        try:
            if is_awaited:
                await self._was_seen.wait()
            return await self._answer(request, body)
        except (ConnectionError, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
            self.num_blocks_active -= num_blocks

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        words = body["prompt"].split()
        cached = max((_common(words, seen) for seen in self._seen), default=0) * self.tokens_per_word
        self._seen.append(words)
        num_tokens = min(body["max_tokens"], self.stops_after or body["max_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        # Others that were sent at the same time may begin too.
        await asyncio.sleep(0.002)
        if self.never_answers and body["max_tokens"] > 1:
            await asyncio.Event().wait()
        for begin in range(0, num_tokens, self.tokens_per_chunk):
            text = " x" * min(self.tokens_per_chunk, num_tokens - begin)
            await response.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
            if self.breaks_off:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0.001)  # chunks that leave together arrive together
        reason = "length" if num_tokens == body["max_tokens"] else "stop"
        closing = _event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
        if self.has_usage:
            usage: dict[str, Any] = {
                "prompt_tokens": len(words) * self.tokens_per_word + 3,
                "completion_tokens": num_tokens,
            }
            if self.reports_cache:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            closing += _event({"choices": [], "usage": usage})
        await response.write(closing + b"data: [DONE]\n\n")
        return response


def kvd_info(kv_format: str, *, bytes_per_token: float, **more: Any) -> dict[str, Any]:
    """What a kvd says about itself."""
    budget = {"block_bytes": round(BLOCK_SIZE * bytes_per_token), "bytes_per_token": bytes_per_token, "num_blocks": 999,
              "kv_bytes": 999_000}  # fmt: skip
    return {"version": "9.9", "kv_cache_dtype": kv_format, "max_num_seqs": 16, "created": 1, "budget": budget} | more


def _common(words: list[str], others: list[str]) -> int:
    return next(
        (index for index, (one, other) in enumerate(zip(words, others, strict=False)) if one != other),
        min(len(words), len(others)),
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": None}}, status=status)


@contextmanager
def serving(*servers: FakeServer) -> Iterator[None]:
    """Run the servers on free loopback ports in a thread of their own; fills in their `url`."""
    loop = asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        for server in servers:
            app = web.Application()
            app.add_routes(
                [
                    web.get("/v1/models", server.models),
                    web.get("/props", server.properties),
                    web.get("/version", server.version),
                    web.get("/kvd/snapshot", server.snapshot),
                    web.post("/v1/completions", server.completions),
                ]
            )
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
