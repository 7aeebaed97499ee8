"""Config dictionaries: what is honoured, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.errors import CheckpointError, StartupError, UnsupportedModel
from kvd.model.config_reader import read_bias_use, read_model_spec
from kvd.model.spec import ModelSpec, RopeSpec
from tests.model.checkpoints import base_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**overrides: Any) -> ModelSpec:
    config = base_config(**({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | overrides))
    return read_model_spec(config, source="config.json", quantization="fp32", bos_token_id=0, eos_token_ids=(2,))


def read_qwen2(**overrides: Any) -> ModelSpec:
    return read(**({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | overrides))


def test_a_plain_llama() -> None:
    spec = read()
    assert spec.architecture == "llama"
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (2, 128, 256)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert spec.rope == RopeSpec(10000.0)
    assert spec.windows == (0, 0)
    assert not spec.tied_embeddings
    assert not spec.qkv_bias


def test_qwen2_has_a_bias() -> None:
    assert read_qwen2().qkv_bias


def test_llama_with_attention_bias_has_an_output_bias_too() -> None:
    config = base_config(architectures=["LlamaForCausalLM"], attention_bias=True)
    use = read_bias_use(config, "config.json")
    assert (use.qkv, use.output, use.mlp) == (True, True, False)
    assert read(attention_bias=True).qkv_bias


def test_defaults_follow_transformers() -> None:
    spec = read(num_key_value_heads=..., rope_theta=..., tie_word_embeddings=..., rms_norm_eps=...)
    assert spec.num_kv_heads == spec.num_heads
    assert spec.rope.theta == 10000.0
    assert not spec.tied_embeddings
    assert spec.rms_norm_eps == 1e-6


@pytest.mark.parametrize("head_dim", [4, 64, 80, 96, 128, 256])
def test_head_dim_comes_from_the_config(head_dim: int) -> None:
    assert read(head_dim=head_dim).head_dim == head_dim


@pytest.mark.parametrize("head_dim", [2, 66, 260, 512])
def test_head_dim_that_does_not_fit_is_named(head_dim: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"head_dim {head_dim} "):
        read(head_dim=head_dim)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_theta": ..., "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}},
    ],
)
def test_llama3_rope_in_every_spelling(keys: dict[str, Any]) -> None:
    assert read(**keys).rope == RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_transformers_5_writes_theta_inside_rope_parameters() -> None:
    spec = read(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert spec.rope == RopeSpec(1e6)


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (0, 64, 64)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64, 64)),
        ({"use_sliding_window": True, "sliding_window": 64}, (0, 0, 0)),  # max_window_layers defaults to 28
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, (0, 0, 0)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, 0, 64),
        ),
    ],
)
def test_qwen2_windows_follow_transformers(keys: dict[str, Any], windows: tuple[int, ...]) -> None:
    spec = read_qwen2(num_hidden_layers=3, **keys)
    assert spec.windows == windows
    if keys.get("sliding_window") is not None and keys.get("use_sliding_window"):
        from transformers import Qwen2Config

        theirs = Qwen2Config(num_hidden_layers=3, **keys).layer_types
        if spec.max_positions > keys["sliding_window"]:
            assert [window > 0 for window in windows] == [kind == "sliding_attention" for kind in theirs]


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_another_architecture_is_named_with_the_list(architecture: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{architecture}.*LlamaForCausalLM, Qwen2ForCausalLM"):
        read(architectures=[architecture])


def test_remote_code_is_ignored_for_a_known_architecture_and_named_for_another() -> None:
    assert read(auto_map={"AutoModelForCausalLM": "x.Y"}).architecture == "llama"
    with pytest.raises(UnsupportedModel, match=r"Other.*remote code"):
        read(architectures=["Other"], auto_map={"AutoModelForCausalLM": "x.Y"})


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    assert read(architectures=...).architecture == "llama"
    with pytest.raises(UnsupportedModel, match="model_type 'mistral'"):
        read(architectures=..., model_type="mistral")


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: key '{key}' is missing"):
        read(**{key: ...})


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"hidden_size": "128"}, CheckpointError, "'hidden_size' must be a positive integer"),
        ({"hidden_size": True}, CheckpointError, "'hidden_size'"),
        ({"num_hidden_layers": 0}, CheckpointError, "'num_hidden_layers'"),
        ({"num_hidden_layers": 10**12}, CheckpointError, "'num_hidden_layers' must be less than 2³¹"),
        ({"num_hidden_layers": 10**6}, CheckpointError, "'num_hidden_layers' must be at most 4096"),
        ({"vocab_size": 10**30}, CheckpointError, "'vocab_size' must be less than 2³¹"),
        ({"num_hidden_layers": 2.0}, CheckpointError, "'num_hidden_layers'"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "'rms_norm_eps'"),
        ({"rms_norm_eps": -1}, CheckpointError, "'rms_norm_eps'"),
        ({"rope_theta": "many"}, CheckpointError, "'rope_theta'"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "'tie_word_embeddings'"),
        ({"architectures": "LlamaForCausalLM"}, CheckpointError, "'architectures'"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads 3"),
        ({"hidden_size": 130}, CheckpointError, "hidden_size 130"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"rope_interleaved": True}, UnsupportedModel, "rope_interleaved"),
        ({"rope_scaling": "linear"}, CheckpointError, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, UnsupportedModel, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, UnsupportedModel, "'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedModel, "full_attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, CheckpointError, "'low_freq_factor'"),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}},
            CheckpointError,
            "low_freq_factor 4.0 must be less",
        ),
    ],
)
def test_bad_values_are_named(keys: dict[str, Any], error: type[StartupError], words: str) -> None:
    with pytest.raises(error) as caught:
        read(**keys)
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_other_layer_types_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        read_qwen2(use_sliding_window=True, sliding_window=64, layer_types=["chunked_attention"] * 2)


def test_configs_as_transformers_itself_writes_them() -> None:
    import transformers

    theirs = transformers.LlamaConfig(
        **{key: value for key, value in base_config().items() if key not in ("torch_dtype", "rope_theta")},
        head_dim=64,
        architectures=["LlamaForCausalLM"],
        rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0},
    )
    spec = read_model_spec(
        theirs.to_dict(), source="config.json", quantization="fp32", bos_token_id=0, eos_token_ids=(2,)
    )
    assert spec.rope == RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert spec.head_dim == 64
