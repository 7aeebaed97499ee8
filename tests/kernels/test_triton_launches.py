"""Whether what the GPU's ops launch is among the forms that the ahead-of-time check compiles.

Launches are written down instead of being run, so the shapes can be those of real models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvd_kernels import bench_cuda
from kvd_kernels.bench_cuda import Bench, Plan
from kvd_kernels.bench_inputs import Shape, attention_inputs
from kvd_kernels.kv_format import ElementType
from kvd_kernels.triton.cards import KNOWN_CARDS, Card
from kvd_kernels.triton.variants import ACTIVATION_TYPES, ActivationType, Variant
from tests.kernels.meters import FakeMeter

DEFAULTS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": None}
"""Of Triton's launcher, for what a launch leaves open."""
TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
DTYPES: dict[ActivationType, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
CARDS = {f"sm_{card.architecture}": card for card in KNOWN_CARDS}
"""The last one of each architecture."""
OF_THE_MODEL = {
    "HEAD_DIM", "PADDED", "HALF", "K_TYPE", "V_TYPE", "OPERAND", "PREPARED", "BIASED", "ROTATION", "ROTATION_SCALE",
    "KEEPS_LSE", "SPLIT",
}  # fmt: skip
"""Constants of attention that come in more combinations than the ahead-of-time check compiles: it takes those that
models have, and of the others some.
"""
STEP_CARDS = [pytest.param(name, marks=[] if name == "sm_80" else pytest.mark.full) for name in CARDS]
PLAN = Plan(
    Shape("narrow 8B", 512, 1024, 32, 8, 128, 1, 128, 1024, 128),
    (1, 2, 3, 4, 8, 16, 17, 32, 64, 65, 128, 512, 1024), (1, 16, 64), ((1, 4096), (16, 512)), ((256, 512),),
    (1, 16, 512), (1, 32),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]

    def is_of(self, variant: Variant) -> bool:
        """Whether the launcher would run this form, up to what divides by 16."""
        return (
            self.is_configured_as(variant)
            and self.constants == variant.constants
            and all(variant.signature[name] == kind for name, kind in self.signature.items())
        )

    def is_configured_as(self, variant: Variant) -> bool:
        """Whether it is this form but for what is the model's and no table's."""
        options = {**DEFAULTS, "num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
        chosen = [
            {name: value for name, value in constants.items() if name not in OF_THE_MODEL}
            for constants in (self.constants, variant.constants)
        ]
        return self.kernel is variant.kernel and self.options == options and chosen[0] == chosen[1]

    def __str__(self) -> str:
        return f"{self.kernel.__name__} {self.signature} {self.constants} {self.options}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched since; nothing is computed."""
    from triton.runtime.interpreter import InterpretedFunction

    noted: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        constant = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        noted.append(
            Launch(
                kernel,
                {name: _kind(value) for name, value in bound.arguments.items() if name not in constant},
                {name: value for name, value in bound.arguments.items() if name in constant},
                options,
            )
        )

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return noted


def unproven(launches: list[Launch], card: Card, is_proven: Callable[[Launch, Variant], bool]) -> list[str]:
    """The launches that no form which is compiled ahead of time stands for."""
    from kvd_kernels.triton import attention, kv_writes, linear, rows, sampling

    assert launches
    modules = (attention, kv_writes, linear, rows, sampling)
    # What handles no activations is listed once, under either type.
    forms = [form for module in modules for each in ACTIVATION_TYPES for form in module.variants(card, each)]
    return sorted({str(launch) for launch in launches if not any(is_proven(launch, form) for form in forms)})


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("architecture", STEP_CARDS)
def test_triton_launches_of_a_step_are_proven(launches: list[Launch], architecture: str, dtype: ActivationType) -> None:
    from kvd_kernels.triton.ops import TritonOps

    card = CARDS[architecture]
    bench = Bench(TritonOps(torch.device("cpu"), card, DTYPES[dtype]), FakeMeter())
    for name, linear, row_counts in bench_cuda.linears_of(PLAN):
        handles = [bench.ops.prepare_linear(linear)]
        for n in row_counts:
            for run in bench_cuda.linear_runs(bench, linear, handles, n, is_head=name == "head"):
                run()
    bench_cuda.measure(bench, PLAN, ["attention", "rows", "sampling"])
    assert not unproven(launches, card, Launch.is_of)


QUICK_ATTENTION = {("int8", 128), ("fp16", 80), ("bf16", 64)}
ATTENTION = [
    pytest.param(element, head_dim, marks=[] if (element, head_dim) in QUICK_ATTENTION else pytest.mark.full)
    for element in ("int8", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16")
    for head_dim in (64, 80, 96, 128, 256)
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("element", "head_dim"), ATTENTION)
def test_triton_launches_of_attention_have_proven_configurations(
    launches: list[Launch], element: ElementType, head_dim: int, dtype: ActivationType
) -> None:
    from kvd_kernels.triton.ops import TritonOps

    for card in CARDS.values():
        ops = TritonOps(torch.device("cpu"), card, DTYPES[dtype])
        for heads in (1, 4, 8):
            shape = replace(PLAN.shape, heads=2 * heads, kv_heads=2, head_dim=head_dim)
            for num_seqs, context, num_new in ((1, 2048, 1), (3, 40, 1), (2, 80, 4), (1, 200, 100)):
                inputs = attention_inputs(shape, num_seqs, context, num_new, element)
                q = torch.zeros(num_seqs * num_new, 2 * heads * head_dim, dtype=DTYPES[dtype])
                qkv = torch.zeros(num_seqs * num_new, (2 * heads + 4) * head_dim, dtype=DTYPES[dtype])
                bias = torch.zeros(2, head_dim)
                mass = torch.zeros(num_seqs, inputs.batch.groups[0].block_tables.shape[1])
                ops.rope_and_write(inputs.batch, qkv, inputs.rope, inputs.cache, inputs.spec, q)
                for spec in (inputs.spec, replace(inputs.spec, key_bias=bias)):
                    for block_mass in (None, mass):
                        ops.attend(inputs.batch, q, inputs.rope, inputs.cache, spec, torch.zeros_like(q), block_mass)
        assert not unproven(launches, card, Launch.is_configured_as)
        launches.clear()


def test_triton_launch_of_another_form_is_noticed(launches: list[Launch]) -> None:
    from tests.kernels.planted_variants import SOUND, TILE

    half = torch.zeros(16, dtype=torch.float16)
    multiply = SOUND.kernel[(1,)]
    multiply(half, half, half, 5, **TILE, num_warps=4)
    multiply(half, half, half, 5, **TILE, num_warps=8)
    multiply(half, half, half, 5, **{**TILE, "K": 32})
    multiply(half, half, half.float(), 5, **TILE)
    multiply(half, half, half, 2**31, **TILE)
    multiply(half, half, half, 5, **TILE, enable_fp_fusion=False)
    assert [launch.is_of(SOUND) for launch in launches] == [True] + [False] * 5
