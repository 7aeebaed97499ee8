"""The memory arithmetic: what fits, what is said when it does not, and that more never fits better."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvd.cache.sizing import GIB, activation_bytes, concurrency_table, size_pool
from kvd.engine.memory_budget import prepared_weight_bytes
from kvd.errors import NotEnoughMemory
from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.spec import ModelSpec, RopeSpec
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.registry import create_ops
from tests.model.checkpoints import make_awq


def make_spec(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "architecture": "qwen2", "num_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28,
        "num_kv_heads": 4, "head_dim": 128, "vocab_size": 152064, "max_positions": 131072, "rms_norm_eps": 1e-6,
        "rope": RopeSpec(1e6), "tied_embeddings": False, "qkv_bias": True, "windows": (0,) * 28, "bos_token_id": None,
        "eos_token_ids": (0,), "quantization": "awq g128",
    }  # fmt: skip
    spec: dict[str, object] = values | changes
    return ModelSpec(**spec)  # type: ignore[arg-type]


def size(kv_format: KVFormat, kv_bytes: int, *, requested: int | None = None, override: int | None = None):
    return size_pool(
        kv_format=kv_format,
        kv_bytes=kv_bytes,
        model_max_len=131072,
        requested_max_len=requested,
        num_blocks_override=override,
        memory_setting="cpu_memory_utilization",
    )


@pytest.mark.parametrize(
    ("spec", "bytes_per_token"),
    [
        (make_spec(), 57344),  # Qwen2.5-7B: 448 MiB at 8,192 tokens
        (make_spec(num_layers=32, num_kv_heads=8, windows=(0,) * 32), 131072),  # Llama-3-8B
        (make_spec(num_layers=32, num_kv_heads=32, num_heads=32, windows=(0,) * 32), 524288),  # Llama-7B
        (make_spec(num_layers=80, num_kv_heads=8, num_heads=64, windows=(0,) * 80), 327680),  # Llama-3.1-70B
    ],
)
def test_sixteen_bit_bytes_per_token_are_the_published_ones(spec: ModelSpec, bytes_per_token: int) -> None:
    assert spec.kv_format("fp16").bytes_per_token == bytes_per_token


def test_qwen_at_8192_tokens() -> None:
    assert make_spec().kv_format("fp16").bytes_per_token * 8192 == 469_762_048


def test_capacity_ratio_counts_scales() -> None:
    """int8 holds twice the codes, less the scales: one 16-bit number per token, head and tensor."""
    spec = make_spec()
    eight, sixteen = spec.kv_format("int8"), spec.kv_format("fp16")
    assert eight.bytes_per_token == 28 * 4 * (2 * 128 + 2 * 2)
    small, large = size(sixteen, 4 * GIB).num_blocks, size(eight, 4 * GIB).num_blocks
    assert large / small == pytest.approx(sixteen.block_bytes / eight.block_bytes, rel=0.001)


def test_a_length_between_the_two_capacities_is_accepted_with_int8() -> None:
    spec = make_spec()
    between = int(1.5 * 2 * GIB / spec.kv_format("fp16").bytes_per_token)
    assert size(spec.kv_format("int8"), 2 * GIB, requested=between).max_model_len == between
    with pytest.raises(NotEnoughMemory):
        size(spec.kv_format("fp16"), 2 * GIB, requested=between)


def test_no_length_given_starts_with_what_fits_and_says_so() -> None:
    pool = size(make_spec().kv_format("int8"), GIB)
    assert pool.max_model_len == pool.num_blocks * 16 < 131072
    assert str(pool.max_model_len) in pool.warning
    assert "131072" in pool.warning


def test_an_explicit_excess_names_the_largest_length_that_fits() -> None:
    kv_format = make_spec().kv_format("int8")
    fits = size(kv_format, GIB).max_model_len
    with pytest.raises(NotEnoughMemory, match=f"--max-model-len {fits}"):
        size(kv_format, GIB, requested=fits + 1)
    assert size(kv_format, GIB, requested=fits).max_model_len == fits


def test_an_explicit_number_of_blocks_starts_with_a_warning() -> None:
    pool = size(make_spec().kv_format("int8"), GIB, requested=4096, override=10)
    assert (pool.num_blocks, pool.max_model_len) == (10, 4096)
    assert "160 tokens" in pool.warning


def test_a_small_number_of_blocks_is_not_blamed_on_memory() -> None:
    pool = size(make_spec().kv_format("int8"), 100 * GIB, override=10)
    assert (pool.num_blocks, pool.max_model_len) == (10, 160)
    assert "num_gpu_blocks_override" in pool.warning
    assert "100.00 GiB" not in pool.warning


def test_raising_the_length_never_goes_back_to_accepted() -> None:
    kv_format = make_spec().kv_format("int8")
    refused = False
    for length in range(256, 80_000, 997):
        try:
            size(kv_format, GIB, requested=length)
        except NotEnoughMemory:
            refused = True
        else:
            assert not refused, f"{length} was accepted after a shorter length had been refused"
    assert refused


def test_hardly_any_memory_is_refused_with_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match=r"room for \d+ tokens.*cpu_memory_utilization"):
        size(make_spec().kv_format("int8"), 1 << 20)


def test_activation_bytes_grow_with_tokens_and_sequences() -> None:
    spec = make_spec()
    one = activation_bytes(spec, max_tokens=1, max_seqs=1, element_bytes=4)
    assert activation_bytes(spec, max_tokens=2, max_seqs=1, element_bytes=4) > one
    assert activation_bytes(spec, max_tokens=1, max_seqs=2, element_bytes=4) - one == 4 * (3584 + 152064)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_what_the_decoder_holds(tied: bool, backend: str, tmp_path: Path) -> None:
    path = make_awq(tmp_path / "model", base="llama", group_size=64, tie_word_embeddings=tied)
    quiet = QuietProgress()
    files = resolve_model(str(path), home=tmp_path / "home", revision=None, progress=quiet)
    spec = read_spec(files)
    weights = load_weights(files, spec, progress=quiet)
    ops = create_ops(backend)
    expected = prepared_weight_bytes(ops, weights)
    decoder = Decoder(weights, ops, spec.kv_format("int8"), max_tokens=1, max_seqs=1, max_positions=16, progress=quiet)
    held = (decoder._embedding, decoder._head, decoder._final_norm, decoder._layers)
    assert sum(tensor.nbytes for tensor in _tensors(held)) == expected


def test_concurrency_table_ends_at_the_served_length() -> None:
    assert concurrency_table(100, 800) == [(512, 3), (800, 2)]
