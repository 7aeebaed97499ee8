"""A Hugging Face checkpoint directory becomes `ModelFiles`: config, tokenizer, template, sampling defaults.

Purpose: everything beside the weights, read once and checked. Torch-free apart from the shard checks.
Owner thread: the one that starts the engine.
Invariant: nothing in a checkpoint is executed. No pickles, no remote code; `auto_map` is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.errors import CheckpointError
from kvd.model.files import ModelFiles
from kvd.model.storage import read_json_object

_SAMPLING_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a finite number ≥ 0", lambda value: 0 <= value < math.inf),
    "top_p": ("a number > 0 and ≤ 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number ≥ -1", lambda value: -1 <= value < math.inf and value == int(value)),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a finite number > 0", lambda value: 0 < value < math.inf),
}
SAMPLING_KEYS = tuple(_SAMPLING_RANGES)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLOAT_LABELS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def read_hf_directory(directory: Path, name: str, shards: tuple[Path, ...]) -> ModelFiles:
    """Read the small files of a checkpoint. CheckpointError names a missing or malformed one."""
    config = read_json_object(directory / "config.json")
    tokenizer_json = directory / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise CheckpointError(f"{tokenizer_json}: file is missing (kvd reads no other tokenizer format)")
    tokenizer = read_json_object(tokenizer_json)
    tokenizer_config = _optional(directory / "tokenizer_config.json")
    generation = _optional(directory / "generation_config.json")
    special_tokens = _special_tokens(tokenizer_config, _optional(directory / "special_tokens_map.json"))
    token_ids = _token_ids(tokenizer, tokenizer_json)

    bos_token_id = token_ids.get(special_tokens.get("bos_token", ""))
    if bos_token_id is None:
        bos_ids = _ids(config, "bos_token_id", directory / "config.json")
        bos_token_id = bos_ids[0] if bos_ids else None
    eos_token_ids = [
        *_ids(generation, "eos_token_id", directory / "generation_config.json"),
        *_ids(config, "eos_token_id", directory / "config.json"),
    ]
    if special_tokens.get("eos_token") in token_ids:
        eos_token_ids.append(token_ids[special_tokens["eos_token"]])
    adds_bos = tokenizer_config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = _template_adds_bos(tokenizer, bos_token_id, token_ids)
    return ModelFiles(
        name=name,
        format="hf",
        directory=directory,
        weights=shards,
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, tokenizer_config),
        adds_bos=adds_bos and bos_token_id is not None,
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        special_tokens=special_tokens,
        default_sampling=_sampling(generation, directory / "generation_config.json"),
    )


def float_label(config: dict[str, Any]) -> str:
    """ "bf16", "fp16" or "fp32", from the config of an unquantised checkpoint."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return FLOAT_LABELS.get(str(dtype).removeprefix("torch."), str(dtype))


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _ids(config: dict[str, Any], key: str, path: Path) -> list[int]:
    """A token id or a list of them; [] when the key is absent or null."""
    value = config.get(key)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{path}: key {key!r} must be a token id or a list of them, not {value!r}")
    return values


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Token strings by role; earlier sources win. A token is a string or an object with `content`."""
    found: dict[str, str] = {}
    for role in SPECIAL_TOKENS:
        for source in sources:
            token = source.get(role)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found[role] = token
                break
    return found


def _token_ids(tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    """Ids of the added tokens, where special tokens live; of the whole vocabulary where there are none."""
    added = tokenizer.get("added_tokens") or []
    try:
        token_ids = {token["content"]: token["id"] for token in added}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: key 'added_tokens' is malformed") from error
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return vocab | token_ids
    return token_ids


def _template_adds_bos(tokenizer: dict[str, Any], bos_token_id: int | None, token_ids: dict[str, int]) -> bool:
    """Whether the tokenizer's own post-processor starts a single sequence with the BOS token."""
    processor = tokenizer.get("post_processor")
    if not isinstance(processor, dict):
        return False
    processors = processor.get("processors", []) if processor.get("type") == "Sequence" else [processor]
    for part in processors:
        is_template = isinstance(part, dict) and part.get("type") == "TemplateProcessing"
        template = part.get("single") if is_template else None
        if template and "SpecialToken" in template[0]:
            return token_ids.get(template[0]["SpecialToken"].get("id")) == bos_token_id
    return False


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, else chat_template.json, else the tokenizer config (its "default" of several)."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{jinja}: not readable as UTF-8 text") from error
    separate = _optional(directory / "chat_template.json")
    template = separate.get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: key 'chat_template' is malformed")
    return template


def _sampling(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    """The sampling defaults that kvd knows; null and mistyped values are left out, as if absent."""
    found: dict[str, Any] = {}
    for key in SAMPLING_KEYS:
        value = generation.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        expected, is_valid = _SAMPLING_RANGES[key]
        if not is_valid(value):
            raise CheckpointError(f"{path}: key {key!r} must be {expected}, not {value!r}")
        found[key] = max(0, int(value)) if key == "top_k" else value  # -1 is a word for "all"
    return found


def dump_config(config: dict[str, Any]) -> bytes:
    """A canonical form for fingerprints: equal for equal content."""
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
