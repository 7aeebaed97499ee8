"""The written format, checked against AutoAWQ's own packing loop and the safetensors library."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvd.errors import ConfigError, StartupError, UnsupportedModel
from kvd.tools.awq_writer import ShardWriter, output_directory, pack_nibbles, to_float16


def test_packing_is_autoawqs() -> None:
    codes = torch.randint(0, 16, (5, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    expected = torch.zeros(5, 4, dtype=torch.int64)
    for column in range(4):
        for nibble, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            expected[:, column] |= codes[:, column * 8 + output].long() << (nibble * 4)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.int32
    torch.testing.assert_close(packed.long() & 0xFFFFFFFF, expected)


def test_one_shard_has_the_usual_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=1000)
    tensors = {"a": torch.arange(6, dtype=torch.int32).view(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.float16)}
    writer.add(tensors)
    assert writer.finish() == 28
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_large_checkpoints_are_sharded_with_an_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=100)
    tensors = {f"t{index}": torch.full((20,), index, dtype=torch.int32) for index in range(3)}
    tensors["large"] = torch.zeros(200, dtype=torch.int32)
    for name, tensor in tensors.items():
        writer.add({name: tensor})
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 80 + 800
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_values_beyond_float16_are_refused_by_name() -> None:
    assert to_float16(torch.tensor([65504.0]), "x").item() == 65504.0
    for value in (70000.0, float("nan"), float("inf")):
        with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight"):
            to_float16(torch.tensor([1.0, value]), "model.norm.weight")


def test_destination_appears_complete(tmp_path: Path) -> None:
    destination = tmp_path / "deep" / "model"
    with output_directory(destination) as directory:
        (directory / "file").write_text("x")
        assert not destination.exists()
    assert (destination / "file").read_text() == "x"
    assert [path.name for path in destination.parent.iterdir()] == ["model"]


def test_empty_destination_is_accepted(tmp_path: Path) -> None:
    with output_directory(tmp_path / "model") as directory:
        (directory / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with output_directory(tmp_path / "empty") as directory:
        (directory / "file").write_text("y")
    assert (tmp_path / "empty" / "file").read_text() == "y"


@pytest.mark.parametrize("kind", ["full", "file"])
def test_existing_destination_is_refused_untouched(tmp_path: Path, kind: str) -> None:
    destination = tmp_path / "model"
    if kind == "full":
        destination.mkdir()
        (destination / "mine").write_text("x")
    else:
        destination.write_text("x")
    with pytest.raises(ConfigError, match="exists"), output_directory(destination):
        pytest.fail("the block must not run")
    assert (destination / "mine" if kind == "full" else destination).read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("bug")])
def test_nothing_is_left_of_a_failed_conversion(tmp_path: Path, failure: BaseException) -> None:
    def convert() -> None:
        with output_directory(tmp_path / "model") as directory:
            (directory / "file").write_text("x")
            raise failure

    with pytest.raises(type(failure)):
        convert()
    assert not list(tmp_path.iterdir())


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught, output_directory(tmp_path / "model"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == f"{tmp_path / 'model'}: no space left on the disk"
    assert not list(tmp_path.iterdir())
