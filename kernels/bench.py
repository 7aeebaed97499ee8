"""Checks and times the native CPU ops, one by one and as the step of a model, against limits measured in the same run.

    python -m kvd_kernels.bench [--threads N] [--level L] [--only small,attention,...] [--seconds S] [--json FILE]
    python -m kvd_kernels.bench --device cuda [--dtype bf16] [--tune] [--only linear,attention,...]

The first form is about the CPU; for the second see `bench_cuda` and `bench_tune`.

Every op is compared with the reference on small inputs before anything is timed; a difference ends the run. Limits:
reading a buffer of the same size (best of five), and integer dot products that never leave the registers. Numbers are
medians; the machine should do nothing else. Synthetic weights, so no model is needed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvd_kernels.bench_inputs import GIGA, LARGE, SMALL, Shape, attention_inputs, int8, layer_linears
from kvd_kernels.cpu.library import NativeUnavailable, available_threads
from kvd_kernels.cpu.ops import CpuOps
from kvd_kernels.cpu.program import NativeBatch, Stage, as_array, fuse
from kvd_kernels.cpu.self_check import failing_op
from kvd_kernels.cpu.structs import Kernel, MeasureArgs
from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import Batch
from kvd_kernels.reference import ReferenceOps
from kvd_kernels.weights import Linear

PIECE = 64 << 10
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """One timing: seconds (median), what moved and what was computed, and the share of the measured limit."""

    name: str
    seconds: float
    gigabytes_per_second: float
    gigaops_per_second: float
    share_of_bandwidth: float
    share_of_dot_peak: float


class Bench:
    """The ops under test and the limits of the machine. One thread drives; the pool computes."""

    def __init__(self, num_threads: int, level: str | None, seconds: float) -> None:
        self.ops = CpuOps(num_threads, level)
        self.seconds = seconds
        self._no_batch = Batch(
            torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64), (),
        )  # fmt: skip
        self._sink = torch.zeros(num_threads, dtype=torch.int64)
        self.dot_peak = self._measure_dot_peak()
        self._bandwidth: dict[int, float] = {}

    def replay(self, forward: Callable[[], None], batch: Batch | None = None) -> Callable[[], None]:
        """Record what `forward` calls and return a function that runs it in one native call."""
        return self._replay_of(self.ops.stages_of(forward), batch)

    def _replay_of(self, stages: list[Stage], batch: Batch | None = None) -> Callable[[], None]:
        stages = fuse(stages)
        array = as_array(stages)
        batch = batch or self._no_batch
        native = NativeBatch(batch)
        struct = native.refresh(batch)
        kept = (stages, native)  # what the addresses point at

        def run() -> None:
            assert kept
            self.ops.pool.run(array, len(array), struct)

        return run

    def time(self, run: Callable[[], None]) -> float:
        """Median seconds of one call, over the time given and at least five calls."""
        run()
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < 5 or time.perf_counter() < end:
            begun = time.perf_counter()
            run()
            samples.append(time.perf_counter() - begun)
        return sorted(samples)[len(samples) // 2]

    def bandwidth(self, num_bytes: int) -> float:
        """Bytes per second that all threads read from one buffer of that size: best of five."""
        count = max(1, num_bytes // PIECE) * PIECE
        if count not in self._bandwidth:
            buffer = torch.ones(count, dtype=torch.uint8)
            args = MeasureArgs(buffer.data_ptr(), count, self._sink.data_ptr())
            run = self._replay_of([Stage(Kernel.READ_BYTES, args, (), (), (buffer,))])
            run()
            best = min(_seconds_of(run) for _ in range(5))
            self._bandwidth[count] = count / best
        return self._bandwidth[count]

    def _measure_dot_peak(self) -> float:
        rounds = 1 << 22
        args = MeasureArgs(None, rounds, self._sink.data_ptr())
        run = self._replay_of([Stage(Kernel.DOT_PEAK, args, (), (), ())])
        run()
        best = min(_seconds_of(run) for _ in range(5))
        per_round: int = self.ops.library.functions.kvd_dot_peak_ops(self.ops.level.encode())
        return per_round * rounds * self.ops.pool.num_threads / best

    def result(self, name: str, seconds: float, num_bytes: int, num_ops: float) -> Result:
        return Result(
            name, seconds, num_bytes / seconds / GIGA, num_ops / seconds / GIGA,
            num_bytes / seconds / self.bandwidth(num_bytes), num_ops / seconds / self.dot_peak,
        )  # fmt: skip


def _seconds_of(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


# --------------------------------------------------------------------------- what is timed


class LinearStep:
    """All linears of a model in order, with the norms and the activation between them, as a step runs them."""

    def __init__(self, ops: CpuOps, shape: Shape) -> None:
        self.ops, self.shape = ops, shape
        sources = layer_linears(shape)
        self.blocks = [
            {name: ops.prepare_linear(linear) for name, linear in sources.items()} for _ in range(shape.layers)
        ]
        self.head = None
        if shape.head_group:
            self.head = ops.prepare_linear(Linear((int8(shape.vocab, shape.hidden, shape.head_group),)))
        handles = [handle for block in self.blocks for handle in block.values()]
        handles += [self.head] if self.head is not None else []
        self.num_bytes = sum(memory.nbytes for handle in handles for memory in handle.packed)
        self.ops_per_row = 2 * sum(handle.num_inputs * handle.num_outputs for handle in handles)

    def stages(self, n: int) -> Callable[[], None]:
        """Calls the ops for n rows over fresh buffers."""
        ops, shape = self.ops, self.shape
        hidden, attended = torch.randn(n, shape.hidden), torch.randn(n, shape.heads * shape.head_dim)
        norm, normed, output = torch.ones(shape.hidden), torch.zeros(n, shape.hidden), torch.zeros(n, shape.hidden)
        qkv = torch.zeros(n, self.blocks[0]["qkv"].num_outputs)
        gate_up, gated = torch.zeros(n, 2 * shape.intermediate), torch.zeros(n, shape.intermediate)
        logits = torch.zeros(n, shape.vocab)

        def forward() -> None:
            for block in self.blocks:
                ops.rms_norm(n, hidden, norm, 1e-5, normed)
                ops.linear(n, normed, block["qkv"], qkv)
                ops.linear(n, attended, block["output"], output, residual=hidden)
                ops.rms_norm(n, hidden, norm, 1e-5, normed)
                ops.linear(n, normed, block["gate_up"], gate_up)
                ops.silu_mul(n, gate_up, gated)
                ops.linear(n, gated, block["down"], output, residual=hidden)
            if self.head is not None:
                ops.rms_norm(n, hidden, norm, 1e-5, normed)
                ops.linear(n, normed, self.head, logits)

        return forward


def bench_linear(bench: Bench, shape: Shape, rows: tuple[int, ...]) -> list[Result]:
    """All linears of a model at several row counts."""
    step = LinearStep(bench.ops, shape)
    results = []
    for n in rows:
        seconds = bench.time(bench.replay(step.stages(n)))
        name = f"linears, {shape.name}, {n} rows"
        results.append(bench.result(name, seconds, step.num_bytes, step.ops_per_row * n))
    return results


def bench_attention(bench: Bench, shape: Shape, num_seqs: int, context: int, num_new: int) -> Result:
    """One layer: the last num_new tokens of num_seqs sequences over `context` tokens each."""
    inputs = attention_inputs(shape, num_seqs, context, num_new)
    batch, cache, spec = inputs.batch, inputs.cache, inputs.spec
    width = shape.heads * shape.head_dim
    q, out = torch.randn(num_seqs * num_new, width), torch.zeros(num_seqs * num_new, width)
    seconds = bench.time(bench.replay(lambda: bench.ops.attend(batch, q, inputs.rope, cache, spec, out), batch))
    seen = num_new * context - num_new * (num_new - 1) // 2  # slots that the queries of a sequence see together
    num_bytes = num_seqs * context * cache.format.block_bytes // BLOCK_TOKENS
    num_ops = 4 * num_seqs * seen * width  # a multiplication and an addition, for scores and for values
    name = f"attention, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    return bench.result(f"{name}, {num_seqs} × {num_new} tokens at {context}", seconds, num_bytes, num_ops)


def check(bench: Bench) -> None:
    """Every level that is timed must give the reference's bytes. SystemExit with the op's name otherwise."""
    ops = bench.ops

    def make(*, level: str) -> CpuOps | ReferenceOps:
        return ops if level == ops.level else ReferenceOps()

    failed = failing_op(make, ops.level, against="reference")
    if failed is not None:
        sys.exit(f"kvd: the {ops.level} {failed} differs from the reference; nothing was timed")


def table(results: list[Result]) -> str:
    lines = [f"{'':58} {'time':>10} {'GB/s':>7} {'of limit':>9} {'GOP/s':>7} {'of limit':>9}"]
    for r in results:
        duration = f"{r.seconds * 1e3:.3f} ms"
        lines.append(
            f"{r.name:58} {duration:>10} {r.gigabytes_per_second:7.1f} {r.share_of_bandwidth:9.0%} "
            f"{r.gigaops_per_second:7.0f} {r.share_of_dot_peak:9.0%}"
        )
    return "\n".join(lines)


PARTS = {"cpu": ("small", "large", "attention"), "cuda": ("linear", "attention", "rows", "sampling")}


def parse_arguments() -> argparse.Namespace:
    """The command line; `only` as a list. Ends the process where something is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m kvd_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(PARTS), default="cpu", help="whose ops are timed")
    parser.add_argument("--threads", type=int, default=available_threads(), help="threads that compute (CPU)")
    parser.add_argument("--level", help="ISA level; the best one otherwise (CPU)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of activations (GPU)")
    parser.add_argument("--tune", action="store_true", help="measure launch configurations, keep the best ones (GPU)")
    parser.add_argument("--only", help="; ".join(f"{device}: of {', '.join(parts)}" for device, parts in PARTS.items()))
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    arguments = parser.parse_args()
    parts = PARTS[arguments.device]
    arguments.only = arguments.only.split(",") if arguments.only else list(parts)
    if unknown := set(arguments.only) - set(parts):
        parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(parts)}")
    if not 1 <= arguments.threads <= MAX_THREADS:
        parser.error(f"--threads: expected 1 to {MAX_THREADS}")
    if not 0 < arguments.seconds <= 60:
        parser.error("--seconds: expected more than 0 and at most 60")
    if arguments.tune and arguments.device != "cuda":
        parser.error("--tune: only with --device cuda")
    if arguments.json is not None:
        try:
            arguments.json.touch()  # before the minutes of timing
        except OSError as error:
            parser.error(f"--json {arguments.json}: {error.strerror}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.device == "cuda":
        from kvd_kernels import bench_cuda

        bench_cuda.run(arguments)
        return
    wanted = arguments.only
    try:
        bench = Bench(arguments.threads, arguments.level, arguments.seconds)
    except NativeUnavailable as reason:
        sys.exit(f"kvd: {reason}")
    check(bench)
    print(f"{bench.ops.label}; dot products in registers {bench.dot_peak / GIGA:.0f} GOP/s")
    results: list[Result] = []
    if "small" in wanted:
        results += bench_linear(bench, SMALL, (1, 4, 8, 16, 64, 256))
    if "large" in wanted:
        results += bench_linear(bench, LARGE, (1, 8, 64))
    if "attention" in wanted:
        for shape, contexts in ((SMALL, (512, 2048, 8192)), (LARGE, (2048, 8192))):
            results += [bench_attention(bench, shape, 1, context, 1) for context in contexts]
            results.append(bench_attention(bench, shape, 8, 1024, 1))
            results.append(bench_attention(bench, shape, 1, 512, 256))
    print(table(results))
    if arguments.json is not None:
        facts = {"level": bench.ops.level, "threads": arguments.threads, "machine": platform.processor()}
        figures = {"dot_peak": bench.dot_peak, "results": [asdict(result) for result in results], **facts}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
