"""Weights of a Hugging Face directory: plain 16- and 32-bit floats, and AutoAWQ's GEMM format.

Purpose: a `WeightSource` over safetensors shards.
Owner thread: the one that loads the model.
Invariant: which tensors exist decides how a module is stored; the config is only checked against that.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.awq import unpack_awq
from kvd.model.awq_config import AwqConfig
from kvd.model.safetensors_files import SafetensorsFiles
from kvd_kernels.weights import FloatWeight, Int4Weight, WeightMatrix

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Written by old versions of transformers; kvd computes the same numbers from the config.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_PACKED = ("qweight", "qzeros", "scales")


class HfWeightSource:
    """Matrices by module name. `config_source` names the config file for messages."""

    def __init__(
        self, files: SafetensorsFiles, awq: AwqConfig | None, *, tied_embeddings: bool, config_source: str
    ) -> None:
        self._files = files
        self._awq = awq
        self._tied_embeddings = tied_embeddings
        self._config_source = config_source
        self._used: set[str] = set()
        paths = {entry.path for entry in files.entries.values()}
        # What a missing tensor is missing from: the one file, or the directory of the shards.
        self._everywhere = paths.pop() if len(paths) == 1 else Path(config_source).parent

    def has(self, tensor: str) -> bool:
        return tensor in self._files

    def where(self, tensor: str) -> str:
        entry = self._files.entries.get(tensor)
        path = entry.path if entry is not None else self._everywhere
        return f"{path}: {tensor}"

    def vector(self, tensor: str, size: int) -> torch.Tensor:
        # A copy: norms and biases are used in every step and must not hang on the file.
        return self._floats(tensor, (size,)).to(torch.float32, copy=True)

    def matrix(self, module: str, num_outputs: int, num_inputs: int) -> WeightMatrix:
        packed = [f"{module}.{suffix}" for suffix in _PACKED if self.has(f"{module}.{suffix}")]
        is_packed = bool(packed)
        if is_packed and self.has(f"{module}.weight"):
            raise CheckpointError(f"{self.where(packed[0])}: there is also {module}.weight")
        if not is_packed:
            # A float weight is a view of the file: its pages are read when a backend packs it.
            return FloatWeight(self._floats(f"{module}.weight", (num_outputs, num_inputs)))
        if self._awq is None:
            raise CheckpointError(
                f"{self.where(f'{module}.qweight')}: a quantised tensor, but {self._config_source} has no "
                "quantization_config"
            )
        if self._awq.names_as_skipped(module):
            raise CheckpointError(f"{self.where(f'{module}.qweight')}: quantised, but modules_to_not_convert names it")
        return self._packed(module, num_outputs, num_inputs, self._awq)

    def _packed(self, module: str, num_outputs: int, num_inputs: int, awq: AwqConfig) -> Int4Weight:
        group_size = num_inputs if awq.group_size == -1 else awq.group_size
        where = self.where(f"{module}.qweight").removesuffix(".qweight")
        if num_inputs % group_size:
            raise UnsupportedModel(f"{where}: group size {group_size} does not divide {num_inputs} inputs")
        if num_outputs % 8:
            raise UnsupportedModel(f"{where}: AWQ packs outputs by eight, and there are {num_outputs}")
        num_groups = num_inputs // group_size
        shapes = ((num_inputs, num_outputs // 8), (num_groups, num_outputs // 8), (num_groups, num_outputs))
        tensors = []
        for suffix, shape in zip(_PACKED, shapes, strict=True):
            tensor = self._checked(f"{module}.{suffix}", shape)
            if suffix != "scales" and tensor.dtype != torch.int32:
                raise CheckpointError(
                    f"{self.where(f'{module}.{suffix}')} has the type {tensor.dtype}, int32 is expected"
                )
            tensors.append(tensor)
        qweight, qzeros, scales = tensors
        return unpack_awq(qweight, qzeros, scales, group_size, where=where)

    def _floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._checked(name, shape)
        if tensor.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{self.where(name)} has the type {tensor.dtype}; kvd reads float16, bfloat16 and float32"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.where(name)} holds NaN or infinity")
        return tensor

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.where(name)}: tensor is missing")
        found = self._files.entries[name].shape
        if found != shape:
            raise CheckpointError(f"{self.where(name)} has the shape {list(found)}, the config says {list(shape)}")
        self._used.add(name)
        return self._files.tensor(name)

    def finish(self) -> None:
        if self._tied_embeddings:
            self._check_duplicate_head()
        unused = [name for name in self._files.entries if name not in self._used and not _DERIVED.search(name)]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise CheckpointError(f"{self.where(unused[0])}{more}: tensors that this architecture has no use for")

    def _check_duplicate_head(self) -> None:
        """A tied checkpoint may repeat its embedding as lm_head.weight; another matrix is a contradiction."""
        name = "lm_head.weight"
        if not self.has(name):
            return
        head, embedding = self._files.tensor(name), self._files.tensor("model.embed_tokens.weight")
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            raise CheckpointError(
                f"{self.where(name)} differs from the embedding, but {self._config_source} ties the two"
            )
        self._used.add(name)
