"""Facts about the NVIDIA device that computes, by NVML. Torch-free.

`DeviceWatch` talks to the driver in a thread of its own: a call may take milliseconds, and tens of them on a card that
wakes up.
Invariant: no failure of the driver is an exception here; what it does not tell is None.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from kvd.device_facts import DeviceFacts
from kvd.observe.watch import Watch

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
"""Readings are at least so far apart."""

THROTTLE_WORDS = {
    0x2: "clocks set by the user",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Of the reasons' bit mask (NVML's nvmlClocksEventReasons); 0x1, an idle card, is no reason to worry."""
_ANY = 0xFFFF_FFFF_FFFF_FFFF  # what NVML writes where it does not know a process's memory


def open_nvml() -> ModuleType | None:
    """The library, initialised; None where there is no driver or no library."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml  # type: ignore[no-any-return]


class Reader:
    """Reads one device. One thread.

    nvml: an initialised pynvml. device_id: the UUID as CUDA or NVML writes it, or the number among NVML's devices.
    """

    def __init__(self, nvml: Any, device_id: str) -> None:
        self._nvml = nvml
        self._handle = self._ask(lambda: self._open(device_id))

    def _open(self, device_id: str) -> Any:
        if device_id.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(device_id))
        uuid = device_id if device_id.startswith(("GPU-", "MIG-")) else f"GPU-{device_id}"
        return self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> DeviceFacts | None:
        """None where NVML does not know the device."""
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return DeviceFacts(
            name=self._ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            utilization=None if rates is None else rates.gpu / 100,
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_own_bytes=self._ask(self._own_bytes),
            power_watts=self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            power_limit_watts=self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            temperature_celsius=self._ask(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            sm_clock_mhz=self._ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            memory_clock_mhz=self._ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            throttle_reasons=self._ask(self._throttle_reasons),
        )

    def _own_bytes(self) -> int | None:
        """Of this process; None where NVML does not see it, as in a container with process ids of its own."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid():
                used = process.usedGpuMemory
                return None if used is None or used == _ANY else int(used)
        return None

    def _throttle_reasons(self) -> tuple[str, ...]:
        # The second is its name before driver 535.
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = None if ask is None else self._ask(lambda: ask(self._handle))
        if mask is None:
            mask = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return tuple(word for bit, word in THROTTLE_WORDS.items() if mask & bit)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The driver's answer; None where it has none, or the library is too old to ask."""
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError):
            return None


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


class DeviceWatch(Watch[DeviceFacts]):
    """The latest facts about a device.

    open_library: called the first time somebody asks, on the thread that reads; None: no facts, ever.
    """

    def __init__(
        self,
        device_id: str,
        *,
        open_library: Callable[[], Any] = open_nvml,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        def open_reader() -> contextlib.AbstractContextManager[Callable[[], DeviceFacts | None]] | None:
            library = open_library()
            return None if library is None else _reading(library, device_id)

        super().__init__("kvd-nvml", open_reader, interval_seconds=interval_seconds)


@contextlib.contextmanager
def _reading(library: Any, device_id: str) -> Iterator[Callable[[], DeviceFacts | None]]:
    try:
        yield Reader(library, device_id).read
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()
