"""A device without a GPU that is as inconvenient as a real one may be. See `kvd_kernels.triton.device`.

What is launched is queued; nothing runs before somebody waits for it, or as early as the waits of the streams allow,
or at random in between: `Eagerness` says which stream does what. A wait that is missing therefore shows as old or new
bytes where others should be. Besides, host memory that a copy has yet to fill is filled with nonsense, and host memory
that a copy has yet to read or to fill must not change until then.

`dropped` holds places in the source whose waits do nothing: the faults that tests plant.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvd.tools.wrapped_ops import WrappedOps
from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import (
    AttentionSpec,
    Batch,
    KVCache,
    Ops,
    RopeTable,
    SamplingBatch,
    SamplingResult,
    StepProgram,
    Transfer,
)
from kvd_kernels.triton.device import Copy, Event, Graph, Stream
from kvd_kernels.triton.program import PendingTokens, Programs, TokenSampler

POISON = 0xA5
UNKNOWN_TOKEN = 1 << 40

Work = Callable[[], None]
Site = tuple[str, str]
"""(file, the line of it that waits)."""


@dataclass(frozen=True, slots=True)
class Eagerness:
    """Which streams run as soon as they may; the others run when somebody waits. seed: both, now and then."""

    compute: bool = False
    copies: bool = False
    seed: int | None = None


EAGERNESSES = (
    Eagerness(),
    Eagerness(compute=True),
    Eagerness(copies=True),
    Eagerness(compute=True, copies=True),
    Eagerness(seed=0),
)


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int, is_timed: bool) -> None:
        self.stream, self._position, self._is_timed = stream, position, is_timed

    @property
    def is_past(self) -> bool:
        return self.stream.num_done >= self._position

    def wait(self) -> None:
        if self.stream.device.honours_wait():
            self.stream.device.run_until(self)

    def is_over(self) -> bool:
        return self.is_past

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, FakeEvent)
        assert self._is_timed
        assert earlier._is_timed
        assert earlier.stream is self.stream
        return (self._position - earlier._position) / 1000


class FakeStream:
    def __init__(self, device: FakeDevice, is_eager: bool) -> None:
        self.device, self.is_eager = device, is_eager
        self.num_done = 0
        self._work: list[Work | FakeEvent] = []

    def mark(self, *, is_timed: bool = False) -> Event:
        assert self.device.captured is None, "no event may be recorded into a graph"
        return FakeEvent(self, len(self._work), is_timed)

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        assert self.device.captured is None, "a graph may not wait for another stream"
        if self.device.honours_wait():
            self.append(event)

    def append(self, work: Work | FakeEvent) -> None:
        self._work.append(work)
        self.device.progress()

    @property
    def blocked_by(self) -> FakeEvent | None:
        """What has to happen before the next piece of work may."""
        work = self._work[self.num_done]
        return work if isinstance(work, FakeEvent) and not work.is_past else None

    def advance(self) -> bool:
        """Run one piece of work; False where there is none that may run."""
        if self.num_done == len(self._work) or self.blocked_by is not None:
            return False
        work = self._work[self.num_done]
        self._work[self.num_done] = _nothing  # which may hold a copy of much
        if not isinstance(work, FakeEvent):
            with torch.inference_mode():  # as it was launched
                work()
        self.num_done += 1
        return True


def _nothing() -> None:
    raise AssertionError("run twice")


class FakeGraph:
    def __init__(self, device: FakeDevice, work: list[Work]) -> None:
        self._device, self._work = device, work

    def replay(self) -> None:
        self._device.num_replays += 1
        for work in self._work:
            self._device.compute.append(work)


class FakeDevice:
    """See the module."""

    def __init__(self, eagerness: Eagerness, dropped: frozenset[Site] = frozenset()) -> None:
        self.compute = FakeStream(self, eagerness.compute)
        self.copies = FakeStream(self, eagerness.copies)
        self.captured: list[Work] | None = None
        self.num_replays = 0
        self.sites: Counter[Site] = Counter()
        self._dropped = dropped
        self._chance = None if eagerness.seed is None else random.Random(eagerness.seed)
        self._host: dict[int, torch.Tensor] = {}
        self._under_way: list[_Copying] = []

    # ------------------------------------------------------------------ the seam

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self._host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._host

    def copy(self, stream: Stream, pairs: Iterable[Copy]) -> None:
        assert isinstance(stream, FakeStream)
        assert self.captured is None, "a graph would copy from the same place again and again"
        for target, source in pairs:
            assert target.is_contiguous()
            assert source.is_contiguous()
            assert target.shape == source.shape
            stays = [tensor for tensor in (target, source) if not self.holds(tensor) and self._is_idle(tensor)]
            if any(tensor is target for tensor in stays):
                target.fill_(POISON)
            copy = _Copying(target, source, [(tensor, tensor.clone()) for tensor in stays])
            self._under_way = [each for each in self._under_way if not each.is_over] + [copy]
            stream.append(copy.run)

    def _is_idle(self, tensor: torch.Tensor) -> bool:
        """Whether no copy that is under way touches this memory; after one, it may change by right."""
        first, end = _span(tensor)
        return all(
            other_end <= first or end <= other_first
            for copy in self._under_way
            if not copy.is_over
            for other_first, other_end in (_span(copy.target), _span(copy.source))
        )

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        # Kernels get numbers and addresses when they are launched; what a batch says later does not reach them.
        frozen = [replace(argument) if isinstance(argument, Batch) else argument for argument in arguments]
        work = partial(function, *frozen)
        if self.captured is not None:
            self.captured.append(work)
        else:
            self.compute.append(work)

    def capture(self, body: Callable[[], None], beside: Graph | None) -> Graph:
        assert beside is None or isinstance(beside, FakeGraph)
        assert self.captured is None
        self.captured = []
        body()
        graph, self.captured = FakeGraph(self, self.captured), None
        return graph

    # ------------------------------------------------------------------ time

    def honours_wait(self) -> bool:
        """Note the place that waits; False where the fault is planted that it does not."""
        frame = sys._getframe(2)
        path = frame.f_code.co_filename
        site = (path.rpartition("/")[2], linecache.getline(path, frame.f_lineno).strip())
        self.sites[site] += 1
        return site not in self._dropped

    def progress(self) -> None:
        """Something was launched: run what runs by itself."""
        streams = (self.compute, self.copies)
        if self._chance is not None:
            for _ in range(self._chance.randrange(4)):
                self._chance.choice(streams).advance()
            return
        while any(stream.is_eager and stream.advance() for stream in streams):
            pass

    def settle(self) -> None:
        """Run everything."""
        for stream in (self.compute, self.copies):
            event = stream.mark()
            assert isinstance(event, FakeEvent)
            self.run_until(event)

    def run_until(self, event: FakeEvent) -> None:
        """Run no more than what the event needs."""
        while not event.is_past:
            blocker = event.stream.blocked_by
            if blocker is not None:
                self.run_until(blocker)
            event.stream.advance()
        self.progress()


@dataclass(slots=True)
class _Copying:
    """stays: memory of the host that nobody may write to before this runs, and its content."""

    target: torch.Tensor
    source: torch.Tensor
    stays: list[tuple[torch.Tensor, torch.Tensor]]
    is_over: bool = False

    def run(self) -> None:
        for tensor, before in self.stays:
            assert torch.equal(tensor, before), "host memory was written to while a copy of it was under way"
        self.target.copy_(self.source)
        self.is_over = True


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address, and the one behind the last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


# --------------------------------------------------------------------------- ops on it


class FakeTokens:
    """Tokens of one step. `result` waits by itself, as that of the real sampler does."""

    def __init__(self, num_rows: int) -> None:
        self.token_ids = torch.full((num_rows,), UNKNOWN_TOKEN)
        self.end: Event | None = None
        self._chosen: SamplingResult | None = None

    def choose(self, ops: Ops, logits: torch.Tensor, params: SamplingBatch) -> None:
        self._chosen = ops.sample(logits, params)
        self.token_ids.copy_(torch.tensor([-1 if token is None else token for token in self._chosen.token_ids]))

    def result(self) -> SamplingResult:
        assert isinstance(self.end, FakeEvent)
        self.end.stream.device.run_until(self.end)
        assert self._chosen is not None
        return self._chosen


class FakeSampler:
    def __init__(self, device: FakeDevice, ops: Ops) -> None:
        self._device, self._ops = device, ops

    def launch(self, logits: torch.Tensor, params: SamplingBatch) -> PendingTokens:
        tokens = FakeTokens(params.num_rows)
        self._device.launch(tokens.choose, self._ops, logits, deepcopy(params))
        tokens.end = self._device.compute.mark()
        return tokens

    def warm_up(self, logits: torch.Tensor, max_rows: int) -> None:
        pass


class QueuedOps(WrappedOps):
    """Another backend's ops, launched on a fake device by what the GPU's programs are made of.

    sampler: None stands for one that chooses as the other backend does.
    """

    steps_ahead = 1

    def __init__(self, inner: Ops, device: FakeDevice, sampler: TokenSampler | None = None) -> None:
        super().__init__(inner)
        self.fake = device
        self.programs = Programs(device, FakeSampler(device, inner) if sampler is None else sampler)
        for name in ("embed", "rms_norm", "linear", "silu_mul", "attend", "gather"):
            setattr(self, name, partial(self._queue, getattr(inner, name)))

    def _queue(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self.fake.launch(partial(function, **options), *arguments)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        self.fake.launch(self._write_live, batch, qkv, rope, cache, spec, q_out)

    def _write_live(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        """Padding stands at the end, and its slots are -1; no other backend meets that."""
        slots = batch.groups[spec.group.group_id].write_slots[: batch.num_tokens]
        num_live = int((slots >= 0).sum())
        assert bool((slots[:num_live] >= 0).all())
        assert bool((slots[:num_live] < len(cache.pools[spec.group.group_id]) * BLOCK_TOKENS).all())
        self._inner.rope_and_write(replace(batch, num_tokens=num_live), qkv, rope, cache, spec, q_out)

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        self.programs.copy_block(self._inner.copy_block, cache, group_id, source, target, num_tokens)

    def copy_rows(self, source, source_rows, target, target_rows) -> Transfer:  # type: ignore[no-untyped-def]
        transfer = self.programs.copy_rows(source, source_rows, target, target_rows)
        assert transfer is not None
        return transfer

    def settle(self) -> None:
        self.programs.settle()

    def allocate_host(self, num_rows: int, width: int) -> torch.Tensor:
        return self.fake.pinned_bytes(num_rows * width).view(num_rows, width)

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        return self.programs.record(batch, cache, forward)
