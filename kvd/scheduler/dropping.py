"""Which blocks a request forgets under `kv_eviction`, so that it can generate beyond its share of the KV cache.

Owner: the engine thread, through the scheduler. Positions stay absolute: what is forgotten leaves a hole in the table.

When it happens depends on the position alone. A request that may hold B blocks computes positions 0 … 16·B - 1 with
everything before them. Before position 16·B, and then every 16·S positions, it drops S blocks, S being an
eighth of B: it never holds more than B blocks, and chunks of a prompt stay long.

What is dropped:
  sliding_window  the oldest blocks
  streaming       the oldest but for those of the attention sinks (StreamingLLM, arXiv 2309.17453)
  heavy_hitter    sinks and the newer half stay; of the blocks between, those that got the least attention go
                  (H2O, arXiv 2306.14048; by blocks as in PagedEviction, arXiv 2509.04377); of equals the newer one

Attention: H2O adds up all attention that a token ever got, so that the old win by age. Here the sums are halved at
every drop. Every block that can be dropped was there during the latest drop periods, with the same number of
queries in each, and its youth, when everybody looks at the newest block, counts little by then.

An answer must not depend on what else the server does, so every drop is recorded and repeated as it was when a
request is computed anew after a preemption; attention is counted once per query; and attention before position
16·(B - S) is not counted at all, as those queries may never be computed: their blocks may come from the prefix cache.
Sums of floats depend in their last bits on how a prompt is cut into chunks, so where attention counts, a prompt is cut
at every 16th position and nowhere else (`wants_whole_chunk`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core import BLOCK_SIZE, KVEviction

MIN_BUDGET_BLOCKS = 4
"""Fewest blocks that a request with `kv_eviction` can work with: a sink, one to drop, and the two newest."""

DEFAULT_SINK_TOKENS = 4
"""First tokens that attention needs whatever they are; StreamingLLM finds four to be enough."""


class DropSchedule:
    """The drops of one request.

    mode             not "none"
    budget_blocks    blocks that the request may hold, at least `MIN_BUDGET_BLOCKS`
    num_sink_tokens  first tokens that stay, in whole blocks; "sliding_window" has none

    events           (position, numbers of the blocks dropped before it was computed), in order
    """

    __slots__ = (
        "_dropped_at", "_first_counted", "_masses", "_num_accumulated", "budget_blocks", "events", "mode",
        "num_dropped_tokens", "num_sink_blocks", "stride_blocks",
    )  # fmt: skip

    def __init__(self, mode: KVEviction, budget_blocks: int, *, num_sink_tokens: int = DEFAULT_SINK_TOKENS) -> None:
        assert mode != "none", "a request that drops nothing has no schedule"
        assert budget_blocks >= MIN_BUDGET_BLOCKS, f"{budget_blocks} blocks are too few to drop any"
        self.mode = mode
        self.budget_blocks = budget_blocks
        self.stride_blocks = max(1, budget_blocks // 8)
        self.num_sink_blocks = 0 if mode == "sliding_window" else -(-num_sink_tokens // BLOCK_SIZE)
        assert self.num_sink_blocks + self.stride_blocks + budget_blocks // 2 <= budget_blocks, "too many sinks"
        self.events: list[tuple[int, tuple[int, ...]]] = []
        self._dropped_at: dict[int, frozenset[int]] = {}  # the events by position
        self.num_dropped_tokens = 0
        self._masses: dict[int, float] = {}
        self._num_accumulated = 0
        self._first_counted = BLOCK_SIZE * (budget_blocks - self.stride_blocks) if self.wants_mass else 0

    @property
    def wants_mass(self) -> bool:
        """Whether the attention that each block gets has to be handed to `accumulate`."""
        return self.mode == "heavy_hitter"

    @property
    def max_matched_tokens(self) -> int:
        """Leading tokens that may be taken from a cache instead of being computed."""
        if self.wants_mass:
            return self._first_counted
        return BLOCK_SIZE * self.budget_blocks

    def limit(self, start: int) -> int:
        """The first position after `start` before which something has to happen: a chunk from `start` ends there.

        That is a drop, the first query whose attention counts, or the first one that has not been counted.
        """
        period = BLOCK_SIZE * self.stride_blocks
        first = BLOCK_SIZE * self.budget_blocks
        end = first if start < first else first + ((start - first) // period + 1) * period
        for other in (self._first_counted, self._num_accumulated):
            if start < other < end:
                end = other
        if self.wants_whole_chunk(start):
            end = min(end, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        return end

    def wants_whole_chunk(self, start: int) -> bool:
        """Whether a chunk of a prompt from `start` has to reach to `limit` or its end, since its attention counts."""
        return self.wants_mass and start >= max(self._first_counted, self._num_accumulated)

    def is_due(self, position: int, numbers: Sequence[int]) -> bool:
        """Whether `due` has something to drop. For "heavy_hitter" every position before must be accumulated by then."""
        first = BLOCK_SIZE * self.budget_blocks
        if position < first or (position - first) % (BLOCK_SIZE * self.stride_blocks):
            return False
        recorded = self._dropped_at.get(position)
        if recorded is not None:
            return any(number in recorded for number in numbers)
        return len(numbers) > self.budget_blocks - self.stride_blocks

    def due(self, position: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """Blocks to drop before `position` is computed, rising; none unless `is_due`.

        `numbers`: the blocks that the request holds (absolute, position // 16), rising, without that of `position`.
        What is decided is recorded; at a recorded position the record is followed.
        """
        if not self.is_due(position, numbers):
            return ()
        recorded = self._dropped_at.get(position)
        if recorded is not None:
            return tuple(number for number in numbers if number in recorded)
        assert not self.events or self.events[-1][0] < position, "a drop was skipped"
        assert not self.wants_mass or self._num_accumulated == position, "the attention so far is not known"
        num_dropped = len(numbers) - (self.budget_blocks - self.stride_blocks)
        dropped = self._choose(numbers, num_dropped)
        self.events.append((position, dropped))
        gone = self._dropped_at[position] = frozenset(dropped)
        self.num_dropped_tokens += BLOCK_SIZE * len(dropped)
        self._masses = {number: mass / 2 for number, mass in self._masses.items() if number not in gone}
        return dropped

    def _choose(self, numbers: Sequence[int], num_dropped: int) -> tuple[int, ...]:
        candidates = [number for number in numbers if number >= self.num_sink_blocks]
        if self.mode == "heavy_hitter":
            candidates = candidates[: len(candidates) - self.budget_blocks // 2]
            candidates.sort(key=lambda number: (self._masses.get(number, 0.0), -number))
        assert num_dropped <= len(candidates), f"{num_dropped} blocks to drop of {len(candidates)}"
        return tuple(sorted(candidates[:num_dropped]))

    def accumulate(self, numbers: Sequence[int], masses: Sequence[float], position: int) -> None:
        """The attention that the blocks `numbers` got from the queries of one step, the last at `position` - 1.

        Steps are told in order and end where `limit` says at the latest. What was told before is ignored.
        """
        if position <= max(self._num_accumulated, self._first_counted):
            return
        self._num_accumulated = position
        for number, mass in zip(numbers, masses, strict=True):
            self._masses[number] = self._masses.get(number, 0.0) + mass
