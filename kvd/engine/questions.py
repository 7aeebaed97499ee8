"""What observers and operators ask a running engine beyond its snapshot. Event loop; the engine thread answers."""

from __future__ import annotations

import asyncio

from kvd.cache.block_map import copy_blocks, draw_map
from kvd.engine.inbox import Inbox
from kvd.engine.sessions import Sessions
from kvd.errors import RequestError, SessionError
from kvd.insight import BlockMap, Timeline
from kvd.scheduler.scheduler import Scheduler
from kvd.views import PrefixView, SessionInfo


class Questions:
    """The part of `Engine` that puts questions to its thread, between two steps."""

    def __init__(self, scheduler: Scheduler, sessions: Sessions | None) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._inbox = Inbox()

    async def reset_cache(self) -> int:
        """Drop every cached block that no request uses, in all tiers; returns how many were in the pool."""
        return await self._inbox.ask(self._scheduler.reset_cache)

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """The chains in the pool that were found most often, the pinned ones first."""
        return await self._inbox.ask(lambda: self._scheduler.cache.chains.prefixes(limit))

    async def drop_prefix(self, chain: str) -> int:
        """Drop a chain from the pool, from its end on, as far as nobody uses or shares it; how many blocks."""
        return await self._inbox.ask(lambda: self._scheduler.drop_prefix(chain))

    async def chain_tokens(self, chain: str, limit: int) -> tuple[int, ...]:
        """The first `limit` token ids of a chain in the pool; () if it is not there."""
        return await self._inbox.ask(lambda: self._scheduler.chain_tokens(chain, limit))

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap:
        """The blocks of a layer group, summed up to at most `max_cells` cells. Raises RequestError: no such group."""
        cache = self._scheduler.cache
        if not 0 <= group_id < cache.num_groups or max_cells < 1:
            raise RequestError(
                f"there are layer groups 0 to {cache.num_groups - 1}, and at least one cell: not {max_cells} cells of "
                f"group {group_id}",
                param="group" if max_cells > 0 else "cells",
            )
        copies = await self._inbox.ask(lambda: copy_blocks(cache, group_id))
        return await asyncio.to_thread(draw_map, copies, max_cells)

    async def timeline(self, request_id: str) -> Timeline | None:
        """What became of a request that runs or ended lately; None: nothing is known of it."""
        return await self._inbox.ask(lambda: self._scheduler.timelines.find(request_id))

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        """The requests that ended last, the latest first; with no entries but the last one."""
        return await self._inbox.ask(lambda: self._scheduler.timelines.latest_ended(limit))

    async def pin(self, chain: str) -> int:
        """Keep a chain for good; how many blocks, 0 if it is not in the pool or would leave too little room."""
        return await self._inbox.ask(lambda: self._scheduler.pin(chain))

    async def unpin(self, chain: str) -> bool:
        """Let a pinned chain be evicted again; False if it was not pinned."""
        return await self._inbox.ask(lambda: self._scheduler.unpin(chain))

    async def keep_turn(self, request_id: str) -> int:
        """A turn ended in a tool call: keep its blocks for `tool_turn_seconds`; how many are kept."""
        return await self._inbox.ask(lambda: self._scheduler.keep_turn(request_id))

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        """Write a chain to the session file of that name. Raises SessionError."""
        sessions = self._known_sessions()
        return await asyncio.to_thread(
            sessions.save, name, lambda: self._scheduler.find_chain(chain), self._inbox.ask_from_worker
        )

    async def restore_session(self, name: str) -> SessionInfo:
        """Read a session file into the KV pool. Raises SessionError."""
        return await asyncio.to_thread(self._known_sessions().restore, name, self._inbox.ask_from_worker)

    def _known_sessions(self) -> Sessions:
        if self._sessions is None:
            raise SessionError("this server keeps no sessions")
        return self._sessions
