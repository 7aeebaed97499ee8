"""Facts about the NVIDIA device that computes, by NVML. Torch-free.

`DeviceWatch` owns one thread, which alone talks to the driver: a call may take milliseconds, and tens of them on a card
that wakes up. Whoever wants facts gets the latest at once and thereby asks for newer ones; nobody asks, nobody reads.
Invariant: no failure of the driver is an exception here; what it does not tell is None.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from kvd.device_facts import DeviceFacts

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


class DeviceWatch:
    """The latest facts about a device, for any thread.

    open_library: made the first time somebody asks, on the thread that reads; None: no facts, ever.
    """

    def __init__(
        self,
        device_id: str,
        *,
        open_library: Callable[[], Any] = open_nvml,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._device_id = device_id
        self._open_library = open_library
        self._interval_seconds = interval_seconds
        self._facts: DeviceFacts | None = None
        self._asked_at = float("-inf")
        self._wanted = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def latest(self) -> DeviceFacts | None:
        """What was read last, at once; has newer facts read where these are too old. None before the first reading."""
        now = time.monotonic()
        if not self._is_closed and now - self._asked_at >= self._interval_seconds:
            self._asked_at = now
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvd-nvml", daemon=True)
                self._thread.start()
            self._wanted.set()
        return self._facts

    def close(self) -> None:
        """End the thread; `latest` then repeats itself."""
        self._is_closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        library = self._open_library()
        if library is None:
            return
        try:
            reader = Reader(library, self._device_id)
            while True:
                self._wanted.wait()
                self._wanted.clear()
                if self._is_closed:
                    return
                self._facts = reader.read()
        finally:
            with contextlib.suppress(library.NVMLError):
                library.nvmlShutdown()
