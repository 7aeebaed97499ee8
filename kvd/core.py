"""The torch-free types that cross the borders between rooms.

Everything in here is frozen: a value is made by its owner, handed over, and never changed. Down goes
`Request → StepPlan`, back comes `StepResult → TokenEvent`; what everybody else sees stands in `views.py`.
What is made for every token is a named tuple: a frozen dataclass of nine fields takes four times as long to make.
Times are `time.monotonic()` seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

BLOCK_SIZE = 16
"""Tokens per KV block, for every model and backend."""

FinishReason = Literal["stop", "length", "abort", "timeout", "error", "refused"]
"""refused: the request turned out to be impossible while it ran: its grammar cannot be followed any further."""
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


class GrammarMatcher(Protocol):
    """Where one answer stands in its grammar. One thread at a time."""

    @property
    def error(self) -> str | None:
        """Why nothing more can be said about what may follow; None: all is well."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was sampled."""
        ...

    def mask(self) -> bytes:
        """A bit per token of the vocabulary in whole 32-bit words, 1: it may come next. Some token may."""
        ...


class Grammar(Protocol):
    """What an answer is held to, compiled; see `text.grammar`. Any thread."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """With any of these the answer is complete. They are allowed where it may end, and nowhere else."""
        ...

    @property
    def first_mask(self) -> bytes:
        """The mask of a matcher that has accepted nothing."""
        ...

    def start(self) -> GrammarMatcher: ...


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
    num_prompt_logprobs: int | None = None  # of the prompt's own tokens, as `SamplingParams.num_logprobs`
    grammar: Grammar | None = None  # what the output is held to; it ends with "stop" when the grammar is complete


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
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None  # with the first token; of each prompt token, first None


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
    num_scored: int = 0  # after so many of the first tokens: report how likely the prompt's next token was

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
    """The token sampled for one plan item; None ends the request: with `refusal`, or as its logits are not finite."""

    request_id: str
    token_id: int | None
    logprobs: Logprobs | None = None
    is_last: bool = False  # an end token that completes the request's grammar
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan: one sample per item with `samples`, in plan order.

    `masses` has one entry per item with `wants_mass`, in plan order: the softmax weight of each table entry of group 0,
    summed over query tokens, heads and layers. `prompt_logprobs` has one per item with `num_scored`, in plan order: of
    the prompt token after each of these; None where the logits were not finite. `seconds` is everything; the two other
    times are parts of it.
    """

    step_id: int
    samples: tuple[Sample, ...]
    seconds: float
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    masses: tuple[tuple[float, ...], ...] = ()
    prompt_logprobs: tuple[tuple[Logprobs | None, ...], ...] = ()
