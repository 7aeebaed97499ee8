"""Replays synthetic traces through the cache manager and prints how much each eviction policy saves, as markdown.

    .venv/bin/python packaging/replay_traces.py [--seeds 11] [--seconds 1800] [--traces mix rag]

The manager is the real one; in the place of a model stands a clock. A prompt is computed when it arrives, its answer
when it ends; where the pool has no room, a request waits for the next one to end. Pool sizes are shares of the blocks
that the trace touches, but at least `MIN_BLOCKS`, which the longest requests need.

tokens  prompt tokens that were in the cache, as a share of all
cost    operations saved, as a share: a block at depth d costs 1 + d / COST_DOUBLES_AT_DEPTH
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replay_policies import FarthestNextUse, S3Fifo, SegmentedLru
from traces import MIXES, TracedRequest, make_trace

from kvd.cache.eviction import COST_DOUBLES_AT_DEPTH, POLICIES, Clock, EvictionPolicy
from kvd.cache.manager import CacheManager, SequenceBlocks, blocks_for
from kvd.cache.prefix_index import KeyChain
from kvd.core import BLOCK_SIZE

SHARES = (0.05, 0.1, 0.2, 0.4)
MIN_BLOCKS = 1000
MakePolicy = Callable[[Clock], EvictionPolicy]


@dataclass(frozen=True, slots=True)
class Saved:
    """What the cache spared; both are shares between 0 and 1."""

    tokens: float
    cost: float


class Trace:
    """Requests with their keys, hashed once for all replays."""

    def __init__(self, requests: Sequence[TracedRequest]) -> None:
        self.requests = requests
        self.tokens = [request.prompt + request.output for request in requests]
        self.keys: list[list[bytes]] = []
        self.uses: dict[bytes, list[int]] = {}  # numbers of the requests that have a block in their prompt
        for number, tokens in enumerate(self.tokens):
            chain = KeyChain(b"", "")
            chain.extend(tokens, len(tokens))
            self.keys.append(chain.keys)
            num_prompt = len(requests[number].prompt) // BLOCK_SIZE
            for at, key in enumerate(chain.keys):
                uses = self.uses.setdefault(key, [])
                if at < num_prompt:
                    uses.append(number)

    @property
    def num_blocks(self) -> int:
        """Blocks that an endless cache would hold in the end."""
        return len(self.uses)


class Replay:
    """One trace through one cache manager."""

    def __init__(self, trace: Trace, num_blocks: int, make_policy: MakePolicy | None) -> None:
        """make_policy: None for the one that knows the future."""
        self.now = 0.0
        self._trace = trace
        self._number = 0
        self._running: list[tuple[float, int, SequenceBlocks]] = []
        make = make_policy if make_policy is not None else self._omniscient
        self.cache = CacheManager([num_blocks], key_seed=b"", make_policy=make, clock=lambda: self.now)

    def _omniscient(self, clock: Clock) -> EvictionPolicy:
        def next_use(key: bytes) -> float:
            uses = self._trace.uses[key]
            at = bisect.bisect_right(uses, self._number)
            return uses[at] if at < len(uses) else math.inf

        return FarthestNextUse(clock, next_use)

    def run(self) -> Saved:
        num_tokens = num_hit = 0
        cost = cost_saved = 0.0
        for number, request in enumerate(self._trace.requests):
            while self._running and self._running[0][0] <= request.arrival:
                self._finish()
            self.now = max(self.now, request.arrival)
            self._number = number
            found = self._admit(number)
            num_tokens += len(request.prompt)
            num_hit += found
            cost += cost_of(len(request.prompt))
            cost_saved += cost_of(found)
        while self._running:
            self._finish()
        return Saved(num_hit / num_tokens, cost_saved / cost)

    def _admit(self, number: int) -> int:
        """Give a request its blocks and compute its prompt; returns the tokens that were found."""
        prompt = self._trace.requests[number].prompt
        sequence = self.cache.open("")
        sequence.chain.keys = self._trace.keys[number][: len(prompt) // BLOCK_SIZE]
        while True:
            numbers = [number, *(other for _, other, _ in self._running)]
            num_spare = sum(blocks_for(len(self._trace.requests[other].output)) + 1 for other in numbers)
            found = self.cache.allocate(sequence, prompt, num_spare_blocks=num_spare)
            if isinstance(found, int):
                break
            assert self._running, f"a request of {len(prompt)} tokens does not fit"
            self._finish()
        if sequence.restore is not None:  # the matching part of a block is copied
            found = self.cache.tiers.proceed(sequence, len(prompt))
            self.cache.tiers.take_transfers()
        self.cache.release(self.cache.publish(sequence, prompt, len(prompt)))
        heapq.heappush(self._running, (self.now + self._trace.requests[number].seconds, number, sequence))
        return found

    def _finish(self) -> None:
        end, number, sequence = heapq.heappop(self._running)
        self.now = max(self.now, end)
        tokens = self._trace.tokens[number]
        fits, retired = self.cache.cover(sequence, len(self._trace.requests[number].prompt), len(tokens))
        assert fits, "room for the answer was set aside"
        assert not retired
        self.cache.release(self.cache.publish(sequence, tokens, len(tokens)))
        self.cache.free(sequence)


def cost_of(num_tokens: int) -> float:
    """Cost of computing a prompt from its start, in blocks at depth 0."""
    depth = num_tokens / BLOCK_SIZE
    return depth + depth * depth / 2 / COST_DOUBLES_AT_DEPTH


def compared() -> dict[str, MakePolicy | None]:
    return {**POLICIES, "SLRU": SegmentedLru, "S3-FIFO": S3Fifo, "(knows the future)": None}


def pool_blocks(trace: Trace, share: float) -> int:
    return max(MIN_BLOCKS, int(share * trace.num_blocks))


def table(name: str, traces: Sequence[Trace]) -> str:
    """One row per policy, one column per pool size: tokens / cost in percent, the mean over the traces."""
    endless = [Replay(trace, trace.num_blocks + MIN_BLOCKS, POLICIES["lru"]).run() for trace in traces]
    sizes = ", ".join(f"{trace.num_blocks:,}" for trace in traces)
    lines = [f"**{name}** ({sizes} blocks; an endless pool saves {_percent(endless)})", ""]
    lines.append("| policy | " + " | ".join(f"pool {share:.0%}" for share in SHARES) + " |")
    lines.append("|---|" + "---|" * len(SHARES))
    for policy, make_policy in compared().items():
        cells = [
            _percent([Replay(trace, pool_blocks(trace, share), make_policy).run() for trace in traces])
            for share in SHARES
        ]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(results: Sequence[Saved]) -> str:
    tokens = sum(result.tokens for result in results) / len(results)
    cost = sum(result.cost for result in results) / len(results)
    return f"{100 * tokens:.1f} / {100 * cost:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11])
    parser.add_argument("--seconds", type=float, default=1800.0, help="length of each trace")
    parser.add_argument("--traces", nargs="+", choices=list(MIXES), default=list(MIXES))
    arguments = parser.parse_args()
    for name in arguments.traces:
        traces = [Trace(make_trace(name, seed, arguments.seconds)) for seed in arguments.seeds]
        print(table(name, traces), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
