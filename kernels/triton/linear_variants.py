"""Every compiled form of the linear kernels, with what its machine code may cost. Stateless.

Instructions per weight are those of the main loop, all of them: what a thread block executes for a chunk, times 32
lanes, divided by the weights of its tile. Read from the machine code of triton 3.7.1, largest of sm_80, 86, 89, 90 and
120, and a tenth more. For comparison, issue slots per 4-bit weight at full bandwidth: A100 4.8, H200 3.7, RTX 3090 10,
RTX 4090 21; twice as many per 8-bit weight.
"""

from __future__ import annotations

from typing import Any

from kvd_kernels.triton import linear_configs as configs
from kvd_kernels.triton import linear_kernels as kernels
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.linear_configs import LinearConfig
from kvd_kernels.triton.variants import ActivationType, Budget, Variant

MATRICES = ((4, 128), (4, 64), (4, 32), (8, 64), (8, 32))
"""(bits, group) of every packed form."""

_FREE = Budget()
_SCALES = {4: "*i32", 8: "*fp16"}
_SIZES = ("num_inputs", "num_outputs", "padded_outputs")
_COUNTS = ("num_chunks", "split_chunks")
_FLAGS = ("is_partial", "has_bias", "has_residual")

INSTRUCTIONS: dict[tuple[str, int, int, ActivationType], tuple[float, ...]] = {
    ("tile", 64, 8, "bf16"): (3.5, 3.8, 4.6, 5.4, 5.9),
    ("tile", 64, 8, "fp16"): (2.8, 3.2, 4.1, 4.0, 4.8),
    ("tile", 64, 16, "bf16"): (4.1, 4.9, 5.8, 5.7, 6.6),
    ("tile", 64, 16, "fp16"): (3.8, 4.5, 5.3, 4.8, 5.8),
    ("tile", 128, 16, "bf16"): (3.5, 4.3, 5.5, 5.4, 5.9),
    ("tile", 128, 16, "fp16"): (3.3, 3.8, 5.0, 3.8, 5.0),
    ("tile", 128, 32, "bf16"): (5.5, 7.0, 8.7, 6.8, 8.1),
    ("tile", 128, 32, "fp16"): (5.6, 6.7, 8.1, 7.3, 8.6),
    ("tile", 128, 64, "bf16"): (8.5, 10.3, 13.4, 10.2, 13.2),
    ("tile", 128, 64, "fp16"): (8.1, 9.4, 13.0, 10.0, 13.3),
    ("tile", 128, 128, "bf16"): (6.9, 0.0, 0.0, 8.9, 0.0),
    ("tile", 128, 128, "fp16"): (6.3, 0.0, 0.0, 9.9, 0.0),
    ("vector", 128, 1, "bf16"): (6.8, 7.3, 8.1, 0.0, 0.0),
    ("vector", 128, 1, "fp16"): (6.8, 7.3, 8.1, 0.0, 0.0),
}
"""By kind, outputs and rows of a tile, and activations: instructions per weight in the order of MATRICES;
0 where that form is not launched."""


def variants(card: Card, dtype: ActivationType) -> list[Variant]:
    """Every form that `linear_configs` can choose on a card, for every packed form of weights."""
    found = [
        _integer_variant(form, bits, group, dtype)
        for bits, group in MATRICES
        for form in configs.forms(card, bits, group)
        if form.kind != "dequantize"
    ]
    found += [_dequantize_variant(bits, dtype) for bits in (4, 8)]
    found += [_sums_variant(group, dtype) for group in (128, 64, 32)]
    for out in (dtype, "fp32"):
        found += [_finish_splits_variant(dtype, out), _finish_rows_variant(dtype, out)]
    return found


