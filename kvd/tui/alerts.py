"""The one line that says why it is slow, or what is wrong, and what to do about it. Pure functions, any thread.

Invariant: at most one alert at a time, the one that hurts most; each names the setting or the act that helps. What was
tried is in the order of `choose_alert`: an engine that cannot answer, then what holds it up, then what it does in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from kvd.tui.causes import worst_cause
from kvd.tui.format import age, duration, exact, percent, short_count
from kvd.tui.view import Link, View
from kvd.views import EngineInfo

Severity = Literal["error", "warning", "info", "none"]

FULL_SHARE = 0.95
"""Pool counts as full when blocks in use exceed this share: an admission needs blocks to grow into."""

MANY_QUERY_TOKENS = 20_000
"""A hit rate over fewer tokens says little: the first request of every client misses."""

LOW_HIT_RATIO = 0.10
MANY_PREEMPTIONS = 3
STALLED_SECONDS = 10.0

PREFILL_BOUND_RATIO = 10
"""From so many prompt tokens computed per token generated on, prefill is what takes the time: a prompt token costs a
tenth of a generated one or more on every backend."""

BUSY_SHARE = 0.7
"""Share of the recent window that the engine must have spent in steps to be called busy."""

_SLOWED_DOWN = {
    "heat": "cool the card",
    "heat, by hardware": "cool the card",
    "hardware slowdown": "look at its cooling and its power supply",
    "power brake": "look at its power supply",
}
"""Reasons for low clocks that something has to be done about, with what."""

_HELD_BACK = {"power limit": "nvidia-smi -pl raises it", "clocks set by the user": "nvidia-smi -rgc resets them"}
"""Reasons that many cards have under full load, or that somebody wanted: said where nothing else holds it up."""

SLOW_TTFT_SECONDS = 1.0
LONG_WAIT_SECONDS = 5.0
"""From here on somebody waits for no reason that has an alert of its own, and would like to know."""

LONG_PROMPT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Alert:
    """One line for the operator, without a final stop; the longest of `texts` that fits is shown."""

    severity: Severity
    texts: tuple[str, ...]


def memory_setting(info: EngineInfo) -> str:
    """The setting that gives this engine's KV pool more memory."""
    return info.budget.setting


def choose_alert(view: View | None, link: Link) -> Alert:
    """The most urgent thing to say; severity "none" where all is well."""
    if link.problem:
        problem = link.problem
        return Alert("error", (f"Disconnected: {problem}; trying again", f"Disconnected, trying again: {problem}"))
    if view is None:
        return Alert("none", ("Waiting for the first snapshot",))
    return (
        _of_state(view)
        or _of_full_pool(view)
        or _of_device(view, _SLOWED_DOWN)
        or _of_prefill(view)
        or _of_preemptions(view)
        or _of_queue(view)
        or _of_device(view, _HELD_BACK)
        or _of_disk(view)
        or _of_cache(view)
        or _calm(view)
    )


def _of_state(view: View) -> Alert | None:
    snapshot = view.snapshot
    match snapshot.state:
        case "failed":
            return Alert("error", ("The engine has failed and answers nothing: see the log, then restart kvd",))
        case "draining":
            left = snapshot.num_running + snapshot.num_waiting
            return Alert("warning", (f"Stopping: no new requests, {left} still to finish",))
        case "loading":
            return Alert("info", ("Loading the model; requests are answered with 503 until it is ready",))
    if snapshot.stalled_seconds >= STALLED_SECONDS:
        since = age(snapshot.stalled_seconds)
        return Alert("error", (f"The engine has got nothing done for {since}: see the log, then restart kvd",))
    return None


def _more_memory(info: EngineInfo) -> tuple[str, ...]:
    """What gives the KV cache more room, the fullest words first."""
    more = f"raise {memory_setting(info)}"
    if info.kv_cache_dtype in ("fp16", "bf16", "fp32", "auto"):
        return f"{more} or set kv_cache_dtype: int8", more
    return f"{more} or lower max_model_len", more


def _of_full_pool(view: View) -> Alert | None:
    snapshot = view.snapshot
    if not snapshot.num_blocks or snapshot.num_blocks_active < FULL_SHARE * snapshot.num_blocks:
        return None
    if view.recent.preemptions >= MANY_PREEMPTIONS:
        problem = f"KV pool full: {_preemption_cost(view)}"
        short = f"KV pool full: {exact(view.recent.preemptions)} preemptions"
    elif snapshot.num_waiting:
        problem = short = f"KV pool full: {exact(snapshot.num_waiting)} waiting"
    else:
        return None
    texts = [f"{words}; {more}" for more in _more_memory(snapshot.info) for words in (problem, short)]
    return Alert("error", tuple(dict.fromkeys((*texts, short))))


def _of_device(view: View, reasons: dict[str, str]) -> Alert | None:
    facts = view.snapshot.device
    if facts is None or not view.snapshot.num_running:
        return None
    for reason in facts.throttle_reasons or ():
        if reason in reasons:
            clock = f" at {facts.sm_clock_mhz:.0f} MHz" if facts.sm_clock_mhz is not None else ""
            slow = f"GPU throttled{clock}"
            return Alert("warning", (f"{slow} ({reason}): {reasons[reason]}", f"GPU throttled: {reasons[reason]}"))
    return None


