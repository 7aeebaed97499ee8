"""Tells whoever listens what was found in the cache for each request that is admitted for the first time.

Owner: the engine thread, through `Scheduler`. A request is told of once, when its prefill begins: what comes from RAM
or disk is there by then, or is not to be had, so the figure is final. One that ends before that is not told of.
Nothing in here raises: no request depends on what is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE
from kvd.insight import Admission, EvictedNote
from kvd.log import harmless
from kvd.scheduler.request_state import RequestState

Receiver = Callable[[Sequence[Admission]], None]


class AdmissionFeed:
    """See the module's docstring. `receive`: called once per plan that has something to tell; must be quick."""

    def __init__(self, cache: CacheManager, clock: Callable[[], float]) -> None:
        self.receive: Receiver | None = None
        self._cache = cache
        self._clock = clock
        self._admissions: list[Admission] = []

    @harmless
    def tell(self, state: RequestState) -> None:
        """The prefill of a request begins, for the first time or again."""
        if state.is_announced:
            return
        state.is_announced = True
        if self.receive is None:
            return
        request = state.request
        is_excused = self._excuse(state)
        # Who gave way while its blocks were being fetched finds less of them now than it had.
        num_cached = min(state.num_cached_tokens, state.num_planned)
        other_format = ""
        if num_cached < BLOCK_SIZE and not is_excused:
            other_format = self._cache.other_format(request.prompt_token_ids, request.cache_salt)
        self._admissions.append(
            Admission(
                request.request_id,
                request.client,
                request.endpoint,
                request.cache_salt,
                self._clock(),
                request.prompt_token_ids,
                num_cached,
                is_excused,
                None if is_excused else self._evicted(state, num_cached),
                other_format,
            )
        )

    @harmless
    def flush(self) -> None:
        """Hand over what was told since the last time."""
        if self._admissions and self.receive is not None:
            admissions, self._admissions = self._admissions, []
            self.receive(admissions)

    def _excuse(self, state: RequestState) -> str:
        if not self._cache.enable_prefix_caching:
            return "prefix caching is off"
        if state.scores is not None:
            return "prompt logprobs have to be computed"
        if state.forgetting is not None and state.forgetting.max_matched_tokens < state.num_prompt:
            return "its prompt is longer than its kv_budget_tokens"
        return ""

    def _evicted(self, state: RequestState, num_cached: int) -> EvictedNote | None:
        """What is known of the block that comes next, and of those behind it, as far as they were all evicted."""
        notes, keys = self._cache.ledger.notes, state.blocks.chain.keys
        first = number = num_cached // BLOCK_SIZE
        while number < len(keys) and notes.find(keys[number]) is not None:
            number += 1
        eviction = notes.find(keys[first]) if first < len(keys) else None
        if eviction is None:
            return None
        num_tokens = number * BLOCK_SIZE - num_cached
        return EvictedNote(
            eviction.evicted_for, max(0.0, self._clock() - eviction.time), eviction.idle_seconds, num_tokens
        )
