"""Where the memory goes and what fits: one arithmetic for start-up, `kvd plan` and the dashboard. Torch-free; pure.

    room            memory that kvd may take: of the host what is free, of a device a share of the whole
    left            room − packed weights − buffers of the largest step − rope tables
    KV cache        on a device all that is left, on the host a share of it, in whole blocks

Figures are bytes. Start-up measures what it hands in here (free memory, and on a device what a step takes beside its
buffers); `kvd plan` estimates the same figures without loading anything; the dashboard takes those of the engine that
runs, as `Geometry`. Every refusal has the numbers, and the largest setting that fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from kvd.cache.sizing import (
    GIB,
    BlockFormat,
    DecoderShape,
    PoolSize,
    activation_bytes,
    request_blocks,
    rope_bytes,
    size_pool,
)
from kvd.config import Config
from kvd.core import BLOCK_SIZE
from kvd.errors import NotEnoughMemory
from kvd.geometry import HOST_SETTING, Choice, Geometry, ModelShape, Room
from kvd.model.spec import kv_format_of, resolved_kv_dtype

HEADROOM_BYTES = 256 << 20
"""Of a device's free memory, left alone: what drivers and other processes take after the start is in no formula."""
MIN_KV_TOKENS = 512
"""The KV cache that advice about other settings leaves room for."""
MIN_STEP_TOKENS = 16
AUTO_MAX_NUM_SEQS = 32
KV_DTYPES = ("int8", "fp16", "bf16")
FP8_DTYPES = ("fp8_e4m3", "fp8_e5m2")


def gib(num_bytes: int) -> str:
    """For messages."""
    return f"{max(0, num_bytes) / GIB:.2f} GiB"


# --------------------------------------------------------------------------- what may be taken


def host_room(available_bytes: int, tier_bytes: int, share: float) -> Room:
    """Of the host: available_bytes once the weights are loaded, and tier_bytes of these for the RAM tier."""
    left = available_bytes - tier_bytes
    words = f"only {gib(left)} of memory are free"
    if tier_bytes:
        words += f" beside swap_space ({gib(tier_bytes)})"
    return Room(left, share, HOST_SETTING, words, left, left)


def device_room(total_bytes: int, reachable_bytes: int, share: float, setting: str) -> tuple[Room, str]:
    """Of a device, of which the driver and others leave reachable_bytes; and a warning, or "".

    share: of the whole device, the value of `setting`.
    """
    most = max(0, reachable_bytes - HEADROOM_BYTES)
    asked = int(total_bytes * share)
    limit = min(asked, most)
    words, warning = f"{setting} {share:g} of {gib(total_bytes)} is {gib(limit)}", ""
    if limit < asked:
        words = (
            f"of {gib(total_bytes)} the driver and others hold {gib(total_bytes - reachable_bytes)}, "
            f"which leaves {gib(limit)}"
        )
        warning = f"{setting} {share:g} asks for {gib(asked)}, but {words}"
    return Room(limit, 1.0, setting, words, most, total_bytes), warning


def with_share(room: Room, share: float) -> Room:
    """The same memory under another value of `room.setting`."""
    if room.setting == HOST_SETTING:
        return replace(room, kv_share=share)
    return device_room(room.total_bytes, room.most_bytes + HEADROOM_BYTES, share, room.setting)[0]


# --------------------------------------------------------------------------- what it is wanted for


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step."""

    max_tokens: int
    max_seqs: int

    @staticmethod
    def of(max_num_batched_tokens: int, max_num_seqs: int) -> Limits:
        """Every running request needs a token per step."""
        return Limits(max(max_num_batched_tokens, max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class Demand:
    """What stands before the KV cache is sized.

    weight_bytes   packed
    scratch_bytes  what the largest step was seen to take beside its buffers, graphs included; 0 before that was seen
    """

    spec: DecoderShape
    kv_format: BlockFormat
    limits: Limits
    element_bytes: int
    weight_bytes: int
    scratch_bytes: int = 0

    def buffer_bytes(self, max_tokens: int | None = None) -> int:
        """Of a step of `max_tokens` tokens, or of the largest; scratch is taken to grow with the tokens."""
        tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        buffers = activation_bytes(
            self.spec, max_tokens=tokens, max_seqs=self.limits.max_seqs, element_bytes=self.element_bytes
        )
        return buffers + self.scratch_bytes * tokens // self.limits.max_tokens

    @property
    def least_kv_bytes(self) -> int:
        """Of a KV cache that is worth starting for."""
        return math.ceil(MIN_KV_TOKENS * self.kv_format.bytes_per_token) + rope_bytes(self.spec, MIN_KV_TOKENS)


class Settings(Protocol):
    """What of the configuration decides the size of the KV cache: a `Config`, or a `Choice`."""

    @property
    def max_model_len(self) -> int | None: ...

    @property
    def kv_cache_memory_bytes(self) -> int | None: ...

    @property
    def num_gpu_blocks_override(self) -> int | None: ...

    @property
    def kv_eviction(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What was settled on. step_bytes: buffers, rope tables and what a step takes beside them."""

    pool: PoolSize
    step_bytes: int


