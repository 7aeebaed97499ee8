"""Thousands of hostile requests over real sockets: never a 500, nothing left behind, memory flat."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.server.state import STATE
from tests.server.conftest import Harness, StartServer
from tests.server.hostile import ALL_PATHS, MAX_BODY_BYTES, Hostility, Step

NUM_WORKERS = 24
ANSWER_SECONDS = 60.0
MAX_GROWTH_BYTES = 64 * 2**20
"""Little more than a kilobyte per request of the long run. Once the caches are full (compiled grammars, above all)
memory goes up and down by half of that."""
NUM_FOR_MEMORY = 50_000
CLIENTS_FAULTS = range(400, 500)
REFUSALS = (503, 504)


@dataclass
class Tally:
    """What came back. `problems` is empty if all is well."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_silent: int = 0

    def note(self, steps: list[Step], answer: bytes) -> None:
        """Judge every answer on one connection."""
        if not answer:
            self.num_silent += 1
        for head, body in split_answers(answer):
            status = int(head.split()[1])
            self.statuses[status] += 1
            if status >= 500 and status not in REFUSALS:
                self.problems.append(f"{status} {body[:300]!r} after {describe(steps)}")
            if status >= 400 and body and not is_error(body):
                self.problems.append(f"{status} without an error object: {body[:200]!r} after {describe(steps)}")


def describe(steps: list[Step]) -> str:
    return repr(b" | ".join(step.data for step in steps)[:600])


def is_error(body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error.get("message"), str) and isinstance(error.get("type"), str)


def split_answers(answer: bytes) -> list[tuple[bytes, bytes]]:
    """Head and body of each answer on a connection; the last may be incomplete. Bodies of streams are left out."""
    found = []
    while answer.startswith(b"HTTP/1.1 "):
        head, _, rest = answer.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 "):
            answer = rest
            continue
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if b"content-length" not in fields:
            _, _, answer = rest.partition(b"\r\n0\r\n\r\n")
            found.append((head, b""))
            continue
        # An answer to HEAD has a length and no body.
        length = 0 if rest.startswith(b"HTTP/1.1 ") else int(fields[b"content-length"])
        found.append((head, rest[:length]))
        answer = rest[length:]
    return found


async def exchange(harness: Harness, steps: list[Step]) -> bytes:
    """Send one hostile request on a connection of its own; everything that comes back."""
    reader, writer = await asyncio.open_connection(harness.server.host, harness.server.port, limit=2**24)
    answer = b""
    try:
        with contextlib.suppress(ConnectionError):  # the server may have had enough; its answer is read all the same
            for step in steps:
                writer.write(step.data)
                await writer.drain()
                if step.half_close:
                    writer.write_eof()
                await asyncio.sleep(step.wait_seconds)
                if step.leave:
                    return b""
            if not steps[-1].half_close:
                # A last, harmless request whose answer closes the connection, whatever the server made of the others.
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ANSWER_SECONDS):
                while piece := await reader.read(2**16):
                    answer += piece
    finally:
        writer.transport.abort()
    return answer


async def attack(harness: Harness, num_requests: int, seed: int) -> Tally:
    """Send `num_requests` from several connections at a time."""
    hostility, tally = Hostility(seed), Tally()
    left = iter(range(num_requests))

    async def work() -> None:
        for _ in left:
            steps = hostility.request()
            try:
                answer = await exchange(harness, steps)
            except TimeoutError:
                tally.problems.append(f"no end of the answer to {describe(steps)}")
                continue
            tally.note(steps, answer)
            forget(harness)

    await asyncio.gather(*(work() for _ in range(NUM_WORKERS)))
    return tally


def forget(harness: Harness) -> None:
    """The fake engine remembers everything; here that would look like a leak."""
    harness.engine.submitted.clear()
    harness.engine.aborted.clear()
    harness.engine.kept.clear()
    harness.engine.chains = {"ab" * 16: 5}


def resident_bytes() -> int:
    """Of this process, without what is free but was not given back: that tells of the tests that ran before, too."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settle(harness: Harness, num_tasks: int, num_files: int) -> None:
    """Wait until nothing of what was asked goes on."""
    state = harness.server.app[STATE]
    for _ in range(600):
        left = {
            "engine requests": len(harness.engine.running_ids),
            "requests": len(state.active),
            "bytes of bodies": state.bodies.num_bytes,
            "tasks": max(0, len(asyncio.all_tasks()) - num_tasks),
            "descriptors": max(0, num_descriptors() - num_files),
        }
        if not any(left.values()):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"left behind: {left}")


class Faults(logging.Handler):
    """Errors that anybody logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def no_faults_logged() -> Iterator[None]:
    handler = Faults()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.lines == []


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(1500, 1), pytest.param(50_000, 2, marks=pytest.mark.full)], ids=["short", "long"]
)
async def test_hostile_requests(start_server: StartServer, num_requests: int, seed: int) -> None:
    harness = await start_server(
        max_body_bytes=MAX_BODY_BYTES, max_body_bytes_in_flight=16 * MAX_BODY_BYTES, body_timeout_seconds=0.5
    )
    assert num_requests > len(ALL_PATHS), "every path of every body gets its turn"
    with no_faults_logged():
        num_tasks, num_files = len(asyncio.all_tasks()), num_descriptors()
        warm_up = await attack(harness, num_requests // 5, seed=seed)
        await settle(harness, num_tasks, num_files)
        before = resident_bytes()
        tally = await attack(harness, num_requests - num_requests // 5, seed=seed + 1000)
        await settle(harness, num_tasks, num_files)
        growth = resident_bytes() - before
    assert not (warm_up.problems + tally.problems), "\n".join((warm_up.problems + tally.problems)[:10])
    statuses = warm_up.statuses + tally.statuses
    assert {200, 400, 403, 404, 405, 408, 413} <= set(statuses), "the attack reaches what it aims at"
    assert statuses[200] > num_requests // 2, "every connection ends with a question that is answered"
    assert tally.num_silent < num_requests // 5
    if num_requests >= NUM_FOR_MEMORY:  # fewer cannot tell a leak from caches that fill and from what other tests left
        assert growth < MAX_GROWTH_BYTES
    assert (await harness.call("GET", "/health"))[0] == 200
