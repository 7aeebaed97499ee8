"""`kvd convert`: a GGUF or 16-bit checkpoint becomes a standard AWQ directory.

Purpose: load, watch the activations of a calibration text, scale and round block by block, write, and measure what
it cost, on the written files as kvd itself loads them.
Owner thread: the caller's.
Invariant: the destination appears complete and measured, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvd.engine.backend import log_to_stderr, open_cpu_ops
from kvd.errors import ConfigError, UnsupportedModel
from kvd.model.awq_config import read_awq_config
from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import Progress
from kvd.model.spec import ModelSpec
from kvd.model.weights import LayerWeights, ModelWeights
from kvd.tools import perplexity
from kvd.tools.awq_scaling import DenseBlock, DenseLinear, round_to_awq, scale_block
from kvd.tools.awq_writer import (
    OUTPUTS_PER_WORD,
    SHARD_BYTES,
    ShardWriter,
    awq_tensors,
    check_destination,
    output_directory,
    require_free_space,
    to_float16,
    write_side_files,
)
from kvd.tools.wrapped_ops import LINEARS_PER_BLOCK, RecordingOps
from kvd_kernels.ops import Ops
from kvd_kernels.weights import Linear, dequantize

GROUP_SIZES = (32, 64, 128)
CALIBRATION_TOKENS = 2048
CALIBRATION_WINDOW = 1024
SAMPLED_ROWS = 512
MEASURED_KV_DTYPE = "fp16"  # weights are judged here, not the cache
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was made and what it cost. Perplexities are of the evaluation text with a 16-bit cache."""

    source: str
    destination: str
    group_size: int
    scaling: bool
    num_bytes: int
    num_tokens: int
    perplexity_before: float
    perplexity_after: float

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        change = self.perplexity_after / self.perplexity_before - 1
        how = "activation-aware scaling" if self.scaling else "plain rounding"
        return [
            f"{self.destination}: AWQ, 4 bits, groups of {self.group_size}, {how}, {self.num_bytes / 1e6:.1f} MB",
            f"perplexity over {self.num_tokens} tokens: {self.perplexity_before:.3f} before, "
            f"{self.perplexity_after:.3f} after ({change:+.1%})",
        ]


