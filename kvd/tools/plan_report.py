"""What `kvd plan` finds out, as one frozen value: from a model and a machine, or from a server that runs.

Invariant: every figure of what fits is by `kvd.cache.fitting`, which start-up uses as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvd.cache.fitting import Fit, Limits, choice_of, fit, limits_of, shape_of
from kvd.cache.lengths import SeenLengths, advise, seen_lengths
from kvd.cache.sizing import request_blocks
from kvd.core import BLOCK_SIZE
from kvd.engine.memory_budget import prepared_weight_bytes
from kvd.errors import ConfigError
from kvd.geometry import HOST_SETTING, Choice, Geometry
from kvd.model.spec import kv_format_of
from kvd.tools.plan_machine import Machine, room_of, scratch_bytes_of
from kvd.tools.plan_model import PlannedModel
from kvd.tools.plan_options import Asked, PlanOptions
from kvd.views import Snapshot
from kvd_kernels.weights import Linear

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
EVERY_DTYPE = ("fp8_e4m3", "int8", "fp16")
"""A column of the tables each; fp8_e5m2 takes what fp8_e4m3 takes, and bf16 what fp16 takes."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """expected_tokens: of one request, and why it is taken to be so long. max_model_len None: any will do."""

    max_num_seqs: int
    max_model_len: int | None
    expected_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """Whether so many requests fit at once, in blocks, and what they take. is_too_long: each alone is refused."""

    num_requests: int
    num_tokens: int
    kv_bytes: int
    fits: bool
    num_fitting: int
    is_too_long: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for, in words: model, where that was read, machine. file_bytes: of the weights on disk."""

    model: str
    source: str
    quantization: str
    machine: str
    file_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanReport:
    """fits: under the settings. by_dtype: the same settings with every KV dtype, without a max_model_len."""

    subject: Subject
    geometry: Geometry
    fits: Fit
    by_dtype: tuple[Fit, ...]
    recommendation: Recommendation
    asked: AskedAnswer | None
    seen: SeenLengths | None

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths for the tables: round ones up to what the best dtype holds, and that itself."""
        longest = max((each.largest_len for each in self.by_dtype), default=0)
        served = {self.fits.max_model_len} - {0}
        return tuple(sorted({*(length for length in CONTEXTS if length <= longest), *served, *({longest} - {0})}))

    @property
    def unasked(self) -> Fit:
        """With the KV dtype that is set, and no max_model_len."""
        column = column_of(self.fits.choice.kv_cache_dtype)
        return next(each for each in self.by_dtype if each.choice.kv_cache_dtype == column)

    @property
    def kv_share(self) -> float:
        """Of all memory of the device, what the KV cache gets."""
        total = self.geometry.room.total_bytes
        return self.fits.kv_bytes / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fits, room = self.fits, self.geometry.room
        return {
            "model": self.subject.model,
            "source": self.subject.source,
            "quantization": self.subject.quantization,
            "machine": self.subject.machine,
            "shape": asdict(self.geometry.shape),
            "settings": asdict(fits.choice),
            "bytes_per_token": {each.choice.kv_cache_dtype: each.bytes_per_token for each in self.by_dtype},
            "kv_dtypes": list(self.geometry.kv_dtypes),
            "memory": {
                "total_bytes": room.total_bytes,
                "limit_bytes": fits.limit_bytes,
                "file_bytes": self.subject.file_bytes,
                "weight_bytes": fits.weight_bytes,
                "activation_bytes": fits.step_bytes,
                "kv_bytes": fits.kv_bytes,
                "num_blocks": fits.num_blocks,
                "block_bytes": fits.block_bytes,
                "block_tokens": BLOCK_SIZE,
                "bytes_per_token": fits.bytes_per_token,
                "kv_share": round(self.kv_share, 6),
            },
            "max_model_len": fits.max_model_len,
            "largest_max_model_len": self.unasked.largest_len,
            "requests": [
                {"tokens": length} | {each.choice.kv_cache_dtype: each.requests(length) for each in self.by_dtype}
                for length in self.contexts
            ],
            "recommended": asdict(self.recommendation),
            "asked": None if self.asked is None else asdict(self.asked),
            "seen": None if self.seen is None else asdict(self.seen),
            "refusal": fits.refusal,
            "warning": fits.warning,
            "notes": list(self.subject.notes),
        }


def column_of(kv_cache_dtype: str) -> str:
    """The dtype of `EVERY_DTYPE` that takes the same memory."""
    return {"fp8_e5m2": "fp8_e4m3", "bf16": "fp16"}.get(kv_cache_dtype, kv_cache_dtype)


def of_model(model: PlannedModel, machine: Machine, options: PlanOptions) -> PlanReport:
    """Of a model on disk, or by numbers. Raises ConfigError and NotEnoughMemory as start-up does."""
    config = options.config
    machine.check_kv_dtype(config.kv_cache_dtype)
    limits = limits_of(config, machine.default_step_tokens)
    weight_bytes = model.weight_bytes
    if weight_bytes is None:
        weight_bytes = prepared_weight_bytes(_Packing(machine), model.outline.weights)
    kv_format = kv_format_of(model.spec, config.kv_cache_dtype)
    loaded_bytes = model.outline.loaded_bytes if model.weight_bytes is None else weight_bytes
    room, notes = room_of(machine, config, kv_format, weight_bytes=weight_bytes, loaded_bytes=loaded_bytes)
    is_quantized = model.spec.quantization not in ("fp16", "bf16", "fp32", "16 bits")
    scratch_bytes, note = scratch_bytes_of(machine, model.spec, limits, is_quantized=is_quantized)
    geometry = Geometry(
        shape_of(model.spec), room, weight_bytes, machine.element_bytes, scratch_bytes, machine.kv_dtypes,
        choice_of(config, limits, room.setting),
    )  # fmt: skip
    subject = Subject(
        model.name, model.source, model.spec.quantization, machine.name,
        None if model.weight_bytes is not None else model.outline.file_bytes,
        (*model.notes, *machine.notes, *notes, note),
    )  # fmt: skip
    return _report(subject, geometry, geometry.choice, options.asked, None)


class _Packing:
    """What `prepared_weight_bytes` asks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def prepared_bytes(self, linear: Linear, /) -> int:
        return self._machine.prepared_bytes(linear)


