"""Which blocks the disk tier has, in memory, so that looking one up never waits for the disk.

Any thread may call these methods. The index may be behind the file: another process evicts and adds blocks, and a block
may turn out to be damaged. Then a load fails and the name is removed. About 500 bytes per block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from kvd.cache.disk_blocks import BlockHead, unpack_token_ids

BlockName = tuple[int, bytes]
"""(group id, key)"""


class DiskIndex:
    """Names, parents and token ids of the blocks on disk.

    `epoch` rises with every `forget`: what was begun before belongs to an earlier epoch and is not added any more.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._lock = threading.Lock()
        self._heads: dict[BlockName, BlockHead] = {}
        self._children: dict[BlockName, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._heads

    def add(self, heads: Iterable[BlockHead], epoch: int) -> None:
        with self._lock:
            if epoch != self.epoch:
                return
            for head in heads:
                self._heads[head.group_id, head.key] = head
                self._children.setdefault((head.group_id, head.parent_key), {})[head.key] = None

    def remove(self, names: Iterable[BlockName]) -> None:
        """Blocks are gone; names that are not known are passed over."""
        with self._lock:
            for name in names:
                head = self._heads.pop(name, None)
                if head is None:
                    continue
                parent = head.group_id, head.parent_key
                siblings = self._children[parent]
                del siblings[head.key]
                if not siblings:
                    del self._children[parent]

    def children(self, group_id: int, parent_key: bytes, limit: int) -> list[tuple[bytes, tuple[int, ...]]]:
        """(key, token ids) of at most `limit` blocks that follow a block, the newest first."""
        with self._lock:
            keys = list(islice(reversed(self._children.get((group_id, parent_key), {})), limit))
            heads = [self._heads[group_id, key] for key in keys]
        return [(head.key, unpack_token_ids(head.token_bytes)) for head in heads]

    def clear(self) -> int:
        """Empty the index because the file was; returns how many blocks it had."""
        with self._lock:
            num_blocks = len(self._heads)
            self._heads.clear()
            self._children.clear()
            return num_blocks

    def forget(self) -> int:
        """Empty the index and begin a new epoch; returns how many blocks it had."""
        with self._lock:
            self.epoch += 1
        return self.clear()
