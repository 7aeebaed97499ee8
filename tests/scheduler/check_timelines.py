"""What must hold of the timeline, and of the admission that was told, of a request that has ended."""

from __future__ import annotations

import itertools
from collections import Counter

from kvd.core import TokenEvent
from kvd.insight import Admission, Timeline
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.timeline import MAX_ENTRIES, MERGED_FROM, Timelines


def check_timeline(timelines: Timelines, state: RequestState, last: TokenEvent) -> Timeline:
    timeline = timelines.find(state.request.request_id)
    assert timeline is not None
    assert timeline.has_ended
    entries = timeline.entries
    assert entries[0].kind == "queued"
    assert [entry.kind for entry in entries].index("finished") == len(entries) - 1, "it does not end with its end"
    assert entries[-1].reason.startswith(last.finish_reason or "?")
    assert entries[-1].num_tokens == last.num_output_tokens
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(entries)), "entries out of order"
    assert len(entries) <= MAX_ENTRIES + 1
    if len(entries) <= MERGED_FROM:
        check_counts(state, entries)
    return timeline


def check_counts(state: RequestState, entries: tuple) -> None:
    times = Counter(entry.kind for entry in entries)
    tokens: Counter[str] = Counter()
    for entry in entries:
        tokens[entry.kind] += entry.num_tokens
    assert times["preempted"] == state.num_preemptions
    assert times["first_token"] == (state.first_token is not None)
    assert times["admitted"] == (state.first_scheduled is not None)
    assert times["resumed"] in (state.num_preemptions, state.num_preemptions - 1)
    assert tokens["forgot"] == state.num_dropped_tokens
    if state.num_preemptions or state.first_token is None:
        return
    assert tokens["hit"] + tokens["restored"] + tokens["chunk"] == state.num_prompt, "tokens do not add up"
    assert tokens["hit"] + tokens["restored"] == state.num_cached_tokens


def check_admission(admissions: list[Admission], state: RequestState) -> None:
    """Told of once, and with the final figure, if its prefill began."""
    told = [each for each in admissions if each.request_id == state.request.request_id]
    assert len(told) <= 1
    assert told or state.first_token is None, "an admission was not told"
    for admission in told:
        assert admission.prompt_token_ids == state.request.prompt_token_ids
        assert state.num_preemptions or admission.num_cached_tokens == state.num_cached_tokens
        assert bool(admission.is_excused) >= (state.scores is not None)
        assert not admission.is_excused or admission.evicted is None
        if admission.evicted is not None:
            assert 0 < admission.evicted.num_tokens <= state.num_prompt - admission.num_cached_tokens
            assert admission.evicted.age_seconds >= 0
