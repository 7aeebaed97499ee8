"""AutoAWQ's GEMM format against an independent reading of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvd.errors import CheckpointError, StartupError, UnsupportedModel
from kvd.model.awq import to_float16_scales, unpack_awq, unpack_nibbles
from kvd_kernels.weights import FloatWeight, Int4Weight, dequantize
from tests.model.checkpoints import (
    make_awq,
    pack_awq,
    reference_tensors,
    rewrite_json,
    rewrite_tensors,
    unpack_awq_slowly,
)
from tests.model.comparing import floats, matrices
from tests.model.conftest import Load

Q_PROJ = "model__layers__0__self_attn__q_proj"


def exact_parts(path: Path, module: str, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zero points [N, K / group] as the files hold them."""
    tensors = load_file(path / "model.safetensors")
    codes = unpack_awq_slowly(tensors[f"{module}.qweight"]).T
    zeros = unpack_awq_slowly(tensors[f"{module}.qzeros"]).T
    return codes, tensors[f"{module}.scales"].T, zeros


@pytest.mark.parametrize("base", ["llama", "qwen2"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_codes_and_scales_are_exact(tmp_path: Path, load: Load, base: str, group_size: int) -> None:
    path = make_awq(tmp_path / "model", base=base, group_size=group_size)
    _, weights = load(path)
    label = "awq whole-row" if group_size == -1 else f"awq g{group_size}"
    assert weights.spec.quantization == label
    num_quantised = 0
    for module, matrix in matrices(weights).items():
        if module in ("model.embed_tokens", "lm_head"):
            assert isinstance(matrix, FloatWeight)
            continue
        assert isinstance(matrix, Int4Weight)
        num_quantised += 1
        codes, scales, zeros = exact_parts(path, module, group_size)
        assert matrix.group_size == (codes.shape[1] if group_size == -1 else group_size)
        assert torch.equal(matrix.codes & 15, codes[:, 0::2].to(torch.uint8))
        assert torch.equal(matrix.codes >> 4, codes[:, 1::2].to(torch.uint8))
        assert torch.equal(matrix.scales, scales)
        assert torch.equal(matrix.offsets, (-zeros * scales.float()).to(torch.float16))
        # The same formula, evaluated independently: bit for bit.
        repeat = matrix.group_size
        ours = codes.float() * scales.float().repeat_interleave(repeat, 1)
        ours = ours + (-zeros * scales.float()).to(torch.float16).float().repeat_interleave(repeat, 1)
        assert torch.equal(dequantize(matrix), ours)
    assert num_quantised == 14


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_values_are_those_of_zero_points_up_to_the_rounding_of_the_offset(
    tmp_path: Path, load: Load, scale_dtype: torch.dtype
) -> None:
    path = make_awq(tmp_path / "model", base="qwen2", scale_dtype=scale_dtype)
    _, weights = load(path)
    expected = reference_tensors(path)
    found = floats(weights)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # The largest offset of these weights is below 2, so that rounding it moves a value by at most 2^-11.
        torch.testing.assert_close(found[name], value, rtol=0, atol=2**-11 if "_proj.weight" in name else 0)


def test_shards_and_a_separate_settings_file(tmp_path: Path, load: Load) -> None:
    path = make_awq(tmp_path / "sharded", shards=4)
    sharded = floats(load(path)[1])
    plain = make_awq(tmp_path / "plain")
    rewrite_json(plain / "config.json", quantization_config=...)
    with pytest.raises(CheckpointError, match=r"qweight.*no quantization_config"):
        load(plain)
    (plain / "quant_config.json").write_text('{"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}')
    for name, value in floats(load(plain)[1]).items():
        assert torch.equal(sharded[name], value)


def test_skip_names_that_are_parts_of_other_names(tmp_path: Path, load: Load) -> None:
    """ "layers.1" is a part of "layers.10" and "k_proj" of nothing else; the tensors decide."""
    path = make_awq(tmp_path / "model", num_hidden_layers=11, skip=["layers.1.", "self_attn.k_proj"])
    rewrite_json(
        path / "config.json",
        quantization_config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "version": "gemm",
            "modules_to_not_convert": ["model.layers.1", "k_proj", "gate"],
        },
    )
    _, weights = load(path)
    found = matrices(weights)
    for module, matrix in found.items():
        is_skipped = ".layers.1." in module or "k_proj" in module or ".layers" not in module
        assert isinstance(matrix, FloatWeight if is_skipped else Int4Weight), module
    # One fused linear holds parts of both forms.
    assert [type(part) for part in weights.layers[0].qkv.parts] == [Int4Weight, FloatWeight, Int4Weight]
    expected = reference_tensors(path)
    key = "model.layers.10.self_attn.k_proj"
    assert torch.equal(dequantize(found[key]), expected[f"{key}.weight"])


def test_a_quantised_module_that_the_skip_list_names_is_a_contradiction(tmp_path: Path, load: Load) -> None:
    path = make_awq(tmp_path / "model")
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["down_proj"]}
    rewrite_json(path / "config.json", quantization_config=settings)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.qweight: quantised, but"):
        load(path)


