"""What observers and operators see of a running engine, and what they may do to it. A leaf; torch-free.

Everything but the two protocols is frozen: the engine makes a `Snapshot`, hands it over, and never changes it. Times
are `time.monotonic()` seconds unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvd.device_facts import DeviceFacts, HostFacts
from kvd.geometry import Geometry


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the memory goes, in bytes, as printed at start-up."""

    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int
    block_bytes: int  # over all layer groups
    bytes_per_token: float
    bytes_per_token_16bit: float
    setting: str = "cpu_memory_utilization"  # the configuration field that makes the KV cache larger


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while the engine lives."""

    model: str
    served_names: tuple[str, ...]
    architecture: str
    quantization: str
    backend: str
    device: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    prefix_caching: bool
    budget: MemoryBudget
    created: int  # unix seconds
    version: str
    geometry: Geometry | None = None  # what decides what fits; None: not known
    is_auto_num_seqs: bool = False  # `max_num_seqs` is a ceiling, and experience says how many run at the same time


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative histogram: `counts[i]` observations are ≤ `bounds[i]`; the last count is the total."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def total(self) -> int:
        return self.counts[-1] if self.counts else 0


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative since start. Own chunks and recomputation after preemption are never hits."""

    num_steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefill_tokens_computed: int = 0  # recomputation included
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    partial_hit_tokens: int = 0  # of these, in blocks that belong to another continuation
    ram_hit_tokens: int = 0  # of these, restored from RAM
    disk_hit_tokens: int = 0  # of these, restored from disk
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that kept the blocks in RAM
    num_evicted_blocks: int = 0  # had to give way to a request or the cap, over all layer groups
    num_saved_blocks: int = 0  # written through to RAM
    num_unsaved_blocks: int = 0  # not written through, since every slot was held
    num_restored_blocks: int = 0
    num_saved_bytes: int = 0  # from the KV pool to RAM, swapped-out blocks included
    num_restored_bytes: int = 0  # and back
    save_seconds: float = 0.0  # spent in moving these, and those
    restore_seconds: float = 0.0
    num_dropped_tokens: int = 0  # forgotten under kv_eviction
    step_seconds: float = 0.0
    finished: tuple[tuple[str, int], ...] = ()  # (finish reason, requests)
    evicted_blocks: tuple[tuple[str, int], ...] = ()  # (reason, blocks): capacity, cap, dropped, reset


@dataclass(frozen=True, slots=True)
class StepMix:
    """The latest step: how many tokens of which kind, and how long it took."""

    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_requests: int = 0
    seconds: float = 0.0


RequestState = Literal["waiting", "restoring", "prefill", "decode", "preempted", "swapped"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One row of the request table. Carries no prompt text."""

    request_id: str
    client: str
    endpoint: str
    state: RequestState
    priority: int
    age_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    ttft_seconds: float | None
    tokens_per_second: float | None
    num_swaps: int = 0  # of the preemptions, those that kept its blocks in RAM
    num_prefill_tokens: int = 0  # tokens that its prefill has to reach, what was lost by preemption included


@dataclass(frozen=True, slots=True)
class PrefixView:
    """One chain of blocks in the KV cache, for people. `prefix_id` names it: the key of its last block, in hex."""

    prefix_id: str
    num_tokens: int
    num_hits: int
    is_pinned: bool
    is_active: bool
    client: str = ""  # who computed it first
    age_seconds: float = 0.0  # since that
    idle_seconds: float = 0.0  # since it was used last


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A chain of blocks that was written to, or read from, a session file."""

    name: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The disk tier: bytes of blocks, and what has been moved since the start."""

    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    num_corrupt_blocks: int = 0
    problem: str = ""  # why it is not used at the moment, in words


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine as others see it. `requests` is filled only when details were asked for."""

    time: float
    uptime_seconds: float
    info: EngineInfo
    state: Literal["loading", "ready", "draining", "failed"]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_active: int
    num_blocks_cached: int
    num_blocks_free: int
    counters: Counters
    last_step: StepMix
    num_blocks_pinned: int = 0
    num_ram_blocks: int = 0  # slots of the RAM tier, first group
    num_ram_blocks_used: int = 0
    num_ram_blocks_held: int = 0  # of these, for requests that were swapped out, and while they are moved
    running_limit: int = 0  # requests that may run at the same time, as of now
    step_budget: int = 0  # tokens that the latest step was allowed
    histograms: dict[str, Histogram] = field(default_factory=dict)
    requests: tuple[RequestView, ...] = ()
    device: DeviceFacts | None = None  # None: the host computes, or nothing is known yet
    disk: DiskFacts | None = None  # None: there is no disk tier
    prefill_tokens_per_second: float = 0.0  # as measured; 0: not yet
    cache_histograms: dict[str, Histogram] = field(default_factory=dict)  # of blocks, see `histograms`
    misses: tuple[tuple[str, int, int], ...] = ()  # (cause, requests, lost tokens), see insight.MissCause
    host: HostFacts | None = None  # None: nothing is known yet
    num_waste_tokens: int = 0  # room in the blocks of running requests that holds no token
    oldest_waiting_seconds: float = 0.0  # since the arrival of the request that waits longest for its first step
    stalled_seconds: float = 0.0  # since the engine got anything done, while requests wait for it; 0: it is not stalled


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of the event log: what happened, to whom, why."""

    time: float  # unix seconds
    level: Literal["debug", "info", "warning", "error"]
    kind: str
    message: str
    request_id: str | None = None


class SnapshotSource(Protocol):
    """Where the dashboard and metrics read: the engine in process, or a client over HTTP."""

    async def snapshot(self, *, details: bool = False) -> Snapshot: ...


class Control(Protocol):
    """What an operator may do to a running engine.

    A chain of cached blocks is named by its `prefix_id` (see `PrefixView`), or by a request that runs or ended lately.
    """

    async def abort(self, request_id: str) -> bool: ...

    async def reset_cache(self) -> int:
        """Drop every cached block that no request uses, in all tiers; returns how many were in the KV pool."""
        ...

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """The chains in the KV pool that were found most often, the pinned ones first."""
        ...

    async def drop_prefix(self, chain: str) -> int:
        """Drop a chain from the KV pool, as far as nobody uses or shares it; how many blocks."""
        ...

    async def pin(self, chain: str) -> int:
        """Keep a chain for good; how many blocks, 0 if it is not in the pool or would leave too little room."""
        ...

    async def unpin(self, chain: str) -> bool: ...

    async def keep_turn(self, request_id: str) -> int:
        """A turn ended in a tool call: keep its blocks for `tool_turn_seconds`; returns how many are kept."""
        ...

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        """Write a chain to the session file of that name. Raises SessionError."""
        ...

    async def restore_session(self, name: str) -> SessionInfo:
        """Read a session file into the KV pool. Raises SessionError."""
        ...
