"""The one line that says what is wrong and what to do about it. Pure functions, callable from any thread.

Invariant: at most one alert at a time, the one that hurts most; each names the setting or the act that helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.tui.format import exact
from kvd.tui.view import Link, View
from kvd.views import EngineInfo

Severity = Literal["error", "warning", "info", "none"]

FULL_SHARE = 0.95
"""Pool counts as full when blocks in use exceed this share: an admission needs blocks to grow into."""

MANY_QUERY_TOKENS = 20_000
"""A hit rate over fewer tokens says little: the first request of every client misses."""

LOW_HIT_RATIO = 0.10
MANY_PREEMPTIONS = 3


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
        return Alert("error", (f"Disconnected: {link.problem}; trying again",))
    if view is None:
        return Alert("none", ("Waiting for the first snapshot",))
    return _of_state(view) or _of_waiting(view) or _of_preemptions(view) or _of_cache(view) or _calm(view)


def _of_state(view: View) -> Alert | None:
    match view.snapshot.state:
        case "failed":
            return Alert("error", ("The engine has failed and answers nothing: see the log, then restart kvd",))
        case "draining":
            left = view.snapshot.num_running + view.snapshot.num_waiting
            return Alert("warning", (f"Stopping: no new requests, {left} still to finish",))
        case "loading":
            return Alert("info", ("Loading the model; requests are answered with 503 until it is ready",))
    return None


def _of_waiting(view: View) -> Alert | None:
    snapshot, info = view.snapshot, view.snapshot.info
    if snapshot.num_waiting == 0:
        return None
    waiting = f"{exact(snapshot.num_waiting)} waiting"
    is_full = snapshot.num_blocks > 0 and snapshot.num_blocks_active >= FULL_SHARE * snapshot.num_blocks
    if is_full:
        problem = f"KV pool full: {waiting}; raise {memory_setting(info)}"
        return Alert("error", (f"{problem} or lower max_model_len", problem))
    if snapshot.num_running >= info.max_num_seqs:
        return Alert("warning", (f"All {info.max_num_seqs} slots busy: {waiting}; raise max_num_seqs",))
    return None


def _of_preemptions(view: View) -> Alert | None:
    recent = view.recent
    if recent.preemptions < MANY_PREEMPTIONS:
        return None
    cost = f"{exact(recent.preemptions)} preemptions, {exact(recent.recomputed_tokens)} tokens recomputed"
    setting = memory_setting(view.snapshot.info)
    return Alert("warning", (f"{cost}: lower max_num_seqs or raise {setting}", f"{cost}: lower max_num_seqs"))


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
    return Alert("warning", (f"{rate}: do prompts start with a date or an id?",))


def _calm(view: View) -> Alert:
    waiting = view.snapshot.num_waiting
    if waiting:
        return Alert("none", (f"{exact(waiting)} waiting to be admitted",))
    return Alert("none", ("All is well",))
