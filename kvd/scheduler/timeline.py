"""What became of each request, for people: the entries of `insight.Timeline`.

Owner: the engine thread, through `Scheduler`. Entries are made when something happens to a request that is not the same
for every token: nothing is noted per decoded token, so recording costs a decode step nothing. Timelines of requests
that have not ended are kept, and those of the `MAX_ENDED` that ended last. None has more than `MAX_ENTRIES` entries
and a last one: beyond `MERGED_FROM` an entry is added to a late one of its kind. What notes something never raises.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice

from kvd.core import FinishReason
from kvd.insight import Timeline, TimelineEntry, TimelineKind
from kvd.log import harmless
from kvd.scheduler.preemption import PreemptionCost
from kvd.scheduler.request_state import RequestState

MAX_ENDED = 256
MERGED_FROM = 64
MAX_ENTRIES = 96
_LATE_ENTRIES = 8
"""Among so many of the last entries one is looked for to which a new one can be added."""


class Track:
    """The entries of one request so far."""

    __slots__ = ("arrived", "entries", "num_left_out", "state")

    def __init__(self, state: RequestState, arrived: float) -> None:
        self.state = state
        self.arrived = arrived  # unix seconds
        self.entries: list[TimelineEntry] = []
        self.num_left_out = 0

    def add(self, entry: TimelineEntry) -> None:
        entries = self.entries
        if len(entries) < MERGED_FROM or entry.kind == "finished":
            entries.append(entry)
            return
        for at in range(len(entries) - 1, len(entries) - 1 - _LATE_ENTRIES, -1):
            if entries[at].kind == entry.kind:
                seconds, kind, num_tokens, _ = entries[at]
                entries[at] = TimelineEntry(seconds, kind, num_tokens + entry.num_tokens, entry.reason)
                self.num_left_out += 1
                return
        if len(entries) < MAX_ENTRIES:
            entries.append(entry)
        else:
            self.num_left_out += 1

    def freeze(self, *, has_ended: bool) -> Timeline:
        request = self.state.request
        return Timeline(
            request.request_id, request.client, request.endpoint, self.arrived, self.state.num_prompt,
            has_ended, tuple(self.entries), self.num_left_out,
        )  # fmt: skip


class Timelines:
    """See the module's docstring. `clock` gives `time.monotonic()` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, Track] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()

    @harmless
    def queued(self, state: RequestState, num_waiting: int, num_running: int) -> None:
        """A request was added; so many others wait and run."""
        arrived = time.time() - (self._clock() - state.request.arrival_time)
        self._live[state.request.request_id] = Track(state, arrived)
        words = f"{num_running} run, {num_waiting} wait" if num_running or num_waiting else ""
        self.add(state, "queued", state.num_prompt, words)

    @harmless
    def add(self, state: RequestState, kind: TimelineKind, num_tokens: int, reason: str = "") -> None:
        """Something happened to a request now; one that has ended meanwhile is passed over."""
        track = self._live.get(state.request.request_id)
        if track is not None:
            seconds = max(0.0, self._clock() - state.request.arrival_time)
            track.add(TimelineEntry(seconds, kind, num_tokens, reason))

    @harmless
    def waits(self, state: RequestState, what_for: str, words: Callable[[], str]) -> None:
        """A request could not start. `what_for` names the reason; `words` are asked for only when it is a new one."""
        if state.waits_for != what_for:
            state.waits_for = what_for
            self.add(state, "waiting", 0, words())

    @harmless
    def ended(self, state: RequestState, reason: FinishReason, error: str | None) -> None:
        """A request has ended: its timeline is kept with those that ended last."""
        request_id = state.request.request_id
        track = self._live.pop(request_id, None)
        if track is None:
            return
        counts = [f"{state.num_prompt:,} prompt tokens", f"{state.num_cached_tokens:,} cached"]
        counts.append(f"{state.num_output:,} generated")
        if state.num_preemptions:
            counts.append(f"preempted {state.num_preemptions}×")
        if state.num_dropped_tokens:
            counts.append(f"{state.num_dropped_tokens:,} forgotten")
        words = f"{reason} ({error})" if error else reason
        seconds = max(0.0, self._clock() - state.request.arrival_time)
        track.add(TimelineEntry(seconds, "finished", state.num_output, f"{words}: {', '.join(counts)}"))
        self._ended.pop(request_id, None)
        self._ended[request_id] = track.freeze(has_ended=True)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Timeline | None:
        """Of a request that is here or ended lately."""
        track = self._live.get(request_id)
        return self._ended.get(request_id) if track is None else track.freeze(has_ended=False)

    def latest_ended(self, limit: int) -> tuple[Timeline, ...]:
        """The requests that ended last, the latest first, each with its last entry alone."""
        return tuple(
            Timeline(
                each.request_id, each.client, each.endpoint, each.arrived, each.num_prompt_tokens, True,
                each.entries[-1:], each.num_left_out + len(each.entries) - 1,
            )
            for each in islice(reversed(self._ended.values()), max(0, limit))
        )  # fmt: skip


_ORIGINS = (
    ("pool", "from the KV pool"), ("partial", "of a block that begins alike"), ("ram", "from RAM"),
    ("disk", "from disk"),
)  # fmt: skip


def origin_words(brought: Mapping[str, int]) -> str:
    """Tokens by where they came from, in words."""
    return ", ".join(f"{brought[name]:,} {words}" for name, words in _ORIGINS if brought.get(name))


def preemption_words(state: RequestState, asking: RequestState, cost: PreemptionCost, *, is_swapped: bool) -> str:
    """For whom a request gave way, what becomes of its blocks, and what either way costs."""
    whom = "for want of blocks" if asking is state else f"for {asking.request.request_id}"
    recompute = f"{1000 * cost.recompute:.1f} ms"
    if cost.swap is None:
        return f"{whom}; to be computed again ({recompute})"
    swap = f"{1000 * cost.swap:.1f} ms"
    if is_swapped:
        return f"{whom}; kept in RAM ({swap}; computing again would take {recompute})"
    if cost.way == "swap":
        return f"{whom}; to be computed again ({recompute}), since RAM has no room to keep it ({swap})"
    return f"{whom}; to be computed again ({recompute}; keeping it in RAM would take {swap})"
