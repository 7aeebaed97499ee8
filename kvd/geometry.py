"""What of a model, of its settings and of the memory decides what fits. A leaf; torch-free.

`kvd.cache.fitting` computes with these: at start-up, for `kvd plan`, and for the dashboard's what-if page, which gets
them with the snapshot. Everything is frozen and can be said in JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_SETTING = "cpu_memory_utilization"
DEVICE_SETTING = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes.

    layer_windows: (tokens that a query sees, itself included, 0 means all; layers of that window), in any order.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    layer_windows: tuple[tuple[int, int], ...]

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layer_windows)

    @property
    def windows(self) -> tuple[int, ...]:
        """One per layer."""
        return tuple(window for window, count in self.layer_windows for _ in range(count))

    @property
    def qkv_bias(self) -> bool:
        """Whether keys have a bias says how they are stored, not in how many bytes."""
        return False


@dataclass(frozen=True, slots=True)
class Room:
    """What may be taken.

    limit_bytes  by weights, steps and KV cache together
    kv_share     of what weights and steps leave, by the KV cache
    setting      the configuration field that makes it more
    words        the limit for messages, as the end of a sentence that begins with "but"
    most_bytes   the limit at a setting of 1; total_bytes is all that there is
    """

    limit_bytes: int
    kv_share: float
    setting: str
    words: str
    most_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings that decide what fits, named as in the configuration. `share` is that of `Room.setting`."""

    kv_cache_dtype: str
    share: float
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_eviction: str = "none"


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model in its memory.

    weight_bytes   packed
    element_bytes  of an activation
    scratch_bytes  what the largest step takes beside its buffers where that comes out of the KV cache's memory; 0
                   where it does not
    kv_dtypes      what the KV cache may be stored in here, the smallest first
    choice         what is set
    """

    shape: ModelShape
    room: Room
    weight_bytes: int
    element_bytes: int
    scratch_bytes: int
    kv_dtypes: tuple[str, ...]
    choice: Choice
