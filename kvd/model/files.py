"""A model on disk, resolved: where its files are and what text needs to know. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What `resolve_model` found, ready to be loaded.

    name             the `model` string that was asked for
    format           "gguf": `weights` is one file; "hf": safetensors shards beside a config.json
    directory        where config and tokenizer lie; for GGUF the folder of what was prepared from the file
    config           config.json, or the GGUF metadata translated to the same keys
    tokenizer_json   a file that `tokenizers.Tokenizer.from_file` reads (made from the metadata for GGUF)
    bos_token_id     the token that starts a sequence; `adds_bos` says whether plain prompts get it
    eos_token_ids    tokens that end an answer, from generation config, config and tokenizer config
    special_tokens   token strings of the tokenizer config that templates use: bos_token, eos_token, …
    default_sampling sampling defaults from generation_config.json (temperature, top_p, top_k, …), {} if none
    """

    name: str
    format: Literal["gguf", "hf"]
    directory: Path
    weights: tuple[Path, ...]
    config: dict[str, Any]
    tokenizer_json: Path
    chat_template: str | None
    adds_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str] = field(default_factory=dict)
    default_sampling: dict[str, Any] = field(default_factory=dict)
