"""The memory that `kvd plan` plans for: this machine as `kvd serve` would see it, or a card by name or by size.

Invariant: nothing is started on a GPU, so what start-up would measure there is assumed, and said in `notes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd.cache.fitting import Limits, device_room, host_room, kv_dtypes_of
from kvd.cache.sizing import GIB, DecoderShape
from kvd.config import Config
from kvd.config_check import FP8_NEEDS_GPU
from kvd.engine import host_memory
from kvd.engine.backend import nvidia_device_is_here, open_cpu_ops
from kvd.engine.build_tiers import STAGING_BYTES
from kvd.errors import ConfigError, NotEnoughMemory, StartupError
from kvd.geometry import DEVICE_SETTING, Room
from kvd.observe.nvml import open_nvml
from kvd.tools.cards import GpuCard, capability_problem, find_card, known_card
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.triton.packing import packed_bytes
from kvd_kernels.weights import Linear

MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB
"""Of a card, assumed to be taken by kvd's CUDA context and by nobody else."""
STEP_BASE_BYTES = 512 * MIB
"""Of a card, assumed for CUDA graphs, loaded kernels and cuBLAS."""
GPU_ELEMENT_BYTES = 2
GPU_STEP_TOKENS = 2048  # what TritonOps takes where nobody has said


@dataclass(frozen=True, slots=True)
class Machine:
    """kind: "cpu" or "gpu". used_bytes: by others, of total_bytes. notes: what was assumed or found."""

    kind: str
    name: str
    arithmetic: str
    element_bytes: int
    default_step_tokens: int
    prepared_bytes: Callable[[Linear], int]
    total_bytes: int
    used_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        return kv_dtypes_of(self.arithmetic)

    def check_kv_dtype(self, kv_cache_dtype: str) -> None:
        """Raises ConfigError as start-up does."""
        if self.kind == "cpu" and kv_cache_dtype.startswith("fp8"):
            raise ConfigError(f"kv_cache_dtype: {kv_cache_dtype} {FP8_NEEDS_GPU}")


def find_machine(config: Config, gpu: str | None, memory_bytes: int | None) -> Machine:
    """gpu: a name of `cards`. memory_bytes: of a card, or of the free RAM where the configuration computes on the CPU.

    Raises ConfigError for a card that nobody knows, and StartupError for one that kvd has no kernels for.
    """
    is_host = config.device == "cpu" or config.backend in ("cpu", "reference")
    if gpu is not None:
        return _named(find_card(gpu))
    if is_host:
        return _host(config, memory_bytes)
    if memory_bytes is not None:
        return _gpu(f"a GPU of {memory_bytes / GIB:.4g} GiB", memory_bytes, 0, ())
    asked = "backend triton" if config.backend == "triton" else "device cuda" if config.device == "cuda" else ""
    if not asked and not nvidia_device_is_here():
        return _host(config, None)
    found = _this_gpu()
    if isinstance(found, Machine):
        return found
    if asked:
        raise StartupError(f"{asked}: {found}; --gpu NAME plans for a card that is not here")
    return _host(config, None, (f"planned for the CPU: {found}",))


def _host(config: Config, memory_bytes: int | None, notes: tuple[str, ...] = ()) -> Machine:
    lines: list[str] = []
    ops = open_cpu_ops(
        "reference" if config.backend == "reference" else config.backend if config.backend == "cpu" else "auto",
        config.cpu_threads,
        lambda level, line: lines.append(line),
    )
    if memory_bytes is None:
        memory_bytes = host_memory.available_bytes()
        notes = (*notes, "free RAM as of now, kvd's own process included; when kvd serve starts it may be another")
    return Machine(
        "cpu", f"this CPU ({ops.label})", ops.arithmetic, ops.activation_dtype.itemsize, ops.default_step_tokens,
        ops.prepared_bytes, memory_bytes, 0, (*notes, *lines),
    )  # fmt: skip


