"""How likely the tokens of a prompt were, one after the other. Engine thread only.

A step computes the hidden states of all its tokens and the logits of the last ones. Where a request asks for its
prompt's log probabilities, the head runs once more behind the step, over the hidden states that are still there, as
many rows at a time as the logits buffer has: nothing is allocated for it, however long the chunk or the vocabulary.

The log probabilities come from `Ops.sample`, as those of sampled tokens do, so both are the same numbers: each row is
made to choose the token that follows in the prompt, by a bias that outweighs all logits, and reports of it what the
unbiased logits say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvd.core import Logprobs, PlanItem, Request
from kvd.model.decoder import Decoder
from kvd_kernels.ops import SamplingBatch

OUTWEIGHS_ALL = 1e30

Scores = tuple[Logprobs | None, ...]
"""Of the prompt token after each scored one; None where the logits were not finite."""


class PromptScorer:
    """Remembers the prompts that are to be scored, and scores what a step has computed of them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._params = SamplingBatch.allocate(decoder.max_seqs)  # temperature 0
        self._params.has_ragged = True
        self._force = torch.tensor([OUTWEIGHS_ALL], dtype=torch.float32)
        self._prompts: dict[str, tuple[torch.Tensor, int]] = {}  # token ids, and how many alternatives are wanted

    def add(self, request: Request) -> None:
        """Take note of a request, should it want its prompt scored."""
        if request.num_prompt_logprobs is not None:
            token_ids = torch.tensor(request.prompt_token_ids, dtype=torch.int64)
            self._prompts[request.request_id] = token_ids, request.num_prompt_logprobs

    def forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def score(self, items: Sequence[PlanItem]) -> tuple[Scores, ...]:
        """For each item with `num_scored`, in order. The decoder's latest pass was that of these items, and is over."""
        scores = []
        row = 0
        for item in items:
            if item.num_scored:
                scores.append(self._score(item, row))
            row += item.num_tokens
        return tuple(scores)

    def _score(self, item: PlanItem, first_row: int) -> Scores:
        prompt, num_logprobs = self._prompts[item.request_id]
        end = item.start + 1 + item.num_scored
        scores: list[Logprobs | None] = []
        for start in range(item.start + 1, end, self._decoder.max_seqs):
            targets = prompt[start : min(end, start + self._decoder.max_seqs)]
            logits = self._decoder.logits_of(first_row + len(scores), len(targets))
            scores += self._look_up(logits, targets, num_logprobs)
        return tuple(scores)

    @torch.inference_mode()
    def _look_up(self, logits: torch.Tensor, targets: torch.Tensor, num_logprobs: int) -> list[Logprobs | None]:
        params = self._params
        num_rows = params.num_rows = len(targets)
        params.num_logprobs[:num_rows] = params.max_logprobs = num_logprobs
        for row in range(num_rows):
            params.bias[row] = (targets[row : row + 1], self._force)
        result = self._decoder.ops.sample(logits, params)
        scores: list[Logprobs | None] = []
        for token_id, target, logprobs in zip(result.token_ids, targets.tolist(), result.logprobs, strict=True):
            if token_id is None or logprobs is None:
                scores.append(None)
                continue
            assert token_id == target, f"token {token_id} was chosen over {target}"
            scores.append(Logprobs(logprobs[0], tuple(logprobs[1])))
        return scores
