"""AutoAWQ's GEMM format: unpacking its matrices.

Purpose: `qweight`, `qzeros` and `scales` become an `Int4Weight`.
Owner thread: the one that loads the model.
Invariant: codes are never rounded again. Scales are kept bit for bit when they are float16. The offset −z·s
is rounded once to float16, which moves a weight by at most 2^-11 of |z·s| (under 1% of one step s).

An int32 of `qweight` [K, N / 8] holds eight outputs of one input channel; from the lowest nibble up they are
the outputs 0, 2, 4, 6, 1, 3, 5, 7 of that eight. `qzeros` [K / group, N / 8] is packed alike.
"""

from __future__ import annotations

import torch

from kvd.errors import CheckpointError, UnsupportedModel
from kvd_kernels.weights import Int4Weight

NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
FLOAT16_MAX = 65504.0


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 [R, N / 8] to uint8 codes [R, N]."""
    rows, words = packed.shape
    pairs = packed.contiguous().view(torch.uint8).view(rows, words, 4)  # little endian: low nibbles first
    codes = torch.empty((rows, words, 8), dtype=torch.uint8)
    for byte in range(4):
        codes[:, :, NIBBLE_OUTPUTS[2 * byte]] = pairs[:, :, byte] & 15
        codes[:, :, NIBBLE_OUTPUTS[2 * byte + 1]] = pairs[:, :, byte] >> 4
    return codes.view(rows, words * 8)


def to_float16_scales(scales: torch.Tensor, where: str) -> torch.Tensor:
    """Scales as float16, each finite and not zero; `where` names file and tensor.

    float16 stays as it is. A bfloat16 or float32 scale is rounded to the nearest float16 (exact for bfloat16
    in float16's normal range); one beyond that range, or so small that nothing would remain, is refused.
    """
    if not scales.is_floating_point():
        raise CheckpointError(f"{where}: scales have the type {scales.dtype}, a float type is expected")
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{where}: scales hold NaN or infinity")
    if bool((scales == 0).any()):
        raise CheckpointError(f"{where}: scales hold zeros")
    if scales.dtype == torch.float16:
        return scales
    if float(scales.abs().max()) > FLOAT16_MAX:
        raise UnsupportedModel(f"{where}: a scale of {float(scales.abs().max()):g} is beyond float16")
    rounded = scales.to(torch.float16)
    if bool((rounded == 0).any()):
        smallest = float(scales.abs().min())
        raise UnsupportedModel(f"{where}: a scale of {smallest:g} is too small for float16")
    return rounded


def unpack_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    *,
    where: str,
) -> Int4Weight:
    """One AWQ matrix in kvd's form.

    qweight int32 [K, N / 8]; qzeros int32 [K / group_size, N / 8]; scales [K / group_size, N];
    group_size a divisor of K; shapes and dtypes are the caller's to check. `where` names file and module.
    """
    float16_scales = to_float16_scales(scales, f"{where}.scales").T.contiguous()
    zeros = unpack_nibbles(qzeros).T.to(torch.float32)
    offsets = -zeros * float16_scales.float()
    if offsets.numel() and float(offsets.abs().max()) > FLOAT16_MAX:
        raise UnsupportedModel(f"{where}.scales: zero point times scale is beyond float16")
    codes = unpack_nibbles(qweight).T.contiguous()
    codes = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    return Int4Weight(codes, float16_scales, offsets.to(torch.float16), group_size)
