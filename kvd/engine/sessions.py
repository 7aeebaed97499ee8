"""Saves chains of cached blocks to named files, and brings them back.

A worker thread reads and writes the file; the bytes of blocks are fetched and put by the engine thread, a few at a
time, so that neither decoding nor the event loop waits for a disk. While a session is saved or restored, its blocks are
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from kvd.cache.chains import ChainHold
from kvd.cache.manager import CacheManager
from kvd.cache.session_file import SessionBlock, SessionFileError, read_session, write_session
from kvd.cache.store import read_block, write_block
from kvd.core import BLOCK_SIZE
from kvd.errors import SessionError
from kvd.views import SessionInfo
from kvd_kernels.ops import KVCache, Ops

BLOCKS_AT_ONCE = 8
"""Blocks that the engine thread copies between two steps."""


class OnEngine(Protocol):
    """Runs a callable on the engine thread between two steps and gives back what it returned."""

    def __call__(self, question: Callable[[], Any]) -> Any: ...


class Sessions:
    """The session files in one folder, which is made when the first is saved."""

    def __init__(self, folder: Path, manager: CacheManager, cache: KVCache, ops: Ops) -> None:
        self._folder = folder
        self._manager = manager
        self._cache = cache
        self._ops = ops
        self._block_bytes = [group.block_bytes for group in cache.format.groups]

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.kvdsession"

    def save(self, name: str, find_chain: Callable[[], bytes | None], on_engine: OnEngine) -> SessionInfo:
        """Write a chain to its file. Worker thread; `find_chain` runs on the engine thread. Raises SessionError."""
        hold: ChainHold | None = on_engine(lambda: self._hold(find_chain))
        if hold is None:
            raise SessionError("no such chain of blocks is in the KV cache", status=404, param="chain")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.path(name)
            write_session(path, self._manager.key_seed, self._block_bytes, self._fetch(hold, on_engine))
            return SessionInfo(name, hold.num_tokens, path.stat().st_size)
        except (OSError, SessionFileError) as error:
            raise SessionError(str(error), status=500) from None
        finally:
            on_engine(lambda: self._manager.chains.let_go(hold))

    def restore(self, name: str, on_engine: OnEngine) -> SessionInfo:
        """Read a file into the KV pool, as much of it as finds room beside what runs. Worker thread.

        Raises SessionError.
        """
        path = self.path(name)
        if not path.is_file():
            raise SessionError(f"there is no session {name!r}", status=404, param="name")
        hold = ChainHold([], 0)
        try:
            blocks = read_session(path, self._manager.key_seed, self._block_bytes)
            while some := list(islice(blocks, BLOCKS_AT_ONCE)):
                if not on_engine(partial(self._put, hold, some)):
                    break
            return SessionInfo(name, hold.num_tokens, path.stat().st_size)
        except (OSError, SessionFileError) as error:
            raise SessionError(str(error), status=409) from None
        finally:
            on_engine(lambda: self._manager.chains.let_go(hold))

    # ------------------------------------------------------------------ the engine thread

    def _hold(self, find_chain: Callable[[], bytes | None]) -> ChainHold | None:
        key = find_chain()
        return None if key is None else self._manager.chains.hold_chain(key)

    def _fetch(self, hold: ChainHold, on_engine: OnEngine) -> Iterator[SessionBlock]:
        for start in range(0, len(hold.blocks), BLOCKS_AT_ONCE):
            yield from on_engine(partial(self._read, hold, start))

    def _read(self, hold: ChainHold, start: int) -> list[SessionBlock]:
        return [
            SessionBlock(
                group_id,
                block.key,
                block.parent_key,
                block.token_ids,
                read_block(self._cache, group_id, block.block_id),
            )
            for group_id, block in hold.blocks[start : start + BLOCKS_AT_ONCE]
        ]

    def _put(self, hold: ChainHold, blocks: list[SessionBlock]) -> bool:
        """False when there is no room left."""
        # A block that is taken here may still be read by a copy that saves what it held.
        self._ops.settle()
        for block in blocks:
            known = self._manager.chains.insert(block.group_id, block.key, block.parent_key, block.token_ids)
            if known is None:
                return False
            indexed, is_new = known
            hold.blocks.append((block.group_id, indexed))
            hold.num_tokens = max(hold.num_tokens, (indexed.depth + 1) * BLOCK_SIZE)
            if is_new:
                write_block(self._cache, block.group_id, indexed.block_id, block.data)
        return True
