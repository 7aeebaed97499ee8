"""The page of the machine: device and host, memory, the engine thread, the tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.device_facts import DeviceFacts, HostFacts
from kvd.tui.engine_panels import StepClock, StepPanel, TiersPanel
from kvd.tui.machine_page import MachinePage
from kvd.tui.machine_panels import DevicePanel, MemoryPanel, memory_lines
from kvd.tui.panel import Panel, span_width
from kvd.tui.view import History, Link
from kvd.views import Counters, DiskFacts, Snapshot, StepMix
from tests.tui.fakes import INFO, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, running

LINK = Link("address", "model", 0.5)
HOST = HostFacts(
    cpu_name="AMD EPYC 7543 32-Core Processor",
    num_cpus=16,
    utilization=0.87,
    own_utilization=0.8,
    memory_total_bytes=24 << 30,
    memory_available_bytes=12 << 30,
    memory_own_bytes=1 << 30,
)
CARD = DeviceFacts(
    "NVIDIA GeForce RTX 4090", 0.87, 24 << 30, 21 << 30, 20 << 30, 312.0, 450.0, 71.0, 1695.0, 9501.0, ()
)
PANELS = (DevicePanel, MemoryPanel, StepPanel, TiersPanel)


def busy(**fields: object) -> Snapshot:
    counters = Counters(num_steps=4000, step_seconds=90.0, num_saved_blocks=412, num_restored_blocks=37)
    values = {
        "active": 1024, "cached": 300, "requests": tuple(row(i) for i in range(9)), "counters": counters,
        "last_step": StepMix(16, 48, 16, 0.022), "step_budget": 512, "running_limit": 20, "num_ram_blocks": 500,
        "num_ram_blocks_used": 20, "prefill_tokens_per_second": 1234.0, "host": HOST,
        "disk": DiskFacts(100, 3 << 30, 20 << 30, 5 << 30, 1 << 30),
    }  # fmt: skip
    return snapshot(**{**values, **fields})  # type: ignore[arg-type]


def text_of(panel: Panel, current: Snapshot, width: int = 76, height: int = 20) -> str:
    view = History().add(current, has_details=True)
    lines = panel.draw(view, LINK, width, height)[:height]
    assert all(span_width(line) <= width for line in lines), lines
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert text.replace("\n", "").isprintable()
    return text


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    "current",
    [
        snapshot(), busy(), busy(device=CARD), busy(device=DeviceFacts(), host=HostFacts()),
        busy(device=replace(CARD, throttle_reasons=("power limit", "heat")), disk=None, num_ram_blocks=0),
        snapshot(num_blocks=0, info=replace(INFO, max_model_len=0)),
    ],
)  # fmt: skip
def test_any_size_can_be_drawn(panel: type[Panel], current: Snapshot) -> None:
    for width in range(1, 130, 5):
        for height in range(1, 20, 3):
            text_of(panel(id="x"), current, width, height)


def test_a_host_that_computes_is_shown_with_what_kvd_takes_of_it() -> None:
    text = text_of(DevicePanel(id="x"), busy())
    for words in ("AMD EPYC 7543 32-Core Processor  16 processors", "87%", "80%", "12 of 24 GiB", "1 GiB"):
        assert words in text


def test_a_card_is_shown_with_everything_that_its_driver_tells() -> None:
    text = text_of(DevicePanel(id="x"), busy(device=CARD), height=22)
    for words in (
        "NVIDIA GeForce RTX 4090", "throttled   no", "87%", "21 of 24 GiB", "1 GiB of other processes",
        "312 of 450 W", "71 °C", "1695 MHz  memory 9501 MHz", "AMD EPYC",
    ):  # fmt: skip
        assert words in text
    text = text_of(DevicePanel(id="x"), busy(device=replace(CARD, throttle_reasons=("power limit",))), 36, 7)
    for words in ("! power limit", "312 of 450 W", "71 °C, 1695 MHz"):
        assert words in text


def test_what_is_not_told_reads_so() -> None:
    text = text_of(DevicePanel(id="x"), busy(device=DeviceFacts(), host=None), height=22)
    assert text.count("n/a") >= 9
    assert "not read (yet)" in text
    assert "None" not in text


def test_the_parts_of_the_memory_add_up() -> None:
    bar, *legend = memory_lines(INFO.budget, 60)
    assert span_width(bar) == 60
    letters = ["".join(part for part, _ in line)[:3] for line in legend]
    assert letters == ["W █", "K ▓", "A ▒", "O ░"]
    text = text_of(MemoryPanel(id="x"), busy())
    for words in (
        "96 MiB    5%",
        "371 MiB   18%",
        "40 MiB    2%",
        "1.5 GiB   75%",
        "11.6 KiB of int8  22.5 KiB in 16 bits",
    ):
        assert words in text
    assert "32,768 tokens  2,048 blocks" in text
    assert "8,192 tokens  fits 4.0 times" in text


def test_a_budget_that_is_overdrawn_has_nothing_left() -> None:
    bar, *legend = memory_lines(replace(INFO.budget, total_bytes=1), 40)
    assert span_width(bar) == 40
    assert "".join(part for part, _ in legend[-1]).split() == ["O", "░", "other,", "free", "0", "B", "–"]


def step(at: float, steps: int, seconds: float) -> Snapshot:
    return snapshot(time=at, counters=Counters(num_steps=steps, step_seconds=seconds))


def test_the_busy_share_is_of_the_last_seconds() -> None:
    clock = StepClock()
    assert (clock.busy_share, clock.steps_per_second, clock.mean_step_seconds) == (None, None, None)
    clock.add(step(100.0, 10, 1.0))
    assert clock.busy_share is None
    clock.add(step(104.0, 110, 3.0))
    assert clock.busy_share == pytest.approx(0.5)
    assert clock.steps_per_second == pytest.approx(25.0)
    assert clock.mean_step_seconds == pytest.approx(0.02)
    for second in range(105, 125):
        clock.add(step(float(second), 110, 3.0))
    assert clock.busy_share == 0.0
    assert clock.mean_step_seconds is None


def test_a_clock_that_nobody_has_looked_at_for_a_while_begins_anew() -> None:
    clock = StepClock()
    clock.add(step(100.0, 10, 1.0))
    clock.add(step(400.0, 1000, 200.0))
    assert clock.busy_share is None
    clock.add(step(401.0, 1010, 200.25))
    assert clock.busy_share == pytest.approx(0.25)
    assert list(clock.history) == [pytest.approx(0.25)]


def test_another_engine_begins_anew() -> None:
    clock = StepClock()
    clock.add(step(100.0, 500, 50.0))
    clock.add(step(101.0, 3, 0.1))
    assert clock.busy_share is None
    clock.add(step(102.0, 4, 0.35))
    assert clock.busy_share == pytest.approx(0.25)


def test_the_engine_thread_tells_its_rates() -> None:
    panel = StepPanel(id="x")
    for second in range(3):
        panel.show(
            History().add(
                busy(time=100.0 + second, counters=Counters(num_steps=40 * second, step_seconds=0.9 * second)),
                has_details=True,
            ),
            LINK,
        )
    text = text_of(panel, busy())
    for words in (
        "90%",
        "22ms  40/s",
        "22ms  16 decode + 48 prefill of 512",
        "measured 1,234 tok/s",
        "9  0 waiting, limit 20",
        "0 waiting",
    ):
        assert words in text


def test_the_tiers_tell_what_they_hold_and_what_moved() -> None:
    text = text_of(TiersPanel(id="x"), busy())
    for words in (
        "1,324 of 2,048 blocks, 240 of 371 MiB", "1,024 active, 300 cached", "20 of 500 blocks",
        "412 saved, 37 restored", "3 of 20 GiB", "5 GiB written  1 GiB read",
    ):  # fmt: skip
        assert words in text
    broken = DiskFacts(0, 0, 1 << 30, num_corrupt_blocks=3, problem="/cache: no space left on device")
    text = text_of(TiersPanel(id="x"), busy(disk=broken))
    assert "! 3 damaged blocks" in text
    assert "! /cache: no space left on device" in text


def test_tiers_that_are_off_say_how_to_have_them() -> None:
    text = text_of(TiersPanel(id="x"), snapshot())
    assert "swap_space" in text
    assert "disk_cache" in text


# --------------------------------------------------------------------------- the page


@SIZES
async def test_everything_essential_is_on_the_page(size: tuple[int, int]) -> None:
    async with running(busy(device=CARD), size=size, page="Machine") as screen:
        for words in (
            "Device", "RTX 4090", "87%", "312 of 450 W", "71 °C", "Memory", "2 GiB by cpu_memory_utilization",
            "weights", "KV cache", "activations", "other, free", "Engine thread", "KV tiers", "RAM", "disk",
        ):  # fmt: skip
            assert words in screen.text, words


# --------------------------------------------------------------------------- pictures

ALONE = (MachinePage,)
"""So that a picture does not change with every page that there is."""


@SIZES
@pytest.mark.parametrize("kind", ["empty", "busy", "gpu", "disconnected"])
async def test_pictures(size: tuple[int, int], kind: str) -> None:
    current = {"empty": snapshot(), "gpu": busy(device=replace(CARD, throttle_reasons=("power limit",)))}.get(
        kind, busy()
    )
    async with running(current, size=size, page="Machine", pages=ALONE) as screen:
        if kind == "disconnected":
            await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        await screen.pilot.pause()
        assert_picture(screen.app, f"machine-{kind}-{size[0]}x{size[1]}")