def run(
    source: str,
    destination: Path,
    *,
    bits: int,
    group_size: int,
    scaling: bool,
    home: Path,
    progress: Progress,
    num_tokens: int | None = None,
) -> ConvertReport:
    """Convert `source` (anything that `model:` accepts) into the directory `destination`.

    num_tokens: limit of the evaluation text. Raises ConfigError for settings that cannot be, UnsupportedModel for a
    source that is already AWQ or whose dimensions do not divide, StartupError when the disk is full.
    """
    if bits != 4:
        raise ConfigError(f"--bits {bits}: kvd converts to 4 bits")
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"--group-size {group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
    check_destination(destination)
    files = resolve_model(source, home=home, revision=None, progress=progress)
    spec = read_spec(files)
    if files.format == "hf" and read_awq_config(files.config, source, files.directory) is not None:
        raise UnsupportedModel(f"{source}: is AWQ already; kvd converts GGUF and 16-bit checkpoints")
    check_dimensions(spec, group_size)
    evaluation = perplexity.load_tokens(files, None, num_tokens)
    calibration = perplexity.tokenize(files, perplexity.read_text("calibration"))[:CALIBRATION_TOKENS]

    weights = load_weights(files, spec, progress=progress)
    stride = max(1, len(calibration) // SAMPLED_ROWS)
    ops = RecordingOps(_ops(), sample_stride=stride)
    scorer = _scorer(files, weights, ops, progress)
    before = _measure(scorer, evaluation, "Perplexity before", progress)
    if scaling:
        ops.recording = True
        _calibrate(scorer, calibration, progress)
        ops.recording = False
    del scorer

    # What is written starts from the checkpoint's own embedding and head; what was measured had them as served.
    weights = load_weights(files, spec, progress=progress, head_int8=False)
    with output_directory(destination) as directory:
        num_bytes = _write(files, weights, directory, group_size, ops if scaling else None, progress)
        del weights, ops
        converted = resolve_model(str(directory), home=home, revision=None, progress=progress)
        converted_weights = load_weights(converted, read_spec(converted), progress=progress)
        scorer = _scorer(converted, converted_weights, _ops(), progress)
        after = _measure(scorer, evaluation, "Perplexity after", progress)
    return ConvertReport(
        source, str(destination), group_size, scaling, num_bytes, scorer.num_scored(len(evaluation)), before, after
    )


def check_dimensions(spec: ModelSpec, group_size: int) -> None:
    """UnsupportedModel naming the first tensor that cannot be stored, and the group sizes that work for all."""
    attention = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    shapes = {  # module: (outputs, inputs)
        "self_attn.q_proj": (attention, spec.hidden_size),
        "self_attn.k_proj": (keys, spec.hidden_size),
        "self_attn.o_proj": (spec.hidden_size, attention),
        "mlp.gate_proj": (spec.intermediate_size, spec.hidden_size),
        "mlp.down_proj": (spec.hidden_size, spec.intermediate_size),
    }
    for module, (outputs, inputs) in shapes.items():
        name = f"model.layers.0.{module}"
        if outputs % OUTPUTS_PER_WORD:
            raise UnsupportedModel(f"{name}: AWQ packs {OUTPUTS_PER_WORD} outputs into a word, this has {outputs}")
        if inputs % group_size:
            working = [size for size in GROUP_SIZES if all(shape[1] % size == 0 for shape in shapes.values())]
            advice = f"--group-size {' or '.join(map(str, working))} works" if working else "no group size of AWQ works"
            raise UnsupportedModel(f"{name}: groups of {group_size} do not divide its {inputs} inputs; {advice}")


def _ops() -> Ops:
    return open_cpu_ops("auto", None, log_to_stderr)


def _scorer(files: ModelFiles, weights: ModelWeights, ops: Ops, progress: Progress) -> perplexity.Scorer:
    return perplexity.build_scorer(
        weights, ops, MEASURED_KV_DTYPE,
        window=CALIBRATION_WINDOW, first_token=perplexity.first_token_of(files), progress=progress,
    )  # fmt: skip


def _measure(scorer: perplexity.Scorer, token_ids: list[int], label: str, progress: Progress) -> float:
    with progress.task(label, scorer.num_scored(len(token_ids)), "tokens") as task:
        return scorer.score(token_ids, task=task).perplexity


def _calibrate(scorer: perplexity.Scorer, token_ids: list[int], progress: Progress) -> None:
    with progress.task("Calibrating", scorer.num_scored(len(token_ids)), "tokens") as task:
        scorer.score(token_ids, task=task)


def dense_block(layer: LayerWeights) -> DenseBlock:
    """A block's exact values in float32."""
    q, k, v = _dense(layer.qkv)
    gate, up = _dense(layer.gate_up)
    (o,), (down,) = _dense(layer.output), _dense(layer.down)
    return DenseBlock(layer.attention_norm.float(), q, k, v, o, layer.mlp_norm.float(), gate, up, down)


def _dense(linear: Linear) -> list[DenseLinear]:
    sizes = [part.num_outputs for part in linear.parts]
    biases: list[torch.Tensor | None] = [None] * len(sizes)
    if linear.bias is not None:
        biases = list(torch.split(linear.bias.float(), sizes))
    return [DenseLinear(dequantize(part), bias) for part, bias in zip(linear.parts, biases, strict=True)]


def _block_tensors(prefix: str, block: DenseBlock, group_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one block as they are stored."""
    linears = (block.q, block.k, block.v, block.o, block.gate, block.up, block.down)
    for module, linear in zip(MODULES, linears, strict=True):
        name = f"{prefix}.{module}"
        codes = round_to_awq(linear.weight, group_size)
        if not bool(torch.isfinite(codes.scales).all()):
            raise UnsupportedModel(f"{name}: its weights span more than float16 scales can")
        yield from awq_tensors(name, codes).items()
        if linear.bias is not None:
            yield f"{name}.bias", to_float16(linear.bias, f"{name}.bias")
    for norm, values in (("input", block.attention_norm), ("post_attention", block.mlp_norm)):
        name = f"{prefix}.{norm}_layernorm.weight"
        yield name, to_float16(values, name)


def _write(
    files: ModelFiles,
    weights: ModelWeights,
    directory: Path,
    group_size: int,
    recorded: RecordingOps | None,
    progress: Progress,
) -> int:
    """Round and write every tensor and the files beside them; returns the bytes of the tensors."""
    spec = weights.spec
    require_free_space(directory, _expected_bytes(weights, group_size))
    writer = ShardWriter(directory, shard_bytes=SHARD_BYTES)
    label = "Scaling and rounding" if recorded is not None else "Rounding"
    with progress.task(label, spec.num_layers * LINEARS_PER_BLOCK, "linears") as task:
        for index, layer in enumerate(weights.layers):
            block = dense_block(layer)
            if recorded is not None:
                scale_block(
                    block, recorded.block_statistics(index), group_size,
                    num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                    after_place=lambda: task.advance(1),
                )  # fmt: skip
            else:
                task.advance(LINEARS_PER_BLOCK)
            writer.add(dict(_block_tensors(f"model.layers.{index}", block, group_size)))
    (head,) = weights.head.parts
    tied = head is weights.embedding
    writer.add({"model.embed_tokens.weight": to_float16(dequantize(weights.embedding), "model.embed_tokens.weight")})
    writer.add({"model.norm.weight": to_float16(weights.final_norm, "model.norm.weight")})
    if not tied:
        writer.add({"lm_head.weight": to_float16(dequantize(head), "lm_head.weight")})
    if weights.head.bias is not None:
        writer.add({"lm_head.bias": to_float16(weights.head.bias, "lm_head.bias")})
    num_bytes = writer.finish()
    write_side_files(files, directory, group_size=group_size, skipped=[] if tied else ["lm_head"], tied=tied)
    return num_bytes


def _expected_bytes(weights: ModelWeights, group_size: int) -> int:
    """Bytes on disk: half a byte per weight, 2.5 per group, 16 bits for embedding and head, and a little more."""
    total = 0
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            count = linear.num_outputs * linear.num_inputs
            total += count // 2 + count // group_size * 5 // 2
    total += 2 * weights.embedding.num_outputs * weights.embedding.num_inputs
    (head,) = weights.head.parts
    if head is not weights.embedding:
        total += 2 * head.num_outputs * head.num_inputs
    return total + (16 << 20)
