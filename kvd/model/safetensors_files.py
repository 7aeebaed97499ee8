"""Reading safetensors shards without copying; headers are checked against the files before mapping.

Purpose: a truncated, missing or contradictory shard is one line that names it, never a crash while serving.
Owner thread: the one that loads the model.
Invariant: every entry lies inside its file and has the number of bytes that its shape and dtype say.

Tensors are views of a private mapping: pages are read when touched, and the file is never written.
Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.shards import INDEX_NAME, SINGLE_NAME, read_weight_map

MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 4096

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: absolute byte range in `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header, offset of the data, size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: truncated, or no safetensors file (header does not fit)")
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is no JSON object")
    header.pop("__metadata__", None)
    return header, 8 + header_bytes, size


def _read_entry(path: Path, name: str, raw: Any, data_start: int, size: int) -> TensorEntry:
    try:
        dtype_name, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        is_integral = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry") from error
    if not is_integral or begin > end:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry")
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedModel(f"{path}: tensor {name!r} has the type {dtype_name}, which kvd does not read")
    if data_start + end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name!r} ends at byte {data_start + end}, the file has {size}"
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name!r} has {end - begin} bytes, which do not fit {dtype_name}{list(shape)}"
        )
    return TensorEntry(path, dtype, shape, data_start + begin, data_start + end)


class SafetensorsFiles:
    """All tensors of a checkpoint by name."""

    def __init__(self, shards: tuple[Path, ...]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._mapped: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}
        for path in shards:
            header, data_start, size = _read_header(path)
            for name, raw in header.items():
                if name in self.entries:
                    other = self.entries[name].path.name
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {other}")
                self.entries[name] = _read_entry(path, name, raw, data_start, size)
        index = shards[0].parent / INDEX_NAME
        if shards[0].name != SINGLE_NAME and index.is_file():
            for name, shard in read_weight_map(index).items():
                if name not in self.entries or self.entries[name].path.name != shard:
                    raise CheckpointError(f"{index.parent / shard}: tensor {name!r} is missing ({INDEX_NAME} names it)")

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file (private: writing to it would not reach the file)."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.from_numpy(self._bytes(entry.path)[entry.begin : entry.end])
        if entry.begin % entry.dtype.itemsize:
            raw = raw.clone()  # an unaligned view would be slow, or a fault on some machines
        return raw.view(entry.dtype).view(entry.shape)

    def _bytes(self, path: Path) -> np.memmap[Any, np.dtype[np.uint8]]:
        if path not in self._mapped:
            try:
                self._mapped[path] = np.memmap(path, dtype=np.uint8, mode="c")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror or error}") from error
        return self._mapped[path]

    def update_digest(self, digest: hashlib._Hash) -> None:
        """Add the identity of every tensor: name, dtype, shape, and a sample of its content.

        The sample is the first, middle and last 4 KiB. Another fine-tune of the same model differs there; a
        file in which somebody changed single values elsewhere does not.
        """
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name}|{entry.dtype}|{entry.shape}|".encode())
            data = self._bytes(entry.path)
            middle = (entry.begin + entry.end - SAMPLE_BYTES) // 2
            for start in (entry.begin, middle, entry.end - SAMPLE_BYTES):
                start = max(start, entry.begin)
                digest.update(data[start : min(start + SAMPLE_BYTES, entry.end)].tobytes())