def of_server(snapshot: Snapshot, url: str, options: PlanOptions) -> PlanReport:
    """Of a server that runs, under its own settings but for those that were chosen here."""
    info = snapshot.info
    geometry = info.geometry
    if geometry is None:
        raise ConfigError(f"--from: {url} does not say what its memory is like; is it an older kvd?")
    theirs = geometry.choice
    limits = Limits(theirs.max_num_batched_tokens, theirs.max_num_seqs)
    ours = choice_of(options.config, limits_of(options.config, limits.max_tokens), geometry.room.setting)
    share = "cpu_memory_utilization" if geometry.room.setting == HOST_SETTING else "gpu_memory_utilization"
    names = {"share": share}
    changed = {
        name: getattr(ours, name) for name in asdict(ours) if names.get(name, name) in options.chosen
    }  # fmt: skip
    choice = replace(theirs, **changed)
    if choice.kv_cache_dtype not in geometry.kv_dtypes:
        raise ConfigError(
            f"kv_cache_dtype: {choice.kv_cache_dtype} is not served there; it is one of {', '.join(geometry.kv_dtypes)}"
        )
    seen = seen_lengths(snapshot.histograms)
    notes = ["weights, memory and what a step takes are as that server measured them when it started"]
    if seen is None:
        notes.append("no request has ended there yet, so nothing is known of their lengths")
    subject = Subject(
        info.served_names[0] if info.served_names else Path(info.model).name, f"the server at {url}",
        info.quantization, f"its {info.device} ({info.backend})", None, tuple(notes),
    )  # fmt: skip
    return _report(subject, geometry, choice, options.asked, seen)


def _report(
    subject: Subject, geometry: Geometry, choice: Choice, asked: Asked | None, seen: SeenLengths | None
) -> PlanReport:
    fits = fit(geometry, choice)
    by_dtype = tuple(
        fit(geometry, replace(choice, kv_cache_dtype=dtype, max_model_len=None)) for dtype in EVERY_DTYPE
    )  # fmt: skip
    return PlanReport(
        subject, geometry, fits, by_dtype, recommend(geometry, fits, asked, seen), answer(fits, asked), seen
    )  # fmt: skip


def recommend(geometry: Geometry, fits: Fit, asked: Asked | None, seen: SeenLengths | None) -> Recommendation:
    """Settings for the requests that are expected, and why they are."""
    advice = advise(geometry, fits, seen, None if asked is None else asked.num_tokens)
    why = "assumed; --requests says otherwise"
    if asked is not None:
        why = "as asked for"
    elif seen is not None:
        why = f"the 90th percentile of {seen.num_requests:,} requests seen"
    return Recommendation(advice.max_num_seqs, advice.max_model_len, advice.expected_tokens, why)


def answer(fits: Fit, asked: Asked | None) -> AskedAnswer | None:
    """Whether what was asked for fits."""
    if asked is None:
        return None
    blocks: int = asked.num_requests * request_blocks(asked.num_tokens, fits.most_tokens)
    is_too_long = not fits.refusal and asked.num_tokens > fits.max_model_len
    num_fitting = 0 if is_too_long else fits.requests(asked.num_tokens)
    return AskedAnswer(
        asked.num_requests, asked.num_tokens, blocks * fits.block_bytes, num_fitting >= asked.num_requests, num_fitting,
        is_too_long,
    )  # fmt: skip
