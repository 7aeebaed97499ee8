"""Which requests can run at all, and how many blocks must stay available when one is admitted.

A request gets the blocks of all its known tokens when it is admitted, so a prefill never runs out of blocks half way
and only generated tokens make requests grow.

Expected growth: a request that has generated n tokens is expected to generate as many again (times
`expected_growth_factor`), at least `min_expected_growth_tokens` and at most what its limits leave. (Of a thing
whose age is all that is known, half its life is a fair guess; the lower bound is for those that have just
begun.) A request is admitted only if the growth expected of everybody, itself included, stays available. Alone
it is admitted in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.manager import blocks_for
from kvd.core import BLOCK_SIZE, Request
from kvd.errors import ContextLengthExceeded, RequestError
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.request_state import RequestState


def expected_growth_blocks(state: RequestState, config: SchedulerConfig) -> int:
    """Blocks that a request is expected to need beyond those of its known tokens."""
    num_tokens = len(state.token_ids)
    growth = max(int(config.expected_growth_factor * state.num_output), config.min_expected_growth_tokens)
    # The last token a request may have is sampled and never computed.
    growth = min(growth, state.max_total - 1 - num_tokens)
    if state.forgetting is not None:  # its tables never grow beyond its budget
        growth = min(growth, state.forgetting.budget_blocks * BLOCK_SIZE - num_tokens)
    return max(0, blocks_for(num_tokens + growth) - blocks_for(num_tokens))


def spare_blocks(running: Sequence[RequestState], newcomer: RequestState, config: SchedulerConfig) -> int:
    """Blocks that must be left, beyond what `newcomer` takes at once, for it to be admitted."""
    if not running:
        return 0
    growth = sum(expected_growth_blocks(state, config) for state in running)
    return growth + expected_growth_blocks(newcomer, config)


def check_length(request: Request, max_model_len: int, capacity_tokens: int) -> None:
    """Refuse a prompt that leaves no room for one more token in the model's context or in the whole KV cache.

    Raises ContextLengthExceeded, or RequestError for an empty prompt. Static facts only: any thread.
    """
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise RequestError("The prompt is empty: it must have at least one token.", param="prompt")
    if num_prompt + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has {num_prompt}; "
            "at least one token of the context must be left for the answer.",
            num_prompt_tokens=num_prompt,
            limit_tokens=max_model_len,
        )
    if num_prompt + 1 > capacity_tokens and request.kv_eviction == "none":
        raise ContextLengthExceeded(
            f"This server's KV cache has {capacity_tokens // BLOCK_SIZE} blocks of {BLOCK_SIZE} tokens to give, so its "
            f"maximum context length is {capacity_tokens} tokens, and the prompt has {num_prompt}; "
            "at least one token must be left for the answer.",
            num_prompt_tokens=num_prompt,
            limit_tokens=capacity_tokens,
        )
