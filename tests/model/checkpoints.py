"""Builds tiny checkpoints with random weights: Hugging Face floats, AutoAWQ, GGUF. For tests of every room.

Each `make_*` writes a complete model that kvd can serve: config.json, weights, a byte-level tokenizer.json with
ChatML special tokens, tokenizer_config.json with a chat template, generation_config.json. Ids 0, 1 and 2 are
<|endoftext|> (BOS), <|im_start|> and <|im_end|> (EOS).

Weights are a function of `seed` and the shapes alone. Needs torch, safetensors, tokenizers, and gguf for GGUF;
`load_reference` needs transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words for a few merges, so that a token is not always a byte.
_TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the other dogs are there with their friends.",
    "def function(value): return value + 1  # and so on, in the same line of the same file",
    "user assistant system the capital of France is Paris; hello world, this is a test of the cache",
]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


def base_config(**overrides: Any) -> dict[str, Any]:
    """The shape that all builders start from; `overrides` replace keys, a value of ... removes one."""
    config: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | overrides
    return {key: value for key, value in config.items() if value is not ...}


def random_tensors(config: dict[str, Any], *, seed: int = 0, qkv_bias: bool = False) -> Tensors:
    """float32 weights by Hugging Face's names; norms near 1, biases of a visible size."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.5)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        shapes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape, scale=shape[1] ** -0.5)
            if qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{prefix}.{name}.bias"] = normal(shape[0], scale=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + normal(hidden, scale=0.1)
    tensors["model.norm.weight"] = 1 + normal(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5)
    return tensors


def make_llama(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **config: Any
) -> Path:
    """A LlamaForCausalLM directory at `path`; `config` overrides keys of `base_config`. Returns `path`."""
    full = base_config(architectures=["LlamaForCausalLM"], model_type="llama", **_dtype_key(dtype, config))
    return _write(path, full, random_tensors(full, seed=seed), dtype, shards)


def make_qwen2(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **config: Any
) -> Path:
    """A Qwen2ForCausalLM directory with random q, k and v biases; sliding window off unless overridden."""
    window = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    full = base_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **(window | _dtype_key(dtype, config)))
    return _write(path, full, random_tensors(full, seed=seed, qkv_bias=True), dtype, shards)


def make_awq(
    path: Path,
    *,
    base: str = "llama",
    seed: int = 0,
    group_size: int = 64,
    skip: Iterable[str] = (),
    scale_dtype: torch.dtype = torch.float16,
    shards: int = 1,
    **config: Any,
) -> Path:
    """An AutoAWQ GEMM directory, quantised by plain rounding from random weights.

    base: "llama" or "qwen2"; group_size: −1 for whole rows; skip: AutoAWQ's `modules_to_not_convert`, matched as
    substrings like AutoAWQ does. Skipped modules, lm_head, embedding, norms and biases are float16.
    """
    skip = list(skip)
    full = base_config(
        architectures=["LlamaForCausalLM" if base == "llama" else "Qwen2ForCausalLM"],
        model_type=base,
        quantization_config={
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "modules_to_not_convert": skip or None,
        },
        **({"torch_dtype": "float16"} | config),
    )
    tensors: Tensors = {}
    for name, value in random_tensors(full, seed=seed, qkv_bias=base == "qwen2").items():
        module = name.removesuffix(".weight")
        if value.dim() == 2 and "_proj" in name and not any(part in name for part in skip):
            tensors |= quantize_awq(value, module, group_size, scale_dtype)
        else:
            tensors[name] = value.to(torch.float16)
    return _write(path, full, tensors, None, shards)


