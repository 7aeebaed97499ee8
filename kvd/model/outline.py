"""A model's weights without their contents: what the headers of its files say, or what its sizes imply.

Purpose: `kvd plan` puts a model together by the very code that loads it, on torch's meta device, where a tensor is a
shape and a type. Owner: one thread. Invariant: nothing but headers is read, and no memory is taken for weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.assemble import assemble
from kvd.model.awq_config import AwqConfig
from kvd.model.config_reader import BiasUse
from kvd.model.gguf_reader import GgufTensor
from kvd.model.gguf_weights import GROUP_SIZE, gguf_name
from kvd.model.progress import QuietProgress
from kvd.model.safetensors_files import SafetensorsFiles, TensorEntry
from kvd.model.spec import ModelSpec
from kvd.model.weights import ModelWeights
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, WeightMatrix, stored_bytes

WeightForm = Literal["16 bits", "awq", "gguf"]
"""How weights are stored that only exist by numbers: fp16; AWQ in groups of 128; Q4_1 with an embedding in Q8_0."""

_GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int4(num_outputs: int, num_inputs: int, group_size: int) -> Int4Weight:
    scales = _meta((num_outputs, num_inputs // group_size), torch.float16)
    return Int4Weight(_meta((num_outputs, num_inputs // 2), torch.uint8), scales, scales, group_size)


def _int8(num_outputs: int, num_inputs: int, group_size: int) -> Int8Weight:
    scales = _meta((num_outputs, num_inputs // group_size), torch.float16)
    return Int8Weight(_meta((num_outputs, num_inputs), torch.int8), scales, group_size)


@dataclass(frozen=True, slots=True)
class Outline:
    """Weights of which only shapes are known.

    file_bytes    of the tensors in their files
    loaded_bytes  that loading takes of the host's memory before anything is packed; what is mapped is none
    """

    weights: ModelWeights
    file_bytes: int
    loaded_bytes: int


class _Source:
    """The part of `assemble.WeightSource` that all have in common."""

    def __init__(self) -> None:
        self.file_bytes = 0

    def has(self, tensor: str) -> bool:
        """Biases that the config does not mention are zeros, which are dropped, or refused when they are loaded."""
        return False

    def where(self, tensor: str) -> str:
        return tensor

    def finish(self) -> None:
        """What is left over is judged when it is loaded: only contents tell whether it matters."""

    def vector(self, tensor: str, size: int) -> torch.Tensor:
        self.file_bytes += self._vector_bytes(tensor, size)
        return _meta((size,), torch.float32)

    @abstractmethod
    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix: ...

    @abstractmethod
    def _vector_bytes(self, tensor: str, size: int) -> int: ...


class _SafetensorsSource(_Source):
    def __init__(self, files: SafetensorsFiles, awq: AwqConfig | None) -> None:
        super().__init__()
        self._entries = files.entries
        self._awq = awq
        self._where = next((entry.path.parent for entry in files.entries.values()), "the checkpoint")

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        if f"{module}.qweight" not in self._entries:
            entry = self._entry(f"{module}.weight", (num_outputs, num_inputs))
            return FloatWeight(_meta(entry.shape, entry.dtype))  # mapped, and read when it is packed
        where = f"{self._where}: {module}"
        if self._awq is None:
            raise CheckpointError(f"{where}.qweight: a quantised tensor, but there is no quantization_config")
        group_size = num_inputs if self._awq.group_size == -1 else self._awq.group_size
        if num_inputs % group_size or num_outputs % 8:
            raise UnsupportedModel(
                f"{where}: {num_outputs} outputs and {num_inputs} inputs cannot be stored as AWQ in groups of "
                f"{group_size}"
            )
        self._entry(f"{module}.qweight", (num_inputs, num_outputs // 8))
        self._entry(f"{module}.qzeros", (num_inputs // group_size, num_outputs // 8))
        self._entry(f"{module}.scales", (num_inputs // group_size, num_outputs))
        weight = _int4(num_outputs, num_inputs, group_size)
        return weight

    def _vector_bytes(self, tensor: str, size: int) -> int:
        self._entry(tensor, (size,))
        return 0  # counted with its entry

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._where}: {name}: tensor is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: {name} has the shape {list(entry.shape)}, the config says {list(shape)}"
            )
        self.file_bytes += entry.end - entry.begin
        return entry


class _GgufSource(_Source):
    def __init__(self, tensors: Mapping[str, GgufTensor], where: str) -> None:
        super().__init__()
        self._tensors = tensors
        self._where = where

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        entry = self._entry(f"{module}.weight", (num_outputs, num_inputs))
        weight: WeightMatrix
        if entry.type in _GGUF_FLOATS:
            weight = FloatWeight(_meta(entry.shape, _GGUF_FLOATS[entry.type]))
        elif entry.type == "Q8_0":
            weight = _int8(num_outputs, num_inputs, GROUP_SIZE)
        else:
            weight = _int4(num_outputs, num_inputs, GROUP_SIZE)
        return weight

    def _vector_bytes(self, tensor: str, size: int) -> int:
        self._entry(tensor, (size,))
        return 0  # counted with its entry

    def _entry(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        entry = self._tensors.get(gguf_name(name))
        if entry is None:
            raise CheckpointError(f"{self._where}: {gguf_name(name)}: tensor is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{self._where}: {gguf_name(name)} has the shape {list(entry.shape)}, the metadata says {list(shape)}"
            )
        self.file_bytes += entry.num_bytes
        return entry


class _SizesSource(_Source):
    """group_size: of AWQ, -1 for a whole row."""

    def __init__(self, form: WeightForm, group_size: int) -> None:
        super().__init__()
        self._form = form
        self._group_size = group_size

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        is_end = module in ("model.embed_tokens", "lm_head")
        if self._form == "gguf":
            group = math.gcd(GROUP_SIZE, num_inputs)
            weight: WeightMatrix = (_int8 if is_end else _int4)(num_outputs, num_inputs, group)
            self.file_bytes += stored_bytes(weight)
            return weight
        if self._form == "16 bits" or is_end:
            self.file_bytes += 2 * num_outputs * num_inputs
            return FloatWeight(_meta((num_outputs, num_inputs), torch.float16))
        group = num_inputs if self._group_size == -1 else math.gcd(self._group_size, num_inputs)
        weight = _int4(num_outputs, num_inputs, group)
        # A zero point takes half a byte in the file, and becomes an offset of two.
        self.file_bytes += stored_bytes(weight) - num_outputs * num_inputs // group * 3 // 2
        return weight

    def _vector_bytes(self, tensor: str, size: int) -> int:
        return 2 * size


def _outlined(source: _Source, spec: ModelSpec, biases: BiasUse, *, maps_floats: bool = True) -> Outline:
    weights = assemble(source, spec, biases, fingerprint="", head_int8=True, progress=QuietProgress())
    return Outline(weights, source.file_bytes, _loaded_bytes(weights, maps_floats=maps_floats))


def _loaded_bytes(weights: ModelWeights, *, maps_floats: bool) -> int:
    matrices = {id(matrix): matrix for matrix in (weights.embedding, *weights.head.parts)}  # tied: one of both
    total = 4 * weights.final_norm.numel()
    for layer in weights.layers:
        total += 4 * (layer.attention_norm.numel() + layer.mlp_norm.numel())
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            matrices |= {id(matrix): matrix for matrix in linear.parts}
            total += 0 if linear.bias is None else linear.bias.nbytes
    is_mapped = {id(matrix) for matrix in matrices.values() if maps_floats and isinstance(matrix, FloatWeight)}
    return total + sum(stored_bytes(matrix) for key, matrix in matrices.items() if key not in is_mapped)


def outline_safetensors(
    files: SafetensorsFiles, spec: ModelSpec, biases: BiasUse, awq: AwqConfig | None
) -> Outline:  # fmt: skip
    """Of a Hugging Face checkpoint. Raises CheckpointError and UnsupportedModel, naming file and tensor."""
    return _outlined(_SafetensorsSource(files, awq), spec, biases)


def outline_gguf(tensors: Mapping[str, GgufTensor], spec: ModelSpec, biases: BiasUse, where: str) -> Outline:
    """Of a GGUF file, by its table of tensors. Raises CheckpointError naming file and tensor."""
    return _outlined(_GgufSource(tensors, where), spec, biases, maps_floats=False)


def outline_sizes(spec: ModelSpec, biases: BiasUse, form: WeightForm, group_size: int = 128) -> Outline:
    """Of a model of which only the sizes are known."""
    return _outlined(_SizesSource(form, group_size), spec, biases)
