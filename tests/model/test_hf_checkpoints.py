"""Hugging Face directories of floats: exact weights, and every way in which files can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvd.errors import CheckpointError, ModelNotFound, StartupError, UnsupportedModel
from kvd.model.assemble import head_group_size
from kvd_kernels.weights import FloatWeight, Int8Weight, dequantize
from tests.model.checkpoints import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    make_llama,
    make_qwen2,
    reference_tensors,
    rewrite_json,
    rewrite_tensors,
)
from tests.model.comparing import assert_equal_tensors, floats, matrices
from tests.model.conftest import Load


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_llama_weights_are_kept_bit_for_bit(tmp_path: Path, load: Load, dtype: torch.dtype, shards: int) -> None:
    path = make_llama(tmp_path / "model", dtype=dtype, shards=shards)
    files, weights = load(path)
    assert_equal_tensors(floats(weights), reference_tensors(path))
    assert all(isinstance(matrix, FloatWeight) for matrix in matrices(weights).values())
    labels = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    assert weights.spec.quantization == labels[dtype]
    assert files.format == "hf"


def test_qwen2_biases_lie_side_by_side(tmp_path: Path, load: Load) -> None:
    path = make_qwen2(tmp_path / "model")
    _, weights = load(path)
    assert_equal_tensors(floats(weights), reference_tensors(path))
    qkv = weights.layers[0].qkv
    assert qkv.bias is not None
    assert qkv.bias.dtype == torch.float32
    assert weights.layers[0].output.bias is None


def test_head_dim_apart_from_hidden_over_heads(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", head_dim=64)
    _, weights = load(path)
    assert weights.layers[0].output.num_inputs == 4 * 64
    assert_equal_tensors(floats(weights), reference_tensors(path))


def test_tied_embeddings_are_one_object(tmp_path: Path, load: Load) -> None:
    _, weights = load(make_llama(tmp_path / "model", tie_word_embeddings=True), head_int8=True)
    assert weights.head.parts[0] is weights.embedding
    assert isinstance(weights.embedding, Int8Weight)


def test_a_repeated_head_of_a_tied_model_is_the_embedding(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite_tensors(path, lm_head__weight=embedding.clone())
    _, weights = load(path)
    assert weights.head.parts[0] is weights.embedding
    rewrite_tensors(path, lm_head__weight=embedding + 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(path)


def test_embedding_and_head_are_int8_by_default_and_layers_are_not(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    _, weights = load(path, head_int8=True)
    expected = reference_tensors(path)
    for module in ("model.embed_tokens", "lm_head"):
        matrix = matrices(weights)[module]
        assert isinstance(matrix, Int8Weight)
        assert matrix.group_size == 128
        exact = expected[f"{module}.weight"]
        # Half a step of the scale, and the scale's own rounding to float16.
        step = exact.abs().amax(1, keepdim=True) / 127
        assert bool(((dequantize(matrix) - exact).abs() <= step * (0.5 + 127 * 2**-11)).all())
    assert isinstance(weights.layers[0].down.parts[0], FloatWeight)


@pytest.mark.parametrize(("hidden", "group"), [(576, 64), (896, 128), (96, 32), (100, 100), (300, 100)])
def test_head_groups_divide_the_hidden_size(hidden: int, group: int) -> None:
    assert head_group_size(hidden) == group


def test_biases_of_llama(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", attention_bias=True, mlp_bias=True)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias: tensor is missing"):
        load(path)
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
    added = {f"self_attn__{name}": size for name, size in sizes.items()}
    added |= {"mlp__gate_proj": 256, "mlp__up_proj": 256, "mlp__down_proj": 128}
    biases = {
        f"model__layers__{layer}__{name}__bias": torch.randn(size) for layer in range(2) for name, size in added.items()
    }
    rewrite_tensors(path, **biases)
    _, weights = load(path)
    assert_equal_tensors(floats(weights), reference_tensors(path))


def test_a_bias_that_the_config_does_not_know(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__layers__1__self_attn__o_proj__bias=torch.zeros(128))
    _, weights = load(path)
    assert weights.layers[1].output.bias is None
    rewrite_tensors(path, model__layers__1__self_attn__o_proj__bias=torch.ones(128))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.bias: a bias"):
        load(path)


def test_what_text_needs_is_read(tmp_path: Path, load: Load) -> None:
    files, _ = load(make_llama(tmp_path / "model"))
    assert files.chat_template == CHAT_TEMPLATE
    assert (files.bos_token_id, files.eos_token_ids, files.adds_bos) == (0, (2,), False)
    assert files.special_tokens == {"bos_token": END_OF_TEXT, "eos_token": IM_END}
    assert files.default_sampling == {"temperature": 0.7}


def test_end_tokens_come_from_all_three_files(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", eos_token_id=7)
    rewrite_json(path / "generation_config.json", eos_token_id=[9, 7])
    files, weights = load(path)
    assert files.eos_token_ids == (9, 7, 2)
    assert weights.spec.eos_token_ids == (9, 7, 2)


def test_bos_follows_the_post_processor_unless_stated(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_json(path / "tokenizer_config.json", add_bos_token=...)
    assert not load(path)[0].adds_bos
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }
    processors = [{"type": "ByteLevel"}, template]
    rewrite_json(path / "tokenizer.json", post_processor={"type": "Sequence", "processors": processors})
    assert load(path)[0].adds_bos
    rewrite_json(path / "tokenizer_config.json", add_bos_token=False)
    assert not load(path)[0].adds_bos


def test_where_a_chat_template_may_lie(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    rewrite_json(path / "tokenizer_config.json", chat_template=named)
    assert load(path)[0].chat_template == "D"
    rewrite_json(path / "tokenizer_config.json", chat_template=...)
    assert load(path)[0].chat_template is None
    (path / "chat_template.jinja").write_text("J")
    assert load(path)[0].chat_template == "J"


def test_the_fingerprint_follows_content_config_and_rounding(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "a")
    prints = [load(path)[1].fingerprint, load(make_llama(tmp_path / "same"))[1].fingerprint]
    assert prints[0] == prints[1]
    prints.append(load(path, head_int8=True)[1].fingerprint)
    prints.append(load(make_llama(tmp_path / "other", seed=1))[1].fingerprint)
    prints.append(load(make_llama(tmp_path / "theta", rope_theta=9999.0))[1].fingerprint)
    assert len(set(prints)) == 4


def _truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_a_missing_shard_is_named(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: file is missing"):
        load(path)


@pytest.mark.parametrize("num_bytes", [1, 10_000, 250_000])
def test_a_truncated_shard_is_named(tmp_path: Path, load: Load, num_bytes: int) -> None:
    path = make_llama(tmp_path / "model", shards=3)
    _truncate(path / "model-00003-of-00003.safetensors", num_bytes)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: truncated"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0nope", b"\x02\0\0\0\0\0\0\0[]"])
def test_garbage_in_place_of_a_shard_is_named(tmp_path: Path, load: Load, content: bytes) -> None:
    path = make_llama(tmp_path / "model")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        load(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        "F32",
    ],
)
def test_header_entries_that_lie_are_named(tmp_path: Path, load: Load, entry: Any) -> None:
    path = make_llama(tmp_path / "model")
    header = json.dumps({"model.norm.weight": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(64)
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*'model\.norm\.weight'"):
        load(path)


def test_a_missing_tensor_is_named(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight: .*missing"):
        load(path)


def test_a_tensor_that_the_index_promises_is_named_with_its_shard(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: tensor 'extra' is missing"):
        load(path)


def test_an_index_cannot_leave_the_directory(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model", shards=2)
    rewrite_json(path / "model.safetensors.index.json", weight_map={"a": "../a.safetensors"})
    with pytest.raises(CheckpointError, match="no file name"):
        load(path)


def test_a_wrong_shape_is_named(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 128))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has the shape \[32, 128\].*\[64, 128\]"):
        load(path)


def test_a_wrong_type_is_named(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__norm__weight=torch.ones(128, dtype=torch.float64))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has the type torch\.float64"):
        load(path)


@pytest.mark.parametrize("name", ["model__norm__weight", "model__layers__0__mlp__down_proj__weight"])
def test_nan_and_infinity_are_named(tmp_path: Path, load: Load, name: str) -> None:
    path = make_llama(tmp_path / "model")
    value = reference_tensors(path)[name.replace("__", ".")]
    value.flatten()[3] = float("inf")
    rewrite_tensors(path, **{name: value})
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        load(path)


def test_tensors_without_a_use_are_named_and_derived_ones_are_not(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))
    load(path)
    rewrite_tensors(path, model__layers__0__self_attn__q_norm__weight=torch.ones(32))
    with pytest.raises(CheckpointError, match=r"q_norm\.weight: tensors that this architecture has no use for"):
        load(path)


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickled \(pytorch_model\.bin\).*safetensors"):
        load(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, load: Load, name: str) -> None:
    path = make_llama(tmp_path / "model")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: file is missing"):
        load(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_named(tmp_path: Path, load: Load, name: str, content: bytes) -> None:
    path = make_llama(tmp_path / "model")
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"bits": 4}, "None"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "version": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "'llm-awq'"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "group_size": 48}, "48"),
        ({"quant_method": "awq", "group_size": "128"}, "'128'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point"),
    ],
)
def test_other_quantisation_is_refused_by_name(
    tmp_path: Path, load: Load, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(make_llama(tmp_path / "model", quantization_config=settings))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no such file or directory"),
        ("/nowhere/at/all", "no such file or directory"),
        ("a.gguf", "no such file or directory"),
        ("smollm2-135m-instrukt", "did you mean 'smollm2-135m-instruct'"),
        ("llama", "the catalogue has"),
    ],
)
def test_models_that_do_not_exist(home: Path, model: str, words: str) -> None:
    from kvd.model.loading import resolve_model
    from kvd.model.progress import QuietProgress

    with pytest.raises(ModelNotFound, match=words) as caught:
        resolve_model(model, home=home, revision=None, progress=QuietProgress())
    assert isinstance(caught.value, StartupError)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 7), ("top_k", 1.5), ("top_k", -5),
     ("min_p", 5), ("repetition_penalty", 0)],
)  # fmt: skip
def test_sampling_defaults_out_of_range_are_named(tmp_path: Path, load: Load, key: str, value: float) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_json(path / "generation_config.json", **{key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config.json: key '{key}' must be .*, not {value}"):
        load(path)


def test_sampling_defaults_are_kept(tmp_path: Path, load: Load) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_json(path / "generation_config.json", temperature=0, top_p=1, top_k=-1, min_p=None, repetition_penalty=1.1)
    assert load(path)[0].default_sampling == {
        "temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.1,
    }  # fmt: skip