def _make(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    integers: tuple[str, ...],
    constants: dict[str, Any],
    form: LinearConfig | None = None,
    budget: Budget = _FREE,
    **options: Any,
) -> Variant:
    """Divisible as models have it: all pointers, and all sizes and strides except counts and flags."""
    signature = {**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(constants, "constexpr")}
    free = {"n", "num_splits", "first_output", "planes_per_group", *_COUNTS, *_FLAGS}
    divisible = (*pointers, *(name for name in integers if name not in free))
    warps, stages = (4, 1) if form is None else (form.num_warps, form.num_stages)
    return Variant(name, kernel, signature, constants, warps, stages, divisible, budget, options)


def _integer_variant(form: LinearConfig, bits: int, group: int, dtype: ActivationType) -> Variant:
    constants: dict[str, Any] = {"BITS": bits, "GROUP": group, "BN": form.block_outputs}
    name = f"linear-{form.kind}-{form.block_outputs}x{form.block_rows}-int{bits}-g{group}-{dtype}"

    per_weight = INSTRUCTIONS[form.kind, form.block_outputs, form.block_rows, dtype][MATRICES.index((bits, group))]
    wide_loads = form.block_outputs * configs.LINE_BYTES // (form.num_warps * 32 * 16)
    budget = Budget(form.block_outputs * (512 // bits), per_weight, wide_loads)
    x = {"x": f"*{dtype}", "words": "*i32", "scales": _SCALES[bits]}
    rest = {"bias": "*fp32", "residual": f"*{dtype}", "out": f"*{dtype}", "partial": "*fp32"}
    if form.kind == "vector":
        return _make(name, kernels.vector_kernel, {**x, **rest}, (*_SIZES, *_COUNTS, *_FLAGS), constants, form, budget)
    integers = ("n", *_SIZES, *_COUNTS, "x_stride", "residual_stride", "out_stride", "sums_stride", *_FLAGS)
    constants |= {"BM": form.block_rows, "SUMS_GIVEN": form.is_wide}
    pointers = {**x, "sums": "*fp32", **rest}
    options = {"maxnreg": form.max_registers} if form.max_registers else {}
    return _make(name, kernels.tile_kernel, pointers, integers, constants, form, budget, **options)


def _dequantize_variant(bits: int, dtype: ActivationType) -> Variant:
    form = configs.DEQUANTIZE
    pointers = {"words": "*i32", "scales": _SCALES[bits], "out": f"*{dtype}"}
    integers = ("first_output", "num_inputs", "padded_outputs", "planes_per_group")
    constants = {"BITS": bits, "BN": form.block_outputs}
    name = f"linear-dequantize-int{bits}-{dtype}"
    return _make(name, kernels.dequantize_kernel, pointers, integers, constants, form, Budget(min_wide_loads=1))


def _sums_variant(group: int, dtype: ActivationType) -> Variant:
    integers = ("n", "num_inputs", "x_stride", "sums_stride")
    constants = {"GROUP": group, "BM": configs.SUM_ROWS}
    return _make(
        f"linear-sums-g{group}-{dtype}", kernels.sums_kernel, {"x": f"*{dtype}", "sums": "*fp32"}, integers, constants
    )


def _finish_splits_variant(dtype: ActivationType, out: str) -> Variant:
    pointers = {"partial": "*fp32", "bias": "*fp32", "residual": f"*{dtype}", "out": f"*{out}"}
    integers = ("n", "num_outputs", "num_splits", "residual_stride", "out_stride", "has_bias", "has_residual")
    constants = {"MAX_SPLITS": configs.MAX_SPLITS, "BN": configs.FINISH_OUTPUTS}
    return _make(f"linear-finish-splits-{dtype}-{out}", kernels.finish_splits_kernel, pointers, integers, constants)


def _finish_rows_variant(dtype: ActivationType, out: str) -> Variant:
    pointers = {"partial": "*fp32", "bias": "*fp32", "residual": f"*{dtype}", "out": f"*{out}"}
    integers = ("n", "num_outputs", "residual_stride", "out_stride", "has_bias", "has_residual")
    constants = {"BM": configs.FINISH_ROWS, "BN": configs.FINISH_OUTPUTS}
    return _make(f"linear-finish-rows-{dtype}-{out}", kernels.finish_rows_kernel, pointers, integers, constants)
