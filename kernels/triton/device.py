"""What the step program needs of a CUDA device, as a seam: streams, events, graphs, pinned memory. Engine thread only.

Work that is launched on a stream runs in the order of its launch; streams run beside each other, and beside Python.
Whatever orders them goes through `Stream.wait`, `Event.wait` and nothing else, so that a device made for tests can run
streams in every order that these allow. `HostDevice` is the seam where Triton interprets: everything is over at once.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from kvd_kernels.ops import DeviceMemory

Copy = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal shape and dtype, both contiguous."""


class Event(Protocol):
    """A point in a stream: everything launched there before it."""

    def wait(self) -> None:
        """Block the calling thread until the stream has come to this point."""

    def is_over(self) -> bool:
        """Whether the stream has come to this point."""

    def seconds_since(self, earlier: Event) -> float:
        """Time on the device from another point to this one, both timed and both waited for."""


class Stream(Protocol):
    """Work in order."""

    def mark(self, *, is_timed: bool = False) -> Event:
        """The point behind all that was launched here so far."""

    def wait(self, event: Event) -> None:
        """What is launched here from now on begins when that point of another stream has been reached."""


class Graph(Protocol):
    """Launches that were recorded, with the addresses and numbers that they had."""

    def replay(self) -> None:
        """Launch them all on the compute stream."""


class Device(Protocol):
    """One device. Everything that is not told otherwise runs on `compute`, plain torch calls included."""

    compute: Stream
    copies: Stream

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        """Host memory that copies read and write without staging: uint8 [num_bytes], contents undefined."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device and has to be copied by a stream."""

    def copy(self, stream: Stream, pairs: Iterable[Copy]) -> None:
        """Launch copies, of which a host side has to stay as it is until the stream has come past them."""

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function whose whole effect is what it launches on the compute stream."""

    def capture(self, body: Callable[[], None], beside: Graph | None) -> Graph:
        """Record what `body` launches, without running it. It may neither wait nor copy from host memory.

        beside: a graph that never runs at the same time, whose scratch memory this one may use as well.
        """


# --------------------------------------------------------------------------- CUDA


class _CudaEvent:
    def __init__(self, raw: torch.cuda.Event) -> None:
        self.raw = raw

    def wait(self) -> None:
        self.raw.synchronize()

    def is_over(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.raw.elapsed_time(self.raw)) / 1000


class _CudaStream:
    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def mark(self, *, is_timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.raw.wait_event(event.raw)


class _CudaGraph:
    def __init__(self, raw: torch.cuda.CUDAGraph) -> None:
        self.raw = raw

    def replay(self) -> None:
        self.raw.replay()


class CudaDevice:
    """A card, by torch.cuda. The compute stream is the default one, on which torch works unless told otherwise."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute: Stream = _CudaStream(torch.cuda.default_stream(device))
        self.copies: Stream = _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        return pin(num_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def copy(self, stream: Stream, pairs: Iterable[Copy]) -> None:
        assert isinstance(stream, _CudaStream)
        with torch.cuda.stream(stream.raw):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def capture(self, body: Callable[[], None], beside: Graph | None) -> Graph:
        assert beside is None or isinstance(beside, _CudaGraph)
        graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.raw.pool()
        # Other threads may call the driver meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            body()
        return _CudaGraph(graph)


class CudaMemory(DeviceMemory):
    """Memory of a card.

    What this process holds is counted as torch's allocator has *reserved* it, since that is what nobody else can have;
    blocks that it keeps for later are given back before anything is counted. The CUDA context, loaded kernels and the
    nodes of graphs are no part of it; they show in `free_bytes`.
    """

    setting = "gpu_memory_utilization"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))


class _Pages:
    """Pages of this process that the driver has pinned; given back when the last array over them is gone."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(driver.cudaHostRegister(address, num_bytes, 0))
        if code:
            raise MemoryError(f"the driver cannot pin {num_bytes / 2**30:.2f} GiB of host memory (CUDA error {code})")
        # Runs before the pages themselves go. At the interpreter's exit the driver cleans up by itself.
        weakref.finalize(self, driver.cudaHostUnregister, address).atexit = False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address, False)}


def pin(num_bytes: int) -> torch.Tensor:
    """Pinned host memory, uint8 [num_bytes]; MemoryError where the driver refuses.

    Not by torch's own allocator, which rounds up to the next power of two: 20 GiB would take 32.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Pages(num_bytes)))


# --------------------------------------------------------------------------- no device


class _Past:
    """An event that is over: on the host every launch returns when its work is done."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def wait(self) -> None:
        pass

    def is_over(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Past)
        return self._at - earlier._at


class _HostStream:
    def mark(self, *, is_timed: bool = False) -> Event:
        return _Past()

    def wait(self, event: Event) -> None:
        pass


class _Repeat:
    """A graph where nothing can be recorded: calls its body again."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


class HostDevice:
    """The processor, on which Triton interprets the kernels."""

    def __init__(self) -> None:
        self.compute: Stream = _HostStream()
        self.copies: Stream = _HostStream()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def copy(self, stream: Stream, pairs: Iterable[Copy]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def capture(self, body: Callable[[], None], beside: Graph | None) -> Graph:
        return _Repeat(body)


def open_device(device: torch.device) -> tuple[Device, DeviceMemory | None]:
    """The seam of a torch device, and its memory where that is not the host's."""
    if device.type == "cuda":
        return CudaDevice(device), CudaMemory(device)
    return HostDevice(), None
