"""A running kvd over HTTP, as the dashboard sees the one in its own process: `insight.Console`.

Event loop only. Snapshots and the event log come over one connection to /kvd/events, which is opened again whenever it
ends; everything else is a call of its own. Invariants: whatever a server sends, every failure is one `RemoteFailed` of
one line that says what to do where that is known; what is kept of a server is bounded; the key is in no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from kvd.errors import KvdError
from kvd.insight import BlockMap, DoctorReport, Reveal, Timeline
from kvd.server.snapshot_json import decode_log_event, decode_snapshot
from kvd.tools.bench_client import is_loopback
from kvd.tools.chat_client import connect_problem
from kvd.tools.event_stream import EventStream
from kvd.views import LogEvent, PrefixView, SessionInfo, Snapshot

CONNECT_SECONDS = 5.0
CALL_SECONDS = 15.0
SILENCE_SECONDS = 10.0
"""A connection to /kvd/events on which no snapshot comes for so long, or for five intervals, is given up."""

RETRY_SECONDS = (0.25, 3.0)
"""Wait before the first attempt to connect again, and longest wait; each is twice the one before."""

MAX_ANSWER_BYTES = 32 * 2**20
MAX_EVENTS = 1000
SEVERAL_CHOICES = "several_choices"
"""Code of the error for the id of an answer that has more than one, where only each of these can be asked about."""

MAX_MESSAGE_CHARACTERS = 300
INTERVAL_SECONDS = (0.1, 60.0)

_T = TypeVar("_T")


class RemoteFailed(KvdError):
    """The server could not be asked, refused, or gave an answer that makes no sense.

    status: of HTTP, 0 without one. code: as the server words it. is_unreachable: nothing listens there.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "", is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.is_unreachable = is_unreachable


class _Timelines(msgspec.Struct):
    timelines: tuple[Timeline, ...]


class _Prefixes(msgspec.Struct):
    prefixes: tuple[PrefixView, ...]


