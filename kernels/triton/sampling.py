"""Choosing tokens on the device: one upload of parameters, a few launches, one small copy back. Engine thread only.

Which launches a step needs is decided from the parameters, which lie on the host; nothing waits for the device before
`PendingTokens.result`. A batch in which every temperature is 0 takes two.

How far this is from `reference/sampling.py`, which computes in float64:
- The uniform number is the same to the last bit, and so is the order of candidates, greedy choices included, except
  that logits which bias or penalties change are rounded to float32 after each of them.
- A probability is off by 2^-23 (2 |ln p| + 4) of itself at most (p relative to the best; float32 products and an
  exponential of 2^-22), and vanishes below 2^-44. A sum over a vocabulary of V is hence off by 2^-18 of itself at most.
  So the token is the reference's wherever number · mass is at least `DRAW_DISTANCE` of the mass away from the edge of a
  candidate's share, and the ends of top_p and min_p are the reference's at the same distance; top_k's always is.
- Logprobs are off by 4e-6 at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvd_kernels.ops import SamplingBatch, SamplingResult
from kvd_kernels.triton import logit_kernels, sampling_kernels
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.device import Device, open_device
from kvd_kernels.triton.sampling_params import NUMBER_WORDS, Adjustments, Masks, Numbers
from kvd_kernels.triton.variants import ActivationType, Budget, Variant

DRAW_DISTANCE = 2.0**-17
"""Share of the mass; see the module."""
TILE = 2048
MAX_TILES = 128
MAX_VOCAB = TILE * MAX_TILES
CAPACITY = 16384
"""Candidates of a row that are listed; where a draw may need more, the row itself is searched, more slowly."""

USUAL_LOGPROBS = 20
"""The most that the server lets a request ask for. Buffers grow where more are wanted."""

_BLOCK = 2048
_WAYS = 4
_ADJUST_BLOCK = 512
_WARPS = {"choose": 8}
_USUAL_WARPS = 4
_LEAST_ROWS = 16


class _Slot:
    """Buffers of one launch whose result was not taken yet: words on both sides, and the answer on both sides."""

    def __init__(self, device: Device, rows: int, num_words: int, width: int) -> None:
        self.rows, self.num_words, self.width = rows, num_words, width
        self.host_words = device.pinned_bytes(4 * num_words).view(torch.int32)
        self.words = device.zeros((num_words,), torch.int32)
        self.numbers = self.words.view(torch.int64)
        self.token_ids = device.zeros((rows,), torch.int64)
        self.sums = device.zeros((rows,), torch.float64)
        self.chosen = device.zeros((rows,), torch.float32)
        self.best = device.zeros((rows * width,), torch.int64)
        self.host_token_ids = device.pinned_bytes(8 * rows).view(torch.int64)
        self.host_sums = device.pinned_bytes(8 * rows).view(torch.float64)
        self.host_chosen = device.pinned_bytes(4 * rows).view(torch.float32)
        self.host_best = device.pinned_bytes(8 * rows * width).view(torch.int64)


class _Scratch:
    """What lives between the kernels of one launch. Launches follow each other on one stream and share it."""

    def __init__(self, device: Device, rows: int) -> None:
        self.rows = rows
        self.peaks = device.zeros((rows * MAX_TILES,), torch.int64)
        self.counts = device.zeros((rows * MAX_TILES * 8,), torch.int32)
        self.masses = device.zeros((rows * MAX_TILES * 8,), torch.int64)
        self.candidates = device.zeros((rows * CAPACITY,), torch.int32)


@dataclass(frozen=True, slots=True)
class _Step:
    """One launch, as far as kernels have to know it."""

    logits: torch.Tensor
    slot: _Slot
    num_rows: int
    vocab: int
    num_adjusted: int
    first_line: int
    is_greedy: bool
    max_logprobs: int


class PendingTokens:
    """Tokens that are being chosen.

    token_ids: int64 [num_rows] on the device, for whatever is launched after it; -1 where a row is not finite. The
    memory is used again by a launch that comes after `result` was called.
    """

    def __init__(self, sampler: Sampler, step: _Step, num_logprobs: list[int]) -> None:
        self.token_ids = step.slot.token_ids[: step.num_rows]
        self._sampler = sampler
        self._step = step
        self._num_logprobs = num_logprobs
        self._event = sampler.device.compute.mark()
        self._taken: SamplingResult | None = None

    def result(self) -> SamplingResult:
        """Wait for the device."""
        if self._taken is None:
            self._event.wait()
            self._taken = _answer(self._step, self._num_logprobs)
            self._sampler.give_back(self._step.slot)
        return self._taken


def _answer(step: _Step, num_logprobs: list[int]) -> SamplingResult:
    slot, rows = step.slot, step.num_rows
    token_ids = [None if token_id < 0 else token_id for token_id in slot.host_token_ids[:rows].tolist()]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None] = [None] * rows
    if step.max_logprobs < 0:
        return SamplingResult(token_ids, logprobs)
    sums, chosen = slot.host_sums[:rows].tolist(), slot.host_chosen[:rows].tolist()
    ranked = slot.host_best.numpy()
    keys = (ranked >> 32).astype(np.int32)
    best_logits = np.where(keys >= 0, keys, keys ^ np.int32(0x7FFFFFFF)).view(np.float32)
    best_ids = 0xFFFFFFFF - (ranked & 0xFFFFFFFF)
    for row, wanted in enumerate(num_logprobs):
        if wanted < 0 or token_ids[row] is None:
            continue
        listed = slice(row * step.max_logprobs, row * step.max_logprobs + min(wanted, step.vocab))
        values = best_logits[listed].astype(np.float64) - sums[row]
        top = list(zip(best_ids[listed].tolist(), values.tolist(), strict=True))
        logprobs[row] = (chosen[row] - sums[row], top)
    return SamplingResult(token_ids, logprobs)


class Sampler:
    """Owns the buffers. Launches and whatever uses their tokens follow each other on the device's compute stream.

    seam: the device as `device.py` sees it, where the caller has it already.
    """

    def __init__(self, device: torch.device, seam: Device | None = None) -> None:
        self.device = open_device(device)[0] if seam is None else seam
        self._numbers = Numbers()
        self._free: list[_Slot] = []
        self._largest: tuple[int, ...] = (0, 0, 0)
        self._scratch: _Scratch | None = None
        self._logprob_scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._saved: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    def warm_up(self, logits: torch.Tensor, max_rows: int) -> None:
        """Compile and allocate for every kind of step of up to max_rows rows. logits: as for `launch`, of any value."""
        params = SamplingBatch.allocate(max_rows)
        params.num_rows, params.has_ragged, params.max_logprobs = max_rows, True, USUAL_LOGPROBS
        params.top_p.fill_(1.0)
        params.repetition.fill_(1.5)
        params.num_logprobs.fill_(USUAL_LOGPROBS)
        params.masks = [torch.full((-(-logits.shape[1] // 32),), -1, dtype=torch.int32)] * max_rows
        params.prompt_counts = [(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))] * max_rows
        pending = []
        for temperature in (0.0, 1.0):  # two at a time, as a caller that runs ahead has them
            params.temperature.fill_(temperature)
            pending.append(self.launch(logits, params))
        for tokens in pending:
            tokens.result()

    def launch(self, logits: torch.Tensor, params: SamplingBatch) -> PendingTokens:
        """Begin to choose; see the ops contract. Logits are as before when the last of these kernels is over.

        logits: float32 [≥ num_rows, vocab], contiguous, on the device, vocab at most MAX_VOCAB.
        """
        rows, vocab = params.num_rows, logits.shape[1]
        assert vocab <= MAX_VOCAB, f"a vocabulary of {vocab} tokens is more than the kernels take ({MAX_VOCAB})"
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        adjustments = Adjustments(params, NUMBER_WORDS * rows)
        masks = Masks(params, vocab, adjustments.end)
        max_logprobs = params.max_logprobs if rows else -1
        slot = self._take(rows, masks.end, max(max_logprobs, 0))
        words = slot.host_words.numpy()
        numbers = words[: NUMBER_WORDS * rows].view(np.int64).reshape(rows, NUMBER_WORDS // 2)
        self._numbers.fill(params, numbers)
        adjustments.write(words)
        masks.write(words, numbers)
        is_greedy = not bool(params.temperature[:rows].any())
        step = _Step(
            logits, slot, rows, vocab, adjustments.num_rows, adjustments.first_line, is_greedy, max_logprobs
        )  # fmt: skip
        num_logprobs = params.num_logprobs[:rows].tolist() if max_logprobs >= 0 else []
        if rows:
            self._reserve_scratch(rows)
            self._reserve_lists(adjustments, vocab)
            self._reserve_logprobs(max_logprobs)
            self.device.copy(self.device.compute, [(slot.words[: masks.end], slot.host_words[: masks.end])])
            self.device.launch(self._launch_kernels, step)
            self.device.copy(self.device.compute, _copies_back(step))
        return PendingTokens(self, step, num_logprobs)

    def give_back(self, slot: _Slot) -> None:
        """The answer was read; the next launch may write over it."""
        self._free.append(slot)

    def _take(self, rows: int, num_words: int, width: int) -> _Slot:
        for place, slot in enumerate(self._free):
            if slot.rows >= rows and slot.num_words >= num_words and slot.width >= width:
                return self._free.pop(place)
        # Pinning takes long, so a new slot is as large as any that was asked for so far.
        self._free.clear()
        wanted = (_grown(rows, _LEAST_ROWS), _grown(num_words, NUMBER_WORDS * _LEAST_ROWS), width)
        self._largest = tuple(max(pair) for pair in zip(self._largest, wanted, strict=True))
        return _Slot(self.device, *self._largest)

    def _reserve_scratch(self, rows: int) -> None:
        if self._scratch is None or self._scratch.rows < rows:
            self._scratch = _Scratch(self.device, _grown(rows, _LEAST_ROWS))

    def _reserve_lists(self, adjustments: Adjustments, vocab: int) -> None:
        if not adjustments.num_rows:
            return
        num_seen = adjustments.num_rows * _seen_words(vocab)
        if self._saved is None or len(self._saved) < adjustments.num_ids:
            self._saved = self.device.zeros((_grown(adjustments.num_ids, 4096),), torch.float32)
        if self._seen is None or len(self._seen) < num_seen:
            self._seen = self.device.zeros((_grown(num_seen, 4096),), torch.int32)

    def _reserve_logprobs(self, max_logprobs: int) -> None:
        assert self._scratch is not None
        if max_logprobs < 0:
            return
        cells = self._scratch.rows * MAX_TILES
        size = cells * max(max_logprobs, 1)
        held = (0, 0) if self._logprob_scratch is None else tuple(len(part) for part in self._logprob_scratch)
        if held[0] < size or held[1] < cells:
            self._logprob_scratch = (self.device.zeros((size,), torch.int64), self.device.zeros((cells,), torch.int64))

    def _launch_kernels(self, step: _Step) -> None:
        """Everything that runs on the device; arguments are device memory and plain numbers alone."""
        scratch, slot, logits, vocab, rows = self._scratch, step.slot, step.logits, step.vocab, step.num_rows
        assert scratch is not None
        num_tiles = -(-vocab // TILE)
        grid = (rows, num_tiles)
        tiles = {"TILE": TILE, "MAX_TILES": MAX_TILES}
        if step.num_adjusted:
            assert self._saved is not None
            assert self._seen is not None
            _call(
                logit_kernels.adjust, (step.num_adjusted,), logits, slot.words, self._saved, self._seen,
                step.first_line, _seen_words(vocab), vocab, BLOCK=_ADJUST_BLOCK,
            )  # fmt: skip
        _call(sampling_kernels.find_peaks, grid, logits, scratch.peaks, slot.numbers, vocab, num_tiles, **tiles)
        if step.is_greedy:
            _call(
                sampling_kernels.choose_greedy, (rows,), scratch.peaks, slot.token_ids, num_tiles, MAX_TILES=MAX_TILES
            )  # fmt: skip
        else:
            measured = (logits, scratch.peaks, slot.numbers, scratch.counts, scratch.masses)
            _call(sampling_kernels.measure, grid, *measured, vocab, num_tiles, **tiles)
            _call(
                sampling_kernels.collect, grid, *measured, scratch.candidates, vocab, num_tiles, CAPACITY, **tiles
            )  # fmt: skip
            _call(
                sampling_kernels.choose, (rows,), *measured, scratch.candidates, slot.token_ids, vocab, num_tiles,
                CAPACITY, BLOCK=_BLOCK, WAYS=_WAYS, MAX_TILES=MAX_TILES,
            )  # fmt: skip
        if step.num_adjusted:
            _call(
                logit_kernels.restore, (step.num_adjusted,), logits, slot.words, self._saved, step.first_line, vocab,
                BLOCK=_ADJUST_BLOCK,
            )  # fmt: skip
        if step.max_logprobs >= 0:
            assert self._logprob_scratch is not None
            num_slots = max(step.max_logprobs, 1)
            wanted = (logits, slot.numbers, slot.token_ids, *self._logprob_scratch)
            _call(logit_kernels.best_of_tiles, grid, *wanted, vocab, num_slots, **tiles)
            _call(
                logit_kernels.merge_best, (rows,), *wanted, slot.sums, slot.chosen, slot.best, vocab, num_slots,
                num_tiles, step.max_logprobs, MAX_TILES=MAX_TILES,
            )  # fmt: skip


def _copies_back(step: _Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    slot, rows = step.slot, step.num_rows
    pairs = [(slot.host_token_ids[:rows], slot.token_ids[:rows])]
    if step.max_logprobs >= 0:
        pairs += [(slot.host_sums[:rows], slot.sums[:rows]), (slot.host_chosen[:rows], slot.chosen[:rows])]
        num_best = rows * step.max_logprobs
        pairs.append((slot.host_best[:num_best], slot.best[:num_best]))
    return pairs


def _seen_words(vocab: int) -> int:
    return -(-vocab // 32)


def _grown(size: int, least: int) -> int:
    """The next power of two, so that growing is rare."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def _call(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    warps = _WARPS.get(kernel.__name__, _USUAL_WARPS)
    kernel[grid](*arguments, num_warps=warps, num_stages=1, enable_fp_fusion=False, **constants)


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """One form of each kernel, for a vocabulary that 16 divides; the same on every card and for every activation."""
    del card, dtype
    row = {"logits": "*fp32", "peaks": "*i64"}
    measured = {**row, "numbers": "*i64", "counts": "*i32", "masses": "*i64"}
    size = {"vocab": "i32", "num_tiles": "i32"}
    wanted = {"logits": "*fp32", "numbers": "*i64", "token_ids": "*i64", "tile_best": "*i64", "tile_masses": "*i64"}
    lists = {"logits": "*fp32", "words": "*i32", "saved": "*fp32"}
    tiles = {"TILE": TILE, "MAX_TILES": MAX_TILES}
    tile_loads = Budget(min_wide_loads=TILE // (32 * _USUAL_WARPS * 4))
    forms: list[tuple[Any, dict[str, str], dict[str, Any], Budget]] = [
        (sampling_kernels.find_peaks, {**row, "numbers": "*i64", **size}, tiles, tile_loads),
        (
            sampling_kernels.choose_greedy,
            {"peaks": "*i64", "token_ids": "*i64", "num_tiles": "i32"},
            {"MAX_TILES": MAX_TILES},
            Budget(),
        ),
        (sampling_kernels.measure, {**measured, **size}, tiles, tile_loads),
        (
            sampling_kernels.collect,
            {**measured, "candidates": "*i32", **size, "capacity": "i32"},
            tiles,
            tile_loads,
        ),
        (
            sampling_kernels.choose,
            {**measured, "candidates": "*i32", "token_ids": "*i64", **size, "capacity": "i32"},
            {"BLOCK": _BLOCK, "WAYS": _WAYS, "MAX_TILES": MAX_TILES},
            Budget(),
        ),
        (
            logit_kernels.adjust,
            {**lists, "seen": "*i32", "first_line": "i32", "num_seen_words": "i32", "vocab": "i32"},
            {"BLOCK": _ADJUST_BLOCK},
            Budget(),
        ),
        (logit_kernels.restore, {**lists, "first_line": "i32", "vocab": "i32"}, {"BLOCK": _ADJUST_BLOCK}, Budget()),
        (logit_kernels.best_of_tiles, {**wanted, "vocab": "i32", "num_slots": "i32"}, tiles, tile_loads),
        (
            logit_kernels.merge_best,
            {
                **wanted, "sums": "*fp64", "chosen": "*fp32", "best": "*i64", "vocab": "i32", "num_slots": "i32",
                "num_tiles": "i32", "width": "i32",
            },
            {"MAX_TILES": MAX_TILES},
            Budget(),
        ),
    ]  # fmt: skip
    return [
        Variant(
            name=kernel.__name__,
            kernel=kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constants=constants,
            num_warps=_WARPS.get(kernel.__name__, _USUAL_WARPS),
            num_stages=1,
            divisible=tuple(name for name, kind in signature.items() if kind.startswith("*") or name == "vocab"),
            budget=budget,
            options={"enable_fp_fusion": False},
        )
        for kernel, signature, constants, budget in forms
    ]