def plan_memory(config: Settings, demand: Demand, room: Room) -> Plan:
    """Settle the KV cache's size and the served context. Raises NotEnoughMemory."""
    spec, kv_format = demand.spec, demand.kv_format
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise NotEnoughMemory(
            f"max_model_len {config.max_model_len} exceeds the model's {spec.max_positions} positions"
        )
    buffer_bytes = demand.buffer_bytes()
    beside = room.limit_bytes - demand.weight_bytes - buffer_bytes
    # Rope tables cover the served context, which is never longer than what fits in all that is left.
    wanted_len = config.max_model_len if config.max_model_len is not None else spec.max_positions
    left = beside - rope_bytes(spec, min(wanted_len, int(max(0, beside) / kv_format.bytes_per_token)))
    if left <= 0:
        raise NotEnoughMemory(
            f"the weights need {gib(demand.weight_bytes)} and a step of {demand.limits.max_tokens} tokens "
            f"{gib(buffer_bytes)}, but {room.words}{advice(demand, room)}"
        )
    if config.kv_cache_memory_bytes is not None:
        kv_bytes, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        if kv_bytes > left:
            raise NotEnoughMemory(
                f"kv_cache_memory_bytes asks for {gib(kv_bytes)}, but beside weights and activations "
                f"only {gib(left)} are left"
            )
    else:
        kv_bytes, setting = int(left * room.kv_share), room.setting
    pool = size_pool(
        kv_format=kv_format, kv_bytes=kv_bytes, model_max_len=spec.max_positions,
        requested_max_len=config.max_model_len, num_blocks_override=config.num_gpu_blocks_override,
        memory_setting=setting, forgets_tokens=config.kv_eviction != "none",
    )  # fmt: skip
    if pool.kv_bytes > left:
        raise NotEnoughMemory(
            f"num_gpu_blocks_override {pool.num_blocks} needs {gib(pool.kv_bytes)}, but {gib(left)} are left; "
            f"the largest that fits is {left // kv_format.block_bytes}"
        )
    return Plan(pool, buffer_bytes + rope_bytes(spec, pool.max_model_len))


def advice(demand: Demand, room: Room) -> str:
    """What to change so that a start succeeds, with numbers: a smaller step, or a larger share of a device."""
    spare = room.limit_bytes - demand.weight_bytes - demand.least_kv_bytes
    least = max(MIN_STEP_TOKENS, demand.limits.max_seqs)
    ways = []
    if demand.limits.max_tokens > least and demand.buffer_bytes(least) <= spare:
        fits, too_many = least, demand.limits.max_tokens
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if demand.buffer_bytes(middle) <= spare else (fits, middle)
        ways.append(f"--max-num-batched-tokens {fits} fits")
    needed = demand.weight_bytes + demand.buffer_bytes() + demand.least_kv_bytes
    if room.setting != HOST_SETTING and needed <= room.most_bytes:
        share = math.ceil(100 * needed / room.total_bytes) / 100
        ways.append(f"--{room.setting.replace('_', '-')} {share:g} would do")
    return "".join(f"; {way}" for way in ways) or "; a smaller model or max_num_seqs is needed"


# --------------------------------------------------------------------------- what fits


def shape_of(spec: DecoderShape) -> ModelShape:
    """The part of a spec that decides what fits."""
    return ModelShape(
        spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size,
        spec.max_positions, tuple(sorted(Counter(spec.windows).items())),
    )  # fmt: skip


def kv_dtypes_of(arithmetic: str) -> tuple[str, ...]:
    """What the KV cache may be stored in under an `Ops.arithmetic`, the smallest first."""
    return KV_DTYPES if arithmetic == "a8" else (*FP8_DTYPES, *KV_DTYPES)


