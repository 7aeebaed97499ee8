"""Why prompts missed, in a few words, and what to change. Constants and pure functions.

The causes are the doctor's, see `kvd.insight.MissCause`; it has the details, here they are one line.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.tui.doctor_panel import CAUSES
from kvd.views import Snapshot

_SHORT: dict[str, str] = {str(name): words for name, words in CAUSES.items()}


class Cause(NamedTuple):
    """short: two words. name: what happened. advice: what to change, or where to look."""

    short: str
    name: str
    advice: str
    num_requests: int = 0
    lost_tokens: int = 0


_CAUSES: dict[str, tuple[str, str]] = {
    "volatile_line": ("a line that changes each time", "move dates and ids to the end"),
    "differs": ("prompts differ early", "put what they share first"),
    "system_prompt": ("another system prompt each time", "keep the system prompt fixed"),
    "reordered": ("same passages, another order", "keep documents and examples in one order"),
    "white_space": ("white space differs", "build prompts with the same white space"),
    "history_rewritten": ("history is rewritten", "send earlier turns as they were"),
    "evicted": ("evicted before it was used again", "give the KV cache more memory, or pin"),
    "other_salt": ("another cache_salt", "use one cache_salt for those who may share"),
    "other_format": ("another KV format on disk", "keep kv_cache_dtype as it was"),
    "too_short": ("shorter than a block", "nothing to gain below 16 tokens"),
    "new": ("never seen before", "nothing to change"),
}


def cause_of(name: str) -> Cause:
    """What a cause means; one that a newer server names is shown as it is."""
    words, advice = _CAUSES.get(name, (name.replace("_", " "), "see the doctor on the cache page"))
    return Cause(_SHORT.get(name, words), words, advice)


def worst_cause(snapshot: Snapshot) -> Cause | None:
    """The cause that lost most tokens; None where nothing was lost."""
    name, num_requests, lost_tokens = max(snapshot.misses, key=lambda miss: miss[2], default=("", 0, 0))
    if lost_tokens <= 0:
        return None
    return cause_of(name)._replace(num_requests=num_requests, lost_tokens=lost_tokens)