def _of_prefill(view: View) -> Alert | None:
    """New prompts hold everybody up: because they miss the cache, or because they are long."""
    recent = view.recent
    is_slow = view.snapshot.num_waiting > 0 or (
        view.ttft.is_recent and view.ttft.p50 is not None and view.ttft.p50.value >= SLOW_TTFT_SECONDS
    )
    is_busy = recent.seconds > 0 and recent.step_seconds >= BUSY_SHARE * recent.seconds
    if not (is_slow and is_busy) or recent.prefill_tokens < PREFILL_BOUND_RATIO * max(1, recent.generation_tokens):
        return None
    hits = percent(recent.hit_tokens, recent.query_tokens)
    cause = worst_cause(view.snapshot)
    if cause is not None and recent.hit_tokens < 0.5 * recent.query_tokens:
        return Alert(
            "warning",
            (
                f"Prompts take the time, {hits} hits: {cause.name} ({exact(cause.num_requests)}×); {cause.advice}",
                f"Prompts take the time: {cause.name}; {cause.advice}",
                f"{hits} hits, {cause.name}: {cause.advice}",
            ),
        )
    lengths = [row.num_prompt_tokens for row in view.requests]
    if not lengths or median(lengths) < LONG_PROMPT_TOKENS:
        return None
    cached = f", {hits} cached" if recent.query_tokens else ""
    length = f"Long prompts take the time: {short_count(median(lengths))} tokens{cached}"
    advice = "shorten them, or put what they share first"
    return Alert("warning", (f"{length}; {advice}", f"{length}; shorten them"))


def _of_queue(view: View) -> Alert | None:
    snapshot, info = view.snapshot, view.snapshot.info
    limit = snapshot.running_limit or info.max_num_seqs
    if snapshot.num_waiting == 0 or snapshot.num_running < limit:
        return None
    waiting = f"{exact(snapshot.num_waiting)} waiting"
    if info.is_auto_num_seqs and limit < info.max_num_seqs:
        problem = f"{waiting}: {limit} at once is the fastest found here so far"
        return Alert("warning", (f"{problem}; lower max_tokens or add a server", f"{problem}; add a server"))
    return Alert("warning", (f"All {limit} slots busy: {waiting}; raise max_num_seqs",))


def _preemption_cost(view: View) -> str:
    recent = view.recent
    return f"{exact(recent.preemptions)} preemptions, {exact(recent.recomputed_tokens)} tokens recomputed"


def _of_preemptions(view: View) -> Alert | None:
    info, cost = view.snapshot.info, _preemption_cost(view)
    if view.recent.preemptions < MANY_PREEMPTIONS:
        num_displaced = sum(row.state in ("preempted", "swapped") for row in view.requests)
        if not num_displaced:
            return None
        cost = f"{exact(num_displaced)} of {exact(view.snapshot.num_waiting)} waiting had to give up their blocks"
    if info.is_auto_num_seqs:
        return Alert("warning", tuple(f"{cost}: {more}" for more in _more_memory(info)))
    setting = memory_setting(info)
    return Alert("warning", (f"{cost}: lower max_num_seqs or raise {setting}", f"{cost}: lower max_num_seqs"))


def _of_disk(view: View) -> Alert | None:
    disk = view.snapshot.disk
    if disk is None or not disk.problem:
        return None
    text = f"Disk cache in trouble: {disk.problem}; see the log, check disk_cache"
    return Alert("warning", (text, f"Check disk_cache: {disk.problem}"))


def _of_cache(view: View) -> Alert | None:
    counters = view.snapshot.counters
    if not view.snapshot.info.prefix_caching:
        if counters.prompt_tokens >= MANY_QUERY_TOKENS:
            return Alert("info", ("Prefix caching is off, every prompt is computed whole: enable_prefix_caching",))
        return None
    # The recent window speaks where it has seen enough, else all there was since the start.
    queries, hits = view.recent.query_tokens, view.recent.hit_tokens
    if queries < MANY_QUERY_TOKENS:
        queries, hits = counters.prefix_query_tokens, counters.prefix_hit_tokens
    if queries < MANY_QUERY_TOKENS or hits >= LOW_HIT_RATIO * queries:
        return None
    rate = f"Only {100 * hits / queries:.0f}% prefix hits in {exact(queries)} tokens"
    cause = worst_cause(view.snapshot)
    if cause is None:
        return Alert("warning", (f"{rate}: do prompts start with a date or an id?",))
    return Alert("warning", (f"{rate}: {cause.name}; {cause.advice}", f"{cause.name}: {cause.advice}"))


def _of_long_wait(view: View) -> Alert:
    """There are slots and blocks, and still nobody comes to use them."""
    snapshot = view.snapshot
    waiting = f"{exact(snapshot.num_waiting)} waiting, the oldest for {duration(snapshot.oldest_waiting_seconds)}"
    if any(row.state == "prefill" for row in view.requests):
        why = f"{waiting}: prompts before them are computed first"
        return Alert("warning", (f"{why}; shorten prompts or add a server", why, waiting))
    return Alert("warning", (f"{waiting}: the timeline of each says why (Enter)", waiting))


def _calm(view: View) -> Alert:
    snapshot = view.snapshot
    if snapshot.num_waiting:
        longest = snapshot.oldest_waiting_seconds
        if longest >= LONG_WAIT_SECONDS:
            return _of_long_wait(view)
        since = f", the oldest for {duration(longest)}" if longest else ""
        return Alert("none", (f"{exact(snapshot.num_waiting)} waiting to be admitted{since}",))
    return Alert("none", ("All is well",))
