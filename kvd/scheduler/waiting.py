"""Which waiting request is tried next.

Owner: the engine thread, through `Scheduler`. The queue orders; whether somebody can run is not known in here.

The order of service:
  1. Aged requests, oldest first, whatever their priority. A request is aged once `max_overtaken` requests that
     arrived after it were admitted while it was the oldest of its client and priority, or preempted.
  2. Priority, smaller first. Within one priority:
     a. preempted requests, by arrival;
     b. the client that has had the least service, and of its requests (of the `WINDOW` oldest) the one with the longest
        cached prefix, the older one on a tie.

Bounded waiting: nobody is offered past an aged request (`in_order` ends after one that was not admitted), so at most
`max_overtaken` admissions of later arrivals pass the oldest request of a client, or a preempted one; beyond these it
waits only for those that arrived before it. A request with k older ones of its client and priority before it is passed
at most (k + 1) · `max_overtaken` times. (To count for every request from its arrival would promise more and
end fairness: behind one client's long queue, all of which has aged, everybody else would wait first come first served.)
As each client gets at least one of `max_overtaken` + 1 admissions, fairness holds among requests whose costs differ
by less than that factor.

Fairness: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024, algorithm
2). A client is charged for every token computed for it, and the one with the least counter is next. A client that
becomes active (has new requests waiting) is lifted to the least counter of those active, or, if there are none, to
that of the client which was the last one: idling earns no credit. Each priority has counters of its own, charged
alike: a client starved at one priority must not hold down the level to which the clients of another are lifted.
Equal counters take turns: the client admitted longest ago is next.

Invariant: a request waits either as new (`_new`, in a share of its level) or as preempted (`_requeued`, in its level);
`_num_overtaken` has the oldest of each share and the preempted ones; `_busy` lists the priorities in use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from kvd.scheduler.request_state import RequestState

WINDOW = 8
"""Oldest requests of a client among which the longest cached prefix is looked for."""

_MAX_IDLE_SHARES = 1024
"""Clients (times priorities) that are remembered before those without a debt are forgotten."""

_counter_of = attrgetter("counter")
_arrival_of = attrgetter("arrival_number")


class _Share:
    """One client within one priority. `counter` is its virtual service in tokens."""

    __slots__ = ("client", "counter", "requests")

    def __init__(self, client: str) -> None:
        self.client = client
        self.counter = 0
        self.requests: dict[int, RequestState] = {}  # new ones, in order, by arrival number


class _Level:
    """One priority. `active` holds the shares with new requests, those admitted latest at the end."""

    __slots__ = ("active", "latest", "requeued", "shares")

    def __init__(self) -> None:
        self.shares: dict[str, _Share] = {}
        self.active: dict[str, _Share] = {}
        self.requeued: list[RequestState] = []  # by arrival
        self.latest: _Share | None = None  # the last one that was active

    @property
    def is_busy(self) -> bool:
        return bool(self.active or self.requeued)

    def floor(self) -> int:
        """The counter to which newcomers are lifted. Never falls: counters only rise, and nobody joins below it."""
        if self.active:
            counter: int = min(map(_counter_of, self.active.values()))
            return counter
        return self.latest.counter if self.latest is not None else 0


class _Window:
    """The oldest requests of a share that one walk has not offered yet, and their cached tokens."""

    __slots__ = ("candidates", "rest", "share")

    def __init__(self, share: _Share) -> None:
        self.share = share
        self.rest = iter([*share.requests.values()])
        self.candidates: list[tuple[int, int, RequestState]] = []  # (cached tokens, -arrival number, request)

    def take(self, num_cached: Callable[[RequestState], int]) -> RequestState | None:
        """The one with the longest cached prefix; None: all have been offered."""
        requests, candidates = self.share.requests, self.candidates
        for state in self.rest:
            number = state.arrival_number
            if number in requests:
                candidates.append((num_cached(state), -number, state))
                if len(candidates) >= WINDOW:
                    break
        while candidates:
            best = max(candidates)
            candidates.remove(best)
            if best[2].arrival_number in requests:
                return best[2]
        return None


class _Walk:
    """What one walk through the queue has offered so far."""

    __slots__ = ("exhausted", "offered", "windows")

    def __init__(self) -> None:
        self.offered: set[int] = set()
        self.exhausted: set[_Share] = set()
        self.windows: dict[_Share, _Window] = {}

    def take(self, share: _Share, num_cached: Callable[[RequestState], int]) -> RequestState | None:
        window = self.windows.get(share)
        if window is None:
            window = self.windows[share] = _Window(share)
        state = window.take(num_cached)
        if state is None:
            self.exhausted.add(share)
        return state


class WaitingQueue:
    """See the module's docstring. `max_overtaken`: admissions of later arrivals that may pass a request, at least 1."""

    def __init__(self, max_overtaken: int = 64) -> None:
        assert max_overtaken >= 1, max_overtaken
        self.max_overtaken = max_overtaken
        self._levels: dict[int, _Level] = {}
        self._busy: list[int] = []  # sorted
        self._shares_of: dict[str, dict[int, _Share]] = {}  # client → priority → share
        self._num_shares = 0
        self._share_limit = _MAX_IDLE_SHARES
        self._new: dict[int, RequestState] = {}  # by arrival number, as are the next three
        self._requeued: dict[int, RequestState] = {}
        self._num_overtaken: dict[int, int] = {}
        self._aged: dict[int, RequestState] = {}
        self._latest_arrival = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, state: RequestState) -> None:
        """Queue a new request. Arrival numbers start at 1 and rise from call to call."""
        number = state.arrival_number
        assert number > self._latest_arrival, "requests are added in order of arrival"
        self._latest_arrival = number
        priority, client = state.request.priority, state.request.client
        level = self._level(priority)
        share = level.active.get(client)
        if share is None:
            share = self._share(level, priority, client)
            share.counter = max(share.counter, level.floor())
            level.active[client] = share
            self._num_overtaken[number] = 0
        share.requests[number] = state
        self._new[number] = state

    def requeue(self, state: RequestState) -> None:
        """Queue a preempted request. Its client is neither charged nor lifted, and overtaking counts from now on."""
        number = state.arrival_number
        assert number not in self._new, f"request number {number} waits already"
        assert number not in self._requeued, f"request number {number} waits already"
        insort(self._level(state.request.priority).requeued, state, key=_arrival_of)
        self._requeued[number] = state
        self._num_overtaken[number] = 0

    def remove(self, state: RequestState) -> None:
        """Take a request out that ended while it waited."""
        number, priority = state.arrival_number, state.request.priority
        level = self._levels[priority]
        was_counted = self._num_overtaken.pop(number, None) is not None
        self._aged.pop(number, None)
        if number in self._requeued:
            del self._requeued[number]
            del level.requeued[bisect_left(level.requeued, number, key=_arrival_of)]
        else:
            del self._new[number]
            share = level.active[state.request.client]
            del share.requests[number]
            if not share.requests:
                del level.active[share.client]
                level.latest = share
            elif was_counted:
                self._num_overtaken[next(iter(share.requests))] = 0
        if not level.is_busy:
            del self._busy[bisect_left(self._busy, priority)]

    def admitted(self, state: RequestState) -> None:
        """Take a request out that starts to run, and count for those that it has passed."""
        number, client = state.arrival_number, state.request.client
        if number in self._new:
            # To the end of the line of those with equal counters.
            active = self._levels[state.request.priority].active
            active[client] = active.pop(client)
        self.remove(state)
        counts = self._num_overtaken
        for other in [other for other in counts if other < number]:
            counts[other] += 1
            if counts[other] == self.max_overtaken:
                self._aged[other] = self._new[other] if other in self._new else self._requeued[other]

    def charge(self, client: str, num_tokens: int) -> None:
        """Tokens were computed for a client; recomputation after a preemption is not to be charged."""
        for share in self._shares_of.get(client, {}).values():
            share.counter += num_tokens

    # ------------------------------------------------------------------ the order

    def in_order(self, num_cached: Callable[[RequestState], int]) -> Iterator[RequestState]:
        """Candidates in order of service, each once, worked out as they are asked for.

        Between two of them the caller may admit the one just offered, remove requests and charge clients; what is
        added meanwhile may be left out. It ends early once an aged request was offered and still waits. `num_cached`
        gives the cached tokens of a request as far as they are known; it is called at most `WINDOW` times for the
        first candidate of each client, and at most once for each other.
        """
        walk = _Walk()
        while (state := self._next(walk, num_cached)) is not None:
            walk.offered.add(state.arrival_number)
            yield state

    def is_aged(self, state: RequestState) -> bool:
        """Whether a waiting request has been passed as often as it may be."""
        return state.arrival_number in self._aged

    def _next(self, walk: _Walk, num_cached: Callable[[RequestState], int]) -> RequestState | None:
        if self._aged:
            oldest = min(self._aged)
            return None if oldest in walk.offered else self._aged[oldest]
        for priority in self._busy:
            level = self._levels[priority]
            for state in level.requeued:
                if state.arrival_number not in walk.offered:
                    return state
            while (share := _least_served(level, walk)) is not None:
                candidate = walk.take(share, num_cached)
                if candidate is not None:
                    return candidate
        return None

    # ------------------------------------------------------------------ levels and shares

    def _level(self, priority: int) -> _Level:
        """The level of a request about to wait there."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        if not level.is_busy:
            insort(self._busy, priority)
        return level

    def _share(self, level: _Level, priority: int, client: str) -> _Share:
        share = level.shares.get(client)
        if share is None:
            if self._num_shares >= self._share_limit:
                self._forget_idle(priority)
            share = level.shares[client] = _Share(client)
            self._shares_of.setdefault(client, {})[priority] = share
            self._num_shares += 1
        return share

    def _forget_idle(self, kept_priority: int) -> None:
        """Drop levels where nobody waits, and idle clients without a debt: lifting would wipe out their past anyway.

        Client names come from outside, so their number is not bounded by anything else. A client that is forgotten
        while it still runs is not charged for the rest of that.
        """
        for priority, level in list(self._levels.items()):
            if not level.is_busy and priority != kept_priority:
                del self._levels[priority]
                dropped = list(level.shares)
            else:
                floor = level.floor()
                dropped = [
                    client
                    for client, share in level.shares.items()
                    if client not in level.active and share.counter <= floor
                ]
            for client in dropped:
                del level.shares[client], self._shares_of[client][priority]
                if not self._shares_of[client]:
                    del self._shares_of[client]
            self._num_shares -= len(dropped)
        self._share_limit = max(_MAX_IDLE_SHARES, 2 * self._num_shares)

    # ------------------------------------------------------------------ everybody

    @property
    def oldest_new(self) -> RequestState | None:
        """The request that arrived first of those that have never run."""
        return next(iter(self._new.values()), None)

    def __len__(self) -> int:
        return len(self._new) + len(self._requeued)

    def __contains__(self, state: RequestState) -> bool:
        number = state.arrival_number
        return self._new.get(number) is state or self._requeued.get(number) is state

    def __iter__(self) -> Iterator[RequestState]:
        """Everybody, by priority, then arrival."""
        states = [*self._new.values(), *self._requeued.values()]
        return iter(sorted(states, key=lambda state: (state.request.priority, state.arrival_number)))


def _least_served(level: _Level, walk: _Walk) -> _Share | None:
    """The active share with the least counter, the one admitted longest ago on a tie, not walked through yet."""
    shares = level.active.values()
    if not walk.exhausted:
        return min(shares, key=_counter_of, default=None)
    return min((share for share in shares if share not in walk.exhausted), key=_counter_of, default=None)
