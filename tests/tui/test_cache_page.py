"""The cache page in a headless terminal: what is on the screen, and what the keys do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvd.errors import KvdError
from kvd.histograms import CACHE_BUCKET_BOUNDS
from kvd.insight import DoctorReport, Finding, MapCell, Miss, Reveal
from kvd.tui.cache_page import CachePage
from kvd.tui.finding import FindingScreen
from kvd.tui.overview import OverviewPage
from kvd.tui.retention import GAPS, IDLE, LIFETIME
from kvd.tui.reveal import RevealScreen
from kvd.views import Counters, DiskFacts, PrefixView, Snapshot
from tests.tui.fakes import FakeConsole, block_map, histogram, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, Screen, running

PAGES = (OverviewPage, CachePage)
"""Of the pictures: a page more somewhere else is no change here."""

BOUNDS = (*CACHE_BUCKET_BOUNDS[GAPS], math.inf)

PREFIXES = (
    PrefixView("ab12" * 8, 8_192, 412, False, True, "claude-code 127.0.0.1", 4_000.0, 0.4),
    PrefixView("cd34" * 8, 2_048, 97, True, False, "rag-indexer", 900.0, 61.0),
    PrefixView("ef56" * 8, 480, 9, False, False, "", 65.0, 12.0),
)
FINDINGS = (
    Finding(
        "volatile_line", "claude-code 127.0.0.1", "chat", 41, 60_680, 173.4, 14,
        "differs from 41 earlier requests at token 14; 1,480 equal tokens after it were recomputed",
        "Put the line with the date after what stays the same.", "chatcmpl-000040ab",
    ),
    Finding(
        "evicted", "rag-indexer", "completions", 3, 1_480, 4.2, -1,
        "evicted for claude-code 127.0.0.1, 40 s after its last use", "Give the pool more memory.", "cmpl-000003ab",
    ),
)  # fmt: skip
MISSES = tuple(
    Miss(f"chatcmpl-{i:06d}ab", "claude-code 127.0.0.1", "chat", 1e9, "volatile_line", 1_600, 14, 1_480, 14, i, "")
    for i in reversed(range(38, 41))
)
REPORT = DoctorReport(FINDINGS, MISSES, 123, 2, 200_000, 90_000, 62_160, 350.0, 0.2, ())
REVEAL = Reveal("chatcmpl-000040ab", "Today is 2026-11-30 00:22", "Today is 2026-11-30 00:21")


def busy(time: float = 1000.0) -> Snapshot:
    return snapshot(
        time=time,
        active=900,
        cached=700,
        requests=tuple(row(i) for i in range(9)),
        counters=Counters(
            num_evicted_blocks=345,
            evicted_blocks=(("capacity", 300), ("cap", 45), ("dropped", 5), ("reset", 0)),
            prefix_query_tokens=20_000,
            prefix_hit_tokens=9_000,
            num_saved_blocks=120,
            num_restored_blocks=40,
            num_unsaved_blocks=3,
        ),
        num_blocks_pinned=128,
        num_ram_blocks=279,
        num_ram_blocks_used=70,
        disk=DiskFacts(812, 1_200 << 20, 10 << 30, 3 << 30, 1 << 28),
        misses=(("volatile_line", 41, 60_680), ("evicted", 3, 1_480)),
        cache_histograms={
            LIFETIME: histogram([20.0] * 9 + [70.0] * 40 + [400.0] * 30 + [2_000.0], BOUNDS),
            IDLE: histogram([8.0] * 9 + [45.0] * 40 + [100.0] * 30, BOUNDS),
            GAPS: histogram([0.2] * 9 + [2.0] * 40 + [20.0] * 30 + [90.0] * 12, BOUNDS),
        },
    )


def busy_console() -> FakeConsole:
    console = FakeConsole(busy())
    console.block_maps = {0: block_map()}
    console.cached_prefixes = PREFIXES
    console.report = REPORT
    console.reveals = {REVEAL.title: REVEAL, PREFIXES[0].prefix_id: Reveal("8,192 tokens", "You are helpful.")}
    return console


def page_of(screen: Screen) -> CachePage:
    page = screen.app.page
    assert isinstance(page, CachePage)
    return page


def asked(screen: Screen) -> set[str]:
    return {name for name, _ in screen.console.asked}


# --------------------------------------------------------------------------- what is shown


@SIZES
async def test_pictures_of_a_busy_engine(size: tuple[int, int]) -> None:
    async with running(busy(), size=size, page="Cache", pages=PAGES, console=busy_console()) as screen:
        assert_picture(screen.app, f"cache-busy-{size[0]}x{size[1]}")


@SIZES
async def test_pictures_of_an_idle_engine(size: tuple[int, int]) -> None:
    async with running(snapshot(), size=size, page="Cache", pages=PAGES) as screen:
        assert_picture(screen.app, f"cache-empty-{size[0]}x{size[1]}")


@SIZES
async def test_pictures_of_a_lost_engine(size: tuple[int, int]) -> None:
    async with running(busy(), size=size, page="Cache", pages=PAGES, console=busy_console()) as screen:
        await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        assert "A claude-code" in screen.text  # what was fetched last stays
        assert_picture(screen.app, f"cache-lost-{size[0]}x{size[1]}")


async def test_pictures_of_the_doctor_in_a_small_terminal() -> None:
    async with running(busy(), page="Cache", pages=PAGES, console=busy_console()) as screen:
        await screen.press("m", "n")
        await screen.fetch()
        assert_picture(screen.app, "cache-doctor-80x24")


async def test_a_wide_and_tall_terminal_shows_all_four() -> None:
    async with running(busy(), size=(160, 50), page="Cache", console=busy_console()) as screen:
        for words in ("Block map", "Top prefixes", "Evictions and tiers", "Prefix doctor", "differs from 41 earlier"):
            assert words in screen.text
        assert asked(screen) == {"block_map", "prefixes", "doctor"}


async def test_the_map_is_asked_for_as_many_cells_as_fit() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        panel = page_of(screen).block_map
        cells = {arguments for name, arguments in screen.console.asked if name == "block_map"}
        assert cells == {(panel.size.width * (panel.size.height - 1), 0)}
        await screen.pilot.resize_terminal(160, 50)
        await screen.until(lambda: ("block_map", (panel.num_cells, 0)) in screen.console.asked)
        assert panel.num_cells > 800


async def test_what_cannot_be_seen_is_not_asked_for() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        assert asked(screen) == {"block_map", "prefixes"}
        await screen.press("n")
        await screen.until(lambda: "doctor" in asked(screen))
        screen.console.asked.clear()
        await screen.press("n")
        await screen.until(lambda: "block_map" in asked(screen))
        assert asked(screen) == {"block_map"}


async def test_one_answer_that_fails_leaves_the_others() -> None:
    class Partial(FakeConsole):
        async def doctor(self) -> DoctorReport:
            raise KvdError("the doctor is out")

    console = Partial(busy())
    console.block_maps = {0: block_map()}
    console.cached_prefixes = PREFIXES
    async with running(busy(), size=(160, 50), page="Cache", console=console) as screen:
        await screen.until(lambda: "Cache: the doctor is out" in screen.text)
        assert screen.text.count("the doctor is out") == 2  # for a few seconds below, and in its panel
        assert "A claude-code" in screen.text
        assert "rag-indexer" in screen.text


# --------------------------------------------------------------------------- keys


async def test_m_draws_the_map_by_owner_sharing_and_age() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        seen = []
        for _ in range(4):
            seen.append(next(words for words in ("by owner;", "by sharing ─", "by time") if words in screen.text))
            await screen.press("m")
        assert seen == ["by owner;", "by sharing ─", "by time", "by owner;"]


async def test_n_goes_through_the_lists_and_the_key_line_says_to_which() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        for following, title in (("doctor", "Top prefixes"), ("evictions", "Prefix doctor"), ("prefixes", "Evictions")):
            await screen.until(lambda: f"n {following}" in screen.lines[-1])  # noqa: B023
            assert title in screen.text
            assert screen.text.count("╭") == 2
            await screen.press("n")
        await screen.until(lambda: "n doctor" in screen.lines[-1])


async def test_n_moves_between_the_lists_where_both_are_seen() -> None:
    async with running(busy(), size=(160, 50), page="Cache", console=busy_console()) as screen:
        page = page_of(screen)
        assert screen.app.focused is page.prefixes
        await screen.press("n")
        assert screen.app.focused is page.doctor
        await screen.press("n")
        assert screen.app.focused is page.prefixes


async def test_l_shows_the_next_layer_group() -> None:
    console = busy_console()
    first = replace(block_map(), num_groups=2)
    console.block_maps = {0: first, 1: replace(first, group_id=1, num_blocks=999)}
    async with running(busy(), page="Cache", console=console) as screen:
        assert "layer group 1 of 2" in screen.text
        await screen.press("l")
        await screen.until(lambda: "999 blocks, 4 per cell, layer group 2 of 2" in screen.text)
        await screen.press("l")
        await screen.until(lambda: "layer group 1 of 2" in screen.text)


async def test_l_does_nothing_for_a_single_group() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        await screen.press("l")
        await screen.fetch()
        assert {arguments[1] for name, arguments in screen.console.asked if name == "block_map"} == {0}  # type: ignore[index]


async def test_p_pins_and_unpins() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        await screen.press("p")
        await screen.until(lambda: "pinned: 512 blocks until it is unpinned" in screen.text)
        await screen.fetch()
        assert "◆ pinned" in next(line for line in screen.lines if "8,192" in line and "▸" in line)
        await screen.press("p")
        await screen.until(lambda: "→ unpinned" in screen.text)
        assert screen.console.acts == [("pin", "ab12" * 8), ("unpin", "ab12" * 8)]


async def test_d_drops_after_a_question() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        await screen.press("down", "down", "d")
        assert "480 tokens of an unnamed client, found 9 times" in screen.text
        await screen.press("n")
        assert screen.console.acts == []
        await screen.press("d", "y")
        await screen.until(lambda: "dropped: 30 blocks" in screen.text)
        assert screen.console.acts == [("drop", "ef56" * 8)]


async def test_a_drop_of_nothing_says_why_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = busy_console()

    async def drop_prefix(chain: str) -> int:
        return 0

    monkeypatch.setattr(fake, "drop_prefix", drop_prefix)
    async with running(busy(), page="Cache", console=fake) as screen:
        await screen.press("d", "y")
        await screen.until(lambda: "nothing dropped: in use, pinned, shared or gone" in screen.text)


@pytest.mark.parametrize("key", ["p", "d"])
async def test_a_dashboard_that_only_reads_changes_nothing(key: str) -> None:
    async with running(busy(), page="Cache", console=busy_console(), is_read_only=True) as screen:
        await screen.press(key)
        await screen.until(lambda: "only reads" in screen.text)
        assert screen.console.acts == []


async def test_an_act_that_fails_is_a_line_of_text() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        screen.console.act_error = KvdError("the engine is draining")
        await screen.press("p")
        await screen.until(lambda: "pin failed: the engine is draining" in screen.text)


async def test_text_of_a_prompt_is_shown_by_v_alone() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        assert "reveal" not in asked(screen)
        await screen.press("v")
        await screen.until(lambda: isinstance(screen.app.screen, RevealScreen) and "You are helpful." in screen.text)
        await screen.press("escape")
        assert "You are helpful." not in screen.text
        await screen.press("down", "v")
        await screen.until(lambda: "reveal failed: nothing is known of cd34" in screen.text)


async def test_columns_are_chosen_with_left_and_right_and_r_reverses() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        assert "hits▾" in screen.text
        await screen.press("left", "r")
        assert "tokens▴" in screen.text
        rows = [line for line in screen.lines if "cached" in line or "pinned" in line or "▓ active" in line]
        assert [next(n for n in ("8,192", "2,048", "480") if f" {n} " in line) for line in rows[-3:]] == [
            "480", "2,048", "8,192",
        ]  # fmt: skip


async def test_the_filter_is_for_prefixes_and_findings() -> None:
    async with running(busy(), size=(160, 50), page="Cache", console=busy_console()) as screen:
        await screen.press("slash", *"rag", "enter")
        assert [row.client for row in page_of(screen).prefixes._prefixes] == ["rag-indexer"]
        assert [finding.cause for finding in page_of(screen).doctor._findings] == ["evicted"]
        await screen.press("escape")
        assert page_of(screen).prefixes.num_rows == 3


async def test_y_copies_the_prefix_and_the_request_of_a_finding() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        await screen.press("down", "y")
        assert screen.app.clipboard == "cd34" * 8
        await screen.press("n")
        await screen.fetch()
        await screen.press("y")
        assert screen.app.clipboard == "chatcmpl-000040ab"


async def test_enter_opens_a_finding_and_v_reveals_the_difference() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        await screen.press("n")
        await screen.fetch()
        await screen.press("enter")
        assert isinstance(screen.app.screen, FindingScreen)
        for words in (
            "Finding: volatile line", "token 14 differs first", "40 earlier requests differ at the same place",
            " 000038ab ", "Put the line with the date",
        ):  # fmt: skip
            assert words in screen.text
        await screen.press("v")
        await screen.until(lambda: isinstance(screen.app.screen, RevealScreen))
        await screen.until(lambda: "Today is 2026-11-30 ▸00:22◂" in screen.text)
        assert "Today is 2026-11-30 ▸00:21◂" in screen.text
        await screen.press("escape", "escape")
        assert len(screen.app.screen_stack) == 1


async def test_a_request_of_a_finding_opens_on_its_page() -> None:
    jumps = []

    class Requests(CachePage):
        title = "Requests"

        def open(self, focus: str = "") -> None:
            jumps.append(focus)

    async with running(busy(), page="Cache", console=busy_console(), pages=(CachePage, Requests)) as screen:
        await screen.press("n")
        await screen.fetch()
        await screen.press("enter", "j", "enter")
        await screen.until(lambda: isinstance(screen.app.page, Requests))
        assert jumps == ["chatcmpl-000039ab"]
        assert len(screen.app.screen_stack) == 1


async def test_keys_on_an_empty_page_change_nothing() -> None:
    async with running(snapshot(), page="Cache") as screen:
        for key in ("p", "d", "v", "enter", "up", "down", "left", "r", "y", "n", "enter", "v", "n", "enter", "m", "l"):
            await screen.press(key)
        assert screen.console.acts == []
        assert len(screen.app.screen_stack) == 1


async def test_help_explains_the_page() -> None:
    async with running(busy(), size=(160, 50), page="Cache", console=busy_console()) as screen:
        await screen.press("question_mark")
        text = screen.text
        for words in ("Block map", "by sharing", "found after", "saves"):
            assert words in text


async def test_resizing_keeps_everything_in_place() -> None:
    async with running(busy(), page="Cache", console=busy_console()) as screen:
        for width, height in ((160, 50), (40, 10), (200, 60), (12, 4), (1, 1), (120, 30), (80, 50), (80, 24)):
            for _ in range(3):
                await screen.pilot.resize_terminal(width, height)
                await screen.pilot.pause()
                assert len(screen.lines) == height
                await screen.press("n", "m")
        await screen.fetch()
        assert "Block map" in screen.text


async def test_ascii_shows_nothing_beyond_ascii() -> None:
    async with running(busy(), size=(160, 50), page="Cache", console=busy_console(), is_ascii=True) as screen:
        for _ in range(3):
            assert screen.text.isascii()
            await screen.press("m")


async def test_fifty_thousand_blocks_fit() -> None:
    console = busy_console()
    cells = tuple(MapCell(0, 0, 66, 0, 0, 0, 0.0) for _ in range(50_000 // 66))
    console.block_maps = {0: replace(block_map(), num_blocks=50_000, blocks_per_cell=66, cells=cells)}
    async with running(busy(), size=(160, 50), page="Cache", console=console) as screen:
        assert "50,000 blocks, 66 per cell" in screen.text
        assert sum(line[:80].count("A") for line in screen.lines[4:15]) == len(cells)
