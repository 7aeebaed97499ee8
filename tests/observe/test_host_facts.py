"""Facts about the host out of files in the form of /proc, and the watch that reads them for any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvd.device_facts import HostFacts
from kvd.observe.host_facts import HostReader, HostWatch

CPU = "processor\t: 0\nvendor_id\t: X\nmodel name\t: Some   CPU  @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n"


class Host:
    """A /proc that can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.own = 5.0
        self.write("cpuinfo", CPU)
        self.write("meminfo", "MemTotal:       16384 kB\nMemFree:        100 kB\n")
        self.write("stat", "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def reader(self) -> HostReader:
        return HostReader(
            available_bytes=lambda: 4 << 20,
            resident_bytes=lambda: 1 << 20,
            proc=self.folder,
            groups=self.folder / "groups",
            clock=lambda: self.now,
            own_seconds=lambda: self.own,
        )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    return Host(tmp_path)


def test_a_reading_says_what_changed_since_the_one_before(host: Host) -> None:
    reader = host.reader()
    host.write("stat", "cpu  160 10 130 750 150 0 0 0 0 0\n")  # 200 ticks more, 100 of them idle or waiting for disks
    host.now, host.own = 101.0, 6.5
    assert reader.read() == HostFacts(
        cpu_name="Some CPU @ 3 GHz",
        num_cpus=2,
        utilization=0.5,
        own_utilization=0.75,
        memory_total_bytes=16 << 20,
        memory_available_bytes=4 << 20,
        memory_own_bytes=1 << 20,
    )


def test_without_time_in_between_no_share_is_invented(host: Host) -> None:
    facts = host.reader().read()
    assert (facts.utilization, facts.own_utilization) == (None, None)


@pytest.mark.parametrize("name", ["groups/memory.max", "groups/memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(("text", "total"), [("8388608\n", 8 << 20), ("max\n", 16 << 20), (f"{1 << 62}\n", 16 << 20)])
def test_a_control_group_lowers_the_total(host: Host, name: str, text: str, total: int) -> None:
    host.write(name, text)
    assert host.reader().read().memory_total_bytes == total


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n"])
def test_what_cannot_be_read_is_none(host: Host, text: str) -> None:
    for name in ("cpuinfo", "meminfo", "stat"):
        host.write(name, text)
    facts = host.reader().read()
    assert (facts.cpu_name, facts.utilization, facts.memory_total_bytes) == (None, None, None)
    assert facts.memory_own_bytes == 1 << 20


def test_this_machine_can_be_read() -> None:
    reader = HostReader(available_bytes=lambda: 1, resident_bytes=lambda: 1)
    facts = reader.read()
    assert facts.num_cpus
    assert (facts.memory_total_bytes or 0) > 1 << 20


class FakeReader(HostReader):
    def __init__(self, read: threading.Event) -> None:
        self._was_read = read
        self.num_readings = 0

    def read(self) -> HostFacts:
        self.num_readings += 1
        self._was_read.set()
        return HostFacts(cpu_name=f"reading {self.num_readings}")


def test_the_watch_reads_when_asked_and_never_in_the_calling_thread() -> None:
    was_read = threading.Event()
    reader = FakeReader(was_read)
    makers: list[threading.Thread] = []

    def make() -> HostReader:
        makers.append(threading.current_thread())
        return reader

    watch = HostWatch(make, interval_seconds=3600.0)
    assert watch.latest() is None  # and has it read
    assert was_read.wait(10)
    watch.close()
    assert watch.latest() == HostFacts(cpu_name="reading 1")
    assert reader.num_readings == 1
    assert makers[0] is not threading.current_thread()
