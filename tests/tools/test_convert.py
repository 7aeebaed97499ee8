"""`kvd convert` on tiny checkpoints: what is written, who accepts it, what is refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvd.errors import ConfigError, StartupError, UnsupportedModel
from kvd.model.progress import QuietProgress
from kvd.tools import convert
from kvd.tools.awq_scaling import round_to_awq
from kvd.tools.convert import ConvertReport
from kvd.tools.perplexity import build_scorer
from kvd.tools.wrapped_ops import FloatLinearOps
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import Int4Weight, dequantize
from tests.model.checkpoints import (
    load_reference,
    make_awq,
    make_gguf,
    make_llama,
    make_qwen2,
    reference_tensors,
    rewrite_tensors,
)
from tests.tools.conftest import load


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CALIBRATION_TOKENS", 192)


def run(source: Path, destination: Path, home: Path, **changes: Any) -> ConvertReport:
    settings: dict[str, Any] = {"bits": 4, "group_size": 64, "scaling": True, "num_tokens": 64} | changes
    return convert.run(str(source), destination, home=home, progress=QuietProgress(), **settings)


def module_of(weights: Any, index: int, name: str) -> Any:
    layer = weights.layers[index]
    places = {"q": layer.qkv, "k": layer.qkv, "v": layer.qkv, "o": layer.output, "down": layer.down}
    return places[name].parts["qkv".find(name)] if name in "qkv" else places[name].parts[0]


def test_plain_rounding_stores_exactly_the_rounded_codes(tmp_path: Path, home: Path) -> None:
    source = make_llama(tmp_path / "source", seed=1)
    report = run(source, tmp_path / "awq", home, scaling=False)
    original = reference_tensors(source)
    _, weights = load(tmp_path / "awq", home)
    for name, module in (("q", "self_attn.q_proj"), ("v", "self_attn.v_proj"), ("down", "mlp.down_proj")):
        expected = round_to_awq(original[f"model.layers.1.{module}.weight"], 64)
        part = module_of(weights, 1, name)
        assert isinstance(part, Int4Weight)
        assert torch.equal(part.scales, expected.scales)
        codes = torch.stack((part.codes & 15, part.codes >> 4), dim=2).flatten(1)
        assert torch.equal(codes, expected.codes)
        # The loader rounds −z·s to float16 once.
        assert (dequantize(part) - expected.values()).abs().max() <= 2**-11 * 15 * expected.scales.max().item()
    assert report.num_tokens == 63
    assert report.perplexity_after != report.perplexity_before
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.5)
    assert report.as_dict()["group_size"] == 64
    assert "before" in report.lines()[1]


def test_the_result_computes_what_its_stored_numbers_say(tmp_path: Path, home: Path) -> None:
    """Logits of the loaded directory against transformers with weights that were unpacked independently."""
    run(make_qwen2(tmp_path / "source", seed=4), tmp_path / "awq", home, group_size=32)
    _, weights = load(tmp_path / "awq", home, head_int8=False)
    token_ids = list(range(3, 67))
    scorer = build_scorer(weights, FloatLinearOps(create_ops("cpu")), "fp16", window=64, chunk=64)
    logits = next(iter(scorer.chunks(token_ids))).logits
    with torch.no_grad():
        expected = load_reference(tmp_path / "awq")(torch.tensor([token_ids[:-1]])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_scaled_model_is_the_source_up_to_rounding(tmp_path: Path, home: Path, architecture: str) -> None:
    """Every matrix of the result, undone by its norm's change, is near the source's; biases and norms fit."""
    make = make_llama if architecture == "llama" else make_qwen2
    source = make(tmp_path / "source", seed=2, dtype=torch.bfloat16)
    run(source, tmp_path / "awq", home, group_size=32)
    before, after = reference_tensors(source), reference_tensors(tmp_path / "awq")
    assert before.keys() == after.keys()
    layer = "model.layers.0"
    factors = before[f"{layer}.input_layernorm.weight"] / after[f"{layer}.input_layernorm.weight"]
    assert factors.max() / factors.min() > 1.05, "nothing was scaled"
    for name in ("q", "k"):
        restored = after[f"{layer}.self_attn.{name}_proj.weight"] / factors
        error = restored - before[f"{layer}.self_attn.{name}_proj.weight"]
        assert error.norm() < 0.15 * before[f"{layer}.self_attn.{name}_proj.weight"].norm()
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(before[name].half(), after[name].half())
    if architecture == "qwen2":
        for name in ("q", "k"):
            bias = f"{layer}.self_attn.{name}_proj.bias"
            assert torch.equal(before[bias].half(), after[bias].half())
        assert not torch.equal(before[f"{layer}.self_attn.v_proj.bias"], after[f"{layer}.self_attn.v_proj.bias"])


def test_other_readers_accept_it(tmp_path: Path, home: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, AwqConfig, GenerationConfig

    source = make_qwen2(tmp_path / "source", dtype=torch.float16, tie_word_embeddings=True)
    destination = tmp_path / "awq"
    run(source, destination, home, group_size=128)
    assert sorted(path.name for path in destination.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = AutoConfig.from_pretrained(destination)
    assert config.model_type == "qwen2"
    assert config.tie_word_embeddings
    assert config.dtype == torch.float16
    settings = AwqConfig.from_dict(config.quantization_config)
    assert (settings.bits, settings.group_size, settings.zero_point) == (4, 128, True)
    assert "gemm" in str(config.quantization_config["version"])
    tensors = load_file(destination / "model.safetensors")
    assert "lm_head.weight" not in tensors
    down = "model.layers.0.mlp.down_proj"
    shapes = {name: (tuple(tensors[f"{down}.{name}"].shape), tensors[f"{down}.{name}"].dtype) for name in
              ("qweight", "qzeros", "scales")}  # fmt: skip
    assert shapes == {
        "qweight": ((256, 16), torch.int32),
        "qzeros": ((2, 16), torch.int32),
        "scales": ((2, 128), torch.float16),
    }
    assert all(tensor.dtype in (torch.float16, torch.int32) for tensor in tensors.values())
    text = "The quick brown fox, 1234."
    tokenizer = AutoTokenizer.from_pretrained(destination)
    assert tokenizer(text).input_ids == Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(destination).eos_token_id in (2, [2])


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_kvd_reads_back_what_text_needs(tmp_path: Path, home: Path, kind: str) -> None:
    source = tmp_path / "source.gguf"
    if kind == "gguf":
        make_gguf(source, seed=3, tie_word_embeddings=True)
    else:
        source = make_llama(tmp_path / "source", seed=3)
    from kvd.model.loading import read_spec, resolve_model

    before = resolve_model(str(source), home=home, revision=None, progress=QuietProgress())
    run(source, tmp_path / "awq", home)
    after, weights = load(tmp_path / "awq", home)
    for name in ("chat_template", "adds_bos", "bos_token_id", "eos_token_ids", "special_tokens", "default_sampling"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.tokenizer_json.read_bytes() == before.tokenizer_json.read_bytes()
    old, new = read_spec(before), read_spec(after)
    assert (new.rope, new.windows, new.head_dim, new.vocab_size) == (
        old.rope,
        old.windows,
        old.head_dim,
        old.vocab_size,
    )
    assert new.tied_embeddings == old.tied_embeddings
    assert (weights.head.parts[0] is weights.embedding) == old.tied_embeddings
    assert new.quantization == "awq g64"


def test_shards_load(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(tmp_path / "source")
    run(source, tmp_path / "one", home, scaling=False)
    monkeypatch.setattr(convert, "SHARD_BYTES", 100_000)
    run(source, tmp_path / "many", home, scaling=False)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = reference_tensors(tmp_path / "one"), reference_tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_undivided_dimensions_are_refused_with_what_works(tmp_path: Path, home: Path) -> None:
    source = make_llama(tmp_path / "source", hidden_size=192, head_dim=32)
    with pytest.raises(UnsupportedModel) as caught:
        run(source, tmp_path / "awq", home, group_size=128)
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj: groups of 128 do not divide its 192 inputs; --group-size 32 or 64 works"
    )
    assert not (tmp_path / "awq").exists()


@pytest.mark.parametrize("settings", [{"bits": 8}, {"group_size": 48}])
def test_impossible_settings_are_refused(tmp_path: Path, home: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--bits 8|--group-size 48"):
        run(tmp_path / "nowhere", tmp_path / "awq", home, **settings)


def test_awq_sources_are_refused(tmp_path: Path, home: Path) -> None:
    source = make_awq(tmp_path / "source")
    with pytest.raises(UnsupportedModel, match="is AWQ already"):
        run(source, tmp_path / "awq", home)


def test_occupied_destination_is_refused_before_any_work(tmp_path: Path, home: Path) -> None:
    (tmp_path / "awq").mkdir()
    (tmp_path / "awq" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        run(tmp_path / "nowhere", tmp_path / "awq", home)


def test_values_beyond_float16_are_refused_and_nothing_is_left(tmp_path: Path, home: Path) -> None:
    source = make_llama(tmp_path / "source", dtype=torch.bfloat16)
    norm = torch.ones(128, dtype=torch.bfloat16)
    norm[3] = 1e5
    rewrite_tensors(source, model__norm__weight=norm)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight: a value of 99840 is beyond float16"):
        run(source, tmp_path / "awq", home)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_full_disk_is_one_line_and_nothing_is_left(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(tmp_path / "source")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvd.tools.awq_writer._write_safetensors", fail)
    with pytest.raises(StartupError, match="awq: no space left on the disk"):
        run(source, tmp_path / "awq", home)
    assert not [path for path in tmp_path.iterdir() if "awq" in path.name]


def test_a_disk_that_is_too_small_is_said_before_writing(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama(tmp_path / "source")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("kvd.tools.awq_writer.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StartupError, match="are needed"):
        run(source, tmp_path / "awq", home)


def test_config_has_no_trace_of_the_source_format(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "source.gguf"
    make_gguf(source)
    run(source, tmp_path / "awq", home, scaling=False)
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    assert config["torch_dtype"] == "float16"
    assert config["architectures"] == ["LlamaForCausalLM"]
