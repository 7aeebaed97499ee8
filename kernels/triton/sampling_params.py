"""A SamplingBatch as the words that the sampling kernels read: one upload per step. Engine thread only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_kernels.ops import SamplingBatch

NUMBER_WORDS = 16
"""int32 words of the eight int64 numbers that every row has; the buffer begins with them."""

_LINE_WORDS = 16
_LEAST_X = -200.0  # 2^-200 is 0 in the kernels
_LARGEST = 3e38
_NO_LIMIT = -1000.0

_Ids = npt.NDArray[np.int64]


def fill_numbers(params: SamplingBatch, target: npt.NDArray[np.int64]) -> None:
    """target int64 [num_rows, 8]: what the kernels read of each row.

    top_k; top_p in 2^-64ths, 0 where it is 1; seed; position; then as the bits of a float32: 2 log2(e) / temperature,
    0 where that is 0; the halved difference of logits at which a probability counts as 0; log2(min_p); then
    num_logprobs in the low half, and in the high half where the row's mask begins, which `Masks` adds.
    """
    rows = params.num_rows
    temperature = params.temperature[:rows].numpy().astype(np.float64)
    top_p = params.top_p[:rows].numpy().astype(np.float64)
    min_p = params.min_p[:rows].numpy().astype(np.float64)
    is_sampled = temperature != 0
    factor = np.zeros(rows)
    np.divide(2 * math.log2(math.e), temperature, out=factor, where=is_sampled)
    np.clip(factor, 1 / _LARGEST, _LARGEST, out=factor, where=is_sampled)
    floor = np.zeros(rows)
    np.divide(_LEAST_X, factor, out=floor, where=is_sampled)
    limit = np.full(rows, _NO_LIMIT)
    np.log2(min_p, out=limit, where=min_p > 0)
    target[:, 0] = params.top_k[:rows].numpy()
    target[:, 1] = np.where(top_p < 1, np.maximum(top_p * 2.0**64, 1), 0).astype(np.uint64).view(np.int64)
    target[:, 2] = params.seeds[:rows].numpy()
    target[:, 3] = params.positions[:rows].numpy()
    for column, values in ((4, factor), (5, np.maximum(floor, -_LARGEST)), (6, np.minimum(limit, 0))):
        target[:, column] = values.astype(np.float32).view(np.int32)
    target[:, 7] = params.num_logprobs[:rows].numpy() & 0xFFFFFFFF


class Numbers:
    """The numbers of the step before, which are those of this one but for the positions as long as no row changes."""

    def __init__(self) -> None:
        self._key: tuple[bytes, ...] = ()
        self._filled = np.zeros((0, NUMBER_WORDS // 2), np.int64)

    def fill(self, params: SamplingBatch, target: npt.NDArray[np.int64]) -> None:
        """What `fill_numbers` does."""
        rows = params.num_rows
        columns = (
            params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, params.num_logprobs,
        )  # fmt: skip
        key = tuple(column[:rows].numpy().tobytes() for column in columns)
        if key != self._key:
            self._filled = np.zeros((rows, NUMBER_WORDS // 2), np.int64)
            fill_numbers(params, self._filled)
            self._key = key
        target[:] = self._filled
        target[:, 3] = params.positions[:rows].numpy()


class Adjustments:
    """The rows whose logits are to be changed, and how, as int32 words.

    num_rows: of these. num_ids: in all their lists. end: words in all, from the beginning of the buffer on.
    Lines of 16 words, one per row: its number; where its ids begin; how many ids other rows have before it; how many
    are biased, of the prompt, of the output, banned (in this order they lie there); where the values of the biased
    begin, which the counts of the output follow; presence, frequency, repetition as the bits of a float32.
    """

    def __init__(self, params: SamplingBatch, first_line: int) -> None:
        self.first_line = first_line
        self._lists: list[npt.NDArray[Any]] = []
        lines: list[tuple[int, ...]] = []
        self._gathered: list[tuple[int, list[_Ids], npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []
        if params.has_ragged:
            for row in range(params.num_rows):
                self._gather(params, row)
        self.num_rows = len(self._gathered)
        self.num_ids = 0
        place = first_line + _LINE_WORDS * self.num_rows
        for row, ids, biases, counts in self._gathered:
            sizes = [len(part) for part in ids]
            values_start = place + sum(sizes)
            penalties = np.array(
                [float(values[row]) for values in (params.presence, params.frequency, params.repetition)], np.float32
            )
            lines.append((row, place, self.num_ids, *sizes, values_start, *penalties.view(np.int32).tolist()))
            self._lists += [*ids, biases, counts]
            self.num_ids += sum(sizes)
            place = values_start + len(biases) + len(counts)
        self.end = place
        self._lines = lines

    def _gather(self, params: SamplingBatch, row: int) -> None:
        none = np.empty(0, np.int64)
        bias, output, banned = params.bias[row], params.output_counts[row], params.banned[row]
        is_repetition = float(params.repetition[row]) != 1.0
        prompt = params.prompt_counts[row] if is_repetition else None
        if not is_repetition and not float(params.presence[row]) and not float(params.frequency[row]):
            output = None
        if bias is None and prompt is None and output is None and banned is None:
            return
        biased, biases = none, np.empty(0, np.float32)
        if bias is not None:
            # An id that comes more than once gets the sum, as in the reference.
            biased, places = np.unique(bias[0].numpy(), return_inverse=True)
            biases = np.bincount(places, weights=bias[1].numpy().astype(np.float64)).astype(np.float32)
        ids = [
            biased,
            none if prompt is None else prompt[0].numpy(),
            none if output is None else output[0].numpy(),
            none if banned is None else banned.numpy(),
        ]
        counts = none if output is None else output[1].numpy()
        self._gathered.append((row, ids, biases.view(np.int32), counts))

    def write(self, words: npt.NDArray[np.int32]) -> None:
        place = self.first_line
        for line in self._lines:
            words[place : place + len(line)] = line
            place += _LINE_WORDS
        for part in self._lists:
            words[place : place + len(part)] = part
            place += len(part)
        assert place == self.end


class Masks:
    """The rows that may not have every token: 64 tokens to an int64 word, from int64 word `first_number` on.

    end: int32 words in all, from the beginning of the buffer on.
    """

    def __init__(self, params: SamplingBatch, vocab: int, first_word: int) -> None:
        self._first_number = -(-first_word // 2)
        self._numbers_per_row = -(-vocab // 64)
        masks = params.masks[: params.num_rows] if params.has_ragged else []
        self._masks = [(row, mask.numpy()) for row, mask in enumerate(masks) if mask is not None]
        assert all(len(mask) == -(-vocab // 32) for _, mask in self._masks)
        self.end = 2 * (self._first_number + self._numbers_per_row * len(self._masks)) if self._masks else first_word

    def write(self, words: npt.NDArray[np.int32], numbers: npt.NDArray[np.int64]) -> None:
        """numbers int64 [num_rows, 8]: their beginning in `words`, filled already."""
        start = self._first_number
        for row, mask in self._masks:
            numbers[row, 7] |= np.int64(start << 32)
            words[2 * start : 2 * start + len(mask)] = mask
            start += self._numbers_per_row
