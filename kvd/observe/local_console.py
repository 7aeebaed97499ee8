"""Everything that can be seen of, asked about and done to the engine in this process: `insight.Console`.

Joins engine, event log, doctor and tokenizer for the dashboard and the server's routes. Event loop only. Invariants:
each act of an operator is one line in the event log; what may take long runs in a worker thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvd.device_facts import HostFacts
from kvd.errors import RequestError
from kvd.insight import BlockMap, DoctorReport, Reveal, Timeline
from kvd.observe.event_log import EventLog
from kvd.views import Control, LogEvent, PrefixView, SessionInfo, Snapshot, SnapshotSource

REVEALED_TOKENS = 400
"""Of a cached prefix, this many are shown from its beginning."""

SHORT_ID = 16
"""Characters of a chain's id in the event log."""


class ConsoleEngine(SnapshotSource, Control, Protocol):
    """What a console needs of the engine."""

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap: ...

    async def timeline(self, request_id: str) -> Timeline | None: ...

    async def timelines(self, limit: int) -> tuple[Timeline, ...]: ...

    async def chain_tokens(self, chain: str, limit: int) -> tuple[int, ...]: ...


class Examiner(Protocol):
    """What console and server need of the doctor; any thread may call it, and `counts` and `answered` are quick."""

    def report(self, prefill_tokens_per_second: float) -> DoctorReport: ...

    def reveal(self, request_id: str) -> Reveal | None: ...

    def counts(self) -> tuple[tuple[str, int, int], ...]: ...

    def answered(self, request_id: str, token_ids: Sequence[int]) -> None: ...


class LocalConsole:
    """Implements `insight.Console`.

    doctor: None where prompts are not examined. decode: token ids to text. host: the latest facts, at once.
    """

    def __init__(
        self,
        engine: ConsoleEngine,
        event_log: EventLog,
        doctor: Examiner | None,
        decode: Callable[[Sequence[int]], str],
        *,
        host: Callable[[], HostFacts | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._event_log = event_log
        self._doctor = doctor
        self._decode = decode
        self._host = host

    # ------------------------------------------------------------------ what is seen

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        snapshot = await self._engine.snapshot(details=details)
        misses = snapshot.misses if self._doctor is None else self._doctor.counts()
        return replace(snapshot, misses=misses, host=self._host())

    async def events(self, limit: int) -> tuple[LogEvent, ...]:
        return self._event_log.recent(limit)

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap:
        return await self._engine.block_map(max_cells, group_id)

    async def timeline(self, request_id: str) -> Timeline | None:
        return await self._engine.timeline(request_id)

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        return await self._engine.timelines(limit)

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        return await self._engine.prefixes(limit)

    async def doctor(self) -> DoctorReport:
        doctor = self._doctor
        if doctor is None:
            raise _not_found("prompts are not examined here, so nothing is known about their misses", "doctor")
        rate = (await self._engine.snapshot()).prefill_tokens_per_second
        return await asyncio.to_thread(doctor.report, rate)

    async def reveal(self, name: str) -> Reveal:
        """Raises a RequestError where `name` is no cached prefix and no request whose prompt is still known."""
        if self._doctor is not None and (found := await asyncio.to_thread(self._doctor.reveal, name)) is not None:
            return found
        token_ids = await self._engine.chain_tokens(name, REVEALED_TOKENS)
        if not token_ids:
            raise _not_found(f"no prompt is kept of '{_short(name)}': it is not cached, or was too long ago", "name")
        text = await asyncio.to_thread(self._decode, token_ids)
        return Reveal(title=f"the first {len(token_ids)} tokens of prefix {_short(name)}", ours=text)

    # ------------------------------------------------------------------ what is done

    async def abort(self, request_id: str) -> bool:
        was_running = await self._engine.abort(request_id)
        if was_running:
            self._event_log.add("info", "abort", "aborted by an operator", request_id)
        return was_running

    async def reset_cache(self) -> int:
        num_dropped = await self._engine.reset_cache()
        self._note("cache_reset", f"{num_dropped} cached blocks, and RAM and disk tier, dropped by an operator")
        return num_dropped

    async def drop_prefix(self, chain: str) -> int:
        num_dropped = await self._engine.drop_prefix(chain)
        if num_dropped:
            self._note("drop", f"{num_dropped} blocks of {_short(chain)} dropped by an operator")
        return num_dropped

    async def pin(self, chain: str) -> int:
        num_pinned = await self._engine.pin(chain)
        if num_pinned:
            self._note("pin", f"{num_pinned} blocks of {_short(chain)} pinned by an operator")
        return num_pinned

    async def unpin(self, chain: str) -> bool:
        was_pinned = await self._engine.unpin(chain)
        if was_pinned:
            self._note("unpin", f"{_short(chain)} unpinned by an operator")
        return was_pinned

    async def keep_turn(self, request_id: str) -> int:
        return await self._engine.keep_turn(request_id)

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        session = await self._engine.save_session(name, chain)
        self._note("session_saved", f"session {name}: {session.num_tokens} tokens")
        return session

    async def restore_session(self, name: str) -> SessionInfo:
        session = await self._engine.restore_session(name)
        self._note("session_restored", f"session {name}: {session.num_tokens} tokens")
        return session

    def _note(self, kind: str, message: str) -> None:
        self._event_log.add("info", kind, message)


def _short(chain: str) -> str:
    return chain if len(chain) <= SHORT_ID else f"{chain[: SHORT_ID - 1]}…"


def _not_found(message: str, param: str) -> RequestError:
    return RequestError(message, status=404, kind="not_found_error", code=f"{param}_not_found", param=param)
