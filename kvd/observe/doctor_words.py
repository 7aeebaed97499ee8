"""What the doctor says, in words: one line about a miss, one about a finding, and what to change. No prompt text."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.insight import Admission, MissCause
from kvd.observe.doctor_causes import MAX_ALIKE, Diagnosis

CAUSES: tuple[MissCause, ...] = (
    "volatile_line", "differs", "system_prompt", "reordered", "white_space", "history_rewritten", "evicted",
    "other_salt", "other_format", "too_short", "new",
)  # fmt: skip

ADVICE: Mapping[MissCause, str] = {
    "volatile_line": "Move the line that changes (date, time, id, counter) behind everything that stays, best into the "
    "last message, or make it change less often.",
    "differs": "Put what all requests share before what differs between them.",
    "system_prompt": "Keep the system prompt the same, byte for byte, and put what differs into the last message.",
    "reordered": "Put documents and examples into a fixed order, sorted by name, say, and new ones behind the others.",
    "white_space": "Send the same white space each time: trim texts in one place, and use the same line ends.",
    "history_rewritten": "Send earlier turns as they were sent and answered before; where the chat template drops "
    "reasoning from history, use one that keeps it, or turn reasoning off.",
    "evicted": "Give the cache more room (a larger KV cache, swap_space or disk_cache), or pin what many "
    "requests begin with.",
    "other_salt": "Where these clients may share what they send, give them the same cache_salt.",
    "other_format": "Keep kv_cache_dtype as it was when the disk cache was filled; it fills again with the new one.",
    "too_short": "Nothing to change; only a longer common beginning is worth keeping.",
    "new": "Nothing to change: nothing like it was seen before.",
}


def miss_words(diagnosis: Diagnosis, admission: Admission) -> str:
    """Why one request missed."""
    lost = diagnosis.lost_tokens
    at, tokens = f"{diagnosis.position:,}", f"{lost:,} equal {_tokens(lost)}"
    match diagnosis.cause:
        case "volatile_line" | "differs" | "system_prompt" if not diagnosis.is_elsewhere:
            return f"differs from {_requests(diagnosis.num_alike)} at token {at}; {tokens} after it {_were(lost)}"
        case "differs" | "reordered" if diagnosis.is_elsewhere:
            return f"{tokens} after token {at} stand behind another beginning in an earlier request"
        case "reordered":
            return f"has the passages of an earlier request in another order from token {at} on; {tokens} {_were(lost)}"
        case "white_space":
            return f"differs from an earlier request in white space from token {at} on; {tokens} {_were(lost)}"
        case "history_rewritten":
            return f"goes on with an earlier chat, rewritten from token {at} on; {tokens} after it {_were(lost)}"
        case "evicted":
            return _evicted_words(diagnosis, admission)
        case "other_salt":
            return f"{tokens} are cached for another cache_salt only, and {_were(lost)}"
        case "other_format":
            return f"the disk cache has its beginning in the KV format {admission.other_format} only"
        case "too_short":
            return f"shares its first {at} tokens with an earlier request, too few more than were cached"
    return "nothing like it was seen before"


def _evicted_words(diagnosis: Diagnosis, admission: Admission) -> str:
    tokens = f"{diagnosis.lost_tokens:,} {_tokens(diagnosis.lost_tokens)}"
    note = admission.evicted
    if note is None:
        ago = duration(diagnosis.peer_seconds)
        return f"{tokens} as in a request {ago} ago were not in the cache any more, nobody knows why"
    whom = f"for {note.evicted_for}" if note.evicted_for else "by an operator or the limit of the cache"
    unused = f"after {duration(note.age_seconds)} unused"
    return f"{tokens} had been evicted {whom} {duration(note.seconds_ago)} ago, {unused}"


def finding_words(cause: MissCause, num_requests: int, lost: int, position: int, num_alike: int) -> str:
    """What the misses of one kind have in common. num_alike: of the one that was like the most."""
    requests = f"{num_requests:,} {'request' if num_requests == 1 else 'requests'}"
    tokens = f"{lost:,} equal {_tokens(lost)}"
    at = f"{position:,}"
    match cause:
        case "volatile_line":
            return f"one line differs from {_requests(num_alike)} at token {at}; {tokens} after it {_were(lost)}"
        case "differs":
            return f"{requests} differ from earlier ones at token {at}; {tokens} after it {_were(lost)}"
        case "system_prompt":
            return (
                f"the system prompt differs from {_requests(num_alike)} at token {at}; {tokens} after it {_were(lost)}"
            )
        case "reordered":
            return f"{requests} had the passages of earlier ones in another order; {tokens} {_were(lost)}"
        case "white_space":
            return f"{requests} differed from earlier ones in white space; {tokens} {_were(lost)}"
        case "history_rewritten":
            return f"{requests} went on with chats whose history was rewritten; {tokens} {_were(lost)}"
        case "evicted":
            return f"{lost:,} {_tokens(lost)} of {requests} had been evicted"
        case "other_salt":
            return f"{tokens} of {requests} were cached for another cache_salt only"
        case "other_format":
            return f"the disk cache has the beginning of {requests} in another KV format only"
        case "too_short":
            return f"{requests} had too little in common with earlier ones"
    return f"{requests} with nothing that was seen before"


def duration(seconds: float) -> str:
    """In the largest unit that gives one or more."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _requests(number: int) -> str:
    least = "at least " if number >= MAX_ALIKE else ""
    return f"{least}{number:,} earlier {'request' if number == 1 else 'requests'}"


def _tokens(number: int) -> str:
    return "token" if number == 1 else "tokens"


def _were(number: int) -> str:
    return "was recomputed" if number == 1 else "were recomputed"
