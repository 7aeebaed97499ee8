"""What operators and clients ask of chains of cached blocks by name, and how they are answered.

Owner: the engine thread; `Scheduler` is made of this and of what runs requests.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.roster import Roster, split_keys


class Operations:
    """The chains in the pool by their names: a `prefix_id`, or a request that runs or ended lately."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, roster: Roster, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.cache = cache
        self._roster = roster
        self._clock = clock
        self._pinned_by: dict[str, bytes] = {}  # the names that clients gave, and the keys that they stood for

    def reset_cache(self) -> int:
        """Drop all cached blocks that nobody uses, in every tier; returns how many were in the pool."""
        return self.cache.reset()

    def find_chain(self, chain: str) -> bytes | None:
        """The key of a chain that a `prefix_id` names, or a request that runs or ended lately; None: there is none.

        Of a request it is as much as the pool has.
        """
        state = self._roster.states.get(chain)
        if state is not None:
            return self.cache.chains.longest_known(state.blocks.chain.keys)
        for known_id, keys in reversed(self._roster.recent_chains):
            if known_id == chain:
                return self.cache.chains.longest_known(split_keys(keys))
        try:
            key = bytes.fromhex(chain)
        except ValueError:
            return None
        return key if self.cache.chains.chain_of(key) else None

    def drop_prefix(self, chain: str) -> int:
        """Drop a chain from its end on, as far as nobody uses or shares it; how many blocks have left the pools."""
        key = self.find_chain(chain)
        return 0 if key is None else self.cache.drop_chain(key)

    def chain_tokens(self, chain: str, limit: int) -> tuple[int, ...]:
        """The first `limit` token ids of a chain in the pool; () if it is not there."""
        key = self.find_chain(chain)
        return () if key is None else self.cache.chains.token_ids(key, limit)

    def pin(self, chain: str) -> int:
        """Keep a chain of cached blocks for good; how many blocks, 0 if it is not there or would leave too little room.

        Every request that is here was accepted because it fits the pool when it is alone: it must go on to do so.
        """
        key = self.find_chain(chain)
        if key is None:
            return 0
        is_new = not self.cache.chains.is_pinned(key)
        num_pinned = self.cache.chains.pin(key)
        needed = max([state.most_held_tokens for state in self._roster.states.values()], default=0)
        if is_new and self.cache.capacity_tokens < max(needed, self.cache.num_blocks * BLOCK_SIZE // 2):
            self.cache.chains.unpin(key)
            return 0
        before = self._pinned_by.get(chain)
        if before is not None and before != key:
            self.cache.chains.unpin(before)  # the request has more blocks now: one name, one pin
        self._pinned_by[chain] = key
        return num_pinned

    def unpin(self, chain: str) -> bool:
        """Let a pinned chain be evicted again; False if it was not pinned.

        `chain` is the name under which it was pinned, whatever that stands for by now, or its `prefix_id`.
        """
        key = self._pinned_by.pop(chain, None) or self.find_chain(chain)
        if key is None or not self.cache.chains.unpin(key):
            return False
        self._pinned_by = {name: pinned for name, pinned in self._pinned_by.items() if pinned != key}
        return True

    def keep_turn(self, request_id: str) -> int:
        """A request that ended lately ended in a tool call, so its next turn is near: keep its blocks for a time.

        Returns how many blocks are kept.
        """
        for known_id, keys in reversed(self._roster.recent_chains):
            if known_id == request_id:
                return self.cache.chains.keep(split_keys(keys), self._clock() + self.config.tool_turn_seconds)
        return 0
