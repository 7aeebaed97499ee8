"""Facts about the GPU: what a driver tells, what it does not tell, and where they are shown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.device_facts import DeviceFacts
from kvd.observe import watch as watching
from kvd.observe.metrics import MetricsExporter
from kvd.observe.nvml import THROTTLE_WORDS, DeviceWatch, Reader, open_nvml
from kvd.server.snapshot_json import decode_snapshot, encode_snapshot
from kvd.text.text_model import TextModel
from kvd.tui.device import device_line
from tests.server.fakes import FakeEngine

GIB = 2**30
UUID = "f1d2d2f9-24e9-86ac-6fce-24e986ac6fce"
FACTS = DeviceFacts(
    "NVIDIA GeForce RTX 3090", 0.87, 24 * GIB, 21 * GIB, 20 * GIB, 312.5, 350.0, 71.0, 1695.0, 9501.0, ("heat",)
)


class FakeError(Exception):
    pass


class FakeNvml:
    """A driver with one card. `absent`: functions that answer with an error; `missing`: that the library lacks."""

    NVMLError = FakeError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self, absent: set[str] | None = None, missing: set[str] | None = None) -> None:
        self.absent, self.missing = absent or set(), missing or set()
        self.reasons = 0x1 | 0x20
        self.pid = os.getpid()
        self.num_reads = 0
        self.is_shut_down = False
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.threads.add(threading.get_ident())
            if name in self.absent:
                raise FakeError("Not Supported")
            return getattr(self, "_" + name.removeprefix("nvml"))(*arguments)

        return call

    def _DeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise FakeError("Not Found")
        return "card"

    def _DeviceGetHandleByIndex(self, index: int) -> str:
        return "card" if index == 0 else "another"

    def _DeviceGetName(self, handle: str) -> bytes:
        self.num_reads += 1
        return b"NVIDIA GeForce RTX 3090"

    def _DeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=87, memory=40)

    def _DeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=24 * GIB, used=21 * GIB, free=3 * GIB)

    def _DeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        others = SimpleNamespace(pid=self.pid + 1, usedGpuMemory=GIB)
        return [others, SimpleNamespace(pid=self.pid, usedGpuMemory=20 * GIB)]

    def _DeviceGetPowerUsage(self, handle: str) -> int:
        return 312_500

    def _DeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 350_000

    def _DeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 71

    def _DeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1695, self.NVML_CLOCK_MEM: 9501}[clock]

    def _DeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def _DeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def _Shutdown(self) -> None:
        self.is_shut_down = True


# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize("device_id", [UUID, f"GPU-{UUID}", "0"])
def test_everything_that_a_driver_tells(device_id: str) -> None:
    assert Reader(FakeNvml(), device_id).read() == FACTS


SOURCES = {
    "name": {"nvmlDeviceGetName"},
    "utilization": {"nvmlDeviceGetUtilizationRates"},
    "memory_own_bytes": {"nvmlDeviceGetComputeRunningProcesses"},
    "power_watts": {"nvmlDeviceGetPowerUsage"},
    "power_limit_watts": {"nvmlDeviceGetEnforcedPowerLimit"},
    "temperature_celsius": {"nvmlDeviceGetTemperature"},
    "throttle_reasons": {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"},
}


@pytest.mark.parametrize("way", ["absent", "missing"])
@pytest.mark.parametrize("field", SOURCES)
def test_one_absent_value_is_none_and_the_others_stay(field: str, way: str) -> None:
    found = Reader(FakeNvml(**{way: SOURCES[field]}), UUID).read()
    assert found == replace(FACTS, **{field: None})


def test_a_driver_that_tells_nothing_gives_facts_without_values() -> None:
    names = {name for name in dir(FakeNvml) if name.startswith("_DeviceGet") and "Handle" not in name}
    found = Reader(FakeNvml({"nvml" + name[1:] for name in names}), UUID).read()
    assert found == DeviceFacts()


def test_a_device_that_the_driver_does_not_know_has_no_facts() -> None:
    assert Reader(FakeNvml(), "00000000-0000-0000-0000-000000000000").read() is None


def test_the_older_name_of_the_reasons_is_asked_where_the_newer_one_is_not_there() -> None:
    for way in ("absent", "missing"):
        found = Reader(FakeNvml(**{way: {"nvmlDeviceGetCurrentClocksEventReasons"}}), UUID).read()
        assert found is not None
        assert found.throttle_reasons == ("heat",)


def test_an_idle_card_is_not_throttled_and_every_reason_has_a_word() -> None:
    library = FakeNvml()
    library.reasons = 0x1
    assert Reader(library, UUID).read() == replace(FACTS, throttle_reasons=())
    library.reasons = 0x1FF
    found = Reader(library, UUID).read()
    assert found is not None
    assert found.throttle_reasons == tuple(THROTTLE_WORDS.values())


@pytest.mark.parametrize("used", [None, 2**64 - 1])
def test_an_unknown_amount_of_our_memory_is_none(used: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=used)
    monkeypatch.setattr(library, "_DeviceGetComputeRunningProcesses", lambda handle: [process])
    assert Reader(library, UUID).read() == replace(FACTS, memory_own_bytes=None)


def test_a_process_that_nvml_does_not_see_has_unknown_memory() -> None:
    library = FakeNvml()
    library.pid += 1000
    assert Reader(library, UUID).read() == replace(FACTS, memory_own_bytes=None)


def test_the_real_library_has_the_words_that_we_use() -> None:
    pynvml = pytest.importorskip("pynvml")
    known = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("nvmlClocksEventReason") and isinstance(value, int)
    }
    assert set(THROTTLE_WORDS) <= known
    assert issubclass(pynvml.NVMLError, Exception)


def test_without_a_driver_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert open_nvml() is None


# --------------------------------------------------------------------------- watching


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_watch_reads_in_a_thread_of_its_own_when_it_is_asked() -> None:
    library = FakeNvml()
    watch = DeviceWatch(UUID, open_library=lambda: library, interval_seconds=0)
    assert watch.latest() is None
    until(lambda: watch.latest() == FACTS)
    watch.close()
    assert library.threads
    assert threading.get_ident() not in library.threads
    assert library.is_shut_down
    assert watch.latest() == FACTS


def test_a_watch_reads_no_more_often_than_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock)
    library = FakeNvml()
    watch = DeviceWatch(UUID, open_library=lambda: library)
    for _ in range(1000):
        watch.latest()
    real = threading.Event()
    for _ in range(1000):
        if library.num_reads and watch.latest() is not None:
            break
        real.wait(0.01)
    assert library.num_reads == 1
    clock += 1.0
    watch.latest()
    for _ in range(1000):
        if library.num_reads == 2:
            break
        real.wait(0.01)
    assert library.num_reads == 2
    watch.close()


def test_a_watch_that_nobody_asks_starts_nothing_and_can_be_closed() -> None:
    library = FakeNvml()
    DeviceWatch(UUID, open_library=lambda: library).close()
    assert not library.threads


def test_no_driver_is_no_facts() -> None:
    watch = DeviceWatch(UUID, open_library=lambda: None, interval_seconds=0)
    for _ in range(3):
        assert watch.latest() is None
    watch.close()


# --------------------------------------------------------------------------- showing


async def test_facts_travel_as_json(text_model: TextModel) -> None:
    for facts in (None, FACTS, DeviceFacts()):
        snapshot = replace(await FakeEngine(text_model).snapshot(), device=facts)
        assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


async def test_every_fact_is_a_series_and_an_absent_one_is_none(text_model: TextModel) -> None:
    snapshot = await FakeEngine(text_model).snapshot()

    def series(facts: DeviceFacts | None) -> dict[str, float]:
        text = MetricsExporter().render(replace(snapshot, device=facts)).decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("kvd:device_")]
        return {name.partition("{")[0]: float(value) for name, _, value in lines}

    assert series(None) == series(DeviceFacts()) == {}
    whole = series(FACTS)
    assert whole["kvd:device_memory_own_bytes"] == 20 * GIB
    assert whole["kvd:device_sm_clock_hertz"] == 1695e6
    assert whole["kvd:device_throttled"] == 1
    for field in fields(DeviceFacts):
        if field.name != "name":
            assert len(series(replace(FACTS, **{field.name: None}))) == len(whole) - 1, field.name


def test_the_line_of_the_dashboard() -> None:
    assert device_line(None, 200) == ""
    assert device_line(FACTS, 200) == (
        "GPU 87% · throttled: heat · 21 GiB of 24 GiB, others 1 GiB · 312/350 W · 71 °C · 1695 MHz"
    )
    assert device_line(replace(FACTS, throttle_reasons=()), 48) == "GPU 87% · 21 GiB of 24 GiB, others 1 GiB"
    assert device_line(DeviceFacts(), 200) == ("GPU n/a · n/a of n/a · n/a/n/a W · n/a °C · n/a MHz · throttling n/a")
    assert all(len(device_line(FACTS, width)) <= max(width, len("GPU 87%")) for width in range(100))
