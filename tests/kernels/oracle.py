"""Dense float64 statements of the ops, written from the contract and independent of every implementation.

They work on numpy arrays, take a whole sequence at a time, and find K and V in a block by the index formulas of
`kv_format`, element by element. `linear_a8` is the one exact statement: the a8 formula, step by step in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, GroupFormat, LayerFormat, k_index, v_index
from kvd_kernels.weights import FloatWeight, Int4Weight, Linear, WeightMatrix

Array = npt.NDArray[np.float64]


# --------------------------------------------------------------------------- weights and linear layers


def codes_of(weight: WeightMatrix) -> npt.NDArray[np.int64]:
    """Integer codes [N, K] of an int4 or int8 weight."""
    assert not isinstance(weight, FloatWeight)
    raw = weight.codes.numpy().astype(np.int64)
    if not isinstance(weight, Int4Weight):
        return raw
    codes = np.empty((raw.shape[0], raw.shape[1] * 2), np.int64)
    codes[:, 0::2] = raw % 16
    codes[:, 1::2] = raw // 16
    return codes


def dense(weight: WeightMatrix) -> Array:
    """The exact matrix [N, K]."""
    if isinstance(weight, FloatWeight):
        return weight.values.double().numpy()
    group = np.arange(weight.num_inputs) // weight.group_size
    values = codes_of(weight) * weight.scales.double().numpy()[:, group]
    if isinstance(weight, Int4Weight):
        values = values + weight.offsets.double().numpy()[:, group]
    return values


def activation_groups(weight: WeightMatrix) -> list[slice]:
    """Input channels that share a scale of x: at most 128, never across two weight groups."""
    if isinstance(weight, FloatWeight):
        return []
    groups = []
    for start in range(0, weight.num_inputs, weight.group_size):
        for cut in range(start, start + weight.group_size, 128):
            groups.append(slice(cut, min(cut + 128, start + weight.group_size)))
    return groups


def linear(x: Array, layer: Linear, residual: Array | None) -> tuple[Array, Array, Array]:
    """(y, Σ|terms|, worst case of rounding x to int8 per group): float64 [rows, N] each."""
    y, terms, slack = [], [], []
    for part in layer.parts:
        weight = dense(part)
        y.append(x @ weight.T)
        terms.append(np.abs(x) @ np.abs(weight).T)
        bound = np.zeros_like(y[-1])
        for group in activation_groups(part):
            step = np.abs(x[:, group]).max(axis=1, initial=0.0) / 127
            bound += step[:, None] / 2 * np.abs(weight[:, group]).sum(axis=1)
        slack.append(bound)
    result = np.concatenate(y, axis=1)
    total = np.concatenate(terms, axis=1)
    if layer.bias is not None:
        result = result + layer.bias.double().numpy()
        total = total + np.abs(layer.bias.double().numpy())
    if residual is not None:
        result = result + residual
        total = total + np.abs(residual)
    return result, total, np.concatenate(slack, axis=1)


def rounding_to_16_bits(x: Array, layer: Linear, dtype: torch.dtype) -> Array:
    """What the Triton kernels' rounding of weights to the activations' dtype can change: float64 [rows, N].

    They hold floats in 16 bits, and integer weights of a group that 32 does not divide, unless it is the whole row; the
    others are exact.
    """
    slack = []
    for part in layer.parts:
        exact = dense(part)
        is_held = isinstance(part, FloatWeight) or (part.group_size % 32 and part.group_size != part.num_inputs)
        held = torch.from_numpy(exact).to(dtype).double().numpy() if is_held else exact
        slack.append(np.abs(x) @ np.abs(held - exact).T)
    return np.concatenate(slack, axis=1)


def linear_a8(x: npt.NDArray[np.float32], weight: WeightMatrix) -> npt.NDArray[np.float32]:
    """The a8 formula for one integer matrix: integers in int64, every float operation rounded to float32."""
    assert not isinstance(weight, FloatWeight)
    codes = codes_of(weight)
    y = np.zeros((x.shape[0], weight.num_outputs), np.float32)
    for group in activation_groups(weight):
        part = x[:, group]
        scale = np.abs(part).max(axis=1) / np.float32(127)
        scale = np.where(scale == 0, np.float32(1), scale)
        quantized = np.rint(part / scale[:, None]).astype(np.int64)
        column = group.start // weight.group_size
        sums = (quantized @ codes[:, group].T).astype(np.float32)
        term = sums * weight.scales.float().numpy()[:, column]
        if isinstance(weight, Int4Weight):
            x_sum = quantized.sum(axis=1).astype(np.float32)
            term = term + x_sum[:, None] * weight.offsets.float().numpy()[:, column]
        y = y + scale[:, None] * term
    return y


# --------------------------------------------------------------------------- element-wise ops


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


def silu_mul(gate_up: Array) -> Array:
    gate, up = np.split(gate_up, 2, axis=1)
    positive = 1 / (1 + np.exp(-np.abs(gate)))
    return gate * np.where(gate >= 0, positive, np.exp(-np.abs(gate)) * positive) * up


def rope(x: Array, positions: npt.NDArray[np.int64], cos: Array, sin: Array) -> Array:
    """x [tokens, heads, head_dim]; pair (i, i + half) turned as a complex number."""
    half = cos.shape[1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[positions][:, None, :]
    return np.concatenate((turned.real, turned.imag, x[..., 2 * half :]), axis=-1)


def hadamard_matrix(head_dim: int, size: int) -> Array:
    """Orthonormal, Sylvester's order, in blocks on the diagonal; entry sign is the parity of i & j."""
    index = np.arange(size)
    parity = np.array([[bin(int(i & j)).count("1") % 2 for j in index] for i in index])
    return np.kron(np.eye(head_dim // size), (1.0 - 2.0 * parity) / np.sqrt(size))


# --------------------------------------------------------------------------- the cache


_NUMPY_TYPES = {"int8": np.int8, "fp16": np.float16, "bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8}


def decode_minifloat(codes: npt.NDArray[np.uint8], exponent_bits: int) -> Array:
    """8-bit floats by their definition."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent = (codes % 128) >> mantissa_bits
    mantissa = (codes % 2**mantissa_bits) / 2.0**mantissa_bits
    magnitude = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias)))
    return sign * magnitude


def elements_to_float(elements: npt.NDArray[np.generic], element: str) -> Array:
    """Stored elements as numbers, without int8 scales."""
    if element == "bf16":
        return (elements.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if element == "fp8_e4m3":
        return decode_minifloat(elements.astype(np.uint8), 4)
    if element == "fp8_e5m2":
        return decode_minifloat(elements.astype(np.uint8), 5)
    return elements.astype(np.float64)


@dataclass
class LayerBytes:
    """Access to one layer of a pool (uint8 [blocks, block_bytes]) through the formulas of `kv_format`."""

    pool: npt.NDArray[np.uint8]
    group: GroupFormat
    layer_index: int
    format: LayerFormat

    def _region(self, offset: int, num_bytes: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        base = self.group.layer_offset(self.layer_index) + offset
        return self.pool[:, base : base + num_bytes].view(dtype)

    def k_elements(self) -> npt.NDArray[np.generic]:
        return self._region(0, self.format.k_bytes, _NUMPY_TYPES[self.format.k_type])

    def v_elements(self) -> npt.NDArray[np.generic]:
        return self._region(self.format.v_offset, self.format.v_bytes, _NUMPY_TYPES[self.format.v_type])

    def k_scales(self) -> npt.NDArray[np.generic]:
        return self._region(self.format.k_scale_offset, self.format.k_scale_bytes, np.float16)

    def v_scales(self) -> npt.NDArray[np.generic]:
        return self._region(self.format.v_scale_offset, self.format.v_scale_bytes, np.float16)

    def indices(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """K index, V index [16, heads, head_dim] and scale index [16, heads] inside their regions."""
        token, head, channel = np.meshgrid(
            np.arange(BLOCK_TOKENS), np.arange(self.format.num_kv_heads), np.arange(self.format.head_dim), indexing="ij"
        )
        scale = np.arange(self.format.num_kv_heads)[None, :] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)[:, None]
        return k_index(self.format, head, token, channel), v_index(self.format, head, token, channel), scale  # type: ignore[arg-type,return-value]

    def read(self, blocks: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """K and V of whole blocks: float64 [len(blocks) · 16, heads, head_dim], as stored (rotated, without bias)."""
        with np.errstate(all="ignore"):  # slots not in use may hold anything
            return self._read(blocks)

    def _read(self, blocks: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        k_at, v_at, scale_at = self.indices()
        shape = (-1, self.format.num_kv_heads, self.format.head_dim)
        k = elements_to_float(self.k_elements()[blocks][:, k_at], self.format.k_type)
        v = elements_to_float(self.v_elements()[blocks][:, v_at], self.format.v_type)
        if self.format.k_type == "int8":
            k = k * self.k_scales()[blocks][:, scale_at].astype(np.float64)[..., None]
        if self.format.v_type == "int8":
            v = v * self.v_scales()[blocks][:, scale_at].astype(np.float64)[..., None]
        return k.reshape(shape), v.reshape(shape)


# --------------------------------------------------------------------------- attention


def attention(
    q: Array,
    query_positions: npt.NDArray[np.int64],
    k: Array,
    v: Array,
    key_positions: npt.NDArray[np.int64],
    *,
    scale: float,
    window: int,
    rotation_size: int,
    bias_keys: Array | None,
    rounds_query: bool,
) -> tuple[Array, Array]:
    """One sequence: (out [tokens, heads, head_dim], softmax weight per slot summed over tokens and heads).

    q [tokens, heads, head_dim] after RoPE; k, v [slots, kv_heads, head_dim] as stored; rotation_size 0: not rotated;
    bias_keys [slots, kv_heads, head_dim]: RoPE(bias) of every slot, to be added to the keys; rounds_query: the rotated
    query is int8 per token and head against the stored keys, as a8 states it for int8 keys.
    """
    num_heads, head_dim = q.shape[1:]
    kv_head = np.arange(num_heads) // (num_heads // k.shape[1])
    rotated = q @ hadamard_matrix(head_dim, rotation_size) if rotation_size else q
    if rounds_query:
        step = np.abs(rotated).max(axis=2, keepdims=True) / 127
        rotated = np.rint(rotated / step) * step
    scores = np.einsum("thd,shd->ths", rotated, k[:, kv_head])
    if bias_keys is not None:
        scores = scores + np.einsum("thd,shd->ths", q, bias_keys[:, kv_head])
    scores = scores * scale
    visible = key_positions[None, :] <= query_positions[:, None]
    if window:
        visible &= key_positions[None, :] > query_positions[:, None] - window
    scores = np.where(visible[:, None, :], scores, -np.inf)
    peak = scores.max(axis=2, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(peak), 0.0, peak))
    total = weights.sum(axis=2, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    return np.einsum("ths,shd->thd", weights, v[:, kv_head]), weights.sum(axis=(0, 1))
