"""The ends of the indexed chains by how often they were found, so that listing the most popular ones is quick.

Owner: the engine thread, through `PrefixIndex`. An end is a whole block that no whole block continues. Every change is
O(1); listing looks at as many ends as are wanted, and among those found equally often at `MAX_EQUALS` of the latest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it keeps the ends itself
    from kvd.cache.prefix_index import IndexedBlock

MAX_EQUALS = 1024


class ChainEnds:
    """See the module's docstring. `find` gives the indexed block under a key."""

    def __init__(self, find: Callable[[bytes], IndexedBlock | None]) -> None:
        self._find = find
        self._num_behind: dict[bytes, int] = {}  # whole blocks by the key that they continue
        self._by_hits: dict[int, dict[bytes, IndexedBlock]] = {}
        self._hits: dict[bytes, int] = {}  # under which number of hits each end stands

    def __len__(self) -> int:
        return len(self._hits)

    def __contains__(self, key: bytes) -> bool:
        return key in self._hits

    def is_continued(self, key: bytes) -> bool:
        """Whether a whole block continues a chain."""
        return key in self._num_behind

    def inserted(self, block: IndexedBlock) -> None:
        """A whole block was indexed."""
        parent_key = block.parent_key
        self._num_behind[parent_key] = self._num_behind.get(parent_key, 0) + 1
        self._drop(parent_key)
        if block.key not in self._num_behind:
            self._add(block)

    def removed(self, block: IndexedBlock) -> None:
        """A whole block is indexed no more."""
        self._drop(block.key)
        parent_key = block.parent_key
        self._num_behind[parent_key] -= 1
        if self._num_behind[parent_key]:
            return
        del self._num_behind[parent_key]
        parent = self._find(parent_key)
        if parent is not None:
            self._add(parent)

    def was_hit(self, block: IndexedBlock) -> None:
        """`num_hits` of a block has changed."""
        if block.key in self._hits:
            self._drop(block.key)
            self._add(block)

    def most_found(self, limit: int) -> list[IndexedBlock]:
        """At most `limit` ends, those found most often first, of equals the longer chain."""
        best: list[IndexedBlock] = []
        for num_hits in sorted(self._by_hits, reverse=True):
            equals = self._by_hits[num_hits]
            latest = islice(reversed(equals.values()), max(limit, MAX_EQUALS))
            best += heapq.nlargest(limit - len(best), latest, key=lambda block: block.depth)
            if len(best) >= limit:
                break
        return best

    def _add(self, block: IndexedBlock) -> None:
        self._hits[block.key] = block.num_hits
        self._by_hits.setdefault(block.num_hits, {})[block.key] = block

    def _drop(self, key: bytes) -> None:
        num_hits = self._hits.pop(key, None)
        if num_hits is not None:
            equals = self._by_hits[num_hits]
            del equals[key]
            if not equals:
                del self._by_hits[num_hits]
