"""GGUF metadata: one file becomes a config with Hugging Face's keys, a tokenizer and a table of tensors.

Purpose: everything that parsing a GGUF file yields, in a form that is written once and read back quickly.
Owner thread: the one that prepares the model. Torch-free; the `gguf` package is imported only here, lazily.
Invariant: every tensor of the table lies inside the file; what changes the arithmetic is honoured or refused.

Parsing takes seconds with the `gguf` package (it visits every token string), so `loading` keeps the result.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Bytes and elements of a block, of the types that kvd keeps exactly.
TENSOR_TYPES: dict[str, tuple[int, int]] = {
    "F32": (4, 1),
    "F16": (2, 1),
    "BF16": (2, 1),
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q8_0": (34, 32),
}
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and 3.2: (factor, low, high, original positions). GGUF stores only the factors that follow.
LLAMA3_SCALINGS = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: type name, shape as [rows, columns] or [size], first byte in the file."""

    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        block_bytes, block_size = TENSOR_TYPES[self.type]
        return math.prod(self.shape) // block_size * block_bytes


@dataclass(frozen=True, slots=True)
class GgufContents:
    """What parsing yields: raw metadata, and tensors by GGUF's names."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    rope_factors: tuple[float, ...] | None


def parse_gguf(path: Path) -> GgufContents:
    """Parse a file. CheckpointError names it when it is truncated or damaged; UnsupportedModel names a tensor
    and its type, a big-endian or a split file."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: truncated, or no GGUF file ({_reason(error)})") from error
    if reader.byte_order == "S":
        raise UnsupportedModel(f"{path}: a big-endian GGUF file is not served")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModel(f"{path}: a GGUF file split in {metadata['split.count']} parts is not served")
    size = path.stat().st_size
    tensors = {}
    for tensor in reader.tensors:
        type_name = tensor.tensor_type.name
        if type_name not in TENSOR_TYPES:
            known = ", ".join(TENSOR_TYPES)
            raise UnsupportedModel(
                f"{path}: tensor {tensor.name} has the type {type_name}, which is not served; kvd reads {known}"
            )
        shape = tuple(int(extent) for extent in reversed(tensor.shape.tolist()))
        if not shape or shape[-1] % TENSOR_TYPES[type_name][1]:
            raise CheckpointError(f"{path}: tensor {tensor.name} of type {type_name} has the shape {list(shape)}")
        entry = GgufTensor(type_name, shape, int(tensor.data_offset))
        if entry.offset + entry.num_bytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {tensor.name} ends at byte {entry.offset + entry.num_bytes}, "
                f"the file has {size}"
            )
        tensors[tensor.name] = entry
    factors = None
    if ROPE_FACTORS in tensors:
        factors = tuple(float(value) for value in reader.get_tensor(list(tensors).index(ROPE_FACTORS)).data)
    return GgufContents(metadata, tensors, factors)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Metadata:
    def __init__(self, values: dict[str, Any], architecture: str, source: str) -> None:
        self._values = values
        self._architecture = architecture
        self._source = source

    def get(self, key: str) -> Any:
        return self._values.get(f"{self._architecture}.{key}")

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._source}: metadata key '{self._architecture}.{key}' is missing")
        return value

    def integer(self, key: str) -> int:
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(
                f"{self._source}: metadata key '{self._architecture}.{key}' must be a positive integer, not {value!r}"
            )
        return value

    def refuse(self, key: str, harmless: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedModel(f"{self._source}: {self._architecture}.{key} = {value!r} is not served")


def translate_config(contents: GgufContents, source: str) -> dict[str, Any]:
    """A config with Hugging Face's keys. Raises UnsupportedModel for an architecture or a setting by name."""
    architecture = contents.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: architecture {architecture!r} is not served; kvd serves {', '.join(ARCHITECTURES)}"
        )
    metadata = _Metadata(contents.metadata, architecture, source)
    metadata.refuse("expert_count", (0,))
    metadata.refuse("rope.scaling.type", ("none",))
    if isinstance(metadata.required("attention.head_count"), list):
        raise UnsupportedModel(f"{source}: a head count per layer is not served")
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.get("attention.key_length") or hidden_size // num_heads
    metadata.refuse("attention.value_length", (head_dim,))
    metadata.refuse("rope.dimension_count", (head_dim,))
    if "token_embd.weight" not in contents.tensors:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.required("feed_forward_length"),
        "num_hidden_layers": metadata.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.required("context_length"),
        "rms_norm_eps": metadata.required("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base") or 10000.0,
        "vocab_size": contents.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "hidden_act": "silu",
        "bos_token_id": contents.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": contents.metadata.get("tokenizer.ggml.eos_token_id"),
        "quantization_config": {"quant_method": "gguf", "type": _common_type(contents)},
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in contents.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in contents.tensors
    if contents.rope_factors is not None:
        config["rope_scaling"] = _recognise_scaling(contents.rope_factors, config["rope_theta"], head_dim, source)
    return config


def _common_type(contents: GgufContents) -> str:
    """The type that most bytes of matrices have, for people."""
    matrices = [tensor for tensor in contents.tensors.values() if len(tensor.shape) == 2]
    counts: Counter[str] = Counter()
    for tensor in matrices:
        counts[tensor.type.lower()] += tensor.num_bytes
    return counts.most_common(1)[0][0] if counts else "f32"


def llama3_factors(theta: float, head_dim: int, scaling: tuple[float, float, float, int]) -> list[float]:
    """What Llama 3.1's scaling divides each inverse frequency by (transformers, `_compute_llama3_parameters`)."""
    factor, low, high, original = scaling
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _recognise_scaling(factors: tuple[float, ...], theta: float, head_dim: int, source: str) -> dict[str, Any]:
    """The scaling whose factors the file holds: GGUF keeps the result only, the spec wants the parameters."""
    if all(factor == 1.0 for factor in factors):
        return {"rope_type": "default"}
    for scaling in LLAMA3_SCALINGS:
        expected = llama3_factors(theta, head_dim, scaling)
        if len(expected) == len(factors) and all(
            math.isclose(ours, theirs, rel_tol=1e-3) for ours, theirs in zip(expected, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": scaling[0],
                "low_freq_factor": scaling[1],
                "high_freq_factor": scaling[2],
                "original_max_position_embeddings": scaling[3],
            }
    raise UnsupportedModel(f"{source}: {ROPE_FACTORS} is neither Llama 3.1's nor Llama 3.2's rope scaling")
