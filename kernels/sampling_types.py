"""The parameters and the outcome of sampling, as every backend takes and gives them. `ops.py` hands them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Ragged = tuple[torch.Tensor, torch.Tensor]
"""(token ids int64 [n], a value for each: int64 or float32 [n])"""


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters in preallocated buffers; row r < num_rows belongs to logits row r, others mean nothing.

    temperature, top_p, min_p, presence, frequency, repetition   float32 [max_seqs]
    top_k           int64 [max_seqs]; 0 means the whole vocabulary
    seeds           int64 [max_seqs]; the generator's key, from (seed, choice index)
    positions       int64 [max_seqs]; absolute position of the token to be sampled, the generator's counter
    num_logprobs    int64 [max_seqs]: -1 none, 0 the sampled token, n also the n best
    max_logprobs    the greatest num_logprobs of a live row; -1 where there is none
    has_ragged      some live row has an entry in the lists below; if not, nobody need look at them

    Lists of max_seqs rows:
    prompt_counts   (token ids, counts) of the prompt, or None when no penalty needs them
    output_counts   the same for output tokens
    bias            (token ids, float32 values) to add, or None
    banned          int64 token ids with probability 0 (stop tokens before min_tokens), or None
    masks           int32 [⌈vocab / 32⌉], bit i % 32 of word i // 32 says whether token i may be sampled, or None: all
                    may. Some token must be left that is neither masked out nor banned.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    num_logprobs: torch.Tensor
    prompt_counts: list[Ragged | None]
    output_counts: list[Ragged | None]
    bias: list[Ragged | None]
    banned: list[torch.Tensor | None]
    masks: list[torch.Tensor | None]
    num_rows: int = 0
    max_logprobs: int = -1
    has_ragged: bool = False

    @classmethod
    def allocate(cls, max_seqs: int) -> SamplingBatch:
        """Buffers for max_seqs rows, of which none is live."""
        floats = [torch.zeros(max_seqs, dtype=torch.float32) for _ in range(6)]
        integers = [torch.zeros(max_seqs, dtype=torch.int64) for _ in range(4)]
        temperature, top_p, min_p, presence, frequency, repetition = floats
        top_k, seeds, positions, num_logprobs = integers
        return cls(
            temperature, top_k, top_p, min_p, presence, frequency, repetition, seeds, positions, num_logprobs,
            [None] * max_seqs, [None] * max_seqs, [None] * max_seqs, [None] * max_seqs, [None] * max_seqs,
        )  # fmt: skip


@dataclass(slots=True)
class SamplingResult:
    """token_ids: R ids, None where the row is not finite.

    logprobs: per row None or (logprob of the token, [(id, logprob) best first]).
    Logprobs are of the raw distribution: before bias, penalties, ban, mask, temperature and truncation.
    """

    token_ids: list[int | None]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
