"""Weights of a GGUF file, kept exactly: no code and no scale changes its value.

Purpose: a `WeightSource` over one mapped file.
Owner thread: the one that loads the model.
Invariant: Q4_0 and Q4_1 become `Int4Weight`, Q8_0 `Int8Weight`, each with groups of 32; F16, BF16 and F32
become `FloatWeight`. The rows of q and k of Llama files are put back in Hugging Face's order.

Block layouts: ggml's `block_q4_0` (scale, 16 bytes), `block_q4_1` (scale, minimum, 16 bytes) and `block_q8_0`
(scale, 32 bytes). Low nibbles are elements 0 … 15 of a block, high nibbles elements 16 … 31.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.gguf_reader import ROPE_FACTORS, TENSOR_TYPES, GgufTensor
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, WeightMatrix

GROUP_SIZE = 32
Q4_0_ZERO = 8  # w = d · (q − 8)

_TOP_LEVEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_name(tensor: str) -> str:
    """GGUF's name of a tensor ("blk.0.attn_q.weight") from Hugging Face's."""
    module, _, suffix = tensor.rpartition(".")
    match = _LAYER_MODULE.fullmatch(module)
    if match is None:
        return f"{_TOP_LEVEL[module]}.{suffix}"
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{suffix}"


class GgufWeightSource:
    """`head_counts`: heads by the module suffix ("q_proj", "k_proj") whose rows a Llama converter permuted;
    empty for architectures that are stored as they are."""

    def __init__(self, path: Path, tensors: Mapping[str, GgufTensor], head_counts: Mapping[str, int]) -> None:
        self._path = path
        self._tensors = tensors
        self._head_counts = head_counts
        self._used = {ROPE_FACTORS}
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not readable ({error})") from error

    def has(self, tensor: str) -> bool:
        return gguf_name(tensor) in self._tensors

    def where(self, tensor: str) -> str:
        return f"{self._path}: {gguf_name(tensor)}"

    def vector(self, tensor: str, size: int) -> torch.Tensor:
        blocks, entry = self._blocks(tensor, (size,))
        if TENSOR_TYPES[entry.type][1] != 1:
            raise UnsupportedModel(f"{self.where(tensor)} is a vector of type {entry.type}, not served")
        values = _floats(blocks, entry.type).reshape(size)
        module = tensor.removesuffix(".bias")
        return self._finite(self._unpermuted(module, values), tensor).to(torch.float32, copy=True)

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        tensor = f"{module}.weight"
        blocks, entry = self._blocks(tensor, (num_outputs, num_inputs))
        blocks = self._permuted_rows(module, blocks)
        if entry.type in ("F32", "F16", "BF16"):
            return FloatWeight(self._finite(_floats(blocks, entry.type), tensor))
        blocks = blocks.reshape(num_outputs, num_inputs // GROUP_SIZE, TENSOR_TYPES[entry.type][0])
        scales = self._finite(_halves(blocks[:, :, 0:2]), tensor)
        if entry.type == "Q8_0":
            codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(num_outputs, num_inputs)
            return Int8Weight(torch.from_numpy(codes), scales, GROUP_SIZE)
        if entry.type == "Q4_0":
            # A product with a power of two is exact, unless it leaves float16.
            offsets = self._finite(scales * -Q4_0_ZERO, tensor)
            return Int4Weight(_nibbles(blocks[:, :, 2:]), scales, offsets, GROUP_SIZE)
        assert entry.type == "Q4_1"
        offsets = self._finite(_halves(blocks[:, :, 2:4]), tensor)
        return Int4Weight(_nibbles(blocks[:, :, 4:]), scales, offsets, GROUP_SIZE)

    def finish(self) -> None:
        unused = [name for name in self._tensors if name not in self._used]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise CheckpointError(f"{self._path}: {unused[0]}{more}: tensors that this architecture has no use for")

    def _blocks(self, tensor: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], GgufTensor]:
        """The bytes of a tensor, one row per output."""
        name = gguf_name(tensor)
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self._path}: {name}: tensor is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{self._path}: {name} has the shape {list(entry.shape)}, the metadata says {list(shape)}"
            )
        end = entry.offset + entry.num_bytes
        if end > self._data.size:
            raise CheckpointError(f"{self._path}: truncated: {name} ends at byte {end}, not {self._data.size}")
        self._used.add(name)
        # Vectors are one element per row, so that rows of biases can be put in order like those of matrices.
        return self._data[entry.offset : end].reshape(shape[0], -1), entry

    def _permuted_rows(self, module: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo the converter's permutation. llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging
        Face the rows i and i + head_dim / 2; its converter interleaves the two halves of each head."""
        num_heads = self._head_counts.get(module.rpartition(".")[2])
        if num_heads is None:
            return rows
        half = rows.shape[0] // num_heads // 2
        return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def _unpermuted(self, module: str, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._permuted_rows(module, values.float().numpy()))

    def _finite(self, values: torch.Tensor, tensor: str) -> torch.Tensor:
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{self.where(tensor)} holds NaN, infinity, or a scale beyond float16")
        return values


def _halves(pairs: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Two bytes per block, [rows, blocks, 2], as float16 [rows, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(pairs).view(np.float16)[:, :, 0].copy())


def _nibbles(packed: npt.NDArray[np.uint8]) -> torch.Tensor:
    """ggml's order, [rows, blocks, 16], to kvd's codes [rows, blocks · 16]: low nibble = even channel."""
    packed = np.ascontiguousarray(packed)
    even, odd = packed[:, :, 0::2], packed[:, :, 1::2]
    codes = np.concatenate(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), axis=2)
    return torch.from_numpy(codes.reshape(packed.shape[0], -1))


def _floats(rows: npt.NDArray[np.uint8], type_name: str) -> torch.Tensor:
    """Rows of bytes as a float tensor [rows, columns] in its own type, copied out of the file."""
    raw = torch.from_numpy(np.array(rows))
    return raw.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name])
