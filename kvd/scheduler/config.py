"""The scheduler's settings, resolved: no `auto` is left in them."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler; ConfigError for a combination that cannot make progress.

    max_num_seqs               requests that run at the same time
    max_num_batched_tokens     tokens that one step computes, over all requests
    max_model_len              prompt and output tokens of one request together
    max_waiting                requests that are accepted beyond the `max_num_seqs` that may run
    queue_timeout_seconds      how long a request may wait to be scheduled for the first time; None: for ever
    expected_growth_factor     tokens a request is expected to generate per token generated (see `admission`)
    min_expected_growth_tokens what it is expected to generate at least; with both at 0 admission hopes for the best
    target_gap_seconds         gap between two tokens of a stream that others' prompts should not exceed; None: any
    is_auto_num_seqs           `max_num_seqs` is a ceiling, and experience says how many requests run at the same time
    max_overtaken              admissions of later arrivals that may pass a waiting request (see `waiting`)
    default_budget_tokens      what a request with `kv_eviction` and no budget of its own may hold; None: the pool
    tool_turn_seconds          how long the blocks of a turn that ended in a tool call are kept
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 256
    queue_timeout_seconds: float | None = None
    expected_growth_factor: float = 1.0
    min_expected_growth_tokens: int = 64
    target_gap_seconds: float | None = None
    is_auto_num_seqs: bool = False
    max_overtaken: int = 64
    default_budget_tokens: int | None = None
    tool_turn_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs: {self.max_num_seqs} is too small, at least 1 is needed")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len: {self.max_model_len} leaves no room for a prompt and a token")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Decodes come first; with fewer tokens than requests a prefill could starve.
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs "
                f"({self.max_num_seqs}); every running request needs one token per step"
            )
