"""Writing a checkpoint in AutoAWQ's GEMM format.

Purpose: the directory that other AWQ readers accept: packed tensors in safetensors shards, config, tokenizer,
generation config.
Owner thread: the one that converts.
Invariant: the destination appears complete under its name or not at all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvd.errors import ConfigError, StartupError, UnsupportedModel
from kvd.model.awq import FLOAT16_MAX, NIBBLE_OUTPUTS
from kvd.model.files import ModelFiles
from kvd.model.storage import read_json_object, readable_os_error
from kvd.tools.awq_scaling import AwqCodes

OUTPUTS_PER_WORD = 8
SHARD_BYTES = 5 * 10**9
_DTYPE_NAMES = {torch.float16: "F16", torch.int32: "I32"}


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [R, N] to AWQ's int32 [R, N / 8]; N is a multiple of 8."""
    rows, outputs = codes.shape
    ordered = codes.view(rows, outputs // OUTPUTS_PER_WORD, OUTPUTS_PER_WORD)[:, :, list(NIBBLE_OUTPUTS)]
    # Little endian: the first byte of a word holds its two lowest nibbles.
    packed = ordered[:, :, 0::2] | (ordered[:, :, 1::2] << 4)
    return packed.contiguous().view(torch.int32).view(rows, outputs // OUTPUTS_PER_WORD)


def awq_tensors(module: str, codes: AwqCodes) -> dict[str, torch.Tensor]:
    """The three tensors of one linear: AWQ stores matrices input-major, eight outputs to a word."""
    return {
        f"{module}.qweight": pack_nibbles(codes.codes.T.contiguous()),
        f"{module}.qzeros": pack_nibbles(codes.zeros.T.contiguous()),
        f"{module}.scales": codes.scales.T.contiguous(),
    }


def to_float16(values: torch.Tensor, tensor: str) -> torch.Tensor:
    """Round to float16; UnsupportedModel names a tensor that has values beyond its range."""
    largest = values.abs().max().item() if values.numel() else 0.0
    if not largest <= FLOAT16_MAX:
        raise UnsupportedModel(f"{tensor}: a value of {largest:g} is beyond float16, which AWQ checkpoints use")
    return values.to(torch.float16)


class ShardWriter:
    """Collects tensors and writes them in safetensors files of at most `shard_bytes` (one larger tensor alone)."""

    def __init__(self, directory: Path, *, shard_bytes: int) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_bytes + size > self._shard_bytes:
                self._flush()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += size
            self._total_bytes += size

    def finish(self) -> int:
        """Write what is left, name the shards, write their index where there is more than one; returns bytes."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._directory / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            write_json(self._directory / "model.safetensors.index.json", index)
        return self._total_bytes

    def _flush(self) -> None:
        path = self._directory / f"shard-{len(self._shards)}.part"
        _write_safetensors(path, self._pending)
        self._shards.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The safetensors format: header length (u64, little endian), JSON header padded to 8 bytes, tensors.

    Written here and not by the library, whose errors do not say that the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(tensor.numpy().data)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def output_directory(destination: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `destination` when the block ends well, and vanishes when it does not.

    Raises ConfigError when the destination exists and is not an empty directory, StartupError when writing fails.
    """
    check_destination(destination)
    temporary: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".part", dir=destination.parent))
        temporary.chmod(0o755)
        yield temporary
        temporary.rename(destination)
    except OSError as error:
        raise readable_os_error(error, destination) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def check_destination(destination: Path) -> None:
    """ConfigError unless the destination is absent or an empty directory."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ConfigError(f"{destination}: exists and is not a directory")
    if destination.is_dir() and any(destination.iterdir()):
        raise ConfigError(f"{destination}: exists and is not empty; choose another destination or remove it")


def write_side_files(files: ModelFiles, directory: Path, *, group_size: int, skipped: list[str], tied: bool) -> None:
    """config.json, tokenizer.json, tokenizer_config.json and generation_config.json."""
    dropped = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")
    config = {key: value for key, value in files.config.items() if key not in dropped}
    config["tie_word_embeddings"] = tied
    config["torch_dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": skipped or None,
    }
    write_json(directory / "config.json", config)
    shutil.copyfile(files.tokenizer_json, directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", _tokenizer_config(files))
    write_json(directory / "generation_config.json", _generation_config(files))


def _source_json(files: ModelFiles, name: str) -> dict[str, Any]:
    path = files.directory / name
    return read_json_object(path) if files.format == "hf" and path.is_file() else {}


def _tokenizer_config(files: ModelFiles) -> dict[str, Any]:
    config = _source_json(files, "tokenizer_config.json")
    if not config:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": files.config.get("max_position_embeddings"),
            "clean_up_tokenization_spaces": False,
        }
    config |= {"add_bos_token": files.adds_bos, **files.special_tokens}
    if files.chat_template is not None:
        config["chat_template"] = files.chat_template
    return config


def _generation_config(files: ModelFiles) -> dict[str, Any]:
    config = _source_json(files, "generation_config.json")
    if not config:
        config = dict(files.default_sampling)
        if config.get("temperature"):
            config["do_sample"] = True
    if files.bos_token_id is not None:
        config["bos_token_id"] = files.bos_token_id
    eos = list(files.eos_token_ids)
    if eos:
        config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return config


def require_free_space(directory: Path, num_bytes: int) -> None:
    """StartupError when the disk cannot hold what is about to be written."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StartupError(f"{directory}: {num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
