"""Checks and times the GPU kernels, one by one, on the shapes of an 8B model, against limits measured in the same run.

Limits: what copying a large buffer on the device moves per second, and torch's product of the same matrices in 16 bits
(cuBLAS). Every kernel is compared with the reference before anything is timed, coarsely: the exact comparison is the
test suite's. Weights and caches exist so many times over that the second-level cache holds none of them at its next
turn. What a step launches from a graph is timed in a graph; sampling, which a step calls from Python, with its launch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from kvd_kernels.bench_check import failing_op
from kvd_kernels.bench_inputs import GIGA, Shape, attention_inputs, int8, layer_linears
from kvd_kernels.kv_format import BLOCK_TOKENS, ElementType
from kvd_kernels.ops import Ops, SamplingBatch
from kvd_kernels.triton.start import TritonUnavailable, create_triton_ops
from kvd_kernels.weights import Linear

EIGHT_B = Shape("8B", 4096, 14336, 32, 8, 128, 32, 128, 128256, 128)
ELEMENTS: tuple[ElementType, ...] = ("int8", "fp8_e4m3", "fp16")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is timed on a shape.

    rows, head_rows   numbers of rows of the linears, and of the head
    decodes           (sequences, tokens in the cache of each)
    prefills          (tokens of the step, tokens in the cache with them)
    row_counts        of the ops between the products
    sampled_rows      of sampling
    """

    shape: Shape
    rows: tuple[int, ...]
    head_rows: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    row_counts: tuple[int, ...]
    sampled_rows: tuple[int, ...]


PLAN = Plan(
    EIGHT_B,
    (1, 2, 4, 8, 16, 32, 64, 512, 2048),
    (1, 16),
    ((1, 8192), (1, 32768), (16, 2048), (32, 8192)),
    ((512, 512), (512, 8192)),
    (1, 16, 512),
    (1, 32),
)
Run = Callable[[], object]


