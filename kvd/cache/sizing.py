"""What fits: the arithmetic of the memory budget. Torch-free, shared by start-up and by `kvd plan`.

    kv_bytes   = memory for the pool, after weights and activations
    num_blocks = kv_bytes // block_bytes            (block_bytes: 16 tokens over all layer groups)
    one request of n tokens needs ceil(n / 16) blocks of every group, and one token is never reused from
    a prompt, so the longest request is num_blocks * 16 tokens

A longer `max_model_len` needs more blocks and nothing else depends on it, so raising it step by step can turn
"fits" into "does not fit" once, and never back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvd.core import BLOCK_SIZE
from kvd.errors import NotEnoughMemory
from kvd.model.spec import KVShape

GIB = 1 << 30
SMALLEST_USEFUL_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool that was settled on. `warning` is a line for the log, or empty."""

    num_blocks: int
    kv_bytes: int
    max_model_len: int
    warning: str = ""


class DecoderShape(KVShape, Protocol):
    """A `ModelSpec`, or a `ModelShape`: the sizes that buffers have."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


def activation_bytes(spec: DecoderShape, *, max_tokens: int, max_seqs: int, element_bytes: int) -> int:
    """Bytes of the decoder's step buffers.

    Per token: residual stream, normed copy, q/k/v, rotated q, attention output, gate and up, and their product;
    per sequence: one hidden row and one float32 row of logits.
    """
    attention_width = spec.num_heads * spec.head_dim
    qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = 2 * spec.hidden_size + qkv_width + 2 * attention_width + 3 * spec.intermediate_size
    per_seq = spec.hidden_size * element_bytes + spec.vocab_size * 4
    return max_tokens * per_token * element_bytes + max_seqs * per_seq


def rope_bytes(spec: DecoderShape, max_positions: int) -> int:
    """Bytes of the cosine and sine tables, float32."""
    return max_positions * spec.head_dim * 4


class BlockFormat(Protocol):
    """A `KVFormat`, or its two figures alone."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def bytes_per_token(self) -> float: ...


def size_pool(
    *,
    kv_format: BlockFormat,
    kv_bytes: int,
    model_max_len: int,
    requested_max_len: int | None,
    num_blocks_override: int | None,
    memory_setting: str,
    forgets_tokens: bool = False,
) -> PoolSize:
    """Settle the number of blocks and the served context length.

    `kv_bytes` is the memory there is; `memory_setting` names the setting that would enlarge it, for messages.
    Raises NotEnoughMemory with the largest length that fits, when an explicit length does not (unless the number of
    blocks was given explicitly, or requests forget tokens by default: then it starts, with a warning), and when
    not even a short context does.
    """
    block_bytes = kv_format.block_bytes
    num_blocks = num_blocks_override if num_blocks_override is not None else kv_bytes // block_bytes
    fits = num_blocks * BLOCK_SIZE
    wanted = requested_max_len if requested_max_len is not None else model_max_len
    if num_blocks_override is None and fits < min(wanted, SMALLEST_USEFUL_CONTEXT):
        raise NotEnoughMemory(
            f"the KV cache would get {kv_bytes / GIB:.2f} GiB, room for {fits} tokens "
            f"({kv_format.bytes_per_token / 1024:.1f} KiB each); raise {memory_setting}"
        )
    if wanted <= fits:
        return PoolSize(num_blocks, num_blocks * block_bytes, wanted)
    needed = -(-wanted // BLOCK_SIZE) * block_bytes
    if requested_max_len is None:
        reason = f"{model_max_len} tokens need {needed / GIB:.2f} GiB of KV cache, there are {kv_bytes / GIB:.2f} GiB"
        if num_blocks_override is not None:
            reason = f"num_gpu_blocks_override gives the KV cache {num_blocks} blocks of {BLOCK_SIZE} tokens"
        warning = f"max_model_len is {fits} instead of the model's {model_max_len}: {reason}"
        return PoolSize(num_blocks, num_blocks * block_bytes, fits, warning)
    if num_blocks_override is not None or forgets_tokens:
        end = "forget tokens (kv_eviction)" if forgets_tokens else "end with finish_reason length"
        warning = (
            f"max_model_len {wanted} is longer than the pool of {num_blocks} blocks ({fits} tokens): "
            f"requests that outgrow it {end}"
        )
        return PoolSize(num_blocks, num_blocks * block_bytes, wanted, warning)
    raise NotEnoughMemory(
        f"max_model_len {wanted} needs {needed / GIB:.2f} GiB of KV cache, but there are {kv_bytes / GIB:.2f} GiB: "
        f"the largest that fits is --max-model-len {fits}; or raise {memory_setting}"
    )


def request_blocks(num_tokens: int, most_tokens: int = 0) -> int:
    """Blocks of every group that a request of so many tokens holds.

    most_tokens: what it holds at most where every layer has a window and blocks behind it are given back; 0: nothing
    is given back.
    """
    held = min(num_tokens, most_tokens) if most_tokens else num_tokens
    return -(-held // BLOCK_SIZE)


def concurrency_table(
    num_blocks: int,
    max_model_len: int,
    lengths: Sequence[int] = (512, 2048, 8192, 32768, 131072),
    most_tokens: int = 0,
) -> list[tuple[int, int]]:
    """(context length, requests of that length that fit at once): `lengths` below the maximum, and the maximum.

    most_tokens: as of `request_blocks`.
    """
    chosen = [length for length in lengths if length < max_model_len] + [max_model_len]
    return [(length, num_blocks // request_blocks(length, most_tokens)) for length in chosen]