def test_both_forms_of_one_module_are_a_contradiction(tmp_path: Path, load: Load) -> None:
    path = make_awq(tmp_path / "model")
    rewrite_tensors(path, **{f"{Q_PROJ}__weight": torch.zeros(128, 128)})
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight: there is also .*q_proj\.weight"):
        load(path)


def test_tied_embeddings(tmp_path: Path, load: Load) -> None:
    _, weights = load(make_awq(tmp_path / "model", tie_word_embeddings=True))
    assert weights.head.parts[0] is weights.embedding


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_bad_scales_are_named(tmp_path: Path, load: Load, value: float) -> None:
    path = make_awq(tmp_path / "model")
    scales = load_file(path / "model.safetensors")["model.layers.0.self_attn.q_proj.scales"]
    scales[1, 5] = value
    rewrite_tensors(path, **{f"{Q_PROJ}__scales": scales})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.layers\.0\.self_attn\.q_proj\.scales: "):
        load(path)


@pytest.mark.parametrize(
    ("suffix", "tensor", "error", "words"),
    [
        ("qweight", None, CheckpointError, "q_proj.qweight: tensor is missing"),
        ("qzeros", None, CheckpointError, "q_proj.qzeros: tensor is missing"),
        ("scales", None, CheckpointError, "q_proj.scales: tensor is missing"),
        ("qweight", torch.zeros(128, 8, dtype=torch.int32), CheckpointError, "q_proj.qweight has the shape"),
        ("qzeros", torch.zeros(1, 16, dtype=torch.int32), CheckpointError, "q_proj.qzeros has the shape"),
        ("scales", torch.ones(4, 128), CheckpointError, "q_proj.scales has the shape"),
        ("qweight", torch.zeros(128, 16), CheckpointError, "q_proj.qweight has the type torch.float32"),
        ("scales", torch.ones(2, 128, dtype=torch.int32), CheckpointError, "q_proj.scales: scales have the type"),
        ("scales", torch.full((2, 128), 1e5), UnsupportedModel, "q_proj.scales: a scale of 100000"),
        ("scales", torch.full((2, 128), 1e-9), UnsupportedModel, "q_proj.scales: a scale of 1e-09"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, load: Load, suffix: str, tensor: torch.Tensor | None, error: type[StartupError], words: str
) -> None:
    path = make_awq(tmp_path / "model")
    rewrite_tensors(path, **{f"{Q_PROJ}__{suffix}": tensor})
    with pytest.raises(error) as caught:
        load(path)
    assert words in str(caught.value)
    assert "model.safetensors: " in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"group_size": 64, "hidden_size": 96}, "q_proj: group size 64 does not divide 96 inputs"),
        ({"group_size": 32, "intermediate_size": 100}, "packs outputs by eight"),
    ],
)
def test_shapes_that_groups_or_packing_do_not_fit(tmp_path: Path, load: Load, keys: dict[str, Any], words: str) -> None:
    path = make_awq(tmp_path / "model", group_size=keys["group_size"])
    changes = {key: value for key, value in keys.items() if key != "group_size"}
    rewrite_json(path / "config.json", **changes)
    rewrite_tensors(
        path,
        model__layers__0__input_layernorm__weight=torch.ones(changes.get("hidden_size", 128)),
    )
    with pytest.raises(UnsupportedModel) as caught:
        load(path)
    assert words in str(caught.value)


def test_nibbles_in_their_order() -> None:
    codes = torch.arange(8)[None, :]
    packed = pack_awq(codes)
    assert packed.tolist() == [[0x75316420]]
    assert unpack_nibbles(packed).tolist() == codes.tolist()
    assert unpack_nibbles(torch.tensor([[-1]], dtype=torch.int32)).tolist() == [[15] * 8]


def test_scales_beyond_float16_after_the_zero_point() -> None:
    scales = torch.full((1, 8), 6e4, dtype=torch.float16)
    with pytest.raises(UnsupportedModel, match="zero point times scale"):
        unpack_awq(pack_awq(torch.zeros(32, 8)), pack_awq(torch.full((1, 8), 15)), scales, 32, where="f: m")


def test_bfloat16_scales_are_exact_in_the_normal_range() -> None:
    scales = torch.tensor([2.0**-14, 0.0123, 1.5, 60000.0], dtype=torch.bfloat16)
    assert torch.equal(to_float16_scales(scales, "x").float(), scales.float())
