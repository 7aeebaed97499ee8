"""Which AWQ a checkpoint says it is: AutoAWQ's settings, or a refusal by name. Torch-free.

Purpose: everything about quantisation that can be decided before a tensor is read.
Owner thread: the one that starts the engine.
Invariant: what is not AutoAWQ's 4-bit GEMM format is refused here, naming method, version, bits or group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.storage import read_json_object

GROUP_SIZES = (32, 64, 128, -1)
LEGACY_CONFIG_NAME = "quant_config.json"


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """group_size −1 means that a group is a whole row. `skipped` are the names of modules left in 16 bits."""

    group_size: int
    skipped: tuple[str, ...]

    @property
    def label(self) -> str:
        return "awq whole-row" if self.group_size == -1 else f"awq g{self.group_size}"

    def names_as_skipped(self, module: str) -> bool:
        """Whether an entry names this module by whole components of its dotted path.

        AutoAWQ itself matches substrings, so that `layers.1` also skips `layers.10`; which tensors exist is
        what decides, and this narrower rule only serves to find contradictions.
        """
        return any(f".{entry.strip('.')}." in f".{module}." for entry in self.skipped)


def read_awq_config(config: dict[str, Any], source: str, directory: Path | None) -> AwqConfig | None:
    """The AWQ settings of a checkpoint, None when it is not quantised.

    source: name of the config file for messages; directory: where AutoAWQ's older `quant_config.json`
    may lie.
    Raises UnsupportedModel naming the method, version, bits or group size that kvd does not read.
    """
    settings = config.get("quantization_config")
    if settings is None and directory is not None and (directory / LEGACY_CONFIG_NAME).is_file():
        source = str(directory / LEGACY_CONFIG_NAME)
        legacy = read_json_object(directory / LEGACY_CONFIG_NAME)
        renamed = {"w_bit": "bits", "q_group_size": "group_size"}
        settings = {"quant_method": "awq"} | {renamed.get(key, key): value for key, value in legacy.items()}
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{source}: key 'quantization_config' must be an object, not {settings!r}")
    method = settings.get("quant_method")
    if method != "awq":
        raise UnsupportedModel(
            f"{source}: quantization method {method!r} is not served; kvd reads AWQ (AutoAWQ's GEMM format), "
            "GGUF and unquantised checkpoints"
        )
    version = settings.get("version") or settings.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise UnsupportedModel(f"{source}: AWQ version {version!r} is not served; kvd reads version 'gemm'")
    if settings.get("backend") == "llm-awq":
        raise UnsupportedModel(f"{source}: AWQ backend 'llm-awq' is not served; kvd reads AutoAWQ's format")
    bits = settings.get("bits", 4)
    if bits != 4 or isinstance(bits, bool):
        raise UnsupportedModel(f"{source}: AWQ with {bits!r} bits is not served; kvd reads 4 bits")
    group_size = settings.get("group_size", 128)
    if group_size not in GROUP_SIZES or isinstance(group_size, bool):
        raise UnsupportedModel(
            f"{source}: AWQ group_size {group_size!r} is not served; kvd reads 32, 64, 128 and -1 (whole row)"
        )
    if settings.get("zero_point", True) is not True:
        raise UnsupportedModel(f"{source}: AWQ without zero points (zero_point: false) is not served")
    skipped = settings.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
        raise CheckpointError(f"{source}: 'modules_to_not_convert' must be a list of names, not {skipped!r}")
    return AwqConfig(group_size, tuple(skipped))
