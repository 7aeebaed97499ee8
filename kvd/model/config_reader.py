"""Hugging Face config dictionaries become a frozen `ModelSpec`. Torch-free.

Purpose: decide once what kvd serves, and refuse by name what it does not, before a weight is touched.
Owner thread: the one that starts the engine.
Invariant: every key that changes the arithmetic is either honoured or refused; nothing is skipped silently.

The rules of each key follow transformers' own configuration classes (LlamaConfig, Qwen2Config).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.spec import ModelSpec, RopeSpec

SUPPORTED_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
MAX_HEAD_DIM = 256
MAX_LAYERS = 4096  # far beyond any model, and a list of so many is small
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_SLIDING_WINDOW = 4096  # Qwen2Config
DEFAULT_MAX_WINDOW_LAYERS = 28  # Qwen2Config


@dataclass(frozen=True, slots=True)
class BiasUse:
    """Which projections have a bias. The spec knows q, k and v; the loaders need the others too."""

    qkv: bool
    output: bool
    mlp: bool


class _Keys:
    """Typed access to a config; every error names the file and the key."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def wrong(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: key {key!r} must be {expected}, not {self.config[key]!r}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer of at most 31 bits; required when there is no default."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.source}: key {key!r} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, "a positive integer")
        if value >= 2**31:
            raise self.wrong(key, "less than 2³¹")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; required when there is no default."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.source}: key {key!r} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value


def read_architecture(config: dict[str, Any], source: str) -> str:
    """ "llama" or "qwen2"; raises UnsupportedModel with the list of what is served."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = config.get("architectures")
    if names is None:
        by_type = {kind: kind for kind in SUPPORTED_ARCHITECTURES.values()}
        model_type = config.get("model_type")
        if model_type in by_type:
            return by_type[model_type]
        raise UnsupportedModel(f"{source}: model_type {model_type!r} is not served; kvd serves {supported}")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{source}: key 'architectures' must be a list of names, not {names!r}")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return SUPPORTED_ARCHITECTURES[name]
    remote = " (it needs its own remote code, which kvd never runs)" if config.get("auto_map") else ""
    raise UnsupportedModel(f"{source}: architecture {names[0]} is not served{remote}; kvd serves {supported}")


def read_bias_use(config: dict[str, Any], source: str) -> BiasUse:
    """Which projections the config gives a bias."""
    keys = _Keys(config, source)
    if read_architecture(config, source) == "qwen2":
        return BiasUse(qkv=True, output=False, mlp=False)
    attention = keys.boolean("attention_bias", False)
    return BiasUse(qkv=attention, output=attention, mlp=keys.boolean("mlp_bias", False))


def read_model_spec(
    config: dict[str, Any],
    *,
    source: str,
    quantization: str,
    bos_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> ModelSpec:
    """The spec of a config with Hugging Face's keys.

    source: the file's name for messages; quantization: for people. Raises CheckpointError for missing or
    mistyped keys and UnsupportedModel for what kvd does not compute.
    """
    keys = _Keys(config, source)
    architecture = read_architecture(config, source)
    num_layers = keys.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise keys.wrong("num_hidden_layers", f"at most {MAX_LAYERS}")
    hidden_size = keys.integer("hidden_size")
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    max_positions = keys.integer("max_position_embeddings")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{source}: hidden_act {activation!r} is not served; kvd computes silu")
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(keys, hidden_size, num_heads),
        vocab_size=keys.integer("vocab_size"),
        max_positions=max_positions,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_read_rope(keys, max_positions),
        tied_embeddings=keys.boolean("tie_word_embeddings", False),
        qkv_bias=read_bias_use(config, source).qkv,
        windows=_read_windows(keys, architecture, num_layers, max_positions),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        quantization=quantization,
    )


def _read_head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    if keys.config.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{keys.source}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = keys.integer("head_dim", hidden_size // num_heads)
    if head_dim % 4 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"{keys.source}: head_dim {head_dim} is not served; kvd serves multiples of 4 up to {MAX_HEAD_DIM}"
        )
    return head_dim


def _read_rope(keys: _Keys, max_positions: int) -> RopeSpec:
    """Both spellings: `rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5."""
    name = "rope_parameters" if keys.config.get("rope_parameters") is not None else "rope_scaling"
    scaling = keys.mapping(name)
    source = f"{keys.source}: {name}"
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModel(f"{source} per layer type ({', '.join(scaling)}) is not served")
    inner = _Keys(scaling, source)
    theta = inner.number("rope_theta", keys.number("rope_theta", DEFAULT_ROPE_THETA))
    for outer in (keys, inner):
        if outer.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{outer.source}: partial_rotary_factor other than 1 is not served")
    if keys.boolean("rope_interleaved", False):
        raise UnsupportedModel(f"{keys.source}: rope_interleaved is not served")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind != "llama3":
        raise UnsupportedModel(f"{source}: rope type {kind!r} is not served; kvd computes default and llama3")
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{source}: low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeSpec(
        theta,
        kind="llama3",
        factor=inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=inner.integer("original_max_position_embeddings", max_positions),
    )


def _read_windows(keys: _Keys, architecture: str, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """Tokens a query sees per layer. Qwen2Config: the window holds from layer `max_window_layers` on, unless
    `layer_types` says otherwise; Llama has none. A window that spans every position is no window."""
    full = (0,) * num_layers
    if architecture != "qwen2" or not keys.boolean("use_sliding_window", False):
        return full
    if keys.config.get("sliding_window", DEFAULT_SLIDING_WINDOW) is None:
        return full
    window = keys.integer("sliding_window", DEFAULT_SLIDING_WINDOW)
    layer_types = keys.config.get("layer_types")
    if layer_types is None:
        first = keys.config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise keys.wrong("max_window_layers", "an integer of at least 0")
        is_windowed = [index >= first for index in range(num_layers)]
    else:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise keys.wrong("layer_types", f"a list of {num_layers} names")
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise UnsupportedModel(f"{keys.source}: layer type {layer_type!r} is not served")
        is_windowed = [layer_type == "sliding_attention" for layer_type in layer_types]
    if window >= max_positions:
        return full
    return tuple(window if windowed else 0 for windowed in is_windowed)
