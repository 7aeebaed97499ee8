"""GGUF: weights against the gguf package's own dequantisation, tokenizers, and every refusal."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from kvd.errors import CheckpointError, ModelNotFound, StartupError, UnsupportedModel
from kvd.model.files import ModelFiles
from kvd.model.gguf_reader import llama3_factors
from kvd.model.gguf_tokenizer import SPLIT_PATTERNS, build_tokenizer_json
from kvd.model.spec import RopeSpec
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, dequantize
from tests.model.checkpoints import CHAT_TEMPLATE, END_OF_TEXT, IM_END, make_gguf, tiny_tokenizer_json
from tests.model.comparing import assert_equal_tensors, floats, matrices
from tests.model.conftest import Load

FORMS = {
    "Q4_0": Int4Weight,
    "Q4_1": Int4Weight,
    "Q8_0": Int8Weight,
    "F16": FloatWeight,
    "BF16": FloatWeight,
    "F32": FloatWeight,
}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tensor_type", list(FORMS))
def test_values_are_exact_and_rows_in_order(tmp_path: Path, load: Load, architecture: str, tensor_type: str) -> None:
    path = tmp_path / "model.gguf"
    expected = make_gguf(path, architecture=architecture, tensor_type=tensor_type)
    _, weights = load(path)
    assert_equal_tensors(floats(weights), expected)
    assert weights.spec.architecture == architecture
    assert weights.spec.quantization == f"gguf {tensor_type.lower()}"
    for module, matrix in matrices(weights).items():
        assert isinstance(matrix, FORMS[tensor_type]), module
        if isinstance(matrix, Int4Weight | Int8Weight):
            assert matrix.group_size == 32


def test_types_may_be_mixed_inside_one_linear(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    types = {"blk.1.attn_v.weight": "Q8_0", "token_embd.weight": "Q8_0", "blk.0.ffn_up.weight": "F16"}
    expected = make_gguf(path, types=types, tie_word_embeddings=True, head_dim=64)
    _, weights = load(path, head_int8=True)
    assert_equal_tensors(floats(weights), expected)
    assert [type(part) for part in weights.layers[1].qkv.parts] == [Int4Weight, Int4Weight, Int8Weight]
    assert weights.head.parts[0] is weights.embedding
    assert weights.spec.tied_embeddings
    assert weights.spec.head_dim == 64


def test_biases_of_llama_are_put_in_order_too(tmp_path: Path, load: Load) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    written = make_gguf(path, tensor_type="F32")
    # The permutation is the same for a bias: compare with the rows of a matrix that holds its row numbers.
    reader = gguf.GGUFReader(path)
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight").data
    original = written["model.layers.0.self_attn.q_proj.weight"]
    order = [int((original == torch.from_numpy(row.copy())).all(1).nonzero()) for row in stored]
    assert order != sorted(order)
    from kvd.model.gguf_weights import GgufWeightSource

    source = GgufWeightSource(path, {}, {"q_proj": 4})
    permuted = torch.tensor(order, dtype=torch.float32)
    assert source._unpermuted("model.layers.0.self_attn.q_proj", permuted).tolist() == sorted(order)


def test_what_text_needs_is_in_the_file(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    make_gguf(path, metadata={"tokenizer.ggml.eot_token_id": 1})
    files, weights = load(path)
    assert files.format == "gguf"
    assert files.chat_template == CHAT_TEMPLATE
    assert (files.bos_token_id, files.eos_token_ids, files.adds_bos) == (0, (2, 1), False)
    assert files.special_tokens == {"bos_token": END_OF_TEXT, "eos_token": IM_END}
    ours = Tokenizer.from_file(str(files.tokenizer_json))
    original = Tokenizer.from_str(tiny_tokenizer_json())
    for text in ("hello the world 2026", "<|im_start|>user\nit's  a\t\n test<|im_end|>", "日本 é🎉"):
        assert ours.encode(text).ids == original.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert weights.spec.vocab_size == 320


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    factors = llama3_factors(500000.0, 32, (32.0, 1.0, 4.0, 8192))
    make_gguf(path, rope_factors=factors, rope_theta=500000.0)
    spec = load(path)[1].spec
    assert spec.rope == RopeSpec(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    other = tmp_path / "other.gguf"
    make_gguf(other, rope_factors=[factor * 1.1 for factor in factors], rope_theta=500000.0)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        load(other)


def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = plain / torch.tensor(llama3_factors(500000.0, 128, (8.0, 1.0, 4.0, 8192)), dtype=torch.float64)
    torch.testing.assert_close(theirs.double(), ours, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({"llama.expert_count": 8}, UnsupportedModel, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModel, "'yarn'"),
        ({"llama.rope.dimension_count": 16}, UnsupportedModel, "rope.dimension_count = 16"),
        ({"llama.attention.value_length": 64}, UnsupportedModel, "value_length = 64"),
        ({"llama.embedding_length": ...}, CheckpointError, "'llama.embedding_length' is missing"),
        ({"llama.embedding_length": 256}, CheckpointError, "has the shape"),
        ({"llama.block_count": 3}, CheckpointError, "blk.2.attn_norm.weight: tensor is missing"),
        ({"llama.block_count": 1}, CheckpointError, "blk.1."),
        ({"llama.embedding_length": "128"}, CheckpointError, "'llama.embedding_length' must be a positive"),
        ({"llama.block_count": "two"}, CheckpointError, "'num_hidden_layers'"),
        ({"split.count": 3}, UnsupportedModel, "3 parts"),
        ({"tokenizer.ggml.model": "llama"}, UnsupportedModel, "tokenizer model 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, CheckpointError, "eos_token_id 9999"),
        ({"general.architecture": "gemma3"}, UnsupportedModel, "architecture 'gemma3'"),
    ],
)
def test_metadata_that_is_refused_is_named(
    tmp_path: Path, load: Load, metadata: dict[str, Any], error: type[StartupError], words: str
) -> None:
    path = tmp_path / "model.gguf"
    architecture = metadata.pop("general.architecture", "llama")
    make_gguf(path, architecture=architecture, metadata=metadata)
    with pytest.raises(error) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_tensor_types_are_refused_by_tensor_and_type(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    make_gguf(path, types={"blk.1.ffn_down.weight": "Q5_0"})
    with pytest.raises(UnsupportedModel, match=r"model\.gguf: tensor blk\.1\.ffn_down\.weight has the type Q5_0"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 3000, 9000, 60_000, -1, -100])
def test_a_truncated_file_is_named(tmp_path: Path, load: Load, keep: int) -> None:
    path = tmp_path / "model.gguf"
    make_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf: truncated") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_no_gguf_file_at_all(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random.Random(0).randbytes(5000))
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load(path)
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(ModelNotFound, match=r"a model is a directory or a \.gguf file"):
        load(tmp_path / "model.txt")


def test_nan_scales_are_named(tmp_path: Path, load: Load) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    make_gguf(path)
    tensors = gguf.GGUFReader(path).tensors
    offset = next(tensor.data_offset for tensor in tensors if tensor.name == "blk.0.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[offset : offset + 2] = b"\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight holds NaN"):
        load(path)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make_gguf(folder / "a.gguf")
    assert load(folder)[0].weights == (folder / "a.gguf",)
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        load(folder)


def test_preparation_is_kept_until_the_content_changes(
    tmp_path: Path, load: Load, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.model import loading

    path = tmp_path / "model.gguf"
    make_gguf(path)
    calls = []
    monkeypatch.setattr(loading, "parse_gguf", lambda p, parse=loading.parse_gguf: calls.append(p) or parse(p))
    first, weights = load(path)
    again, weights_again = load(path)
    assert (len(calls), first, weights.fingerprint) == (1, again, weights_again.fingerprint)
    make_gguf(path, seed=1)
    _, other = load(path)
    assert (len(calls), other.fingerprint == weights.fingerprint) == (2, False)
    # A folder that lacks its last file was interrupted, and is made again.
    (load(path)[0].directory / loading.CONTENTS_NAME).unlink()
    load(path)
    assert len(calls) == 3
    assert not list(home.rglob("*.part"))


def _tokenizer(pre: str, tokens: list[str], types: list[int], merges: list[str] | None = None) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges or [],
    }
    return Tokenizer.from_str(build_tokenizer_json(metadata, "x.gguf").decode())


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _words(pre: str, text: str) -> list[str]:
    tokenizer = _tokenizer(pre, BYTES, [1] * 256)
    return [word.replace("Ġ", " ") for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["Don", "'t", " ", "1", "2", "3", "4", " a", "!"]),
        ("gpt-2", ["Don", "'t", " 1234", " a", "!"]),
        ("qwen2", ["Don", "'t", " ", "1", "2", "3", "4", " a", "!"]),
        ("llama-bpe", ["Don", "'t", " ", "123", "4", " a", "!"]),
        ("default", ["Don", "'", "t", " ", "123", "4", " a", "!"]),
    ],
)
def test_words_are_split_as_the_model_expects(pre: str, words: list[str]) -> None:
    assert _words(pre, "Don't 1234 a!") == words


def test_smollm_splits_like_its_original_tokenizer() -> None:
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = _tokenizer("smollm", BYTES, [1] * 256).pre_tokenizer
    generator = random.Random(0)
    alphabet = "ab  \n\t'sd12٣²½.,!-é日🎉_"
    for _ in range(2000):
        text = "".join(generator.choice(alphabet) for _ in range(generator.randrange(12)))
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text), text


def test_gpt2_splits_like_byte_level_itself() -> None:
    original = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours = _tokenizer("gpt-2", BYTES, [1] * 256).pre_tokenizer
    for text in ("it's  we'll\n\n x 12½ ,. ", "  ", "a\u00a0b\t\tc"):
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)


def test_control_tokens_are_special_and_user_defined_ones_are_plain() -> None:
    tokenizer = _tokenizer("qwen2", [*BYTES, "<|end|>", "<tool_call>", "[PAD0]"], [1] * 256 + [3, 4, 5])
    ids = tokenizer.encode("a<tool_call>b<|end|>").ids
    assert ids[1:4:2] == [257, 256]
    assert tokenizer.decode(ids) == "a<tool_call>b"
    assert tokenizer.token_to_id("[PAD0]") == 258
    assert tokenizer.encode("[PAD0]").ids != [258]


def test_qwen2_normalises_and_llama3_takes_whole_words() -> None:
    tokens = [*BYTES, "ab"]
    assert len(_tokenizer("qwen2", tokens, [1] * 257).encode("e\u0301").ids) == 2
    assert len(_tokenizer("gpt-2", tokens, [1] * 257).encode("e\u0301").ids) == 3
    assert _tokenizer("llama-bpe", tokens, [1] * 257).encode("ab").ids == [256]
    assert len(_tokenizer("gpt-2", tokens, [1] * 257).encode("ab").ids) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens' must be a list of strings"),
        ({"merges": None}, "merges' must be a list of strings"),
        ({"merges": ["a zz"]}, "merge 'a zz'"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
        ({"token_type": [1]}, "1 token types for 256 tokens"),
    ],
)
def test_token_lists_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    lists: dict[str, Any] = {"tokens": BYTES, "merges": [], "token_type": [1] * 256}
    if changes.get("tokens"):
        lists["token_type"] = [1] * len(changes["tokens"])
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (lists | changes).items()}
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer_json(metadata | {"tokenizer.ggml.model": "gpt2"}, "x.gguf")
    assert words in str(caught.value)


def test_every_pattern_is_one_that_tokenizers_understands() -> None:
    for pre in SPLIT_PATTERNS:
        assert "".join(_words(pre, "x y 12")) == "x y 12"


def test_the_default_model_reads_as_its_authors_meant_it(default_model_files: ModelFiles) -> None:
    """Known encodings of SmolLM2, and weights that a plain float32 forward finds meaningful."""
    from kvd.model.loading import load_weights, read_spec
    from kvd.model.progress import QuietProgress

    tokenizer = Tokenizer.from_file(str(default_model_files.tokenizer_json))
    assert tokenizer.encode("<|im_start|>system\nYou are a helpful AI assistant named SmolLM").ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519,
    ]  # fmt: skip
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "1", "2"]
    assert default_model_files.eos_token_ids == (2,)
    assert not default_model_files.adds_bos
    spec = read_spec(default_model_files)
    assert (spec.num_layers, spec.hidden_size, spec.head_dim, spec.rope.theta) == (30, 576, 64, 100000.0)
    weights = load_weights(default_model_files, spec, progress=QuietProgress())
    assert isinstance(weights.embedding, Int8Weight)
    assert weights.head.parts[0] is weights.embedding
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = torch.tensor(tokenizer.encode(text).ids[:256])
    loss = plain_forward_loss(weights, token_ids)
    assert loss.exp() < 25, f"perplexity {loss.exp():.1f}"


def plain_forward_loss(weights: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a Llama forward in float32, written from the architecture alone."""
    spec = weights.spec
    num_tokens, half = len(token_ids), spec.head_dim // 2
    frequencies = 1 / spec.rope.theta ** (torch.arange(half) / half)
    angles = torch.arange(num_tokens)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + spec.rms_norm_eps) * weight

    def project(x: torch.Tensor, linear: Any) -> list[torch.Tensor]:
        return [x @ dequantize(part).T for part in linear.parts]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    embedding = dequantize(weights.embedding)
    x = embedding[token_ids]
    for layer in weights.layers:
        q, k, v = (
            part.view(num_tokens, -1, spec.head_dim).transpose(0, 1)
            for part in project(norm(x, layer.attention_norm), layer.qkv)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            rotate(q)[None], rotate(k)[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + project(attended.transpose(0, 1).reshape(num_tokens, -1), layer.output)[0]
        gate, up = project(norm(x, layer.mlp_norm), layer.gate_up)
        x = x + project(torch.nn.functional.silu(gate) * up, layer.down)[0]
    logits = norm(x, weights.final_norm) @ embedding.T
    return torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:])


def test_the_prepared_folder_is_plain_json(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "model.gguf"
    make_gguf(path)
    files, _ = load(path)
    contents = json.loads((files.directory / "contents.json").read_text())
    assert contents["config"]["architectures"] == ["LlamaForCausalLM"]
    assert contents["tensors"]["output_norm.weight"][:2] == ["F32", [128]]
