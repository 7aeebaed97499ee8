"""What HTTP and text cost: the real server and tokenizer of the default model before an engine that computes nothing.

    python packaging/measure_http.py

Prints (1) the time of the event loop's thread per 1,000 streamed tokens, while 16 clients of another process are sent
62.5 tokens a second each; (2) the time from sending a chat request of about 1,000 prompt tokens until its first token
arrives, where the engine has that token at once: what HTTP, template, tokenizer and detokenizer add to the time to
first token. The clients share the machine with the server.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from kvd.config import Config
from kvd.core import FinishReason, Request, TokenEvent
from kvd.engine.streams import TokenStream
from kvd.model.loading import read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.server.settings import ServerSettings
from kvd.tools.serve import open_text
from kvd.views import EngineInfo, MemoryBudget

NUM_STREAMS, TOKENS_PER_SECOND, STREAM_TOKENS = 16, 1000, 1000
NUM_FIRST_TOKENS = 100
WORDS = "The cache keeps the blocks of a prompt so that the next request need not compute them again. "


class PacedEngine:
    """Gives every request tokens of a text: one each per step of a thread, or the first at once. Computes nothing."""

    def __init__(self, info: EngineInfo, token_ids: Sequence[int], step_seconds: float) -> None:
        self.info = info
        self._token_ids, self._step_seconds = token_ids, step_seconds
        self._running: dict[str, tuple[Request, TokenStream, int]] = {}
        self._loop = asyncio.get_running_loop()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        if step_seconds:
            self._thread.start()

    def submit(self, request: Request) -> TokenStream:
        stream = TokenStream(request.request_id, self._end)
        self._running[request.request_id] = (request, stream, 0)
        if not self._step_seconds:
            self._loop.call_soon(self._dispatch, self._next_tokens())
        return stream

    def _end(self, request_id: str, reason: FinishReason = "abort") -> None:
        self._running.pop(request_id, None)

    def health(self) -> None:
        return None

    def close(self) -> None:
        self._has_ended.set()
        if self._step_seconds:
            self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(self._step_seconds):
            events = self._next_tokens()
            if events:
                self._loop.call_soon_threadsafe(self._dispatch, events)

    def _next_tokens(self) -> list[TokenEvent]:
        events = []
        for request_id, (request, stream, count) in list(self._running.items()):
            count += 1
            num_prompt = len(request.prompt_token_ids)
            is_last = count >= request.sampling.max_tokens
            token_id = self._token_ids[count % len(self._token_ids)]
            events.append(
                TokenEvent(request_id, token_id, num_prompt, 0, count, finish_reason="length" if is_last else None)
            )
            if request_id in self._running:
                self._running[request_id] = (request, stream, count)
        return events

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            found = self._running.get(event.request_id)
            if found is not None:
                found[1].put(event)
                if event.finish_reason is not None:
                    self._running.pop(event.request_id, None)


async def _one_stream(session: aiohttp.ClientSession, url: str, content: str, max_tokens: int) -> float:
    """Seconds until the first content."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": max_tokens, "stream": True}
    started, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not first and line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - started
    return first


async def _clients(url: str, kind: str) -> Any:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        if kind == "streams":
            await asyncio.gather(*[_one_stream(session, url, "Go on.", STREAM_TOKENS) for _ in range(NUM_STREAMS)])
            return None
        prompt = WORDS * 55
        return [await _one_stream(session, url, f"{number} {prompt}", 1) for number in range(NUM_FIRST_TOKENS)]


async def _measure(kind: str) -> dict[str, float]:
    config = Config()
    files = resolve_model(config.model, home=config.home_path, revision=None, progress=QuietProgress())
    spec = read_spec(files)
    text = open_text(config, files)
    info = EngineInfo(
        "measured", ("measured",), spec.architecture, spec.quantization, "none", "cpu", "int8", spec.max_positions,
        NUM_STREAMS, 256, spec.vocab_size, True, MemoryBudget(0, 0, 0, 0, 1, 1, 1.0, 1.0), 0, "measured",
    )  # fmt: skip
    step_seconds = NUM_STREAMS / TOKENS_PER_SECOND if kind == "streams" else 0.0
    engine = PacedEngine(info, text.encode_prompt(WORDS, limit_tokens=1000), step_seconds)
    settings = ServerSettings(served_names=("measured",))
    server = await serve(build_app(engine, text, config=settings), "127.0.0.1", 0)  # type: ignore[arg-type]
    num_prompt = len(text.encode_prompt(WORDS * 55, limit_tokens=100_000))
    try:
        started, before = time.monotonic(), time.thread_time()
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--clients", server.url, kind, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        busy, wall = time.thread_time() - before, time.monotonic() - started
    finally:
        await server.close()
        engine.close()
    if kind == "streams":
        num_tokens = NUM_STREAMS * STREAM_TOKENS
        return {"loop_seconds_per_1000_tokens": busy / num_tokens * 1000, "wall_seconds": wall, "tokens": num_tokens}
    seconds = json.loads(output)
    return {"prompt_tokens": num_prompt, "median_ms": statistics.median(seconds) * 1e3, "worst_ms": max(seconds) * 1e3}


def main() -> None:
    if sys.argv[1:2] == ["--clients"]:
        print(json.dumps(asyncio.run(_clients(sys.argv[2], sys.argv[3]))))
        return
    for kind in ("streams", "first token"):
        print(kind, json.dumps(asyncio.run(_measure(kind))))


if __name__ == "__main__":
    main()