class RemoteConsole:
    """The console of the kvd at `root`, the base URL without /v1. `aclose` it in the loop that has used it.

    interval_seconds: how often the server is to send a snapshot. Following it begins with the first call of `snapshot`
    or `events`.
    """

    def __init__(self, root: str, api_key: str | None, *, interval_seconds: float = 0.5) -> None:
        self.root = root
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._interval_seconds = min(max(interval_seconds, INTERVAL_SECONDS[0]), INTERVAL_SECONDS[1])
        self._session: aiohttp.ClientSession | None = None
        self._follower: asyncio.Task[None] | None = None
        self._is_known = asyncio.Event()  # a snapshot or a problem is there
        self._snapshot: Snapshot | None = None
        self._problem: RemoteFailed | None = None
        self._events: dict[LogEvent, None] = {}  # in order; a server that is connected to again repeats the newest

    async def aclose(self) -> None:
        """End all connections."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------ what is seen

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        """The latest that has arrived, always with the request table; waits for the first. Raises RemoteFailed."""
        follower = self._follow()
        await self._is_known.wait()
        if follower.done():
            follower.result()  # a fault of ours, which must not look like silence
        if self._snapshot is None:
            assert self._problem is not None
            raise self._problem.with_traceback(None)
        return self._snapshot

    async def snapshot_json(self) -> bytes:
        """One snapshot as the server words it, checked to be one."""
        data = await self._call("GET", "/kvd/snapshot")
        with self._refusing_nonsense("/kvd/snapshot"):
            decode_snapshot(data)
        return data

    async def events(self, limit: int) -> tuple[LogEvent, ...]:
        self._follow()
        await self._is_known.wait()
        known = tuple(self._events)
        return known[-limit:] if limit > 0 else ()

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap:
        return await self._get(f"/kvd/blocks?cells={max_cells}&group={group_id}", BlockMap)

    async def timeline(self, request_id: str) -> Timeline | None:
        path = f"/kvd/requests/{_word(request_id)}/timeline"
        try:
            data = await self._find("GET", path)
        except RemoteFailed as error:
            if error.code != SEVERAL_CHOICES:
                raise
            data = None  # only each of its choices has a timeline
        return None if data is None else self._decode(path, data, Timeline)

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        return (await self._get(f"/kvd/timelines?limit={limit}", _Timelines)).timelines

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        return (await self._get(f"/kvd/cache/prefixes?limit={limit}", _Prefixes)).prefixes

    async def doctor(self) -> DoctorReport:
        return await self._get("/kvd/doctor", DoctorReport)

    async def reveal(self, name: str) -> Reveal:
        return await self._get(f"/kvd/reveal/{_word(name)}", Reveal)

    # ------------------------------------------------------------------ what is done

    async def abort(self, request_id: str) -> bool:
        return await self._find("POST", f"/kvd/requests/{_word(request_id)}/abort") is not None

    async def reset_cache(self) -> int:
        return await self._count("/kvd/cache/reset", "dropped_blocks")

    async def drop_prefix(self, chain: str) -> int:
        return await self._count("/kvd/cache/drop", "dropped_blocks", {"chain": chain})

    async def pin(self, chain: str) -> int:
        return await self._count("/kvd/cache/pin", "pinned_blocks", {"chain": chain})

    async def unpin(self, chain: str) -> bool:
        return await self._find("POST", "/kvd/cache/unpin", {"chain": chain}) is not None

    async def keep_turn(self, request_id: str) -> int:
        return await self._count(f"/kvd/requests/{_word(request_id)}/keep", "kept_blocks")

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        return await self._post(f"/kvd/sessions/{_word(name)}/save", {"chain": chain}, SessionInfo)

    async def restore_session(self, name: str) -> SessionInfo:
        return await self._post(f"/kvd/sessions/{_word(name)}/restore", {}, SessionInfo)

    # ------------------------------------------------------------------ following

    def _follow(self) -> asyncio.Task[None]:
        if self._follower is None:
            self._follower = asyncio.create_task(self._stay_connected(), name="kvd-events")
            self._follower.add_done_callback(lambda _: self._is_known.set())
        return self._follower

    async def _stay_connected(self) -> None:
        silence_seconds = max(SILENCE_SECONDS, 5 * self._interval_seconds)
        shortest, longest = RETRY_SECONDS
        wait_seconds = shortest
        while True:
            try:
                async with asyncio.timeout(silence_seconds) as limit, aclosing(self._stream()) as events:
                    async for name, data in events:
                        if self._take(name, data):
                            wait_seconds = shortest
                            limit.reschedule(asyncio.get_running_loop().time() + silence_seconds)
                raise RemoteFailed(f"{self.root} has closed the connection")
            except TimeoutError:
                self._lose(RemoteFailed(f"{self.root} has sent no snapshot for {silence_seconds:g} s"))
            except RemoteFailed as error:
                self._lose(error)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, longest)

    def _lose(self, problem: RemoteFailed) -> None:
        self._snapshot, self._problem = None, problem
        self._is_known.set()

    def _take(self, name: str, data: bytes) -> bool:
        """Keep what an event says; whether it was a snapshot."""
        with self._refusing_nonsense("/kvd/events"):
            if name == "snapshot":
                self._snapshot = decode_snapshot(data)
                self._is_known.set()
            elif name == "log":
                self._events[decode_log_event(data)] = None
                if len(self._events) > MAX_EVENTS:
                    del self._events[next(iter(self._events))]
        return name == "snapshot"

    async def _stream(self) -> AsyncGenerator[tuple[str, bytes]]:
        """The events of one connection; of several snapshots that come together, the last one."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        path = "/kvd/events"
        async with self._open("GET", f"{path}?interval={self._interval_seconds:.3f}", timeout=timeout) as response:
            if response.content_type != "text/event-stream":
                raise RemoteFailed(f"{self.root} is no kvd server: {path} is {response.content_type}")
            stream = EventStream(MAX_ANSWER_BYTES)
            async for piece in response.content.iter_any():
                with self._refusing_nonsense(path):
                    events = stream.feed(piece)
                last = max((at for at, (name, _) in enumerate(events) if name == "snapshot"), default=-1)
                for at, (name, data) in enumerate(events):
                    if name != "snapshot" or at == last:
                        yield name, data
                await asyncio.sleep(0)  # bytes that are there already are handed out without a turn of the loop

    # ------------------------------------------------------------------ single calls

    async def _get(self, path: str, answer: type[_T]) -> _T:
        return self._decode(path, await self._call("GET", path), answer)

    async def _post(self, path: str, body: Mapping[str, str], answer: type[_T]) -> _T:
        return self._decode(path, await self._call("POST", path, body), answer)

    async def _count(self, path: str, field: str, body: Mapping[str, str] | None = None) -> int:
        """How many the answer says it were; 0 where what was named is not there."""
        data = await self._find("POST", path, body)
        if data is None:
            return 0
        number = self._decode(path, data, dict[str, Any]).get(field)
        if not isinstance(number, int):
            raise RemoteFailed(f"{self.root} answers {path} without {field}")
        return number

    async def _find(self, method: str, path: str, body: Mapping[str, str] | None = None) -> bytes | None:
        """The answer; None where what path or body name is not there, or not any more."""
        try:
            return await self._call(method, path, body)
        except RemoteFailed as error:
            if error.status == HTTPStatus.NOT_FOUND and error.code.endswith("_not_found"):
                return None
            raise

    def _decode(self, path: str, data: bytes, answer: type[_T]) -> _T:
        with self._refusing_nonsense(path):
            return msgspec.json.decode(data, type=answer)

    async def _call(self, method: str, path: str, body: Mapping[str, str] | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, connect=CONNECT_SECONDS)
        arguments = {} if body is None else {"json": body}
        async with self._open(method, path, timeout=timeout, **arguments) as response:
            return await self._read(response)

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, *, timeout: aiohttp.ClientTimeout, **arguments: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            trusts_environment = not is_loopback(urlsplit(self.root).hostname or "")
            self._session = aiohttp.ClientSession(
                headers=self._headers, trust_env=trusts_environment, auto_decompress=False, read_bufsize=2**20
            )
        try:
            async with self._session.request(
                method, self.root + path, timeout=timeout, allow_redirects=False, **arguments
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._refusal(response, path.partition("?")[0])
                yield response
        except aiohttp.ClientSSLError as error:
            hint = "; does it speak http:// only?" if self.root.startswith("https:") else ""
            raise RemoteFailed(f"{self.root}: no TLS connection: {_tls_problem(error)}{hint}") from None
        except aiohttp.ClientConnectorError as error:
            text = f"nothing answers at {self.root}: {connect_problem(error)}; is kvd running?"
            raise RemoteFailed(text, is_unreachable=True) from None
        except TimeoutError:
            raise RemoteFailed(f"no answer from {self.root} in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RemoteFailed(f"{self.root}: {_one_line(str(error)) or type(error).__name__}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > MAX_ANSWER_BYTES:
                raise RemoteFailed(f"{self.root} answers {response.url.path} with more than {MAX_ANSWER_BYTES:,} bytes")
        return bytes(data)

    async def _refusal(self, response: aiohttp.ClientResponse, path: str) -> RemoteFailed:
        status = response.status
        reason, code = _read_error(await self._read(response))
        if status == HTTPStatus.UNAUTHORIZED:
            text = f"{self.root}: {reason or 'an API key is needed'} (--key, or KVD_API_KEY in the environment)"
        elif status == HTTPStatus.NOT_FOUND and not code:
            text = f"{self.root} is no kvd server, or one of another version: there is no {path}"
        else:
            text = f"{self.root}: {reason}" if reason else f"{self.root} answers {path} with HTTP {status}"
        return RemoteFailed(text, status=status, code=code)

    @contextlib.contextmanager
    def _refusing_nonsense(self, path: str) -> Iterator[None]:
        try:
            yield
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            route = path.partition("?")[0]
            raise RemoteFailed(f"{self.root}, {route}: not what this kvd reads: {_one_line(str(error))}") from None


def _read_error(data: bytes) -> tuple[str, str]:
    """Message and code of an error answer; empty where it says none."""
    try:
        error = msgspec.json.decode(data)["error"]
        return _one_line(str(error["message"])), str(error.get("code") or "")
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "", ""


def _tls_problem(error: aiohttp.ClientSSLError) -> str:
    """`wrong version number`, out of `[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:992)`."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    return _one_line(re.sub(r"^\[.*?\] *| *\(_ssl\.c:\d+\)$", "", getattr(cause, "strerror", None) or str(cause)))


def _word(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


def _one_line(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * MAX_MESSAGE_CHARACTERS])
    return " ".join(printable.split())[:MAX_MESSAGE_CHARACTERS]