def _named(card: GpuCard) -> Machine:
    problem = capability_problem(card.name, card.capability)
    if problem:
        raise StartupError(f"--gpu: {problem}")
    major, minor = card.capability
    note = f"{card.name}: {card.total_gib:g} GiB as CUDA reports it, compute capability {major}.{minor}"
    return _gpu(card.name, card.total_bytes, 0, (note,))


def _gpu(name: str, total_bytes: int, used_bytes: int, notes: tuple[str, ...]) -> Machine:
    return Machine(
        "gpu", name, "a16", GPU_ELEMENT_BYTES, GPU_STEP_TOKENS, packed_bytes, total_bytes, used_bytes, notes
    )  # fmt: skip


def _this_gpu() -> Machine | str:
    """The card that CUDA would put first, by NVML; else why there is none."""
    nvml = open_nvml()
    if nvml is None:
        return "the NVIDIA driver does not answer (NVML)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        handle = _handle(nvml, visible)
        name = nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error})"
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    problem = capability_problem(name, (int(capability[0]), int(capability[1])))
    if problem:
        return problem
    card = known_card(name)
    total = int(memory.total) if card is None else min(int(memory.total), card.total_bytes)
    used = max(0, total - int(memory.free))
    return _gpu(name.removeprefix("NVIDIA "), total, used, (f"others hold {used / GIB:.2f} GiB of it now",))


def _handle(nvml: Any, visible: str) -> Any:
    if visible.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(visible)
    return nvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdecimal() else 0)


# --------------------------------------------------------------------------- what start-up would measure


def room_of(
    machine: Machine, config: Config, kv_format: KVFormat, *, weight_bytes: int, loaded_bytes: int
) -> tuple[Room, tuple[str, ...]]:
    """The room for weights, steps and KV cache, and notes. Raises NotEnoughMemory where the RAM tier is too much.

    loaded_bytes: of the host's memory that unpacked weights take while the KV cache is sized.
    """
    tier_bytes = int(config.swap_space * GIB)
    if config.disk_cache is not None and not tier_bytes:
        tier_bytes = STAGING_BYTES
    tier_bytes = tier_bytes // kv_format.block_bytes * kv_format.block_bytes
    if machine.kind == "cpu":
        available = max(0, machine.total_bytes - loaded_bytes)
        if tier_bytes and tier_bytes > available - weight_bytes:
            raise NotEnoughMemory(
                f"swap_space takes {tier_bytes / GIB:.2f} GiB, but beside the weights only "
                f"{max(0, available - weight_bytes) / GIB:.2f} GiB of memory are free"
            )
        note = f"while it starts, unpacked weights take {loaded_bytes / GIB:.2f} GiB beside the packed ones"
        return host_room(available, tier_bytes, config.cpu_memory_utilization), (note,)
    reachable = max(0, machine.total_bytes - machine.used_bytes - CONTEXT_BYTES)
    room, warning = device_room(machine.total_bytes, reachable, config.gpu_memory_utilization, DEVICE_SETTING)
    note = f"assumed: {CONTEXT_BYTES // MIB} MiB for kvd's CUDA context, and nobody else on the card"
    if machine.used_bytes:
        note = f"assumed: {CONTEXT_BYTES // MIB} MiB for kvd's CUDA context"
    return room, (note, *([warning] if warning else []))


def scratch_bytes_of(machine: Machine, shape: DecoderShape, limits: Limits, *, is_quantized: bool) -> tuple[int, str]:
    """What a step takes beside its buffers out of the KV cache's memory, and how that was come to.

    On a GPU start-up runs the largest step and looks. Here: the float32 product of the widest matrix, that matrix
    written out in 16 bits where weights are quantised, and a flat part for graphs and kernels.
    """
    if machine.kind == "cpu":
        return 0, "what a step takes beside its buffers comes out of the RAM that the KV cache leaves"
    widest = max(2 * shape.intermediate_size, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    total = STEP_BASE_BYTES + 4 * widest * limits.max_tokens
    if is_quantized:
        total += 2 * widest * shape.hidden_size
    return total, (
        f"assumed: a step takes {total / GIB:.2f} GiB beside its buffers (graphs, kernels, products); kvd serve "
        "runs the largest step and measures it"
    )
