"""Rotary embedding, and what a key bias adds to a score. Element-wise, so the same bits in every batch. Stateless."""

from __future__ import annotations

import torch

from kvd_kernels.ops import RopeTable


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Rotate the pairs (i, i + rotary_dim / 2) of every head by the angle of its token's position.

    x: float32 [tokens, heads, head_dim]; positions: integers [tokens]. Channels from rotary_dim on pass.
    """
    half = rope.cos.shape[1]
    cos = rope.cos[positions].unsqueeze(1)
    sin = rope.sin[positions].unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    result = torch.empty_like(x)
    torch.sub(first * cos, second * sin, out=result[..., :half])
    torch.add(second * cos, first * sin, out=result[..., half : 2 * half])
    result[..., 2 * half :] = x[..., 2 * half :]
    return result


def bias_coefficients(q: torch.Tensor, key_bias: torch.Tensor, half: int) -> torch.Tensor:
    """Per query, what q · RoPE_p(key_bias) is made of, apart from the key position p.

    q · RoPE_p(b) = Σ_i cos_i(p) (q_i b_i + q_j b_j) + sin_i(p) (q_j b_i - q_i b_j) + Σ of passing channels,
    j = i + rotary_dim / 2. So the bias costs one dot product per key with a table that all layers share.

    q: float32 [..., head_dim] after RoPE; key_bias: broadcastable to it; half: rotary_dim / 2.
    Returns [..., head_dim]: cos part, sin part, passing channels; to be multiplied with `position_rows`.
    """
    q1, q2, b1, b2 = q[..., :half], q[..., half : 2 * half], key_bias[..., :half], key_bias[..., half : 2 * half]
    passing = q[..., 2 * half :] * key_bias[..., 2 * half :]
    return torch.cat((q1 * b1 + q2 * b2, q2 * b1 - q1 * b2, passing), dim=-1)


def position_rows(positions: torch.Tensor, rope: RopeTable, head_dim: int) -> torch.Tensor:
    """[…] integer positions → float32 […, head_dim]: cos, sin, and ones for the passing channels."""
    cos, sin = rope.cos[positions], rope.sin[positions]
    passing = head_dim - 2 * rope.cos.shape[1]
    return torch.cat((cos, sin, cos.new_ones(*positions.shape, passing)), dim=-1)
