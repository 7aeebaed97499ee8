"""The overview: its pictures, its tiers, its latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.device_facts import DeviceFacts
from kvd.tui.blocks import tiers_of
from kvd.tui.device import computes_on
from kvd.views import Counters, DiskFacts, Snapshot, StepMix
from tests.tui.fakes import INFO, FakeConsole, histogram, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, running

INFO_HERE = replace(INFO, backend="native avx2, 2 threads", device="cpu", is_auto_num_seqs=True)


def first_poll() -> Snapshot:
    """A server with all tiers, its clients and its troubles."""
    states = ("decode", "decode", "prefill", "restoring", "decode", "decode", "swapped", "waiting", "waiting")
    clients = ("claude-code 127.0.0.1", "rag-indexer", "open-webui 192.168.1.23", "")
    rows = tuple(
        row(
            number,
            state=state,  # type: ignore[arg-type]
            client=clients[number % len(clients)],
            endpoint=("chat", "responses", "messages")[number % 3],
            num_output_tokens=37 * number if state in ("decode", "swapped") else 0,
            num_preemptions=3 if state == "swapped" else 0,
            num_swaps=1 if state == "swapped" else 0,
            priority=number % 2,
        )
        for number, state in enumerate(states)
    )
    return snapshot(
        info=INFO_HERE,
        active=1500,
        cached=400,
        requests=rows,
        counters=Counters(
            prefix_query_tokens=19_456, prefix_hit_tokens=12_345, ram_hit_tokens=2_000, disk_hit_tokens=500,
            num_preemptions=3, num_swaps=1, num_evicted_blocks=120, recomputed_tokens=2_345,
        ),
        last_step=StepMix(16, 48, 16, 0.022),
        step_budget=96,
        running_limit=16,
        num_blocks_pinned=77,
        num_ram_blocks=4096,
        num_ram_blocks_used=1234,
        num_ram_blocks_held=200,
        disk=DiskFacts(num_blocks=4000, num_bytes=700 << 20, max_bytes=2 << 30),
        misses=(("volatile_line", 14, 14_321), ("new", 3, 0), ("evicted", 2, 900)),
        histograms={
            "time_to_first_token_seconds": histogram([0.2] * 10),
            "inter_token_latency_seconds": histogram([0.03] * 100),
            "request_queue_time_seconds": histogram([0.01] * 10),
        },
    )  # fmt: skip


def second_poll() -> Snapshot:
    first = first_poll()
    return replace(
        first,
        time=first.time + 2.0,
        counters=replace(
            first.counters, prefill_tokens_computed=4_000, generation_tokens=300, prefix_query_tokens=23_456,
            prefix_hit_tokens=15_345, num_evicted_blocks=140,
        ),
        histograms={
            "time_to_first_token_seconds": histogram([0.2] * 10 + [0.6] * 10),
            "inter_token_latency_seconds": histogram([0.03] * 200),
            "request_queue_time_seconds": histogram([0.01] * 10 + [30.0]),
        },
    )  # fmt: skip


@SIZES
async def test_pictures(size: tuple[int, int]) -> None:
    name = f"overview-{{}}-{size[0]}x{size[1]}"
    async with running(snapshot(info=INFO_HERE), size=size) as screen:
        assert_picture(screen.app, name.format("empty"))
        await screen.show(replace(first_poll(), time=2000.0))
        await screen.show(replace(second_poll(), time=2002.0))
        assert_picture(screen.app, name.format("busy"))
        await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        assert_picture(screen.app, name.format("lost"))


async def test_pictures_of_what_never_answered() -> None:
    console = FakeConsole(snapshot())
    console.error = ConnectionRefusedError("connection to 127.0.0.1:8000 refused")
    async with running(snapshot(), console=console, on_quit="close") as screen:
        assert_picture(screen.app, "overview-never-80x24")


@pytest.mark.parametrize("theme", ["light", "contrast", "mono"])
async def test_pictures_of_themes(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.tui.status.NOTE_SECONDS", 3600.0)
    async with running(second_poll()) as screen:
        for _ in range(("light", "contrast", "mono").index(theme) + 1):
            await screen.press("t")
        assert_picture(screen.app, f"overview-{theme}-80x24")


@pytest.mark.parametrize("size", [(40, 12), (20, 6)])
async def test_a_small_terminal_shows_what_matters(size: tuple[int, int]) -> None:
    async with running(second_poll(), size=size) as screen:
        assert len(screen.lines) == size[1]
        assert "1 Overview" in screen.text
        assert "KV blocks" in screen.text


# --------------------------------------------------------------------------- tiers


def test_tiers_add_up() -> None:
    pool, ram, disk = tiers_of(first_poll())
    assert (pool.name, pool.counts) == ("pool", (1500, 400, 148))
    assert (ram.name, ram.counts) == ("RAM", (200, 1034, 2862))
    assert (disk.name, disk.counts) == ("disk", (0, 700 << 20, (2 << 30) - (700 << 20)))
    assert disk.num_bytes == 2 << 30
    on_gpu = replace(first_poll(), info=replace(INFO, device="cuda:0"), num_ram_blocks=0, disk=None)
    assert [tier.name for tier in tiers_of(on_gpu)] == ["GPU"]


def test_a_tier_never_has_less_than_nothing() -> None:
    odd = replace(first_poll(), num_ram_blocks_used=100, num_ram_blocks_held=200, disk=DiskFacts(1, 3 << 30, 2 << 30))
    _, ram, disk = tiers_of(odd)
    assert ram.counts == (100, 0, 3996)
    assert disk.counts[2] == 0


@SIZES
async def test_every_tier_has_its_bar(size: tuple[int, int]) -> None:
    async with running(second_poll(), size=size) as screen:
        for word in ("pool", "RAM", "disk", "cached 34%", "free 66%", "active 73%", "2 GiB"):
            assert word in screen.text, word


# --------------------------------------------------------------------------- figures


@SIZES
async def test_latencies_have_medians_tails_and_curves(size: tuple[int, int]) -> None:
    async with running(first_poll(), size=size) as screen:
        assert "of all" in next(line for line in screen.lines if "TTFT    p50" in line)
        await screen.show(second_poll())
        ttft, itl, queue = (
            next(line for line in screen.lines if f"{name} p50" in line) for name in ("TTFT   ", "ITL    ", "queue  ")
        )
        assert "p50 625ms" in ttft, "of the ten that came lately"
        assert "█" in ttft
        assert "p50 30ms" in itl
        assert "p50 >10.0s" in queue or ">10.0s" in queue
        step = next(line for line in screen.lines if "step" in line)
        assert "48 pre" in step
        assert "of 96" in step
        assert "22ms" in step


@SIZES
async def test_the_worst_cause_of_misses_is_named(size: tuple[int, int]) -> None:
    async with running(second_poll(), size=size) as screen:
        line = next(line for line in screen.lines if "misses" in line)
        assert "volatile line" in line
        assert "14.3k tok" in line


async def test_preemptions_say_by_which_way() -> None:
    async with running(second_poll(), size=(160, 50)) as screen:
        line = next(line for line in screen.lines if "swapped" in line and "chatcmpl" not in line)
        assert "2r1s" in line


@pytest.mark.parametrize(
    ("backend", "device", "name", "expected"),
    [
        ("native avx2, 2 threads", "cpu", None, "CPU avx2, 2 threads"),
        ("reference", "cpu", None, "CPU reference"),
        ("triton sm_90, NVIDIA H200", "cuda:0", None, "NVIDIA H200"),
        ("triton sm_90, NVIDIA H200", "cuda:0", "NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("triton", "cuda:1", None, "cuda:1"),
        ("other", "xpu:0", None, "xpu:0"),
    ],
)
def test_what_computes_is_named_as_people_name_it(backend: str, device: str, name: str | None, expected: str) -> None:
    info = replace(INFO, backend=backend, device=device)
    assert computes_on(info, None if name is None else DeviceFacts(name)) == expected


@SIZES
async def test_the_header_has_all_that_identifies_the_server(size: tuple[int, int]) -> None:
    async with running(second_poll(), size=size) as screen:
        top = "\n".join(screen.lines[:2])
        for word in (
            "smollm2-135m-instruct",
            "http://127.0.0.1:8000/v1",
            "Q4_1",
            "CPU avx2, 2 thr",
            "8,192",
            "KV int8",
        ):
            assert word in top, word
