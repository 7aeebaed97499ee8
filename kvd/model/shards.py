"""Which files a checkpoint's weights lie in. Torch-free.

Purpose: find the safetensors shards of a directory; missing ones are named, pickled weights are refused.
Owner thread: the one that starts the engine.
Invariant: every returned path exists.
"""

from __future__ import annotations

from pathlib import Path

from kvd.errors import CheckpointError, UnsupportedModel
from kvd.model.storage import read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_shards(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint directory; all of them exist.

    Raises CheckpointError for a shard that the index names and the directory lacks, and UnsupportedModel
    where there are only pickled weights.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.is_file():
        return (single,)
    if index.is_file():
        shards = sorted(set(read_weight_map(index).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{directory / shard}: file is missing ({INDEX_NAME} names it)")
        return tuple(directory / shard for shard in shards)
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    if others:
        raise CheckpointError(f"{directory}: {len(others)} safetensors files, but no {INDEX_NAME}")
    refuse_pickles([path.name for path in directory.iterdir()], str(directory))
    raise CheckpointError(f"{single}: file is missing")


def refuse_pickles(names: list[str], where: str) -> None:
    """Raise UnsupportedModel when the only weights among `names` are pickled."""
    pickled = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if pickled and not any(name.endswith(".safetensors") for name in names):
        raise UnsupportedModel(
            f"{where}: the weights are pickled ({pickled[0]}), and unpickling can run any code; "
            "kvd reads safetensors and GGUF only"
        )


def read_weight_map(index: Path) -> dict[str, str]:
    """File name by tensor name, from an index file."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: key 'weight_map' must be an object that names a file per tensor")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: tensor {tensor!r} names {shard!r}, which is no file name")
    return weight_map
