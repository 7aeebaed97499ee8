"""The test suite's case tables, run on the card: every case against float64, at the suite's own tolerances.

Compiling takes most of the time, since each case is another form of a kernel, so the part stops at its deadline and
says how many cases it has left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_check_world import Line, World

from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, Ops, RopeTable, SamplingBatch, SamplingResult
from kvd_kernels.weights import Linear, WeightMatrix
from tests.kernels import cases, checks

_MOVED = (Batch, GroupTables, KVCache, RopeTable, AttentionSpec)


class OnDevice(Ops):
    """Takes tensors of the host, as the suite makes them: copies them to the device of another Ops, and back again.

    Tensors of one storage stay one, so that an op may write where it reads.
    """

    def __init__(self, inner: Ops) -> None:
        self.name, self.arithmetic, self.arithmetic_id = inner.name, inner.arithmetic, inner.arithmetic_id
        self.activation_dtype = inner.activation_dtype
        self.device = torch.device("cpu")
        self._inner = inner

    def _call(self, op: Callable[..., Any], *arguments: Any) -> Any:
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in moved:
                    moved[id(value)] = (value, value.to(self._inner.device, copy=True))
                return moved[id(value)][1]
            if isinstance(value, tuple):
                return tuple(move(item) for item in value)
            if is_dataclass(value) and isinstance(value, _MOVED):
                return replace(value, **{each.name: move(getattr(value, each.name)) for each in fields(value)})
            return value

        result = op(*[move(argument) for argument in arguments])
        for host, device in moved.values():
            host.copy_(device)
        return result

    def prepare_linear(self, linear: Linear) -> Any:
        return self._inner.prepare_linear(linear)

    def prepared_bytes(self, linear: Linear) -> int:
        return self._inner.prepared_bytes(linear)

    def prepare_embedding(self, weight: WeightMatrix) -> Any:
        return self._inner.prepare_embedding(weight)

    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        # The handle is on the device already.
        self._call(lambda *moved: self._inner.linear(n, moved[0], handle, moved[1], moved[2]), x, out, residual)

    def embed(self, batch: Batch, table: Any, out: torch.Tensor) -> None:
        self._call(lambda *moved: self._inner.embed(moved[0], table, moved[1]), batch, out)

    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self._call(self._inner.rms_norm, n, x, weight, eps, out)

    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._call(self._inner.silu_mul, n, gate_up, out)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        self._call(self._inner.rope_and_write, batch, qkv, rope, cache, spec, q_out)

    def attend(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None = None,
    ) -> None:
        self._call(self._inner.attend, batch, q, rope, cache, spec, out, block_mass)

    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        self._call(self._inner.gather, batch, x, out)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        result: SamplingResult = self._call(self._inner.sample, logits, params)
        return result

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        self._call(self._inner.copy_block, cache, group_id, source, target, num_tokens)


Case = tuple[str, Callable[[Ops], None]]


def all_cases(*, is_dry: bool) -> Iterator[Case]:
    """(name, check), those of different kernels in turn; in a dry run the first of each."""
    linears: list[Case] = [
        (f"linear {case.name}, {n} rows", partial(_linear, case=case, n=n))
        for n in cases.ROW_COUNTS
        for case in cases.LINEAR_CASES
    ]
    attention: list[Case] = []
    for case in cases.QUICK_ATTENTION:
        attention.append((f"attention {case.name}", partial(_attention, case=case)))
        attention.append((f"rope_and_write {case.name}", partial(_rope, case=case)))
    if is_dry:
        yield from (*linears[len(cases.LINEAR_CASES) : len(cases.LINEAR_CASES) + 2], *attention[:2])
        return
    for index in range(max(len(linears), len(attention))):
        yield from (*linears[index : index + 1], *attention[index : index + 1])


def _linear(ops: Ops, case: cases.LinearCase, n: int) -> None:
    checks.check_linear(ops, case, n)


def _attention(ops: Ops, case: cases.AttentionCase) -> None:
    checks.check_attention(ops, case)


def _rope(ops: Ops, case: cases.AttentionCase) -> None:
    checks.check_rope_and_write(ops, case)


def run(world: World) -> list[Line]:
    """One line for each type of activations, and one for each case that fails."""
    lines: list[Line] = []
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ops = OnDevice(world.ops_of(dtype))
        num_held = num_left_out = 0
        for case, check in all_cases(is_dry=world.is_dry):
            if time.monotonic() > world.deadline:
                num_left_out += 1
                continue
            try:
                check(ops)
            except AssertionError as wrong:
                text = str(wrong).strip().splitlines()
                lines.append(
                    Line("cases", f"{case}, {name}: {text[0] if text else 'differs'}"[:90], "FAILED", is_failure=True)
                )
            else:
                num_held += 1
        left_out = f", {num_left_out} left out for time" if num_left_out else ""
        lines.append(Line("cases", f"the suite's cases, {name}", f"{num_held} hold{left_out}", "", num_held, "cases"))
    return lines