def quantize_awq(weight: torch.Tensor, module: str, group_size: int, scale_dtype: torch.dtype) -> Tensors:
    """qweight, qzeros and scales of one float32 [N, K] matrix, packed like AutoAWQ's WQLinear_GEMM."""
    num_outputs, num_inputs = weight.shape
    group_size = num_inputs if group_size == -1 else group_size
    grouped = weight.view(num_outputs, -1, group_size)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low).clamp(min=1e-5) / 15).to(scale_dtype)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[:, :, None]).round() + zeros[:, :, None]
    codes = codes.clamp(0, 15).view(num_outputs, num_inputs)
    return {
        f"{module}.qweight": pack_awq(codes.T),
        f"{module}.qzeros": pack_awq(zeros.T),
        f"{module}.scales": scales.T.contiguous(),
    }


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 … 15 as any type, [R, N], to int32 [R, N / 8] in AWQ's order."""
    eights = codes.to(torch.int64).reshape(codes.shape[0], -1, 8)
    words = sum(eights[:, :, output] << (4 * nibble) for nibble, output in enumerate(AWQ_ORDER))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def unpack_awq_slowly(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_awq`, written independently of kvd's reader: int64 [R, N]."""
    rows, words = packed.shape
    codes = torch.zeros((rows, words * 8), dtype=torch.int64)
    for nibble, output in enumerate(AWQ_ORDER):
        codes[:, output::8] = (packed.to(torch.int64) >> (4 * nibble)) & 15
    return codes


def reference_tensors(path: Path) -> Tensors:
    """Every weight of a Hugging Face or AWQ directory as float32 by its plain name; AWQ as (q − z)·s."""
    stored: Tensors = {}
    for shard in sorted(path.glob("*.safetensors")):
        stored |= load_file(shard)
    config = json.loads((path / "config.json").read_text())
    group_size = config.get("quantization_config", {}).get("group_size", -1)
    tensors = {}
    for name, value in stored.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            size = value.shape[0] if group_size == -1 else group_size
            zeros = unpack_awq_slowly(stored[f"{module}.qzeros"]).repeat_interleave(size, 0)
            scales = stored[f"{module}.scales"].float().repeat_interleave(size, 0)
            tensors[f"{module}.weight"] = ((unpack_awq_slowly(value) - zeros) * scales).T.contiguous()
        elif not name.endswith((".qzeros", ".scales")):
            tensors[name] = value.float()
    return tensors


def load_reference(path: Path) -> Any:
    """transformers' own model in float32 and eval mode, with the (dequantised) weights of a directory."""
    import transformers

    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[config["model_type"]]
    config["dtype"] = config.pop("torch_dtype", "float32")
    model = model_class(config_class(**config)).float().eval()
    tensors = reference_tensors(path)
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model


def make_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tensor_type: str = "Q4_1",
    types: dict[str, str] | None = None,
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
    **config: Any,
) -> Tensors:
    """A GGUF file at `path`, written as llama.cpp's converter does; returns its weights dequantised by the
    `gguf` package, as float32 by Hugging Face's names.

    tensor_type: of all matrices; types: exceptions by GGUF name; metadata: extra or replaced keys (strings,
    integers, floats and booleans; a value of ... drops the key).
    """
    import gguf

    full = base_config(**config)
    tensors = random_tensors(full, seed=seed, qkv_bias=architecture == "qwen2")
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    values: dict[str, Any] = {
        "block_count": full["num_hidden_layers"],
        "context_length": full["max_position_embeddings"],
        "embedding_length": full["hidden_size"],
        "feed_forward_length": full["intermediate_size"],
        "attention.head_count": full["num_attention_heads"],
        "attention.head_count_kv": full["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": full["rope_theta"],
        "attention.layer_norm_rms_epsilon": full["rms_norm_eps"],
    }
    document = json.loads(tiny_tokenizer_json(full["vocab_size"]))
    vocab = document["model"]["vocab"]
    num_special = len(document["added_tokens"])
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), full["vocab_size"])]
    defaults = {f"{architecture}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, value in (defaults | (metadata or {})).items():
        if value is ...:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3] * num_special + [1] * (len(tokens) - num_special))
    writer.add_array("tokenizer.ggml.merges", [" ".join(pair) for pair in document["model"]["merges"]])

    from kvd.model.gguf_weights import gguf_name

    dequantized = {}
    for name, tensor in tensors.items():
        stored_name = gguf_name(name)
        kind = (types or {}).get(stored_name, tensor_type if tensor.dim() == 2 else "F32")
        quantized = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind])
        dequantized[name] = torch.from_numpy(
            gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType[kind]).astype(np.float32)
        ).reshape(tensor.shape)
        for letter, heads in (("q", full["num_attention_heads"]), ("k", full["num_key_value_heads"])):
            if architecture == "llama" and name.endswith((f"{letter}_proj.weight", f"{letter}_proj.bias")):
                # LlamaModel.permute of convert_hf_to_gguf.py
                shape = quantized.shape
                quantized = quantized.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
                quantized = quantized.swapaxes(1, 2).reshape(shape)
        writer.add_tensor(stored_name, np.ascontiguousarray(quantized), raw_dtype=gguf.GGMLQuantizationType[kind])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized


@functools.cache
def tiny_tokenizer_json(vocab_size: int = 320) -> str:
    """Byte-level BPE in SmolLM2's style (single digits), at most `vocab_size` tokens, three of them special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return str(tokenizer.to_str())


def rewrite_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON file; a value of ... removes one."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def rewrite_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint directory; "__" stands for a dot."""
    file = path / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = dict(load_file(file))
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def _dtype_key(dtype: torch.dtype, config: dict[str, Any]) -> dict[str, Any]:
    return {"torch_dtype": str(dtype).removeprefix("torch.")} | config


def _write(path: Path, config: dict[str, Any], tensors: Tensors, dtype: torch.dtype | None, shards: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [2], "temperature": 0.7, "do_sample": True})
    )
    (path / "tokenizer.json").write_text(tiny_tokenizer_json(config["vocab_size"]))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": END_OF_TEXT,
                "eos_token": {"content": IM_END, "special": True},
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    if dtype is not None:
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index_file = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return path
