"""The tokenizer of a GGUF file as a `tokenizer.json`.

Purpose: byte-level BPE from GGUF metadata, with the pre-tokenizer that `tokenizer.ggml.pre` names.
Owner thread: the one that prepares the model. Torch-free.
Invariant: ids are the file's own. A vocabulary or pre-tokenizer that kvd does not know exactly is refused:
a wrong split of words is not an error anybody would see, only worse answers.

The split patterns are those of the models' own tokenizer.json files; "default" is llama.cpp's rule for files
that name no pre-tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from kvd.errors import CheckpointError, UnsupportedModel

# GGUF's token types.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = [_MODERN_PATTERN.replace("DIGITS", r"\p{N}{1,3}")]
SPLIT_PATTERNS: dict[str, list[str]] = {
    "smollm": [r"\p{N}", _GPT2_PATTERN],
    "gpt-2": [_GPT2_PATTERN],
    "gpt2": [_GPT2_PATTERN],
    "qwen2": [_MODERN_PATTERN.replace("DIGITS", r"\p{N}")],
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
# Llama 3's own tokenizer takes a word that is a whole token as it is, without replaying merges.
_IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3")
_PREFIX = "tokenizer.ggml."


def build_tokenizer_json(metadata: dict[str, Any], source: str) -> bytes:
    """A `tokenizer.json` for the `tokenizers` library. Control tokens are special, user-defined ones are not.

    metadata: GGUF keys and values; source: the file for messages. Raises UnsupportedModel naming the model or
    pre-tokenizer, CheckpointError for lists that are missing or contradict each other.
    """
    model = metadata.get(f"{_PREFIX}model")
    if model != "gpt2":
        raise UnsupportedModel(f"{source}: tokenizer model {model!r} is not served; kvd reads byte-level BPE ('gpt2')")
    pre = metadata.get(f"{_PREFIX}pre", "default")
    if pre not in SPLIT_PATTERNS:
        known = ", ".join(SPLIT_PATTERNS)
        raise UnsupportedModel(f"{source}: pre-tokenizer {pre!r} is not served; kvd knows {known}")
    tokens, merges = (_strings(metadata, name, source) for name in ("tokens", "merges"))
    types = metadata.get(f"{_PREFIX}token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: {len(types)} token types for {len(tokens)} tokens")
    if metadata.get(f"{_PREFIX}add_space_prefix"):
        raise UnsupportedModel(f"{source}: add_space_prefix is not served")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml.tokens holds a token twice")

    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise CheckpointError(f"{source}: merge {' '.join(pair)!r} names tokens that do not exist")
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLIT_PATTERNS[pre]
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES,
            "vocab": vocab,
            "merges": pairs,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a plain prompt starts with BOS. As in llama.cpp: what the file says, else only Llama 3's does."""
    stated = metadata.get(f"{_PREFIX}add_bos_token")
    if isinstance(stated, bool):
        return stated
    return metadata.get(f"{_PREFIX}pre") in _IGNORES_MERGES


def _strings(metadata: dict[str, Any], name: str, source: str) -> list[str]:
    value = metadata.get(f"{_PREFIX}{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{source}: metadata key '{_PREFIX}{name}' must be a list of strings")
    return value
