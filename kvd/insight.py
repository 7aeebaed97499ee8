"""What explains a running engine: where blocks are, what became of a request, why prompts missed. A leaf; torch-free.

Everything but the protocols is frozen and can be said in JSON. Times of day are unix seconds, ages and durations
seconds. No prompt text in here but what `Insight.reveal` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvd.views import Control, LogEvent, SnapshotSource

# --------------------------------------------------------------------------- blocks


class MapCell(NamedTuple):
    """Neighbouring blocks of the KV pool, summed up.

    num_shared: of the active ones, those with more than one reference. owner: index into `BlockMap.owners` of the
    client that has most of the blocks that are not free, -1 where all are free. idle_seconds: median time since the
    cached ones were last used; 0 where there are none.
    """

    num_free: int
    num_cached: int
    num_active: int
    num_shared: int
    num_pinned: int
    owner: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of one layer group in the order of their ids, `blocks_per_cell` to a cell; the last may have fewer."""

    group_id: int
    num_groups: int
    num_blocks: int
    blocks_per_cell: int
    owners: tuple[str, ...]
    owner_blocks: tuple[int, ...]  # parallel to owners: blocks that are not free
    cells: tuple[MapCell, ...]


# --------------------------------------------------------------------------- one request


TimelineKind = Literal[
    "queued", "waiting", "admitted", "hit", "restored", "chunk", "first_token", "forgot", "preempted", "resumed",
    "finished",
]  # fmt: skip


class TimelineEntry(NamedTuple):
    """Something that happened to a request, `seconds` after it arrived.

    num_tokens: what the kind says: tokens of the prompt, hit, restored, computed by a chunk, forgotten, generated.
    reason: in words, why, with numbers; empty where there is nothing to add.
    """

    seconds: float
    kind: TimelineKind
    num_tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of one request so far. num_left_out: entries that were merged into their neighbours."""

    request_id: str
    client: str
    endpoint: str
    arrived: float
    num_prompt_tokens: int
    has_ended: bool
    entries: tuple[TimelineEntry, ...]
    num_left_out: int = 0


# --------------------------------------------------------------------------- misses


class EvictedNote(NamedTuple):
    """The block that a prompt would have hit next was there once.

    evicted_for: client of the request that needed the room; empty where an operator or the cap dropped it.
    seconds_ago: since the eviction. age_seconds: how long it had been unused then. num_tokens: of this prompt, in
    neighbouring blocks that are known to have been evicted.
    """

    evicted_for: str
    seconds_ago: float
    age_seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What the engine tells the doctor when a request is admitted for the first time. Carries token ids: not for JSON.

    num_cached_tokens includes what comes from RAM and disk. is_excused: it may not use the cache (prompt logprobs,
    caching off, forgotten tokens), so nothing is lost that could have been had.
    """

    request_id: str
    client: str
    endpoint: str
    cache_salt: str
    time: float
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    is_excused: str = ""  # why, in a few words
    evicted: EvictedNote | None = None
    other_format: str = ""  # KV format in which the disk cache has the beginning of this prompt, if another than ours


MissCause = Literal[
    "volatile_line", "differs", "system_prompt", "reordered", "white_space", "history_rewritten", "evicted",
    "other_salt", "other_format", "too_short", "new",
]  # fmt: skip
"""`new`: nothing like it was seen before; nothing is lost."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why one request computed tokens that it need not have computed.

    lost_tokens: tokens of this prompt that equal tokens of earlier ones and were computed all the same. position: the
    first token that differs, -1 where that says nothing. num_alike: earlier requests it is compared with that differ at
    this position. words: one line without any prompt text.
    """

    request_id: str
    client: str
    endpoint: str
    time: float
    cause: MissCause
    num_prompt_tokens: int
    num_cached_tokens: int
    lost_tokens: int
    position: int
    num_alike: int
    words: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Misses of one cause, client and place, with what to change. Ranked by lost tokens."""

    cause: MissCause
    client: str
    endpoint: str
    num_requests: int
    lost_tokens: int
    saved_seconds: float  # of TTFT, all requests together, at the measured rate of prefill; 0: not measured yet
    position: int  # most frequent one, -1: none
    words: str
    advice: str
    example_id: str  # request id for `Insight.reveal`


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What the doctor found since the start, or since it was reset.

    num_skipped: admissions that were not examined, since the doctor may only take so much time. seconds_spent: of its
    thread, in all.
    """

    findings: tuple[Finding, ...]
    recent: tuple[Miss, ...]  # the newest first
    num_examined: int
    num_skipped: int
    prompt_tokens: int
    cached_tokens: int
    lost_tokens: int
    prefill_tokens_per_second: float  # 0: not measured yet
    seconds_spent: float
    by_cause: tuple[tuple[str, int, int], ...]  # (cause, requests, lost tokens), for metrics


@dataclass(frozen=True, slots=True)
class Reveal:
    """Text of a prompt, shown because somebody asked for it.

    ours: the text around the place where it differs (or the beginning of a prefix); theirs: the same of the earlier
    request, empty where there is none.
    """

    title: str
    ours: str
    theirs: str = ""


class Insight(Protocol):
    """What can be asked about a running engine beyond its snapshot. Raises KvdError where it cannot be answered."""

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap: ...

    async def timeline(self, request_id: str) -> Timeline | None:
        """Of a request that runs or ended lately; None: nothing is known of it."""
        ...

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        """The requests that ended last, the latest first; with no entries but the last one."""
        ...

    async def events(self, limit: int) -> tuple[LogEvent, ...]:
        """The newest events of the log, oldest first."""
        ...

    async def doctor(self) -> DoctorReport: ...

    async def reveal(self, name: str) -> Reveal:
        """The text behind a prefix id of `Control.prefixes`, or behind a miss (its request id)."""
        ...


class Console(SnapshotSource, Control, Insight, Protocol):
    """Everything that a dashboard sees and does: of the engine in this process, or of a server over HTTP."""
