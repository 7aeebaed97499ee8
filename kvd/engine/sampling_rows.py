"""What sampling needs to know of each request, and the rows of the SamplingBatch. Engine thread only.

Invariant: row r of the buffers holds the parameters of the request that `fill` last put there. They do not change
while a request lives, so a request that samples in the same row as in the step before costs its position alone;
token counts, bans and masks, which do change, are looked at for the requests that have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvd.core import Request
from kvd.engine.grammar_masks import GrammarRun
from kvd_kernels.ops import Ragged, SamplingBatch

_MASK64 = (1 << 64) - 1
_FIRST_CAPACITY = 64


class TokenCounts:
    """How often each token has come, in tensors that grow in place."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._token_ids = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._view: Ragged | None = None

    def _grow(self) -> None:
        """Twice the room; views that were given out keep the old arrays, and are replaced by the caller."""
        self._token_ids, self._counts = (
            np.concatenate([array, np.zeros_like(array)]) for array in (self._token_ids, self._counts)
        )

    def add(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1  # seen through the latest view, too
            return
        place = len(self._places)
        if place == len(self._counts):
            self._grow()
        self._places[token_id] = place
        self._token_ids[place], self._counts[place] = token_id, 1
        self._view = None

    def view(self) -> Ragged | None:
        """(token ids, counts) in the order of first coming; None while there are none. Counts go on in it."""
        num_tokens = len(self._places)
        if self._view is None and num_tokens:
            self._view = (
                torch.from_numpy(self._token_ids[:num_tokens]),
                torch.from_numpy(self._counts[:num_tokens]),
            )
        return self._view


class RequestSampling:
    """What is remembered of one request from its first step to its end, preemptions included.

    seed: of the request, or one drawn for it. grammar: None where it has none.
    """

    __slots__ = ("bias", "grammar", "key", "min_position", "output_counts", "params", "prompt_counts", "stop_ids")

    def __init__(self, request: Request, seed: int, grammar: GrammarRun | None = None) -> None:
        self.params = params = request.sampling
        self.key = sampling_key(seed, request.choice_index)
        self.grammar = grammar
        self.prompt_counts: Ragged | None = None
        self.output_counts: TokenCounts | None = None
        self.bias: Ragged | None = None
        self.stop_ids: torch.Tensor | None = None
        self.min_position = 0  # before it, `stop_ids` are banned
        if params.repetition_penalty != 1.0:
            ids, counts = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int64), return_counts=True)
            self.prompt_counts = (torch.from_numpy(ids), torch.from_numpy(counts))
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self.output_counts = TokenCounts()
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            self.bias = (torch.tensor(token_ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32))
        if params.min_tokens and params.stop_token_ids and grammar is None:  # whose mask sees to it
            self.stop_ids = torch.tensor(sorted(params.stop_token_ids), dtype=torch.int64)
            self.min_position = len(request.prompt_token_ids) + params.min_tokens

    @property
    def is_ragged(self) -> bool:
        """May have an entry in the lists of a SamplingBatch."""
        entries = (self.output_counts, self.bias, self.stop_ids, self.grammar)
        return any(entry is not None for entry in entries)

    @property
    def awaits_output(self) -> bool:
        """Which token comes next depends on those before it in more ways than by the logits."""
        return self.output_counts is not None or self.grammar is not None


class SamplingRows:
    """Owns the SamplingBatch of one runner."""

    def __init__(self, max_seqs: int) -> None:
        self.batch = batch = SamplingBatch.allocate(max_seqs)
        self._rows: list[RequestSampling] = []  # who was put where by the latest `fill`
        self._ragged: list[tuple[int, RequestSampling]] = []
        self._positions = batch.positions.numpy()
        self._columns = tuple(
            tensor.numpy()
            for tensor in (
                batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.presence, batch.frequency,
                batch.repetition, batch.seeds, batch.num_logprobs,
            )
        )  # fmt: skip

    def fill(self, rows: list[RequestSampling], positions: Sequence[int]) -> SamplingBatch:
        """Describe the requests that sample in this step, in the order of their logits rows.

        positions: absolute position of the token to be sampled, by row.
        """
        batch = self.batch
        if rows != self._rows:  # compares identities: a RequestSampling equals itself alone
            self._change(rows)
        self._positions[: len(rows)] = positions
        if self._ragged:
            batch.has_ragged = self._fill_ragged(positions)
        return batch

    def _change(self, rows: list[RequestSampling]) -> None:
        """Write the rows that hold another's parameters."""
        batch = self.batch
        for row, sampling in enumerate(rows):
            if row >= len(self._rows) or self._rows[row] is not sampling:
                self._write(row, sampling)
        for row in range(len(rows), len(self._rows)):  # keep nothing of requests that may have ended
            batch.prompt_counts[row] = batch.output_counts[row] = batch.bias[row] = None
            batch.banned[row] = batch.masks[row] = None
        self._rows = rows
        self._ragged = [(row, sampling) for row, sampling in enumerate(rows) if sampling.is_ragged]
        batch.num_rows = len(rows)
        batch.max_logprobs = int(batch.num_logprobs[: len(rows)].max()) if rows else -1
        batch.has_ragged = False

    def _write(self, row: int, sampling: RequestSampling) -> None:
        params = sampling.params
        values = (
            params.temperature, params.top_k, params.top_p, params.min_p, params.presence_penalty,
            params.frequency_penalty, params.repetition_penalty, sampling.key,
            -1 if params.num_logprobs is None else params.num_logprobs,
        )  # fmt: skip
        for column, value in zip(self._columns, values, strict=True):
            column[row] = value
        self.batch.prompt_counts[row] = sampling.prompt_counts
        self.batch.bias[row] = sampling.bias
        self.batch.output_counts[row] = self.batch.banned[row] = self.batch.masks[row] = None

    def _fill_ragged(self, positions: Sequence[int]) -> bool:
        """What changes from step to step in the lists; returns whether any row has an entry at all."""
        batch = self.batch
        has_any = False
        for row, sampling in self._ragged:
            counts = None if sampling.output_counts is None else sampling.output_counts.view()
            banned = sampling.stop_ids if positions[row] < sampling.min_position else None
            mask = None if sampling.grammar is None else sampling.grammar.mask(positions[row])
            batch.output_counts[row], batch.banned[row], batch.masks[row] = counts, banned, mask
            has_any = has_any or any(
                entry is not None for entry in (counts, banned, mask, sampling.bias, sampling.prompt_counts)
            )
        return has_any


def sampling_key(seed: int, choice_index: int) -> int:
    """One int64 key from a seed and a choice index, well mixed (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (seed + 0x9E3779B97F4A7C15 * (choice_index + 1)) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    value ^= value >> 31
    return value - (1 << 64) if value >= 1 << 63 else value
