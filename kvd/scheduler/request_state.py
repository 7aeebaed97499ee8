"""One request as the scheduler sees it: its tokens, and how many of them are planned and computed.

Owner: the engine thread, through `Scheduler`.

There is no prefill phase and no decode phase. A request has `token_ids` (prompt and sampled tokens), of which
`num_computed` are in the KV cache by committed steps and `num_planned` will be when the steps in flight are
committed; every step lets it catch up. `num_pending` samples are in flight, tokens which exist for the plan
but have no value yet.

Invariant: num_computed ≤ num_planned ≤ len(token_ids) + num_pending ≤ max_total.
"""

from __future__ import annotations

from kvd import views
from kvd.cache.manager import SequenceBlocks
from kvd.core import BLOCK_SIZE, FinishReason, Logprobs, Request, RequestTiming, TokenEvent
from kvd.scheduler.dropping import DropSchedule
from kvd.scheduler.preemption import quantum
from kvd.views import RequestView


class RequestState:
    """Everything that changes about a request between its arrival and its end.

    key            (priority, arrival number): the order in which running requests are asked
    max_total      at so many tokens, prompt included, the request ends with "length"
    prefill_target tokens that were known at the latest admission; what lies before it counts as prefill
    num_seen       tokens that have been computed at some time; computing them again is recomputation
    must_release   ended or preempted while steps that name it are in flight: blocks and slot go when they are
                   committed
    has_failed     ended by an error: what was computed for it last is not to be trusted
    forgetting     which blocks it forgets, under `kv_eviction`; None: none
    num_forced     preemptions before it had got anywhere, see `planning`
    scores         how likely the prompt's tokens from the second on were, as far as that is known; None: nobody asked
    output_at_preemption  output tokens it had when it was preempted last
    is_announced   the admission feed was told of it
    waits_for      why it could not start when it was last looked at, in a word; "": it was not looked at yet
    """

    __slots__ = (
        "arrival_number", "blocks", "first_scheduled", "first_token", "forgetting", "has_ended", "has_failed",
        "is_announced", "key", "last_token", "max_total", "must_release", "num_cached_tokens", "num_computed",
        "num_forced", "num_in_flight", "num_pending", "num_planned", "num_preemptions", "num_prompt",
        "num_seen", "num_swaps", "output_at_preemption", "prefill_target", "request", "scores", "slot",
        "token_ids", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        arrival_number: int,
        blocks: SequenceBlocks,
        max_total_limit: int,
        forgetting: DropSchedule | None = None,
    ) -> None:
        self.request = request
        self.arrival_number = arrival_number
        self.key = (request.priority, arrival_number)
        self.blocks = blocks
        self.forgetting = forgetting
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.max_total = min(self.num_prompt + request.sampling.max_tokens, max_total_limit)
        self.slot: int | None = None
        self.prefill_target = 0
        self.num_planned = 0
        self.num_computed = 0
        self.num_pending = 0
        self.num_in_flight = 0
        self.num_seen = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_forced = 0
        self.num_swaps = 0
        self.waits_for = ""
        self.is_announced = False
        self.output_at_preemption = 0
        self.scores: list[Logprobs] | None = None if request.num_prompt_logprobs is None else []
        self.has_ended = False
        self.has_failed = False
        self.must_release = False
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_plan(self) -> int:
        """Tokens that could be computed next; 0 while the tokens in flight may be the last ones."""
        num_total = len(self.token_ids) + self.num_pending
        return num_total - self.num_planned if num_total < self.max_total else 0

    def num_to_score(self, start: int, end: int) -> int:
        """After how many of the tokens `start` … `end` - 1, which come next, the prompt's next one is to be scored."""
        if self.scores is None or self.num_output:
            return 0
        return max(0, min(end, self.num_prompt - 1) - start)

    def add_scores(self, start: int, scores: tuple[Logprobs | None, ...]) -> bool:
        """Take in the scores after the tokens from `start` on; False if one is missing, as the logits were not finite.

        What is computed again after a preemption is scored again.
        """
        assert self.scores is not None
        assert start <= len(self.scores), f"{self.request.request_id}: scores from {start} on leave a gap"
        finite = [score for score in scores if score is not None]
        self.scores[start:] = finite
        return len(finite) == len(scores)

    @property
    def max_reused_tokens(self) -> int | None:
        """Leading tokens that may come from the cache: those that are yet to be scored must be computed. None: all."""
        if self.scores is None or self.num_output or len(self.scores) >= self.num_prompt - 1:
            return None
        return len(self.scores)

    @property
    def is_running(self) -> bool:
        """Holds blocks and a slot that nobody waits for."""
        return self.slot is not None and not self.must_release

    @property
    def is_prefilling(self) -> bool:
        return self.num_planned < self.prefill_target

    @property
    def may_be_preempted(self) -> bool:
        """It has got somewhere since the last time (see `preemption.quantum`), or there was none."""
        return self.num_output - self.output_at_preemption >= quantum(self.num_preemptions)

    @property
    def num_promised(self) -> int:
        """Tokens beyond the known ones for which it gets blocks at admission, so that it can get that far."""
        missing = quantum(self.num_preemptions) - (self.num_output - self.output_at_preemption)
        return max(0, min(missing, self.max_total - 1 - len(self.token_ids)))

    @property
    def most_held_tokens(self) -> int:
        """Tokens that it may hold in the cache at a time."""
        if self.forgetting is not None:
            return self.forgetting.budget_blocks * BLOCK_SIZE
        return self.max_total - 1  # the last one is sampled and never computed

    @property
    def num_dropped_tokens(self) -> int:
        return 0 if self.forgetting is None else self.forgetting.num_dropped_tokens

    @property
    def stage(self) -> views.RequestState:
        if not self.is_running:
            if self.blocks.swapped is not None:
                return "swapped"
            return "waiting" if self.first_scheduled is None else "preempted"
        if self.blocks.restore is not None:
            return "restoring"
        return "prefill" if self.num_computed < self.prefill_target else "decode"

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the request ends with the token just appended, if it does."""
        if token_id in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_total else None

    def event(
        self,
        token_id: int | None,
        finish_reason: FinishReason | None,
        *,
        logprobs: Logprobs | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        return TokenEvent(
            self.request.request_id,
            token_id,
            self.num_prompt,
            self.num_cached_tokens,
            self.num_output,
            logprobs,
            finish_reason,
            error,
            self.timing() if finish_reason is not None else None,
            self.num_dropped_tokens,
            None if self.scores is None or token_id is None or self.num_output > 1 else (None, *self.scores),
        )

    def timing(self) -> RequestTiming:
        arrival = self.request.arrival_time
        scheduled = arrival if self.first_scheduled is None else self.first_scheduled
        first = scheduled if self.first_token is None else self.first_token
        return RequestTiming(arrival, scheduled, first, first if self.last_token is None else self.last_token)

    def view(self, now: float) -> RequestView:
        request = self.request
        ttft = None if self.first_token is None else self.first_token - request.arrival_time
        rate = None
        if self.first_token is not None and self.last_token is not None and self.last_token > self.first_token:
            rate = (self.num_output - 1) / (self.last_token - self.first_token)
        return RequestView(
            request_id=request.request_id,
            client=request.client,
            endpoint=request.endpoint,
            state=self.stage,
            priority=request.priority,
            age_seconds=now - request.arrival_time,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed,
            num_output_tokens=self.num_output,
            max_tokens=request.sampling.max_tokens,
            num_blocks=self.blocks.num_blocks,
            num_preemptions=self.num_preemptions,
            ttft_seconds=ttft,
            tokens_per_second=rate,
            num_swaps=self.num_swaps,
            num_prefill_tokens=self.prefill_target or len(self.token_ids),
        )
