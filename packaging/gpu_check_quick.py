"""Every kernel against the reference, once, for both types of activations; and products of the shapes that serve."""

from __future__ import annotations

import torch
from gpu_check_world import Line, World

from kvd_kernels.bench_check import COARSE, failing_op
from kvd_kernels.bench_inputs import layer_linears
from kvd_kernels.ops import Ops
from kvd_kernels.weights import Linear, dequantize

ROWS, DRY_ROWS = (1, 2, 7, 16, 33, 64, 200, 512, 2048), (1, 20)


def run(world: World) -> list[Line]:
    lines = []
    for dtype in (torch.float16, torch.bfloat16):
        ops, name = world.ops_of(dtype), str(dtype).removeprefix("torch.")
        failed = failing_op(ops)
        lines.append(_check(f"every kernel against the reference, {name}", failed or ""))
        with torch.inference_mode():
            for layer, linear in layer_linears(world.shape).items():
                wrong = _wrong_rows(ops, linear, DRY_ROWS if world.is_dry else ROWS)
                size = f"{linear.num_outputs} × {linear.num_inputs}"
                lines.append(_check(f"{layer} {size} against float32, {name}", wrong))
    return lines


def _wrong_rows(ops: Ops, linear: Linear, row_counts: tuple[int, ...]) -> str:
    """The numbers of rows at which a product is off, in words; empty where it is right everywhere.

    The dense product is torch's, in float32 on the same device, of the weights' exact values.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    handle = ops.prepare_linear(linear)
    dense = torch.cat([dequantize(part) for part in linear.parts]).to(ops.device)
    wrong = []
    for n in row_counts:
        x = torch.randn(n, linear.num_inputs, device=ops.device).to(ops.activation_dtype)
        out = torch.full((n + 1, linear.num_outputs), -77.0, dtype=ops.activation_dtype, device=ops.device)
        ops.linear(n, x, handle, out)
        expected = x.float() @ dense.t()
        limit = COARSE * float(expected.abs().max())
        is_right = bool(((out[:n].float() - expected).abs() <= limit).all()) and bool((out[n] == -77.0).all())
        wrong += [] if is_right else [str(n)]
    return f"wrong at {', '.join(wrong)} rows" if wrong else ""


def _check(name: str, failed: str) -> Line:
    return Line("quick", name, f"FAILED: {failed}" if failed else "ok", is_failure=bool(failed))
