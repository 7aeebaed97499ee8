"""The torch-free types that cross the borders between rooms.

Everything in here is frozen: a value is made by its owner, handed over, and never changed. Down goes
`Request → StepPlan`, back comes `StepResult → TokenEvent`; a `Snapshot` is what everybody else sees.
What is made for every token is a named tuple: a frozen dataclass of nine fields takes four times as long to make.
Times are `time.monotonic()` seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvd.device_facts import DeviceFacts

BLOCK_SIZE = 16
"""Tokens per KV block, for every model and backend."""

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
KVEviction = Literal["none", "sliding_window", "streaming", "heavy_hitter"]


# --------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, with every default resolved; ranges are validated by whoever builds it."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy; ties go to the lowest token id
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens, as OpenAI states it
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens, as in CTRL (arXiv 1909.05858)
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the engine draws one, so that a recomputed request stays itself
    min_tokens: int = 0  # no stop token may be sampled before that many output tokens
    stop_token_ids: frozenset[int] = frozenset()  # the model's end tokens included, unless ignore_eos
    num_logprobs: int | None = None  # None: none wanted; 0: of the sampled token only; n: and of the n best


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to complete. `n` choices of one HTTP request are n of these with the same group id."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    client: str = ""  # name of the API key, else user agent and address
    endpoint: str = ""  # route for people to read: "chat", "completions", ...
    priority: int = 0  # as in vLLM: smaller runs first
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    choice_index: int = 0
    deadline: float | None = None
    kv_eviction: KVEviction = "none"  # which tokens to forget when the request outgrows its share of the KV cache
    kv_budget_tokens: int | None = None  # that share; None: as much as the pool holds


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the model's distribution before temperature and truncation."""

    token_logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When one request passed which stage; NaN-free: a stage not reached repeats the one before it."""

    arrival: float
    first_scheduled: float
    first_token: float
    last_token: float


class TokenEvent(NamedTuple):
    """What one step did to one request. The last event of a request has a finish reason.

    `token_id` is None when a request ends without a new token (abort, timeout, error). A stop token is
    delivered as the last event's `token_id` with `finish_reason == "stop"`; it is part of the counts, and
    text leaves it out.
    """

    request_id: str
    token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that were not computed for this request
    num_output_tokens: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: RequestTiming | None = None  # on the last event
    num_dropped_tokens: int = 0  # tokens that kv_eviction has forgotten so far


# --------------------------------------------------------------------------- one step


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `source` to `target`, both of one layer group."""

    group_id: int
    source: int
    target: int
    num_tokens: int = BLOCK_SIZE


class BlockTransfer(NamedTuple):
    """Copy a whole block between the KV pool and slot `slot` of the RAM tier, both of one layer group."""

    group_id: int
    block_id: int
    slot: int


class PlanItem(NamedTuple):
    """One request's share of a step: compute `num_tokens` tokens from position `start`.

    `token_ids` are the tokens to compute. When `last_from_slot` is set the last of them is not known to the
    scheduler yet (its step has been planned but not committed): the runner takes the newest token that it
    sampled for `slot`, and the last entry of `token_ids` is a placeholder.
    `block_tables[group_id]` are physical block ids that cover positions 0 … start + num_tokens - 1;
    `first_positions[group_id][j]` is the absolute position of the first token of table entry j.
    """

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    first_positions: tuple[Sequence[int], ...]
    samples: bool  # the last token is the newest of the request, so a token is sampled from its logits
    last_from_slot: bool = False
    wants_mass: bool = False  # report the attention mass of each table entry of group 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner does next, in this order: forget, register, save, copy, restore, compute, sample.

    The order matters: a block may be saved and, in the same plan, be given to somebody else who copies, restores or
    computes into it; copies are made one after the other. A plan without items moves blocks only.
    """

    step_id: int
    items: tuple[PlanItem, ...]
    new_requests: tuple[Request, ...] = ()  # scheduled for the first time: the runner needs their sampling
    ended_request_ids: tuple[str, ...] = ()  # the runner may forget these
    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[BlockTransfer, ...] = ()  # KV pool → RAM tier
    restores: tuple[BlockTransfer, ...] = ()  # RAM tier → KV pool

    @property
    def num_tokens(self) -> int:
        return sum([len(item.token_ids) for item in self.items])


class Sample(NamedTuple):
    """The token sampled for one plan item; None where the logits were not finite, which ends the request."""

    request_id: str
    token_id: int | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan: one sample per item with `samples`, in plan order.

    `masses` has one entry per item with `wants_mass`, in plan order: the softmax weight of each table entry of group 0,
    summed over query tokens, heads and layers. `seconds` is everything; the two other times are parts of it.
    """

    step_id: int
    samples: tuple[Sample, ...]
    seconds: float
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    masses: tuple[tuple[float, ...], ...] = ()


# --------------------------------------------------------------------------- what others see


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
    num_evicted_blocks: int = 0
    num_saved_blocks: int = 0  # written through to RAM
    num_unsaved_blocks: int = 0  # not written through, since every slot was held
    num_restored_blocks: int = 0
    num_dropped_tokens: int = 0  # forgotten under kv_eviction
    step_seconds: float = 0.0
    finished: tuple[tuple[str, int], ...] = ()  # (finish reason, requests)


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


@dataclass(frozen=True, slots=True)
class PrefixView:
    """One chain of blocks in the KV cache, for people. `prefix_id` names it: the key of its last block, in hex."""

    prefix_id: str
    num_tokens: int
    num_hits: int
    is_pinned: bool
    is_active: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A chain of blocks that was written to, or read from, a session file."""

    name: str
    num_tokens: int
    num_bytes: int


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
    running_limit: int = 0  # requests that may run at the same time, as of now
    step_budget: int = 0  # tokens that the latest step was allowed
    histograms: dict[str, Histogram] = field(default_factory=dict)
    requests: tuple[RequestView, ...] = ()
    device: DeviceFacts | None = None  # None: the host computes, or nothing is known yet


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