def limits_of(config: Config, default_step_tokens: int) -> Limits:
    """The largest step. default_step_tokens: what the backend takes where nobody has said."""
    return Limits.of(
        default_step_tokens if config.max_num_batched_tokens is None else config.max_num_batched_tokens,
        AUTO_MAX_NUM_SEQS if config.max_num_seqs is None else config.max_num_seqs,
    )


def choice_of(config: Config, limits: Limits, setting: str) -> Choice:
    """What a configuration says. setting: `Room.setting`."""
    return Choice(
        kv_cache_dtype=resolved_kv_dtype(config.kv_cache_dtype),
        share=config.cpu_memory_utilization if setting == HOST_SETTING else config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_eviction=config.kv_eviction,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """What comes of a geometry under a choice.

    refusal          why it would not start, in one line; then kv_bytes and num_blocks are 0. "": it starts
    max_model_len    served
    bytes_per_token  of KV cache, over all layers
    most_tokens      as of `request_blocks`
    """

    choice: Choice
    limit_bytes: int
    weight_bytes: int
    step_bytes: int
    kv_bytes: int
    num_blocks: int
    block_bytes: int
    bytes_per_token: float
    max_model_len: int
    max_positions: int
    most_tokens: int = 0
    refusal: str = ""
    warning: str = ""

    @property
    def largest_len(self) -> int:
        """The longest context that one request may have here."""
        return min(self.max_positions, self.num_blocks * BLOCK_SIZE)

    def requests(self, num_tokens: int) -> int:
        """How many requests of so many tokens fit at once, if nothing is shared; 0 where not even one may be."""
        if num_tokens > self.largest_len:
            return 0
        return self.num_blocks // request_blocks(num_tokens, self.most_tokens)


@dataclass(frozen=True, slots=True)
class _BlockSize:
    """What of a `KVFormat` counts. window: the widest where every layer has one, else 0."""

    block_bytes: int
    bytes_per_token: float
    window: int


@lru_cache(maxsize=32)
def _block_size(shape: ModelShape, kv_cache_dtype: str) -> _BlockSize:
    """One layer of each window is formatted, and multiplied: layers of one window are alike."""
    counts: Counter[int] = Counter()
    for window, count in shape.layer_windows:
        counts[window] += count
    one_each = replace(shape, layer_windows=tuple((window, 1) for window in counts))
    groups = kv_format_of(one_each, kv_cache_dtype).groups
    block_bytes = sum(group.block_bytes * counts[group.window] for group in groups)
    return _BlockSize(block_bytes, block_bytes / BLOCK_SIZE, max(counts) if all(counts) else 0)


def fit(geometry: Geometry, choice: Choice) -> Fit:
    """What start-up would come to with `choice`; never raises."""
    shape = geometry.shape
    block = _block_size(shape, choice.kv_cache_dtype)
    limits = Limits.of(choice.max_num_batched_tokens, choice.max_num_seqs)
    demand = Demand(
        shape, block, limits, geometry.element_bytes, geometry.weight_bytes, geometry.scratch_bytes
    )  # fmt: skip
    room = with_share(geometry.room, choice.share)
    # Of what lies behind the window a request holds the rest of a block; a chunk is written before that goes.
    most_tokens = block.window + limits.max_tokens + BLOCK_SIZE if block.window else 0
    pool, step_bytes, refusal = PoolSize(0, 0, 0), demand.buffer_bytes(), ""
    try:
        plan = plan_memory(choice, demand, room)
        pool, step_bytes = plan.pool, plan.step_bytes
    except NotEnoughMemory as error:
        refusal = str(error)
    return Fit(
        choice, room.limit_bytes, demand.weight_bytes, step_bytes, pool.kv_bytes, pool.num_blocks,
        block.block_bytes, block.bytes_per_token, pool.max_model_len, shape.max_positions, most_tokens,
        refusal, pool.warning,
    )  # fmt: skip


def fits_by_concurrency(geometry: Geometry, choice: Choice, counts: Sequence[int]) -> tuple[Fit, ...]:
    """One per count: what the memory comes to where so many requests may run, or as many as `choice` says if more.

    No context is asked for, so that `Fit.requests` answers for every length.
    """
    return tuple(
        fit(geometry, replace(choice, max_model_len=None, max_num_seqs=max(count, choice.max_num_seqs)))
        for count in counts
    )
