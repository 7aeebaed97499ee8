"""The dashboard in a headless terminal: what is on the screen, and what the keys do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvd.device_facts import DeviceFacts
from kvd.tui.app import Dashboard
from kvd.tui.question import Question
from kvd.tui.requests import RequestsPanel
from kvd.tui.view import View
from kvd.views import Counters, Snapshot, StepMix
from tests.tui.fakes import INFO, FakeConsole, histogram, row, snapshot
from tests.tui.screens import SIZES, Screen, running

HISTOGRAMS = {
    "time_to_first_token_seconds": histogram([0.2] * 10 + [30.0]),
    "inter_token_latency_seconds": histogram([0.03] * 100),
}


def busy(num_running: int = 16, num_waiting: int = 12) -> Snapshot:
    rows = tuple(row(i, state="prefill" if i == 1 else "decode") for i in range(num_running))
    rows += tuple(row(num_running + i, state="waiting") for i in range(num_waiting))
    return snapshot(
        active=2048,
        requests=rows,
        counters=Counters(
            prefix_query_tokens=19_456,
            prefix_hit_tokens=12_345,
            num_preemptions=3,
            num_evicted_blocks=120,
            recomputed_tokens=2_345,
        ),
        last_step=StepMix(16, 48, 16, 0.022),
        histograms=HISTOGRAMS,
    )


def table(screen: Screen) -> RequestsPanel:
    """The requests on the overview."""
    return screen.app.screen.query_one(RequestsPanel)


FACTS = DeviceFacts("card", 0.87, 24 << 30, 21 << 30, None, 312.0, None, 71.0, 1695.0, 9501.0, ())


# --------------------------------------------------------------------------- what is shown


@SIZES
async def test_an_idle_engine_says_how_to_use_it(size: tuple[int, int]) -> None:
    async with running(snapshot(cached=300), size=size) as screen:
        text = screen.text
        for word in (
            "kvd", "0.1.0", "smollm2-135m-instruct", "● ready", "http://127.0.0.1:8000/v1", "Q4_1", "8,192", "int8",
            "A active 0", "C cached 300", "F free 1,748", "32,768 tokens", "0 running, 0 waiting", "base URL",
            "All is well", "q quit", "? help",
        ):  # fmt: skip
            assert word in text, word


@SIZES
async def test_a_busy_engine_shows_everything_essential(size: tuple[int, int]) -> None:
    async with running(busy(), size=size) as screen:
        text = screen.text
        for word in (
            "active 100%", "A active 2,048", "100%", "F free 0", "32,768 tok", "hit rate", "63% total",
            "12,345 of 19,456", "evicted    120", "preempted  3", "recomputed 2,345", "TTFT", "p50", "p95", "ITL",
            "16 running, 12 waiting",
            "of 28", "prefill 43%", "64%", "37/512", "182ms", "1m40", "p95 >10.0s",
            "KV pool full: 12 waiting; raise cpu_memory_utilization or lower max_model_len", "x abort", "/ filter",
        ):  # fmt: skip
            assert word in text, word
        heading = next(line for line in screen.lines if "client" in line)
        for column in ("id", "client", "api", "state", "hit", "output", "tok/s", "TTFT", "blks", "pre", "age"):
            assert column in heading, column
        assert all(len(line) <= size[0] for line in screen.lines)


@SIZES
async def test_the_device_has_a_line_where_there_is_one(size: tuple[int, int]) -> None:
    async with running(busy(), size=size) as screen:
        assert "GPU" not in screen.text
        screen.console.current = replace(busy(), device=FACTS)
        await screen.refresh()
        (line,) = [line for line in screen.lines if "GPU 87%" in line]
        assert "21 GiB of 24 GiB" in line
        assert ("312/n/a W" in line) == (size[0] > 100)
        assert all(len(line) <= size[0] for line in screen.lines)


@SIZES
async def test_tiers_pins_and_limits_are_shown(size: tuple[int, int]) -> None:
    first = busy()
    counters = replace(first.counters, ram_hit_tokens=2_000, disk_hit_tokens=500, partial_hit_tokens=45)
    rows = (row(1, state="restoring"), row(2, state="swapped"), *first.requests[2:])
    tiers = replace(
        first, counters=counters, requests=rows, num_ram_blocks=4096, num_ram_blocks_used=1234, num_blocks_pinned=77,
        running_limit=16, step_budget=96,
    )  # fmt: skip
    async with running(tiers, size=size) as screen:
        text = screen.text
        for word in (
            "RAM 1,234 of 4,096, 77 pinned", "└ RAM 2,000 disk 500 part 45", "evicted    120", "preempted  3",
            "16 running, 12 waiting, limit 16", "restoring", " of 96",
        ):  # fmt: skip
            assert word in text, word
        assert "recomputed 2,345" in text
        await screen.press("end")
        states = [line for line in screen.lines if "swapped" in line]
        assert states or size[1] < 40, "the table at 80x24 shows fewer rows than there are"


async def test_a_swapped_request_is_a_row_like_others() -> None:
    async with running(snapshot(requests=(row(1, state="swapped"), row(2, state="waiting")))) as screen:
        first, second = (line for line in screen.lines if "swapped" in line or "waiting  " in line)
        assert "swapped" in first, "it comes before those that never ran"
        assert "waiting" in second


async def test_rates_come_from_the_difference_of_two_polls() -> None:
    first = busy()
    async with running(first) as screen:
        counters = replace(first.counters, prefill_tokens_computed=4_000, generation_tokens=300)
        await screen.show(replace(first, time=first.time + 2.0, counters=counters))
        prefill = next(line for line in screen.lines if "prefill  " in line)
        decode = next(line for line in screen.lines if "decode   " in line and "tok/s" in line)
        assert "2,000 tok/s" in prefill
        assert "150 tok/s" in decode
        assert "█" in prefill


async def test_the_time_of_the_latest_step_is_whole() -> None:
    current = replace(busy(), last_step=StepMix(0, 256, 1, 1.32), step_budget=256)
    async with running(current) as screen:
        assert "0 dec + 256 pre  1.32s" in screen.text


async def test_five_hundred_requests_cost_the_lines_in_view() -> None:
    many = busy(num_running=16, num_waiting=484)
    async with running(many, size=(160, 50)) as screen:
        assert "16 running, 484 waiting" in screen.text
        assert len(table(screen)._lines) <= 50
        await screen.press("end")
        assert "of 500" in screen.text
        assert "000499ab"[:6] in screen.text
        await screen.press("home")
        assert "1–15 of 500" in screen.text


async def test_only_lines_that_changed_are_painted() -> None:
    first = busy()
    async with running(first) as screen:
        painted: list[int] = []
        requests = table(screen)
        original = requests.render_line

        def spy(y: int) -> Any:
            painted.append(y)
            return original(y)

        requests.render_line = spy  # type: ignore[method-assign]
        rows = (first.requests[0], replace(first.requests[1], num_output_tokens=99), *first.requests[2:])
        await screen.show(replace(first, time=first.time + 1.0, requests=rows))
        await screen.until(lambda: bool(painted))
        assert set(painted) == {2}  # the heading is line 0
        assert "99/512" in screen.text


async def test_names_from_clients_cannot_write_escape_sequences() -> None:
    nasty = row(1, client="\x1b[31mred\x07 [bold]x[/bold]\u202e", request_id="id-\x1b]0;title\x07")
    async with running(snapshot(active=10, requests=(nasty,)), size=(160, 50)) as screen:
        assert "\x1b" not in screen.text
        assert "\u202e" not in screen.text
        assert "·[31mred· [bold]x[/bold]·" in screen.text
        await screen.press("x")
        assert "[bold]x[/bold]" in screen.text


@pytest.mark.parametrize(
    ("state", "word"), [("loading", "◌ loading"), ("draining", "◐ draining"), ("failed", "✖ failed")]
)
async def test_states_are_words(state: str, word: str) -> None:
    async with running(snapshot(state=state)) as screen:
        assert word in screen.text


async def test_prefix_caching_off_is_said() -> None:
    async with running(snapshot(info=replace(INFO, prefix_caching=False))) as screen:
        assert "enable_prefix_caching" in screen.text


async def test_long_names_do_not_push_the_rest_away() -> None:
    info = replace(INFO, device="cpu (AMD EPYC 9654 96-Core Processor, 192 threads, AMX)", backend="native")
    async with running(snapshot(info=info)) as screen:
        text = screen.text
        assert "8,192" in text
        assert "KV int8" in text
        assert "cpu (AMD" in text


async def test_resizing_keeps_everything_in_place() -> None:
    async with running(busy()) as screen:
        for width, height in ((160, 50), (40, 10), (200, 60), (12, 4), (80, 24)):
            await screen.pilot.resize_terminal(width, height)
            await screen.pilot.pause()
            assert len(screen.lines) == height
        assert "KV pool full: 12 waiting" in screen.text
        assert "16 running, 12 waiting" in screen.text
        assert "x abort" in screen.text


async def test_without_colour_the_bar_still_says_which_is_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(snapshot(active=700, cached=700)) as screen:
        bar = next(line for line in screen.lines if "active 34%" in line)
        assert "█" in bar
        assert "▒" in bar
        assert "·" in bar
        segments = [segment for strip in screen.strips for segment in strip]
        assert not [s for s in segments if s.style and (s.style.color or s.style.bgcolor)]
        assert "\x1b[" in "".join(strip.render(screen.app.console) for strip in screen.strips), "bold is left"


# --------------------------------------------------------------------------- a source that fails


async def test_a_failing_source_is_shown_and_tried_again() -> None:
    async with running(busy()) as screen:
        screen.console.error = ConnectionRefusedError("connection to 127.0.0.1:8000 refused")
        await screen.refresh()
        assert "✖ disconnected" in screen.text
        assert "Disconnected: connection to 127.0.0.1:8000 refused; trying again" in screen.text
        assert "A active 2,048" in screen.text  # the last figures stay
        screen.console.error = None
        await screen.show(snapshot(time=5.0, cached=40))  # restarted meanwhile: its clock is another
        assert "● ready" in screen.text
        assert "C cached 40" in screen.text
        assert "disconnected" not in screen.text.lower()


async def test_a_silent_source_is_disconnected_too() -> None:
    async with running(busy(), timeout_seconds=0.05) as screen:
        screen.console.hangs = True
        await screen.refresh()
        assert "no answer within 0.05 s" in screen.text


async def test_a_source_that_never_answered() -> None:
    console = FakeConsole(busy())
    console.error = RuntimeError("")
    async with running(busy(), console=console, on_quit="close") as screen:
        assert "Disconnected: RuntimeError; trying again" in screen.text
        await screen.press("x", "R", "escape", "question_mark", "escape")


async def test_a_fault_of_the_dashboard_closes_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> View:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("kvd.tui.view.History.add", broken)
    app = Dashboard(FakeConsole(busy()), address="x", model="m", on_quit="ask", interval_seconds=60.0)
    assert await app.run_async(headless=True, size=(80, 24)) == "close"
    assert "the server keeps running" in caplog.text


# --------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("keys", "outcome"), [(("c",), "close"), (("s",), "stop"), (("enter",), "close"), (("down", "enter"), "stop")]
)
async def test_q_asks_what_to_leave(keys: tuple[str, ...], outcome: str) -> None:
    async with running(busy()) as screen:
        await screen.press("q")
        assert "close the dashboard, keep serving" in screen.text
        assert "stop the server" in screen.text
        assert "28 requests are being served" in screen.text
        await screen.press(*keys)
        assert screen.app.return_value == outcome


@pytest.mark.parametrize("size", [(40, 10), (60, 15)])
async def test_the_answers_are_seen_where_the_question_does_not_fit(size: tuple[int, int]) -> None:
    async with running(busy(), size=size) as screen:
        await screen.press("q")
        for words in ("c  close the dashboard", "s  stop the server", "n  cancel"):
            assert words in screen.text


@pytest.mark.parametrize("key", ["escape", "n", "q"])
async def test_leaving_can_be_cancelled(key: str) -> None:
    async with running(busy()) as screen:
        await screen.press("q", key)
        assert not isinstance(screen.app.screen, Question)
        assert screen.app.return_value is None
        await screen.refresh()
        assert "● ready" in screen.text


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_an_attached_dashboard_just_closes(key: str) -> None:
    async with running(busy(), on_quit="close") as screen:
        await screen.press(key)
        assert screen.app.return_value == "close"


async def test_ctrl_c_asks_and_a_second_one_stops() -> None:
    async with running(busy()) as screen:
        await screen.press("ctrl+c")
        assert isinstance(screen.app.screen, Question)
        await screen.press("ctrl+c")
        assert screen.app.return_value == "stop"


async def test_ctrl_q_asks_too() -> None:
    async with running(busy()) as screen:
        await screen.press("ctrl+q")
        assert isinstance(screen.app.screen, Question)
        assert screen.app.return_value is None


async def test_x_aborts_the_selected_request_after_a_question() -> None:
    async with running(busy()) as screen:
        await screen.press("down", "down", "x")
        assert "chatcmpl-000002ab" in screen.text
        assert "openai-python 10.0.0.7: decode, 37 tokens" in screen.text
        assert screen.console.aborted == []
        await screen.press("y")
        await screen.until(lambda: screen.console.aborted == ["chatcmpl-000002ab"])
        await screen.until(lambda: "chatcmpl-000002ab aborted" in screen.text)


async def test_x_and_enter_change_nothing() -> None:
    async with running(busy()) as screen:
        await screen.press("x", "enter")
        await screen.refresh()
        assert screen.console.aborted == []


async def test_aborting_what_has_ended_says_so() -> None:
    async with running(busy()) as screen:
        screen.console.still_runs = False
        await screen.press("x", "y")
        await screen.until(lambda: "had ended already" in screen.text)


async def test_an_act_that_fails_is_a_line_of_text() -> None:
    async with running(busy()) as screen:
        screen.console.act_error = ConnectionResetError("connection reset")
        await screen.press("x", "y")
        await screen.until(lambda: "abort failed: connection reset" in screen.text)
        await screen.press("R", "y")
        await screen.until(lambda: "reset failed: connection reset" in screen.text)


async def test_shift_r_resets_the_cache_after_a_question() -> None:
    async with running(snapshot(cached=321)) as screen:
        await screen.press("R")
        assert "321 cached blocks would be dropped" in screen.text
        assert "RAM and disk" not in screen.text
        await screen.press("n")
        assert screen.console.acts == []
        await screen.press("R", "y")
        await screen.until(lambda: "321 cached blocks dropped" in screen.text)
        assert screen.console.acts == [("reset", "")]


async def test_the_question_before_a_reset_names_the_tiers_below() -> None:
    async with running(replace(snapshot(cached=0), num_ram_blocks=279, num_ram_blocks_used=70)) as screen:
        await screen.press("R")
        assert "0 cached blocks would be dropped" in screen.text
        assert "all that RAM and disk keep" in screen.text


async def test_the_cursor_stays_with_its_request() -> None:
    first = busy(num_running=4, num_waiting=0)
    async with running(first) as screen:
        await screen.press("down", "down")
        assert table(screen).selected == first.requests[2]
        await screen.show(replace(first, time=first.time + 1.0, requests=first.requests[1:]))
        assert table(screen).selected == first.requests[2]
        await screen.show(replace(first, time=first.time + 2.0, requests=first.requests[:1]))
        assert table(screen).selected == first.requests[0]
        await screen.show(snapshot(time=first.time + 3.0))
        assert table(screen).selected is None
        await screen.press("x", "up", "down", "end")
        assert not isinstance(screen.app.screen, Question)


async def test_the_mouse_selects() -> None:
    async with running(busy()) as screen:
        await screen.pilot.click("#requests", offset=(10, 4))
        assert table(screen).selected == busy().requests[2]


async def test_space_pauses_the_figures() -> None:
    async with running(busy()) as screen:
        await screen.press("space")
        assert "‖ paused" in screen.text
        assert "space resume" in screen.text
        calls = screen.console.num_calls
        for _ in range(3):
            screen.app.poll_now()
            await screen.pilot.pause()
        assert screen.console.num_calls == calls
        await screen.press("space")
        await screen.until(lambda: screen.console.num_calls > calls)
        assert "paused" not in screen.text


async def test_plus_and_minus_change_the_pace() -> None:
    async with running(busy()) as screen:
        await screen.press("plus", "plus")
        assert "+/- 2s" in screen.text
        await screen.press("minus")
        assert "+/- 5s" in screen.text
        await screen.press(*["plus"] * 9)
        assert "+/- 0.1s" in screen.text


async def test_help_explains_keys_and_figures() -> None:
    async with running(busy(), size=(160, 50)) as screen:
        await screen.press("question_mark")
        for word in ("stop the server", "A █ active", "time to first token", "hit rate", "preempted"):
            assert word in screen.text, word
        await screen.press("question_mark")
        assert "KV pool full" in screen.text


async def test_figures_go_on_below_a_question() -> None:
    first = busy()
    async with running(first) as screen:
        await screen.press("q")
        await screen.show(replace(first, time=first.time + 1.0, num_waiting=77))
        await screen.press("escape")
        assert "77 waiting" in screen.text


async def test_details_are_asked_for_no_more_often_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.tui.poller.DETAILS_EVERY_SECONDS", 3600.0)
    async with running(busy()) as screen:
        assert screen.console.num_detailed_calls == 1
        await screen.refresh()
        await screen.refresh()
        assert screen.console.num_detailed_calls == 1
        assert "16 running, 12 waiting" in screen.text
        assert "1–3 of 28" in screen.text


# --------------------------------------------------------------------------- pictures


async def test_the_picture_is_svg_without_foreign_parts(tmp_path: Path) -> None:
    async with running(busy(), size=(160, 50)) as screen:
        target = tmp_path / "dashboard.svg"
        screen.app.save_picture(target)
        text = target.read_text()
        screen.app.save_picture(target)
        assert target.read_text() == text
    root = ElementTree.fromstring(text)
    words = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "KV pool full: 12 waiting" in words
    assert "smollm2-135m-instruct" in words
    assert "url(" not in text
    assert "@font-face" not in text
