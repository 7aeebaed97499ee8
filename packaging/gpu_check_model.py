"""Generation through engine, scheduler and runner, by a 4-bit model of an 8B's shape that is made on the card.

Weights are random, so the text means nothing; the work per token is that of a real model. A decoder of two such layers
is compared with the reference first.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_check_world import Line, World

from kvd.config import Config
from kvd.core import BLOCK_SIZE, PlanItem, Request, SamplingParams, StepPlan
from kvd.engine.build import wire_engine
from kvd.engine.engine import Engine
from kvd.engine.memory_budget import gib
from kvd.engine.runner import Runner
from kvd.model.decoder import Decoder
from kvd.model.progress import QuietProgress
from kvd.model.spec import ModelSpec, RopeSpec
from kvd.model.weights import LayerWeights, ModelWeights
from kvd_kernels.bench_inputs import Shape
from kvd_kernels.ops import Ops
from kvd_kernels.reference.a16 import ReferenceOps16
from kvd_kernels.weights import Int4Weight, Int8Weight, Linear, WeightMatrix

LEVELS_DEVIATION = 4.6
"""Standard deviation of a number from 0 to 15."""
WHOLE_MODEL_BYTES = 13 << 30
"""Of free memory that weights, a step and a useful KV cache of the whole model want."""
AGREEMENT = 2.0**-5
"""Of the greatest logit: two layers of roundings to 16 bits, and K and V that may round to neighbouring int8 codes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the requests."""

    prompt: int
    output: int
    streams: tuple[int, ...]
    context: int
    temperature: float


SIZES, DRY_SIZES = Sizes(512, 128, (1, 32), 8192, 0.8), Sizes(20, 3, (1, 2), 64, 0.0)


def spec_of(shape: Shape, *, num_layers: int, context: int) -> ModelSpec:
    return ModelSpec(
        architecture="llama", num_layers=num_layers, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab,
        max_positions=context, rms_norm_eps=1e-5, rope=RopeSpec(5e5), tied_embeddings=False, qkv_bias=False,
        windows=(0,) * num_layers, bos_token_id=None, eos_token_ids=(0,), quantization="awq g128",
    )  # fmt: skip


def make_weights(spec: ModelSpec, shape: Shape, device: torch.device) -> ModelWeights:
    """Random weights whose products have the size of their inputs. All layers are packed from the same one."""
    random = torch.Generator(device=device).manual_seed(0)

    def int4(num_outputs: int, num_inputs: int) -> Int4Weight:
        groups = (num_outputs, num_inputs // shape.group)
        codes = torch.randint(
            0, 256, (num_outputs, num_inputs // 2), dtype=torch.uint8, device=device, generator=random
        )
        spread = torch.rand(groups, device=device, generator=random) + 0.5
        scales = (spread / (LEVELS_DEVIATION * math.sqrt(num_inputs))).half()
        return Int4Weight(codes, scales, (-7.5 * scales.float()).half(), shape.group)

    def int8() -> Int8Weight:
        size = (spec.vocab_size, spec.hidden_size)
        codes = torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=random)
        groups = (spec.vocab_size, spec.hidden_size // shape.head_group)
        scales = torch.full(groups, 1 / (73 * math.sqrt(spec.hidden_size)), device=device)
        return Int8Weight(codes, scales.half(), shape.head_group)

    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm = torch.ones(hidden, device=device)
    layer = LayerWeights(
        norm,
        Linear((int4(queries, hidden), int4(keys, hidden), int4(keys, hidden))),
        Linear((int4(hidden, queries),)),
        norm,
        Linear((int4(width, hidden), int4(width, hidden))),
        Linear((int4(hidden, width),)),
    )
    head: WeightMatrix = int8()
    return ModelWeights(spec, int8(), (layer,) * spec.num_layers, norm, Linear((head,)), "synthetic")


# --------------------------------------------------------------------------- agreement with the reference


class _LogitsOfLast:
    """A RunnerObserver that keeps the latest row."""

    row = torch.empty(0)

    def computed(self, request_id: str, start: int, num_tokens: int) -> None:
        pass

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        self.row = row.float().cpu().clone()


def _logits(ops: Ops, weights: ModelWeights, token_ids: tuple[int, ...]) -> torch.Tensor:
    """float32 [2, vocab]: after the whole prompt in one step, and after one token more in a step of its own."""
    from kvd.cache.store import allocate_cache

    spec, seen = weights.spec, _LogitsOfLast()
    kv_format = spec.kv_format("int8")
    decoder = Decoder(
        weights, ops, kv_format,
        max_tokens=len(token_ids), max_seqs=1, max_positions=spec.max_positions, progress=QuietProgress(),
    )  # fmt: skip
    num_blocks = len(token_ids) // BLOCK_SIZE + 1
    runner = Runner(
        decoder, allocate_cache(kv_format, num_blocks, ops.device),
        max_blocks_per_request=num_blocks, draw_seed=lambda: 1, observer=seen,
    )  # fmt: skip
    table, positions = tuple(reversed(range(num_blocks))), range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE)
    request = Request("it", token_ids, SamplingParams(max_tokens=2, temperature=0.0), 0.0)
    rows = []
    for step, (start, end) in enumerate(((0, len(token_ids) - 1), (len(token_ids) - 1, len(token_ids)))):
        item = PlanItem("it", 0, start, token_ids[start:end], (table,), (positions,), samples=True)
        runner.run(StepPlan(step, (item,), (request,) if not step else ()))
        rows.append(seen.row)
    return torch.stack(rows)


def agreement(world: World) -> Line:
    """Logits of two layers against the reference on the host, prompt and decode."""
    shape = world.shape
    spec = spec_of(shape, num_layers=2, context=256)
    token_ids = tuple(7 + (13 * index) % (shape.vocab - 8) for index in range(21 if world.is_dry else 65))
    ours = _logits(world.ops, make_weights(spec, shape, world.ops.device), token_ids)
    torch.manual_seed(0)
    host = _on_host(make_weights(spec, shape, world.ops.device))
    expected = _logits(ReferenceOps16(world.ops.activation_dtype), host, token_ids)
    worst = float((ours - expected).abs().max() / expected.abs().max())
    holds = bool(torch.isfinite(ours).all()) and worst <= AGREEMENT
    name = "logits of two layers against the reference"
    result = f"{'ok' if holds else 'FAILED'}, {worst:.4f} of the greatest"
    return Line("model", name, result, f"{AGREEMENT:.4f}", worst, "of the greatest logit", is_failure=not holds)


def _on_host(weights: ModelWeights) -> ModelWeights:
    def matrix(weight: WeightMatrix) -> WeightMatrix:
        if isinstance(weight, Int4Weight):
            return Int4Weight(weight.codes.cpu(), weight.scales.cpu(), weight.offsets.cpu(), weight.group_size)
        assert isinstance(weight, Int8Weight)
        return Int8Weight(weight.codes.cpu(), weight.scales.cpu(), weight.group_size)

    def linear(source: Linear) -> Linear:
        return Linear(tuple(matrix(part) for part in source.parts))

    layers = tuple(
        LayerWeights(
            layer.attention_norm.cpu(), linear(layer.qkv), linear(layer.output), layer.mlp_norm.cpu(),
            linear(layer.gate_up), linear(layer.down),
        )
        for layer in weights.layers
    )  # fmt: skip
    return ModelWeights(
        weights.spec, matrix(weights.embedding), layers, weights.final_norm.cpu(), linear(weights.head), "synthetic"
    )


# --------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class Run:
    """One load. decode_rate: tokens per second of all streams while all decode; prefill_rate: of the first prompt."""

    num_tokens: int
    reasons: tuple[str, ...]
    decode_rate: float
    prefill_rate: float


async def generate(engine: Engine, num_streams: int, sizes: Sizes, name: str) -> Run:
    """So many requests at once, to their end."""
    first, last, counts, reasons = [0.0] * num_streams, [0.0] * num_streams, [0] * num_streams, [""] * num_streams
    started = time.monotonic()

    async def one(index: int) -> None:
        prompt = tuple(
            5 + (31 * index + 7 * position) % (engine.info.vocab_size - 6) for position in range(sizes.prompt)
        )
        sampling = SamplingParams(max_tokens=sizes.output, temperature=sizes.temperature, top_p=0.95, seed=index)
        request = Request(f"{name}-{index}", prompt, sampling, time.monotonic())
        async for events in engine.submit(request):
            for event in events:
                if event.token_id is not None:
                    last[index] = time.monotonic()
                    first[index] = first[index] or last[index]
                    counts[index] += 1
                if event.finish_reason is not None:
                    reasons[index] = event.error or event.finish_reason

    await asyncio.gather(*(one(index) for index in range(num_streams)))
    # All have their first token by then; prompts that come in while others decode are left out of the figure.
    span = max(min(last) - max(first), 1e-9)
    steady = num_streams * (sizes.output - 1) * span / max(max(last) - max(first), span)
    return Run(sum(counts), tuple(reasons), steady / span, sizes.prompt / max(min(first) - started, 1e-9))


def run(world: World) -> list[Line]:
    lines = [agreement(world)]
    shape, ops = world.shape, world.ops
    sizes = DRY_SIZES if world.is_dry else SIZES
    free = None if ops.memory is None else ops.memory.free_bytes()
    num_layers = shape.layers if free is None or free > WHOLE_MODEL_BYTES else shape.layers // 4
    spec = spec_of(shape, num_layers=num_layers, context=sizes.context)
    config = Config(
        model=f"synthetic {shape.name} of {num_layers} layers", max_num_seqs=max(sizes.streams), target_itl_ms=0.0,
        num_gpu_blocks_override=16 if world.is_dry else None, enable_prefix_caching=False,
        max_num_batched_tokens=16 if world.is_dry else None,
    )  # fmt: skip
    notices: list[str] = []
    with tempfile.TemporaryDirectory() as home:
        begun = time.monotonic()
        engine = wire_engine(
            config, spec, lambda: make_weights(spec, shape, ops.device), ops,
            home=Path(home), progress=QuietProgress(), log=lambda level, line: notices.append(line),
        )  # fmt: skip
        budget = engine.info.budget
        lines.append(
            Line("model", f"{config.model}: weights {gib(budget.weight_bytes)}, KV cache {gib(budget.kv_bytes)}",
                 f"ready in {time.monotonic() - begun:.0f} s")
        )  # fmt: skip
        lines += asyncio.run(_loads(world, engine, sizes))
    return lines + [Line("model", line[:90], "notice") for line in notices]


async def _loads(world: World, engine: Engine, sizes: Sizes) -> list[Line]:
    lines: list[Line] = []
    await engine.start()
    try:
        await generate(engine, 1, sizes, "warm-up")
        for num_streams in sizes.streams:
            done = await generate(engine, num_streams, sizes, f"run-{num_streams}")
            holds = set(done.reasons) == {"length"} and done.num_tokens == num_streams * sizes.output
            outcome = "all ended with length" if holds else f"FAILED: {', '.join(sorted(set(done.reasons)))}"
            streams = f"{num_streams} stream{'s' if num_streams > 1 else ''}"
            lines.append(Line("model", f"{streams}, {done.num_tokens} tokens", outcome, is_failure=not holds))
            rate = done.decode_rate
            lines.append(Line("model", f"decode, {streams} together", f"{rate:.0f} tok/s", "", rate, "tok/s"))
            if num_streams == 1:
                # A step reads every matrix but the embedding, and K and V of the context.
                embedding = engine.info.vocab_size * world.shape.hidden * (1 + 2 / world.shape.head_group)
                kv_bytes = engine.info.budget.bytes_per_token * (sizes.prompt + sizes.output / 2)
                share = rate * (engine.info.budget.weight_bytes - embedding + kv_bytes) / world.bench.bandwidth
                lines.append(world.share("model", "bytes of a decode step, 1 stream", share, world.targets.end_to_end))
                prefill = done.prefill_rate
                lines.append(
                    Line("model", f"prefill of {sizes.prompt} tokens", f"{prefill:.0f} tok/s", "", prefill, "tok/s")
                )
    finally:
        await engine.stop(0)
    return lines
