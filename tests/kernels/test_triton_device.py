"""The seam over torch.cuda, as far as it can be looked at without a card: pinned pages, memory, what it calls."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch

from kvd_kernels.triton import device as seam
from kvd_kernels.triton.device import CudaMemory, HostDevice, pin


class Driver:
    """The part of the CUDA runtime that pins pages."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0
        if not self.code:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_memory_is_as_large_as_asked_and_goes_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensor = pin(5000)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (5000,)
    assert driver.pinned == {tensor.data_ptr(): 5000}
    view = tensor.view(50, 100)[7:9]
    view.fill_(3)
    assert tensor[700:900].sum() == 600
    del tensor
    gc.collect()
    assert driver.pinned
    assert view.sum() == 600
    del view
    gc.collect()
    assert not driver.pinned
    assert pin(0).numel() == 0


def test_a_driver_that_does_not_pin_is_an_error_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(MemoryError, match=r"cannot pin 0\.50 GiB of host memory \(CUDA error 2\)"):
        pin(1 << 29)
    gc.collect()  # nothing is given back that was not taken: the driver would raise


def test_memory_counts_what_the_allocator_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached blocks are given back first, so that they count neither as held nor as missing."""
    reserved, kept_for_later = 300, 80
    calls: list[str] = []

    def empty_cache() -> None:
        nonlocal kept_for_later
        calls.append("empty")
        kept_for_later = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - reserved - kept_for_later - 150, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved + kept_for_later)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 444)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.setting == "gpu_memory_utilization"
    assert memory.total_bytes() == 1000
    assert memory.held_bytes() == reserved
    kept_for_later = 80
    assert memory.free_bytes() == 1000 - reserved - 150
    calls.clear()
    memory.reset_peak()
    assert calls == ["empty", "reset"]
    assert memory.peak_bytes() == 444


def test_torch_has_what_the_seam_calls() -> None:
    """By name and parameter; what these do is proven on a card."""
    assert {"pool", "capture_error_mode"} <= set(inspect.signature(torch.cuda.graph).parameters)
    for owner, names in {
        torch.cuda.Event: ("record", "synchronize", "query", "elapsed_time"),
        torch.cuda.Stream: ("wait_event",),
        torch.cuda.CUDAGraph: ("replay", "pool"),
        torch.cuda: ("default_stream", "stream", "cudart", "mem_get_info", "get_arch_list"),
    }.items():
        for name in names:
            assert callable(getattr(owner, name)), name
    assert inspect.signature(torch.cuda.Stream.wait_event).parameters.keys() == {"self", "event"}


def test_the_host_is_a_device_on_which_everything_is_over() -> None:
    host = HostDevice()
    calls: list[int] = []
    graph = host.capture(lambda: calls.append(1), None)
    calls.clear()
    graph.replay()
    graph.replay()
    assert calls == [1, 1]
    target, source = host.zeros((4,), torch.int32), torch.arange(4, dtype=torch.int32)
    host.copy(host.copies, [(target, source)])
    assert torch.equal(target, source)
    first, second = host.compute.mark(is_timed=True), host.compute.mark(is_timed=True)
    host.copies.wait(first)
    assert second.is_over()
    assert second.seconds_since(first) >= 0
    assert host.pinned_bytes(12).shape == (12,)
    assert isinstance(seam.open_device(torch.device("cpu"))[0], HostDevice)
