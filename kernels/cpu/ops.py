"""The a8 backend in native code. Every op gives the bytes of the reference, at every ISA level, on any threads.

Called one by one, an op is one native call. Recorded (`record`), a whole step is one. Engine thread, apart from
`prepare_*`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvd_kernels.cpu import packing
from kvd_kernels.cpu.layers import NativeLayers
from kvd_kernels.cpu.library import Library, Pool, available_threads, choose_level, installed_library
from kvd_kernels.cpu.packing import FLOAT_TYPES, InputForm, PackedLinear
from kvd_kernels.cpu.program import NativeBatch, Stage, as_array, fuse
from kvd_kernels.cpu.sampling import Sampler
from kvd_kernels.cpu.structs import (
    AttendArgs,
    EmbedArgs,
    GatherArgs,
    Kernel,
    LinearArgs,
    NormArgs,
    QuantizeArgs,
    Quantized,
    RopeArgs,
    SiluArgs,
    Type,
)
from kvd_kernels.cpu.workspace import Workspace
from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import (
    AttentionSpec,
    Batch,
    FinishedTransfer,
    KVCache,
    LiveSize,
    Ops,
    RopeTable,
    SamplingBatch,
    SamplingResult,
    StepProgram,
    Transfer,
)
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear, WeightMatrix


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _floats(tensor: torch.Tensor) -> int:
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class CpuOps(Ops):
    """See the module. fp8 KV raises NotImplementedError; NativeUnavailable where the kernels cannot run.

    num_threads: None means as many as this process may keep busy. level: None means the best one.
    """

    name = "cpu"
    arithmetic = "a8"
    arithmetic_id = "a8-1"
    device = torch.device("cpu")
    activation_dtype = torch.float32

    def __init__(
        self, num_threads: int | None = None, level: str | None = None, library: Library | None = None
    ) -> None:
        self.library = installed_library() if library is None else library
        self.level = choose_level(self.library, level)
        self.pool = Pool(self.library, self.level, num_threads or available_threads())
        self._layers = NativeLayers()
        self._workspace = Workspace()
        self._recording: list[Stage] | None = None

    @property
    def label(self) -> str:
        threads = "1 thread" if self.pool.num_threads == 1 else f"{self.pool.num_threads} threads"
        return f"native {self.level}, {threads}"

    def prepare_linear(self, linear: Linear) -> PackedLinear:
        return packing.prepare(self.library, linear)

    def prepared_bytes(self, linear: Linear) -> int:
        return packing.prepared_bytes(self.library, linear)

    def prepare_embedding(self, weight: WeightMatrix) -> WeightMatrix:
        return weight

    def embed(self, batch: Batch, table: WeightMatrix, out: torch.Tensor) -> None:
        values, scales, offsets, group = _table(table)
        kind = FLOAT_TYPES.get(values.dtype, Type.I8)
        if isinstance(table, Int4Weight):
            kind = Type.U4
        args = EmbedArgs(
            batch.num_tokens, _address(values), _address(scales), _address(offsets), _floats(out), table.num_inputs,
            group, table.num_outputs, kind,
        )  # fmt: skip
        self._emit(Kernel.EMBED, args, (), (out,), batch, keep=(table,))

    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        args = NormArgs(n, _floats(x), _floats(weight), _floats(out), x.shape[1], eps)
        self._emit(Kernel.RMS_NORM, args, (x,), (out,), None, keep=(weight,))

    def linear(
        self, n: int, x: torch.Tensor, handle: PackedLinear, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        assert x.shape[1] == handle.num_inputs
        assert out.shape[1] == handle.num_outputs
        inputs = (Quantized * max(1, len(handle.forms)))()
        codes = []
        for target, form in zip(inputs, handle.forms, strict=False):
            codes.append(self._quantize(n, x, form, target))
        args = LinearArgs(
            n, _floats(x), _pointer(inputs), _pointer(handle.parts), _address(handle.bias), _address(residual),
            _floats(out), handle.num_inputs, handle.num_outputs, len(handle.parts), 0,
        )  # fmt: skip
        read = [*codes, *((x,) if handle.reads_floats else ()), *((residual,) if residual is not None else ())]
        self._emit(Kernel.LINEAR, args, tuple(read), (out,), None, keep=(handle, inputs))

    def _quantize(self, n: int, x: torch.Tensor, form: InputForm, target: Quantized) -> torch.Tensor:
        """Emit the rounding of x; fills `target` and returns the buffer of the codes."""
        buffers = self._workspace.quantized(x.shape[0], form)
        target.codes, target.scales, target.sums = (buffer.data_ptr() for buffer in buffers)
        target.stride, target.groups = form.stride, form.groups
        target.weight_group, target.cuts, target.length = form.weight_group, form.cuts, form.length
        args = QuantizeArgs(n, _floats(x), None, form.num_inputs, 0.0, target)
        self._emit(Kernel.QUANTIZE, args, (x,), (buffers[0],), None, keep=buffers)
        return buffers[0]

    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        args = SiluArgs(n, _floats(gate_up), _floats(out), out.shape[1])
        self._emit(Kernel.SILU_MUL, args, (gate_up,), (out,), None)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        layer = self._layers.of(cache, spec)
        args = RopeArgs(
            _pointer(layer), _floats(qkv), _floats(rope.cos), _floats(rope.sin), _floats(q_out), spec.num_heads,
            rope.cos.shape[1],
        )  # fmt: skip
        self._emit(Kernel.ROPE_WRITE, args, (qkv,), (q_out,), batch, keep=(layer, rope, cache))

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
        layer = self._layers.of(cache, spec)
        tables = batch.groups[spec.group.group_id].block_tables
        partials = self._workspace.partials(
            tables.shape[0], tables.shape[1] * BLOCK_TOKENS, spec.num_heads, spec.head_dim
        )
        args = AttendArgs(
            _pointer(layer), _floats(q), _floats(rope.cos), _floats(rope.sin), _address(spec.key_bias), _floats(out),
            _address(block_mass), partials.data_ptr(), partials.numel(),
            0 if block_mass is None else block_mass.stride(0), spec.num_heads, rope.cos.shape[1], rope.cos.shape[0],
            spec.scale,
        )  # fmt: skip
        self._emit(Kernel.ATTEND, args, (q,), (out,), batch, keep=(layer, rope, cache, spec, partials, block_mass))

    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        args = GatherArgs(_floats(x), _floats(out), x.shape[1])
        self._emit(Kernel.GATHER, args, (x,), (out,), batch)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        assert self._recording is None, "sampling follows a recorded pass by itself"
        sampler = Sampler(params, logits, params.num_rows)
        sampler.refresh()
        self._emit(Kernel.SAMPLE, sampler.args, (logits,), (), None, keep=(sampler,))
        return sampler.result()

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        layers = self._layers.of_group(cache, group_id)
        pool = cache.pools[group_id]
        self.library.functions.kvd_copy_block(
            pool.data_ptr(), pool.stride(0), _pointer(layers), len(layers), source, target, num_tokens
        )

    def copy_rows(
        self, source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
    ) -> Transfer:
        started = time.monotonic()
        count, width = len(source_rows), source.shape[1]
        assert target.shape[1] == width
        assert source.dtype is target.dtype is torch.uint8
        assert len(target_rows) == count
        if not count:
            return FinishedTransfer(0.0)
        assert min(source_rows) >= 0 <= min(target_rows)
        assert max(source_rows) < len(source)
        assert max(target_rows) < len(target)
        rows = ctypes.c_int64 * count
        self.library.functions.kvd_copy_rows(
            _address(source), rows(*source_rows), _address(target), rows(*target_rows), count, width
        )
        return FinishedTransfer(time.monotonic() - started)

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        codes = replace(batch, num_tokens=LiveSize.TOKENS, num_logit_rows=LiveSize.LOGIT_ROWS)
        results: list[torch.Tensor] = []
        stages = self.stages_of(lambda: results.append(forward(codes)))
        return _NativeProgram(self, batch, stages, results[0])

    def stages_of(self, calls: Callable[[], None]) -> list[Stage]:
        """The stages of all ops that `calls` calls, in order; nothing is computed."""
        assert self._recording is None
        self._recording = []
        try:
            calls()
            return self._recording
        finally:
            self._recording = None

    def _emit(
        self,
        kernel: Kernel,
        args: Any,
        reads: tuple[torch.Tensor, ...],
        writes: tuple[torch.Tensor, ...],
        batch: Batch | None,
        *,
        keep: tuple[Any, ...] = (),
    ) -> None:
        """Run the stage, or note it down while a program is recorded."""
        stage = Stage(
            kernel, args, tuple(t.data_ptr() for t in reads), tuple(t.data_ptr() for t in writes),
            (*keep, *reads, *writes),
        )  # fmt: skip
        if self._recording is not None:
            self._recording.append(stage)
            return
        native = NativeBatch(batch or _NO_BATCH)
        self.pool.run(as_array([stage]), 1, native.refresh(batch or _NO_BATCH))


class _NativeProgram(StepProgram):
    """All stages of a step, the choice of tokens the last of them, replayed by one native call."""

    def __init__(self, ops: CpuOps, batch: Batch, stages: list[Stage], logits: torch.Tensor) -> None:
        self.logits = logits
        self._pool = ops.pool
        self._stages = fuse(stages)
        self._batch = batch
        self._native = NativeBatch(batch)
        self._forward = as_array(self._stages)
        self._sampler: Sampler | None = None
        self._with_sampling = self._forward

    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        assert batch is self._batch, "a program runs on the batch that it was made for"
        struct = self._native.refresh(batch)
        if params is None:
            self._pool.run(self._forward, len(self._forward), struct)
            return None
        sampler = self._sampler
        if sampler is None or sampler.params is not params:
            sampler = self._sampler = Sampler(params, self.logits, LiveSize.LOGIT_ROWS)
            sample = Stage(Kernel.SAMPLE, sampler.args, (self.logits.data_ptr(),), (), (sampler,))
            self._with_sampling = as_array([*self._stages, sample])
        assert params.num_rows == batch.num_logit_rows
        sampler.refresh()
        self._pool.run(self._with_sampling, len(self._with_sampling), struct)
        return sampler.result()


def _table(weight: WeightMatrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]:
    """(values, scales, offsets, group size) of an embedding table."""
    if isinstance(weight, FloatWeight):
        return weight.values, None, None, weight.num_inputs
    if isinstance(weight, Int8Weight):
        return weight.codes, weight.scales, None, weight.group_size
    return weight.codes, weight.scales, weight.offsets, weight.group_size


def _pointer(structure: Any) -> int:
    return ctypes.addressof(structure)


_EMPTY = torch.zeros(1, dtype=torch.int64)
_NO_BATCH = Batch(_EMPTY, _EMPTY.int(), _EMPTY.int(), _EMPTY, ())
