"""Conversion of real weights: scaling beats plain rounding; the AWQ loader is proven on the result. Takes minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvd.model.files import ModelFiles
from kvd.model.progress import QuietProgress
from kvd.model.weights import LayerWeights
from kvd.tools import convert, perplexity
from kvd.tools.convert import ConvertReport
from kvd.tools.perplexity import build_scorer, kl_divergence
from kvd.tools.wrapped_ops import FloatLinearOps
from kvd_kernels.registry import create_ops
from kvd_kernels.weights import FloatWeight, Linear
from tests.model.checkpoints import Tensors, reference_tensors
from tests.tools.conftest import load

pytestmark = pytest.mark.full

GROUP_SIZE = 64
EVALUATED_TOKENS = 768


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("converted")


@pytest.fixture(scope="module")
def reports(folder: Path, default_model_files: ModelFiles, kvd_home: Path) -> dict[bool, ConvertReport]:
    """By whether scaling was on."""
    return {
        scaling: convert.run(
            default_model_files.name,
            folder / f"scaling-{scaling}",
            bits=4,
            group_size=GROUP_SIZE,
            scaling=scaling,
            home=kvd_home,
            progress=QuietProgress(),
            num_tokens=EVALUATED_TOKENS,
        )
        for scaling in (False, True)
    }


def test_scaling_beats_plain_rounding(reports: dict[bool, ConvertReport]) -> None:
    plain, scaled = reports[False], reports[True]
    assert plain.perplexity_before == scaled.perplexity_before
    assert scaled.perplexity_before < scaled.perplexity_after < plain.perplexity_after
    # Integer zero points cost a model with float offsets much, and scaling takes back a good part of it.
    lost, lost_plain = (report.perplexity_after / report.perplexity_before - 1 for report in (scaled, plain))
    assert lost < 0.75 * lost_plain


def test_the_loader_reads_what_the_files_say(reports: dict[bool, ConvertReport], folder: Path, kvd_home: Path) -> None:
    """The loaded model against float weights that were unpacked independently of kvd's loader."""
    path = folder / "scaling-True"
    files, loaded = load(path, kvd_home)
    tensors = reference_tensors(path)
    layers = tuple(_floats(tensors, index, layer) for index, layer in enumerate(loaded.layers))
    token_ids = perplexity.load_tokens(files, None, 256)
    ops = create_ops("cpu")
    floats = FloatLinearOps(ops)
    reference = build_scorer(replace(loaded, layers=layers), floats, "fp16", window=256)
    sides = [build_scorer(loaded, backend, "fp16", window=256) for backend in (floats, ops)]
    exact, served = kl_divergence(reference, sides, token_ids)
    assert exact.mean_kl < 1e-4  # the loader rounds −z·s to float16
    assert served.mean_kl < 0.01  # int8 activations
    assert served.top1_agreement > 0.9


def _floats(tensors: Tensors, index: int, layer: LayerWeights) -> LayerWeights:
    def linear(like: Linear, *modules: str) -> Linear:
        parts = tuple(FloatWeight(tensors[f"model.layers.{index}.{module}.weight"]) for module in modules)
        assert [part.values.shape for part in parts] == [
            torch.Size((part.num_outputs, part.num_inputs)) for part in like.parts
        ]
        return Linear(parts, like.bias)

    return replace(
        layer,
        qkv=linear(layer.qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=linear(layer.output, "self_attn.o_proj"),
        gate_up=linear(layer.gate_up, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(layer.down, "mlp.down_proj"),
    )
