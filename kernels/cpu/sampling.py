"""Sampling parameters and results as the native stage reads and writes them. Engine thread."""

from __future__ import annotations

import ctypes

import torch

from kvd_kernels.cpu.structs import Ragged, SampleArgs
from kvd_kernels.ops import SamplingBatch, SamplingResult

MAX_VOCAB_SIZE = 1_000_000
"""What the threads' scratch memory holds: float64 values, ids and a bit per token in 16 MiB."""


class Sampler:
    """The arguments of one sampling stage over `logits`, float32 [rows, vocab]. The params' buffers are fixed."""

    def __init__(self, params: SamplingBatch, logits: torch.Tensor, rows: int) -> None:
        max_seqs, vocab_size = params.temperature.shape[0], logits.shape[1]
        assert logits.dtype is torch.float32
        assert logits.is_contiguous()
        if vocab_size > MAX_VOCAB_SIZE:
            raise NotImplementedError(f"a vocabulary of {vocab_size} tokens; up to {MAX_VOCAB_SIZE} can be sampled")
        self.params = params
        self._logits = logits
        self._token_ids = torch.zeros(max_seqs, dtype=torch.int64)
        self._logprobs = torch.zeros(max_seqs, dtype=torch.float64)
        self._top_ids = torch.zeros((max_seqs, 0), dtype=torch.int64)
        self._top_logprobs = torch.zeros((max_seqs, 0), dtype=torch.float64)
        self._ragged = tuple(_RaggedRows(max_seqs) for _ in range(4))
        self._masks = (ctypes.c_void_p * max_seqs)()
        self._has_ragged = False
        empty = Ragged(None, None, None)
        self.args = SampleArgs(
            rows, logits.data_ptr(), vocab_size, params.temperature.data_ptr(), params.top_p.data_ptr(),
            params.min_p.data_ptr(), params.presence.data_ptr(), params.frequency.data_ptr(),
            params.repetition.data_ptr(), params.top_k.data_ptr(), params.seeds.data_ptr(),
            params.positions.data_ptr(), params.num_logprobs.data_ptr(), empty, empty, empty, empty, None,
            self._token_ids.data_ptr(), self._logprobs.data_ptr(), None, None, 0,
        )  # fmt: skip

    def refresh(self) -> None:
        """Take over what changed in the params since the last step; to be called before every run."""
        params, args = self.params, self.args
        if params.max_logprobs > self._top_ids.shape[1]:
            max_seqs = self._token_ids.shape[0]
            self._top_ids = torch.zeros((max_seqs, params.max_logprobs), dtype=torch.int64)
            self._top_logprobs = torch.zeros((max_seqs, params.max_logprobs), dtype=torch.float64)
            args.top_ids, args.top_logprobs = self._top_ids.data_ptr(), self._top_logprobs.data_ptr()
            args.top_stride = params.max_logprobs
        if not (params.has_ragged or self._has_ragged):
            return
        prompt, output, bias, banned = self._ragged
        for row in range(params.num_rows):
            prompt.set(row, params.prompt_counts[row])
            output.set(row, params.output_counts[row])
            bias.set(row, params.bias[row])
            ids = params.banned[row]
            banned.set(row, None if ids is None else (ids, ids))
            self._masks[row] = self._mask_address(params.masks[row])
        args.masks = ctypes.addressof(self._masks) if params.has_ragged else None
        self._has_ragged = params.has_ragged
        args.prompt, args.output, args.bias, args.banned = (
            (rows.struct for rows in self._ragged) if params.has_ragged else (Ragged(None, None, None),) * 4
        )

    def _mask_address(self, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            return None
        assert mask.dtype is torch.int32
        assert len(mask) == -(-self._logits.shape[1] // 32)
        return mask.data_ptr()

    def result(self) -> SamplingResult:
        """What the last run chose."""
        params = self.params
        chosen: list[int] = self._token_ids[: params.num_rows].tolist()
        if params.max_logprobs < 0:
            token_ids: list[int | None] = [None if token_id < 0 else token_id for token_id in chosen]
            return SamplingResult(token_ids, [None] * params.num_rows)
        token_ids = []
        logprobs: list[tuple[float, list[tuple[int, float]]] | None] = []
        for row, token_id in enumerate(chosen):
            token_ids.append(None if token_id < 0 else token_id)
            wanted = int(params.num_logprobs[row])
            if token_id < 0 or wanted < 0:
                logprobs.append(None)
                continue
            count = min(wanted, self._logits.shape[1])
            top = zip(self._top_ids[row, :count].tolist(), self._top_logprobs[row, :count].tolist(), strict=True)
            logprobs.append((float(self._logprobs[row]), list(top)))
        return SamplingResult(token_ids, logprobs)


class _RaggedRows:
    """Addresses of one ragged input. The tensors stay alive in the SamplingBatch."""

    def __init__(self, max_seqs: int) -> None:
        self._ids = (ctypes.c_void_p * max_seqs)()
        self._values = (ctypes.c_void_p * max_seqs)()
        self._counts = (ctypes.c_int64 * max_seqs)()
        self.struct = Ragged(
            ctypes.addressof(self._ids), ctypes.addressof(self._values), ctypes.addressof(self._counts)
        )

    def set(self, row: int, entry: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if entry is None or not len(entry[0]):
            self._ids[row] = None
            return
        ids, values = entry
        assert ids.dtype is torch.int64
        self._ids[row], self._values[row], self._counts[row] = ids.data_ptr(), values.data_ptr(), len(ids)
