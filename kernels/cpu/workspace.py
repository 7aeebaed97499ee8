"""Buffers between stages: stages run one after the other, so all layers share one buffer per form. Engine thread."""

from __future__ import annotations

import torch

from kvd_kernels.cpu.packing import InputForm, aligned_bytes

SPLIT_SLOTS = 256
MAX_PARTIALS = 4 << 20


class Workspace:
    """Grows on demand; what was handed out stays valid, since its user keeps it."""

    def __init__(self) -> None:
        self._quantized: dict[tuple[InputForm, int], tuple[torch.Tensor, ...]] = {}
        self._partials: torch.Tensor | None = None

    def quantized(self, rows: int, form: InputForm) -> tuple[torch.Tensor, ...]:
        """(codes uint8 [rows · stride], scales float32 [rows, groups], sums float32 [rows, groups])."""
        key = (form, rows)
        known = self._quantized.get(key)
        if known is None:
            codes = aligned_bytes(rows * form.stride)
            codes.zero_()  # the padding between rows is read with weights of 0
            known = (codes, torch.zeros(rows, form.groups), torch.zeros(rows, form.groups))
            self._quantized[key] = known
        return known

    def partials(self, max_seqs: int, max_slots: int, num_heads: int, head_dim: int) -> torch.Tensor:
        """float32 buffer for what splits of decoding sequences leave to be merged."""
        num_splits = -(-max_slots // SPLIT_SLOTS)
        wanted = min(max_seqs * num_splits * num_heads * (head_dim + 2), MAX_PARTIALS)
        if self._partials is None or self._partials.numel() < wanted:
            self._partials = aligned_bytes(4 * wanted).view(torch.float32).zero_()  # counters begin at zero
        return self._partials
