"""Who gives way when a running request needs a block and none is left.

The rule, in order:
  1. Never the oldest running request (by arrival). It can take blocks from everybody, so it always finishes, and
     then somebody else is the oldest: the whole makes progress.
  2. Nobody twice without a token sampled in between, so a request is preempted at most once per token it
     delivers. Such a request needs no block before its next token (admission gives it all), so waiting for it
     is bounded too.
  3. Of the rest the last in the order of service: lowest priority, then latest arrival. Unless the oldest asks,
     the one who asks is among the candidates and nobody before it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.scheduler.request_state import RequestState


def oldest_of(running: Iterable[RequestState]) -> RequestState:
    return min(running, key=lambda state: state.arrival_number)


def choose_victim(running: Iterable[RequestState], asking: RequestState, oldest: RequestState) -> RequestState | None:
    """The request to preempt so that `asking` gets a block (possibly itself); None: it has to wait."""
    victim = None
    for state in running:
        if state is oldest or not state.has_progressed:
            continue
        if asking is not oldest and state.key < asking.key:
            continue
        if victim is None or state.key > victim.key:
            victim = state
    return victim
