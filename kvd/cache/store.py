"""The tensors of the KV cache. The only file of this room that knows torch; owned by the engine thread.

The store neither allocates nor frees blocks: the manager says which block means what, ops read and write
the bytes, and the store holds them.
"""

from __future__ import annotations

import torch

from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import KVCache


def allocate_cache(kv_format: KVFormat, num_blocks: int, device: torch.device) -> KVCache:
    """A pool of `num_blocks` blocks per layer group, contents undefined.

    On the CPU the operating system hands out pages when a block is first written, so an idle server's resident
    memory grows with use, up to the budget that was printed at start.
    """
    pools = tuple(
        torch.empty((num_blocks, group.block_bytes), dtype=torch.uint8, device=device) for group in kv_format.groups
    )
    return KVCache(kv_format, pools)
