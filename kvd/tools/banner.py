"""What start-up tells a person: the three things that a client needs, and where the memory goes.

Pure functions from facts to lines, so that the numbers can be tested.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.sizing import concurrency_table
from kvd.core import BLOCK_SIZE
from kvd.views import EngineInfo, MemoryBudget

_CONTEXTS = (2048, 8192, 32768, 131072)


def client_lines(url: str, info: EngineInfo, *, needs_key: bool, key_origin: str) -> list[str]:
    """Base URL, key and model name; the key itself is never shown."""
    key = f"required, as set by {key_origin}" if needs_key else "none needed"
    return [
        f"kvd {info.version} is ready: {info.architecture}, {info.quantization}, on the {info.device} ({info.backend})",
        f"  base URL  {url}",
        f"  API key   {key}",
        f"  model     {', '.join(info.served_names)}",
    ]


def budget_lines(info: EngineInfo) -> list[str]:
    """Weights, activations, KV cache, blocks, bytes per token, and how many requests of which context fit."""
    budget = info.budget
    share = budget.bytes_per_token / budget.bytes_per_token_16bit
    return [
        f"memory: {size(budget.total_bytes)} free; weights {size(budget.weight_bytes)}, "
        f"activations {size(budget.activation_bytes)}, KV cache {size(budget.kv_bytes)}",
        f"KV cache: {budget.num_blocks:,} blocks of {BLOCK_SIZE} tokens, {info.kv_cache_dtype}, "
        f"{size(budget.bytes_per_token)} per token ({share:.0%} of 16 bits)",
        f"fits: {fitting(budget, info.max_model_len)}; at most {info.max_num_seqs} run at once",
    ]


def fitting(budget: MemoryBudget, max_model_len: int) -> str:
    """`26 requests of 8,192 tokens, 6 of 32,768`: how many of each context the blocks hold at once."""
    counts = [(count, context) for context, count in concurrency_table(budget.num_blocks, max_model_len, _CONTEXTS)]
    return _listed([(count, context) for count, context in counts if count] or counts[:1])


def size(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _listed(counts: Sequence[tuple[int, int]]) -> str:
    first_count, first_context = counts[0]
    noun = "request" if first_count == 1 else "requests"
    rest = [f"{count:,} of {context:,}" for count, context in counts[1:]]
    return ", ".join([f"{first_count:,} {noun} of {first_context:,} tokens", *rest])
