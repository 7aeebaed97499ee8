"""Who waits, who runs, who holds a slot, and which steps are in flight.

Owner: the engine thread, through `Scheduler`. Planning and committing both change it; every change of a request's
standing is made in here.

While a plan is in flight, everything that it names stays as it was: a request that ends or is preempted meanwhile
keeps its blocks and its slot until the last plan that names it is committed. So whoever runs plans never sees a block
or a slot change hands under it.

Invariant: every request that was added and has not ended is either in `waiting` or in `running`, which is sorted by
`RequestState.key`; a slot belongs to each running request and to each that still has to be released.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvd.cache.manager import KEY_BYTES, CacheManager, PhysicalBlock
from kvd.core import FinishReason, Request, Sample, StepPlan, TokenEvent
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.tally import Tally
from kvd.scheduler.timeline import Timelines
from kvd.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Flight:
    """A plan that is not committed yet.

    states           parallel to its items
    restored         (request, tokens in place) for those to which it brings blocks
    replaced_blocks  read by this plan, released after it
    """

    plan: StepPlan
    states: list[RequestState]
    restored: list[tuple[RequestState, int]]
    num_preempted: int = 0
    replaced_blocks: list[PhysicalBlock] = field(default_factory=list)


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a chain that was noted in `recent_chains`: joined they take a quarter of the memory."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def order_of_running(state: RequestState) -> tuple[int, int]:
    return state.key


class Roster:
    """See the module's docstring."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, tally: Tally, timelines: Timelines) -> None:
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(config.max_overtaken)
        self.running: list[RequestState] = []
        self.free_slots = list(range(config.max_num_seqs))  # a heap
        self.in_flight: deque[Flight] = deque()
        self.new_requests: dict[str, Request] = {}  # scheduled, and not yet told to the runner
        self.ended_request_ids: list[str] = []  # neither are these
        self.num_releasing = 0  # requests with `must_release`
        self.recent_chains: deque[tuple[str, bytes]] = deque(maxlen=256)  # ids and joined keys of requests that ended
        self._cache = cache
        self._tally = tally
        self._timelines = timelines

    def add(self, state: RequestState) -> None:
        self.states[state.request.request_id] = state
        self.waiting.add(state)

    def start(self, state: RequestState, num_cached: int) -> None:
        """A waiting request has got blocks, of which `num_cached` tokens are in place."""
        self.waiting.admitted(state)
        insort(self.running, state, key=order_of_running)
        state.slot = heappop(self.free_slots)
        state.num_planned = state.num_computed = num_cached
        state.prefill_target = len(state.token_ids)

    def preempt(self, state: RequestState, *, num_kept_tokens: int) -> bool:
        """Back to the queue. True: so many tokens are kept in RAM; False: there was no room, all are computed again."""
        self.running.remove(state)
        is_swapped = num_kept_tokens > 0 and self._cache.swapper.swap_out(state.blocks, num_kept_tokens)
        state.num_preemptions += 1
        state.num_swaps += is_swapped
        state.output_at_preemption = state.num_output
        self._tally.num_preemptions += 1
        self._tally.num_swaps += is_swapped
        self.waiting.requeue(state)
        self._release_when_landed(state)
        return is_swapped

    def end(
        self, state: RequestState, sample: Sample | None, reason: FinishReason, *, error: str | None = None
    ) -> TokenEvent:
        """A request has ended, at whatever stage."""
        request_id = state.request.request_id
        del self.states[request_id]
        if state.is_running:
            self.running.remove(state)
        else:
            self.waiting.remove(state)
        state.has_ended = True
        state.has_failed = reason == "error"
        if state.first_scheduled is not None and self.new_requests.pop(request_id, None) is None:
            self.ended_request_ids.append(request_id)
        if not state.must_release and state.slot is not None:
            self._release_when_landed(state)
        if not state.must_release:
            self._cache.swapper.forget(state.blocks)
        self.recent_chains.append((request_id, b"".join(state.blocks.chain.keys)))
        self._tally.count_finish(reason)
        self._timelines.ended(state, reason, error)
        if sample is None:
            return state.event(None, reason, error=error)
        return state.event(sample.token_id, reason, logprobs=sample.logprobs)

    def retire(self, state: RequestState, blocks: list[PhysicalBlock]) -> None:
        """Blocks that a request has no use for any more: released as soon as no step in flight reads them."""
        if blocks and state.num_in_flight and self.in_flight:
            self.in_flight[-1].replaced_blocks.extend(blocks)
        elif blocks:
            self._cache.release(blocks)

    def land(self, state: RequestState) -> None:
        """One step less in flight names the request. The caller looks at `must_release` when it is done with it."""
        state.num_in_flight -= 1

    def release_if_due(self, state: RequestState) -> None:
        if state.must_release and not state.num_in_flight:
            self._release(state)

    @property
    def awaits_blocks(self) -> bool:
        """Blocks are on their way back: they are here when the step in flight is committed."""
        return self.num_releasing > 0 or any(flight.replaced_blocks for flight in self.in_flight)

    def _release_when_landed(self, state: RequestState) -> None:
        state.must_release = True
        self.num_releasing += 1
        if not state.num_in_flight:
            self._release(state)

    def _release(self, state: RequestState) -> None:
        """Give back blocks and slot; no plan in flight names the request."""
        assert state.slot is not None
        assert not state.num_in_flight
        if state.has_ended and not state.has_failed:
            # Of a token whose sample was discarded nobody knows the id.
            num_tokens = min(state.num_computed, len(state.token_ids))
            self._cache.publish_rest(state.blocks, state.token_ids, num_tokens)
        self._cache.free(state.blocks)
        if state.has_ended:
            self._cache.swapper.forget(state.blocks)
        heappush(self.free_slots, state.slot)
        state.slot = None
        state.num_planned = state.num_computed = state.prefill_target = 0
        state.must_release = False
        self.num_releasing -= 1
