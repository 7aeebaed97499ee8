"""What kvd needs to know about a model's shape. Torch-free; `config_reader` fills it.

A `ModelSpec` describes what one generic decoder computes: pre-norm blocks of attention and a gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kvd_kernels.kv_format import ElementType, KVFormat, LayerFormat, build_kv_format


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `llama3` is the frequency scaling of Llama 3.1 (factor and the three values below)."""

    theta: float
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that shapes memory and arithmetic.

    architecture   "llama" or "qwen2"
    windows        per layer: tokens a query sees, itself included; 0 means all
    qkv_bias       biases on the q, k and v projections
    quantization   for people: "gguf q4_1", "awq g128", "bf16", …
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool
    windows: tuple[int, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: str

    def kv_format(self, kv_cache_dtype: str) -> KVFormat:
        """See `kv_format_of`."""
        return kv_format_of(self, kv_cache_dtype)


class KVShape(Protocol):
    """What of a model's shape decides the format of its KV cache."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def qkv_bias(self) -> bool: ...

    @property
    def windows(self) -> tuple[int, ...]: ...


def resolved_kv_dtype(kv_cache_dtype: str) -> str:
    """What the setting `kv_cache_dtype` stands for: auto is int8."""
    return "int8" if kv_cache_dtype == "auto" else kv_cache_dtype


def kv_format_of(shape: KVShape, kv_cache_dtype: str) -> KVFormat:
    """The cache format under a `kv_cache_dtype`.

    "int8" is symmetric int8 with its remedies (Hadamard rotation, bias-free keys where there is a key bias);
    "int8_plain" is the same without them, for measurements only; "fp16" and "bf16" store 16 bits.
    """
    kv_cache_dtype = resolved_kv_dtype(kv_cache_dtype)
    if kv_cache_dtype in ("int8", "int8_plain"):
        remedied = kv_cache_dtype == "int8"
        layer = LayerFormat(
            shape.num_kv_heads,
            shape.head_dim,
            "int8",
            "int8",
            rotated=remedied,
            bias_free=remedied and shape.qkv_bias,
        )
    elif kv_cache_dtype in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2"):
        element: ElementType = kv_cache_dtype  # type: ignore[assignment]
        layer = LayerFormat(shape.num_kv_heads, shape.head_dim, element, element)
    else:
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r}")
    return build_kv_format((window, layer) for window in shape.windows)
