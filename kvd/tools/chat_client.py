"""One conversation partner over HTTP: an OpenAI-compatible endpoint whose answers are streamed.

Event loop only. Invariants: every failure is one `ChatFailed` of one line that says what to do where that is known;
the key is in no message; proxies are bypassed on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvd.errors import KvdError
from kvd.tools.bench_client import is_loopback

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 180.0
"""Longest wait for the next bytes; kvd sends a sign of life every 15 seconds."""

Message = dict[str, str]


class ChatFailed(KvdError):
    """The endpoint could not be asked, or its answer broke off."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one has a finish reason."""

    text: str = ""
    is_reasoning: bool = False
    finish_reason: str | None = None


class ChatEndpoint:
    """An endpoint, its model and how to be let in."""

    def __init__(self, root: str, model: str | None, api_key: str | None) -> None:
        """root: the base URL without /v1. model: None asks for the first that is served."""
        self.root = root
        self.model = model or ""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def find_model(self) -> None:
        """Set `model` to the first that is served, unless one was given."""
        if self.model:
            return
        async with self._open("GET", "/v1/models") as response:
            try:
                self.model = str((await response.json(content_type=None))["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise ChatFailed(f"{self.root} lists no model; is this an OpenAI endpoint?") from None

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Delta, None]:
        """The answer to `messages`, piece by piece."""
        body = {"model": self.model, "messages": list(messages), "stream": True}
        finish_reason: str | None = None
        async with self._open("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    break
                for delta in _read_chunk(data):
                    finish_reason = delta.finish_reason or finish_reason
                    yield delta
        if finish_reason is None:
            raise ChatFailed("the answer broke off")

    @contextlib.asynccontextmanager
    async def _open(self, method: str, path: str, **arguments: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        trusts_environment = not is_loopback(urlsplit(self.root).hostname or "")
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=trusts_environment, read_bufsize=2**20) as session,
                session.request(
                    method, self.root + path, headers=self._headers, allow_redirects=False, **arguments
                ) as response,
            ):
                if response.status != HTTPStatus.OK:
                    raise ChatFailed(await _explain(response))
                yield response
        except aiohttp.ClientConnectorError as error:
            reason = connect_problem(error)
            raise ChatFailed(f"nothing answers at {self.root}: {reason}; is kvd running? (--url)") from None
        except TimeoutError:
            raise ChatFailed(f"no answer from {self.root} for {SILENCE_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise ChatFailed(f"{self.root}: {type(error).__name__}: {error}") from None


def connect_problem(error: aiohttp.ClientConnectorError) -> str:
    """Why no connection could be made, in a few words."""
    number = error.os_error.errno
    # The numbers of name look-ups are negative, and no system errors.
    is_known = number is not None and number > 0
    return os.strerror(number or 0) if is_known else error.os_error.strerror or str(error.os_error)


def _read_chunk(data: bytes) -> list[Delta]:
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatFailed(str(chunk["error"]["message"]))
        deltas = []
        for choice in chunk["choices"][:1]:
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                deltas.append(Delta(reasoning, is_reasoning=True))
            if text := delta.get("content"):
                deltas.append(Delta(text))
            if reason := choice.get("finish_reason"):
                deltas.append(Delta(finish_reason=reason))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ChatFailed("the stream is not that of an OpenAI chat") from None
    return deltas


async def _explain(response: aiohttp.ClientResponse) -> str:
    try:
        answer = await response.json(content_type=None)
        text = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.reason or "no reason given"
    if response.status == HTTPStatus.UNAUTHORIZED:
        return f"{text} (--key, or KVD_API_KEY in the environment)"
    return f"HTTP {response.status}: {text}"
