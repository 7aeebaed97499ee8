"""Makes the tiers below the KV pool: the RAM tier's memory, and the disk tier behind it.

The disk tier reads and writes slots of the RAM tier. Where a disk is configured without `swap_space`, a small RAM tier
is made for it to work through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.cache.disk_folder import DiskFolder
from kvd.cache.disk_formats import KVFormatName, remember_format
from kvd.cache.sizing import GIB
from kvd.cache.store import Arena, allocate_arena
from kvd.config import Config
from kvd.engine.disk_link import DiskLink
from kvd.errors import NotEnoughMemory
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import Ops

STAGING_BYTES = 256 << 20
"""RAM that the disk tier works through when there is no `swap_space`."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """`num_slots` of every layer group; 0: no RAM tier. `num_bytes` is what they take at most."""

    num_slots: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tiers:
    """What `open_tiers` made; None where there is none. other_formats: of this model, that the folder was used with."""

    arena: Arena | None
    disk: DiskLink | None
    num_slots: tuple[int, ...]
    other_formats: tuple[KVFormatName, ...] = ()


def size_tiers(config: Config, kv_format: KVFormat, log: Callable[[str, str], None]) -> TierSizes:
    """Slots of the RAM tier: whole blocks of all groups in `swap_space`, never more.

    Raises NotEnoughMemory where `swap_space` is smaller than one block of every group, and StartupError for a folder of
    the disk tier that cannot be used.
    """
    num_bytes = int(config.swap_space * GIB)
    if config.disk_cache is not None and not num_bytes:
        num_bytes = STAGING_BYTES
    num_slots = num_bytes // kv_format.block_bytes
    if config.swap_space and not num_slots:
        raise NotEnoughMemory(
            f"swap_space {config.swap_space} GiB is less than one KV block of {kv_format.block_bytes / GIB:.6f} GiB"
        )
    if config.disk_cache is not None:
        DiskFolder(
            config.disk_cache.path, lambda line: log("warning", line)
        )  # a bad folder is to be known before weights are loaded
    return TierSizes(num_slots, num_slots * kv_format.block_bytes)


def open_tiers(
    config: Config,
    kv_format: KVFormat,
    sizes: TierSizes,
    ops: Ops,
    *,
    key_seed: bytes,
    format_name: str,
    wake: Callable[[], None],
    log: Callable[[str, str], None],
) -> Tiers:
    """Allocate the RAM tier and open the disk tier.

    key_seed: the model's fingerprint, "|", and what else decides the bytes of a block, which `format_name` names for
    people. wake: called from the disk tier's threads when it has done something. Raises StartupError for a folder that
    cannot be used.
    """
    num_slots = (sizes.num_slots,) * len(kv_format.groups)
    if not sizes.num_slots:
        return Tiers(None, None, num_slots)
    try:
        arena = allocate_arena(kv_format, num_slots, ops)
    except MemoryError as error:
        raise NotEnoughMemory(f"swap_space of {sizes.num_bytes / GIB:.2f} GiB is not to be had: {error}") from None
    if config.disk_cache is None:
        return Tiers(arena, None, num_slots)
    disk = DiskLink(
        config.disk_cache.path,
        config.disk_cache.size_bytes,
        [group.block_bytes for group in kv_format.groups],
        memory=arena.memory,
        wake=wake,
        log=lambda line: log("warning", line),
    )
    others = remember_format(disk.folder, key_seed, format_name, lambda line: log("warning", line))
    of_this_model = key_seed.partition(b"|")[0] + b"|"
    return Tiers(arena, disk, num_slots, tuple(each for each in others if each[0].startswith(of_this_model)))
