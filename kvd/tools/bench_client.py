"""An OpenAI-compatible endpoint as `kvd bench` sees it: what it is, and streamed completions with arrival times.

Event loop only. Invariants: only the address that was asked for is spoken to (no redirect, no proxy on loopback);
every failure is one `BenchFailed` that names the endpoint; what an endpoint does not reveal is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvd.errors import ConfigError
from kvd.tools.bench_answer import Answer, BenchFailed, error_text, read_answer
from kvd.tools.bench_prompts import Prompt, Sizer

CONNECT_SECONDS = 10.0

_SOFTWARE = {"kvd": "kvd", "vllm": "vLLM", "llamacpp": "llama.cpp"}
"""`owned_by` of /v1/models → the server's name."""


class ContextRefused(BenchFailed):
    """The endpoint says that a prompt does not fit its context."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an endpoint is, without /v1, and how to be let in."""

    label: str
    root: str
    model: str | None
    api_key: str | None = field(repr=False)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(urlsplit(self.root).hostname or "")


@dataclass(frozen=True, slots=True)
class Description:
    """What an endpoint says about itself.

    `context_tokens`: longest prompt and answer together, of one request. `kv_block_bytes` and `kv_bytes_per_token`:
    of its KV cache. None is what it does not say.
    """

    software: str
    version: str | None
    model: str
    context_tokens: int | None = None
    kv_block_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def parse_root(url: str, flag: str, *, allow_remote: bool) -> str:
    """`http://host:port` of a base URL with or without /v1. ConfigError where it is no URL, or not this machine."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{flag}: expected http://HOST:PORT, got {url[:80]!r}")
    if not allow_remote and not is_loopback(host):
        raise ConfigError(f"{flag}: {host} is not this machine; add --allow-remote if it is yours to load")
    host = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"


def is_loopback(host: str) -> bool:
    """Whether a host name of a URL means this machine, without asking a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Endpoint:
    """One endpoint to measure. Made by `connect`."""

    def __init__(self, address: Address, session: aiohttp.ClientSession) -> None:
        self.label = address.label
        self.root = address.root
        self.sizer = Sizer()
        self.description = Description("unknown", None, address.model or "")
        self._wanted_model = address.model
        self._session = session
        self._headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}

    async def prepare(self) -> None:
        """Ask the endpoint who it is, and how many tokens its tokenizer makes of our words."""
        self.description = await self._describe()
        try:
            await self.sizer.calibrate(self.complete)
        except ValueError as error:
            raise BenchFailed(f"{self._name}: {error}") from None

    async def complete(self, prompt: Prompt, max_tokens: int) -> Answer:
        """One greedy streamed completion of `max_tokens` tokens, and what it taught about prompt sizes."""
        body: dict[str, Any] = {
            "model": self.description.model,
            "prompt": prompt.text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.description.software == "llama.cpp":
            body["cache_prompt"] = True
        pieces: list[tuple[float, bytes]] = []
        sent = time.perf_counter()
        async with self._open("POST", "/v1/completions", json=body) as response:
            while piece := await response.content.readany():
                pieces.append((time.perf_counter(), piece))
        try:
            answer = read_answer(sent, pieces, max_tokens)
        except BenchFailed as error:
            raise BenchFailed(f"{self._name}: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError):
            raise BenchFailed(f"{self._name}: the stream is not that of an OpenAI completion") from None
        self.sizer.learn(prompt.num_words, answer.prompt_tokens)
        return answer

    async def num_preemptions(self) -> int | None:
        """How often a running request lost its place so far; None where /metrics does not say."""
        try:
            async with self._open("GET", "/metrics") as response:
                text = await response.text()
        except BenchFailed:
            return None
        found = re.findall(r"^vllm:num_preemptions_total(?:\{.*\})?\s+([0-9.eE+]+)", text, re.MULTILINE)
        return round(sum(map(float, found))) if found else None

    # ------------------------------------------------------------------ who it is

    async def _describe(self) -> Description:
        try:
            models = (await self.ask("/v1/models"))["data"]
            entry = next((model for model in models if model["id"] == self._wanted_model), models[0])
            name = self._wanted_model or str(entry["id"])
        except (KeyError, TypeError, IndexError):
            raise BenchFailed(f"{self._name}: /v1/models lists no model; is this an OpenAI endpoint?") from None
        software = _SOFTWARE.get(str(entry.get("owned_by")), "unknown")
        context = _positive(entry.get("max_model_len"))
        try:
            if software == "kvd":
                return await self._describe_kvd(name, context)
            if software == "vLLM":
                version = (await self.ask("/version")).get("version")
                return Description(software, version, name, context)
            if software == "llama.cpp":
                return await self._describe_llama(name)
        except (KeyError, TypeError, AttributeError):
            raise BenchFailed(f"{self._name}: it calls itself {software} and answers like something else") from None
        return Description(software, None, name, context)

    async def _describe_kvd(self, name: str, context: int | None) -> Description:
        info = (await self.ask("/kvd/snapshot"))["info"]
        budget = info["budget"]
        known = ("architecture", "quantization", "backend", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens")
        return Description(
            "kvd",
            info["version"],
            name,
            context,
            budget["block_bytes"],
            budget["bytes_per_token"],
            {key: info.get(key) for key in known} | {"num_blocks": budget["num_blocks"]},
        )

    async def _describe_llama(self, name: str) -> Description:
        # Its list of models has the context of the training; what a request gets is a slot's.
        properties = await self.ask("/props")
        slots = _positive(properties.get("total_slots"))
        context = _positive((properties.get("default_generation_settings") or {}).get("n_ctx"))
        return Description("llama.cpp", properties.get("build_info"), name, context, details={"slots": slots})

    # ------------------------------------------------------------------ the wire

    async def ask(self, path: str) -> dict[str, Any]:
        """The JSON object that GET `path` answers with. Raises BenchFailed."""
        async with self._open("GET", path) as response:
            try:
                body = await response.json(content_type=None)
            except (ValueError, RecursionError):
                body = None
        if not isinstance(body, dict):
            raise BenchFailed(f"{self._name}: {path} does not answer with a JSON object")
        return body

    @contextlib.asynccontextmanager
    async def _open(self, method: str, path: str, **arguments: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200; everything else is a BenchFailed, also while its body is read."""
        try:
            async with self._session.request(
                method, self.root + path, headers=self._headers, allow_redirects=False, **arguments
            ) as response:
                if response.status != 200:
                    await self._refuse(response, method, path)
                yield response
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number else str(error.os_error)
            raise BenchFailed(f"{self._name}: nothing answers there: {reason}") from None
        except TimeoutError:
            raise BenchFailed(f"{self._name}: {path}: no answer within the time limit (--timeout)") from None
        except aiohttp.ClientError as error:
            raise BenchFailed(f"{self._name}: {path}: {type(error).__name__}: {error}") from None

    async def _refuse(self, response: aiohttp.ClientResponse, method: str, path: str) -> None:
        try:
            text = error_text(await response.json(content_type=None))
        except (ValueError, RecursionError):
            text = response.reason or "no reason given"
        message = f"{self._name}: {method} {path}: HTTP {response.status}: {text}"
        if response.status == 400 and "context" in text.lower():
            raise ContextRefused(message)
        raise BenchFailed(message)

    @property
    def _name(self) -> str:
        return f"{self.label} ({self.root})"


@contextlib.asynccontextmanager
async def connect(addresses: list[Address], *, timeout_seconds: float) -> AsyncIterator[list[Endpoint]]:
    """The endpoints of `addresses`, prepared; `timeout_seconds` bounds every wait for the next bytes."""
    async with contextlib.AsyncExitStack() as stack:
        endpoints = []
        for address in addresses:
            # A connection per request: a kept one may be closed by the server between two requests, and a POST on it
            # would fail. On loopback a new one costs a fraction of a millisecond, for every endpoint alike.
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout_seconds, connect=CONNECT_SECONDS
                ),
                trust_env=not address.is_loopback,
                read_bufsize=2**20,
            )
            endpoints.append(Endpoint(address, await stack.enter_async_context(session)))
        for endpoint in endpoints:
            await endpoint.prepare()
        yield endpoints
        await asyncio.sleep(0)  # lets closing transports go


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
