"""What the parts of gpu_check share: the backend, the shapes, the clock, and the lines that they return."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvd_kernels.bench_cuda import EIGHT_B, Bench, CudaMeter, Meter, Plan, Run
from kvd_kernels.bench_inputs import Shape
from kvd_kernels.ops import Ops
from kvd_kernels.triton.cards import KNOWN_CARDS, Card
from kvd_kernels.triton.start import TritonUnavailable, create_triton_ops

TINY = Shape("tiny", 128, 192, 4, 2, 64, 1, 64, 320, 64)
RATES = Plan(EIGHT_B, (1, 16, 64, 512), (1, 16), ((1, 8192), (16, 4096)), ((512, 8192),), (1, 16), (1, 32))
DRY_RATES = Plan(TINY, (1, 20), (1,), ((2, 40),), ((20, 40),), (2,), (2,))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. value: the figure behind `result`, where there is one, in units of `unit`."""

    part: str
    name: str
    result: str
    target: str = ""
    value: float | None = None
    unit: str = ""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Targets:
    """Shares, by what limits them; of a class of cards. See docs/measurements.md.

    wide, narrow: of copy bandwidth, by 4-bit products of up to 16 rows: gate_up and down; qkv and output
    """

    wide: float
    narrow: float
    attention: float
    end_to_end: float
    prefill: float


TARGETS = {
    86: Targets(0.88, 0.78, 0.80, 0.80, 0.70),
    89: Targets(0.88, 0.78, 0.80, 0.80, 0.70),
    120: Targets(0.88, 0.78, 0.80, 0.80, 0.70),
    80: Targets(0.70, 0.55, 0.70, 0.60, 0.60),
    90: Targets(0.60, 0.38, 0.60, 0.45, 0.55),
}
"""By architecture."""
INT8_OVER_FP16 = 1.5
"""How much faster attention over int8 is to be at 32K tokens."""


class HostMeter:
    """Takes the time of one call; for dry runs, whose rates mean nothing."""

    def copies(self, num_bytes: int) -> int:
        return 1

    def seconds(self, runs: Sequence[Run]) -> float:
        begun = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - begun) / len(runs)

    def seconds_with_launch(self, run: Run) -> float:
        return self.seconds([run])

    def copy_bandwidth(self) -> float:
        source = torch.zeros(1 << 20, dtype=torch.uint8)
        return 2 * source.nbytes / self.seconds([source.clone])


@dataclass(frozen=True, slots=True)
class World:
    """What a part gets.

    deadline  time.monotonic() when a part that can stop early does
    """

    is_dry: bool
    ops: Ops
    card: Card
    bench: Bench
    rates: Plan
    deadline: float

    @property
    def shape(self) -> Shape:
        return self.rates.shape

    @property
    def targets(self) -> Targets:
        return TARGETS[self.card.architecture]

    def ops_of(self, dtype: torch.dtype) -> Ops:
        """The backend for activations of another type."""
        return self.ops if dtype is self.ops.activation_dtype else open_ops(dtype, is_dry=self.is_dry)

    def share(self, part: str, name: str, value: float, target: float | None, of: str = "copying") -> Line:
        """A rate as a share of a limit, with its target where there is one."""
        wanted = "" if target is None else f"{target:.0%}{'' if value >= target or self.is_dry else ' (missed)'}"
        return Line(part, name, f"{value:.0%} of {of}", wanted, value, f"share of {of}")


def open_ops(dtype: torch.dtype, *, is_dry: bool) -> Ops:
    """The GPU's backend; in a dry run the same on the CPU, interpreted."""
    if not is_dry:
        return create_triton_ops(dtype)
    from kvd_kernels.triton.ops import TritonOps

    return TritonOps(torch.device("cpu"), KNOWN_CARDS[0], dtype)


def open_world(*, is_dry: bool, seconds: float) -> World:
    """seconds: for each measurement."""
    ops = open_ops(torch.float16, is_dry=is_dry)
    card: Card = ops.card  # type: ignore[attr-defined]
    meter: Meter = HostMeter() if is_dry else CudaMeter(card.l2_bytes, seconds)
    limit = float(os.environ.get("GPU_CHECK_LIMIT", "3600"))
    deadline = time.monotonic() + 0.8 * limit
    with torch.inference_mode():
        bench = Bench(ops, meter)
    return World(is_dry, ops, card, bench, DRY_RATES if is_dry else RATES, deadline)


def why_unusable() -> str:
    """Why the GPU's backend does not start here; empty where it does."""
    try:
        create_triton_ops()
    except TritonUnavailable as reason:
        return str(reason)
    return ""


def describe_machine(*, is_dry: bool) -> dict[str, str]:
    """Card and versions."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if is_dry:
        return {"device": "none (dry run)", **versions}
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    return {"device": properties.name, "memory": memory, "cuda": str(torch.version.cuda), **versions}