class Meter(Protocol):
    """Measures time on a device."""

    def copies(self, num_bytes: int) -> int:
        """How many buffers of that size, used in turn, no cache holds."""

    def seconds(self, runs: Sequence[Run]) -> float:
        """Of one of these equivalent runs, as a graph replays them; median."""

    def seconds_with_launch(self, run: Run) -> float:
        """Of one run that waits for its end itself; median."""

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written counted, of copying a large buffer on the device; best of several."""


class CudaMeter:
    """By events on the current device. duration: seconds that each measurement may take, beside its first call."""

    SAMPLES = 7
    MOST_COPIES = 64

    def __init__(self, l2_bytes: int, duration: float) -> None:
        self._l2_bytes = l2_bytes
        self._duration = duration

    def copies(self, num_bytes: int) -> int:
        return min(self.MOST_COPIES, 1 + -(-2 * self._l2_bytes // num_bytes))

    def seconds(self, runs: Sequence[Run]) -> float:
        for run in runs:  # compiles, and lets workspaces grow
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        once = self._elapsed(graph.replay, 1)
        repeats = max(1, int(self._duration / self.SAMPLES / max(once, 1e-7)))
        samples = sorted(self._elapsed(graph.replay, repeats) for _ in range(self.SAMPLES))
        return samples[self.SAMPLES // 2] / repeats / len(runs)

    def seconds_with_launch(self, run: Run) -> float:
        run()
        samples: list[float] = []
        end = time.perf_counter() + self._duration
        while len(samples) < self.SAMPLES or time.perf_counter() < end:
            begun = time.perf_counter()
            run()
            samples.append(time.perf_counter() - begun)
        return sorted(samples)[len(samples) // 2]

    def copy_bandwidth(self) -> float:
        source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        best = min(self._elapsed(lambda: target.copy_(source), 4) for _ in range(self.SAMPLES)) / 4
        return 2 * source.nbytes / best

    @staticmethod
    def _elapsed(run: Run, repeats: int) -> float:
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class Result:
    """One timing. shares: of the measured copy bandwidth by the bytes that have to move; of the rate of torch's 16-bit
    product, where there is one to compare with.
    """

    name: str
    seconds: float
    gigabytes_per_second: float
    share_of_bandwidth: float
    share_of_matmul: float | None


class Bench:
    """The ops under test and the limits of the card."""

    def __init__(self, ops: Ops, meter: Meter) -> None:
        self.ops = ops
        self.meter = meter
        self.bandwidth = meter.copy_bandwidth()

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.ops.device, dtype=self.ops.activation_dtype)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=self.ops.device, dtype=self.ops.activation_dtype)

    def result(self, name: str, seconds: float, num_bytes: int, matmul_seconds: float | None = None) -> Result:
        rate = num_bytes / seconds
        share = None if matmul_seconds is None else matmul_seconds / seconds
        return Result(name, seconds, rate / GIGA, rate / self.bandwidth, share)


# --------------------------------------------------------------------------- what is timed


def linears_of(plan: Plan) -> list[tuple[str, Linear, tuple[int, ...]]]:
    """The four linears of a block and the int8 head, with their numbers of rows."""
    shape = plan.shape
    head = Linear((int8(shape.vocab, shape.hidden, shape.head_group),))
    return [
        *((name, linear, plan.rows) for name, linear in layer_linears(shape).items()),
        ("head", head, plan.head_rows),
    ]


def bench_linear(bench: Bench, plan: Plan) -> list[Result]:
    """Each linear beside the same product by torch."""
    results = []
    for name, linear, row_counts in linears_of(plan):
        handles = linear_copies(bench, linear)
        plain = [
            bench.randn(linear.num_outputs, linear.num_inputs)
            for _ in range(bench.meter.copies(2 * linear.num_outputs * linear.num_inputs))
        ]
        for n in row_counts:
            x, matmul_out = bench.randn(n, linear.num_inputs), bench.zeros(n, linear.num_outputs)
            runs = linear_runs(bench, linear, handles, n, is_head=name == "head")
            by_torch = [partial(torch.matmul, x, weight.t(), out=matmul_out) for weight in plain]
            label = f"{name} {linear.num_outputs} × {linear.num_inputs}, {n} rows"
            moved = bench.ops.prepared_bytes(linear) + 2 * n * (linear.num_inputs + linear.num_outputs)
            results.append(bench.result(label, bench.meter.seconds(runs), moved, bench.meter.seconds(by_torch)))
    return results


def linear_copies(bench: Bench, linear: Linear) -> list[object]:
    """A linear packed so often that the cache of the card holds none of them at its next turn."""
    count = bench.meter.copies(bench.ops.prepared_bytes(linear))
    return [bench.ops.prepare_linear(linear) for _ in range(count)]


def linear_runs(bench: Bench, linear: Linear, handles: Sequence[object], n: int, *, is_head: bool) -> list[Run]:
    """One call of n rows for each copy."""
    x, out = bench.randn(n, linear.num_inputs), bench.zeros(n, linear.num_outputs)
    if is_head:
        out = out.float()
    return [partial(bench.ops.linear, n, x, handle, out) for handle in handles]


def attention_runs(
    bench: Bench, shape: Shape, num_seqs: int, context: int, num_new: int, element: ElementType
) -> tuple[list[Run], int]:
    """One call for each copy of the cache, and the bytes of K and V that it reads."""
    probe = attention_inputs(shape, 1, BLOCK_TOKENS, 1, element)
    num_bytes = num_seqs * -(-context // BLOCK_TOKENS) * probe.cache.format.block_bytes
    width = shape.heads * shape.head_dim
    q, out = bench.randn(num_seqs * num_new, width), bench.zeros(num_seqs * num_new, width)
    copies = [
        attention_inputs(shape, num_seqs, context, num_new, element, bench.ops.device)
        for _ in range(bench.meter.copies(num_bytes))
    ]

    runs: list[Run] = [partial(bench.ops.attend, i.batch, q, i.rope, i.cache, i.spec, out) for i in copies]
    return runs, num_bytes


def attention_work(plan: Plan) -> list[tuple[int, int, int]]:
    """(sequences, tokens in the cache of each, tokens of the step of each)."""
    decodes = [(num_seqs, context, 1) for num_seqs, context in plan.decodes]
    return decodes + [(1, context, num_new) for num_new, context in plan.prefills]


def bench_attention(bench: Bench, plan: Plan) -> list[Result]:
    """Decode of several sequences, and one chunk of a prompt, per type of K and V."""
    results = []
    for num_seqs, context, num_new in attention_work(plan):
        for element in ELEMENTS:
            runs, num_bytes = attention_runs(bench, plan.shape, num_seqs, context, num_new, element)
            name = f"attention {element}, {num_seqs} × {num_new} tokens at {context}"
            results.append(bench.result(name, bench.meter.seconds(runs), num_bytes))
    return results


def bench_rows(bench: Bench, plan: Plan) -> list[Result]:
    """What lies between the products."""
    ops, shape = bench.ops, plan.shape
    results = []
    norm = torch.ones(shape.hidden, device=ops.device)
    table = ops.prepare_embedding(int8(shape.vocab, shape.hidden, shape.head_group))
    for n in plan.row_counts:
        x, out = bench.randn(n, shape.hidden), bench.zeros(n, shape.hidden)
        gate_up, gated = bench.randn(n, 2 * shape.intermediate), bench.zeros(n, shape.intermediate)
        qkv = bench.randn(n, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        q = bench.zeros(n, shape.heads * shape.head_dim)
        inputs = attention_inputs(shape, n, 2 * BLOCK_TOKENS, 1, "int8", ops.device)
        batch, cache = inputs.batch, inputs.cache
        written = n * cache.format.block_bytes // BLOCK_TOKENS
        copied = cache.format.block_bytes * (BLOCK_TOKENS - 1) // BLOCK_TOKENS
        write = partial(ops.rope_and_write, batch, qkv, inputs.rope, cache, inputs.spec, q)
        timed: list[tuple[str, Run, int]] = [
            ("rms_norm", partial(ops.rms_norm, n, x, norm, 1e-5, out), x.nbytes + out.nbytes),
            ("silu_mul", partial(ops.silu_mul, n, gate_up, gated), gate_up.nbytes + gated.nbytes),
            ("embed", partial(ops.embed, batch, table, out), out.nbytes + out.nbytes // 2),
            ("gather", partial(ops.gather, batch, x, out), x.nbytes + out.nbytes),
            ("rope_and_write", write, qkv.nbytes + q.nbytes + written),
            ("copy_block", partial(ops.copy_block, cache, 0, 0, 1, BLOCK_TOKENS - 1), 2 * copied),
        ]
        for name, run, num_bytes in timed:
            results.append(bench.result(f"{name}, {n} rows", bench.meter.seconds([run]), num_bytes))
    return results


def sampling_parameters(num_rows: int, kind: str) -> SamplingBatch:
    """kind: greedy, or nucleus: temperature, top-k and top-p together."""
    params = SamplingBatch.allocate(num_rows)
    params.num_rows = num_rows
    params.num_logprobs.fill_(-1)
    params.top_p.fill_(0.9 if kind == "nucleus" else 1.0)
    params.repetition.fill_(1.0)
    params.seeds.copy_(torch.arange(num_rows))
    if kind == "nucleus":
        params.temperature.fill_(0.8)
        params.top_k.fill_(50)
    return params


def bench_sampling(bench: Bench, plan: Plan) -> list[Result]:
    """From logits to tokens that Python holds."""
    results = []
    for n in plan.sampled_rows:
        logits = torch.randn(n, plan.shape.vocab, device=bench.ops.device)
        for kind in ("greedy", "nucleus"):
            seconds = bench.meter.seconds_with_launch(partial(bench.ops.sample, logits, sampling_parameters(n, kind)))
            results.append(bench.result(f"sampling {kind}, {n} rows, with launch", seconds, logits.nbytes))
    return results


PARTS = {"linear": bench_linear, "attention": bench_attention, "rows": bench_rows, "sampling": bench_sampling}


def measure(bench: Bench, plan: Plan, wanted: Sequence[str]) -> list[Result]:
    """The parts that are wanted, in one order."""
    return [result for name, part in PARTS.items() if name in wanted for result in part(bench, plan)]


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':48} {'time':>12} {'GB/s':>7} {'of copying':>11} {'of cuBLAS':>10}"]
    for r in results:
        share = "" if r.share_of_matmul is None else f"{r.share_of_matmul:.0%}"
        rate = f"{r.gigabytes_per_second:7.0f} {r.share_of_bandwidth:11.0%}"
        lines.append(f"{r.name:48} {r.seconds * 1e6:9.1f} µs {rate} {share:>10}")
    return "\n".join(lines)


def refuse(reason: str) -> NoReturn:
    """One line, and exit code 2."""
    print(f"kvd: {reason}", file=sys.stderr)
    sys.exit(2)


def run(arguments: argparse.Namespace) -> None:
    """What `kvd_kernels.bench --device cuda` does."""
    try:
        ops = create_triton_ops(torch.bfloat16 if arguments.dtype == "bf16" else torch.float16)
    except TritonUnavailable as reason:
        refuse(f"--device cuda: {reason}")
    failed = failing_op(ops)
    if failed is not None:
        sys.exit(f"kvd: {failed} differs from the reference; nothing was timed")
    with torch.inference_mode():
        bench = Bench(ops, CudaMeter(ops.card.l2_bytes, arguments.seconds))
        sheet = ops.card.bytes_per_second / GIGA
        print(f"{ops.label}; copying {bench.bandwidth / GIGA:.0f} GB/s, data sheet {sheet:.0f} GB/s")
        if arguments.tune:
            from kvd_kernels import bench_tune

            bench_tune.run(bench, ops, PLAN, arguments.only)
        results = measure(bench, PLAN, arguments.only)
    print(table(results))
    if arguments.json is not None:
        facts = {"card": ops.card.name, "dtype": arguments.dtype, "torch": torch.__version__}
        figures = {**facts, "bandwidth": bench.bandwidth, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
