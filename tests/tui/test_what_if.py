"""The what-if page: the same answers as start-up and `kvd plan`, whatever is tried, at any size."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvd.cache.fitting import device_room, fit, host_room, kv_dtypes_of
from kvd.cache.lengths import seen_lengths
from kvd.cache.sizing import GIB
from kvd.config_flags import parse_flags
from kvd.config_load import load_config
from kvd.geometry import Choice, Geometry, ModelShape
from kvd.tui.panel import Panel, span_width
from kvd.tui.view import History, Link
from kvd.tui.what_if import WhatIf
from kvd.tui.what_if_page import GridPanel, SettingsPanel, WhatIfPage
from kvd.views import Snapshot
from tests.cache.test_fitting import QWEN_7B, histograms
from tests.tui.fakes import INFO, row, snapshot
from tests.tui.pictures import assert_picture
from tests.tui.screens import SIZES, Screen, running

LINK = Link("address", "model", 0.5)
SMALL = ModelShape(576, 1536, 9, 3, 64, 49_152, 8192, ((0, 30),))
HOST = Geometry(SMALL, host_room(2 * GIB, 0, 0.3), 96 << 20, 4, 0, kv_dtypes_of("a8"), Choice("int8", 0.3))
CARD = Geometry(
    QWEN_7B, device_room(24 * GIB, 23 * GIB, 0.9, "gpu_memory_utilization")[0], 4 * GIB, 2, GIB, kv_dtypes_of("a16"),
    Choice("int8", 0.9, 32_768, 32, 2048),
)  # fmt: skip
SEEN = histograms([900, 1000, 2000] * 40, [100, 200, 300] * 40)


def of(geometry: Geometry | None, **fields: object) -> Snapshot:
    length = 8192 if geometry is None else fit(geometry, geometry.choice).max_model_len
    return snapshot(info=replace(INFO, geometry=geometry, max_model_len=length), **fields)


def page_of(screen: Screen) -> WhatIfPage:
    page = screen.app.page
    assert isinstance(page, WhatIfPage)
    return page


def texts(panel: Panel, current: Snapshot, width: int, height: int) -> list[str]:
    lines = panel.draw(History().add(current, has_details=True), LINK, width, height)[:height]
    assert all(span_width(line) <= width for line in lines), lines
    return ["".join(part for part, _ in line) for line in lines]


# --------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("kind", [SettingsPanel, GridPanel])
@pytest.mark.parametrize(
    "geometry",
    [
        HOST, CARD, None, replace(HOST, weight_bytes=3 * GIB), replace(HOST, room=host_room(0, 0, 0.3)),
        replace(CARD, shape=replace(QWEN_7B, layer_windows=((4096, 28),))),
        replace(HOST, choice=replace(HOST.choice, num_gpu_blocks_override=1)),
    ],
)  # fmt: skip
def test_any_size_can_be_drawn(kind: type[SettingsPanel | GridPanel], geometry: Geometry | None) -> None:
    for width in range(1, 150, 7):
        for height in range(1, 30, 5):
            texts(kind(WhatIf(), id="x"), of(geometry, histograms=SEEN), width, height)


@pytest.mark.parametrize("geometry", [HOST, CARD])
@pytest.mark.parametrize(("width", "height"), [(76, 9), (156, 33)])
def test_every_mark_of_the_grid_is_what_start_up_would_say(geometry: Geometry, width: int, height: int) -> None:
    state = WhatIf()
    grid = GridPanel(state, id="x")
    lines = texts(grid, of(geometry), width, height)
    contexts, counts = grid._shown
    assert len(contexts) >= 5
    assert len(counts) >= 7
    for line, count in zip(lines[1:], counts, strict=False):
        marks = [letter for letter in line if letter in "✓✗"]
        room = fit(geometry, replace(geometry.choice, max_model_len=None, max_num_seqs=max(32, count)))
        assert marks == ["✓" if room.requests(length) >= count else "✗" for length in contexts]
        assert int(line[:6].replace(",", "")) == count
    assert {"✓", "✗"} <= set("".join(lines))


def test_the_current_setting_is_in_the_grid_however_odd_it_is() -> None:
    odd = replace(CARD, choice=replace(CARD.choice, max_model_len=20_000, max_num_seqs=23))
    state = WhatIf()
    grid = GridPanel(state, id="x")
    lines = texts(grid, of(odd), 76, 9)
    assert "20,000" in lines[0]
    (line,) = [line for line in lines if line.startswith("   23  ")]
    assert "‹" in line
    state.move(-1, 0, grid._shown)
    (line,) = [line for line in texts(grid, of(odd), 76, 9) if line.startswith("   23  ")]
    assert "[" in line
    assert "‹" in line


def test_a_model_that_knows_less_than_a_round_length_has_its_own_column() -> None:
    odd = replace(HOST, shape=replace(SMALL, max_positions=40_960))
    lines = texts(GridPanel(WhatIf(), id="x"), of(odd), 156, 30)
    assert lines[0].split()[-2:] == ["32K", "40K"]


def test_seen_lengths_become_advice() -> None:
    state = WhatIf()
    text = "\n".join(texts(SettingsPanel(state, id="x"), of(HOST, histograms=SEEN), 150, 8))
    seen = seen_lengths(SEEN)
    assert seen is not None
    advice = state.advice(seen)
    assert f"--max-model-len {advice.max_model_len} --max-num-seqs {advice.max_num_seqs}" in text
    assert "seen by 120 requests" in text
    assert "none has ended yet" in "\n".join(texts(SettingsPanel(WhatIf(), id="x"), of(HOST), 150, 8))


# --------------------------------------------------------------------------- what is tried


def test_what_was_tried_is_forgotten_when_another_engine_answers() -> None:
    state = WhatIf()
    state.put(HOST, 8192)
    state.turn_dtype()
    assert not state.is_as_now
    state.put(HOST, 8192)
    assert not state.is_as_now
    state.put(CARD, 32_768)
    assert state.is_as_now
    assert (state.tokens, state.requests) == (32_768, 32)


def test_the_dtypes_go_round() -> None:
    for geometry in (HOST, CARD):
        state = WhatIf()
        state.put(geometry, 8192)
        seen = []
        for _ in geometry.kv_dtypes:
            state.turn_dtype()
            seen.append(state.tried.kv_cache_dtype)
        assert sorted(seen) == sorted(geometry.kv_dtypes)
        assert state.is_as_now


def test_a_share_takes_the_place_of_an_exact_size() -> None:
    state = WhatIf()
    state.put(replace(HOST, choice=replace(HOST.choice, num_gpu_blocks_override=10)), 160)
    assert state.fits.num_blocks == 10
    assert state.change_share(1) == "num_gpu_blocks_override is left out: the share decides"
    assert state.fits.num_blocks > 1000
    assert state.change_share(1) == ""
    for _ in range(40):
        state.change_share(-1)
    assert state.tried.share == 0.05
    for _ in range(40):
        state.change_share(1)
    assert state.tried.share == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_flags_lead_to_what_was_tried(seed: int) -> None:
    random_ = random.Random(seed)
    geometry = random_.choice((HOST, CARD))
    state = WhatIf()
    state.put(geometry, fit(geometry, geometry.choice).max_model_len)
    shown = (state.contexts(8), state.counts(8))
    for _ in range(random_.randrange(8)):
        random_.choice(
            (
                state.turn_dtype,
                lambda: state.change_share(random_.choice((-1, 1))),
                lambda: state.move(random_.randrange(-3, 4), random_.randrange(-3, 4), shown),
                state.try_cell,
            )
        )()
    line = parse_flags(state.flags().split())
    config = load_config(None, line.entries).config
    tried = state.tried
    share = getattr(config, geometry.room.setting)
    for name, ours in (("kv_cache_dtype", config.kv_cache_dtype), ("share", share),
                       ("max_model_len", config.max_model_len), ("max_num_seqs", config.max_num_seqs)):  # fmt: skip
        if state.is_as_now or getattr(tried, name) != getattr(geometry.choice, name):
            assert ours == getattr(tried, name), name


# --------------------------------------------------------------------------- on the screen


@SIZES
async def test_keys_try_settings_and_take_them_back(size: tuple[int, int]) -> None:
    async with running(of(HOST, histograms=SEEN), size=size, page="What-if") as screen:
        page = page_of(screen)
        assert "the same; the keys below change it" in screen.text
        await screen.press("d", "right_square_bracket")
        assert "fp16*  cpu memory 0.35*" in screen.text
        assert screen.app.page.copied() == "--kv-cache-dtype fp16 --cpu-memory-utilization 0.35"
        await screen.press("up", "k", "h", "enter")
        assert (page.state.tried.max_model_len, page.state.tried.max_num_seqs) == (4096, 8)
        assert "max_model_len 4,096*  max_num_seqs 8*" in screen.text
        await screen.press("left_square_bracket", "u")
        assert page.state.is_as_now
        await screen.press("right", "right", "right", "j", "l")
        assert page.state.tokens == 8192
        assert screen.console.acts == []


async def test_what_would_not_start_is_said_with_the_reason() -> None:
    tight = replace(CARD, room=device_room(8 * GIB, 8 * GIB, 0.7, "gpu_memory_utilization")[0])
    async with running(of(tight), page="What-if") as screen:
        page = page_of(screen)
        assert not page.state.fits.refusal
        for _ in range(3):
            await screen.press("left_square_bracket")
        assert page.state.fits.refusal
        assert "✗ would not start: " in screen.text
        assert page.state.fits.refusal[:40] in screen.text
        await screen.press("u")
        assert "✗ would not start" not in screen.text


async def test_an_older_server_and_no_server_at_all_do_no_harm() -> None:
    async with running(of(None), page="What-if") as screen:
        assert "this server does not say what its memory is like" in screen.text
        await screen.press("d", "right_square_bracket", "enter", "u", "left", "y")
        assert "this server does not say" in screen.text
        await screen.show(of(HOST))
        assert "28%" in screen.text or "KV " in screen.text
        assert "✓" in screen.text


async def test_the_page_says_everything_in_letters_too() -> None:
    async with running(of(HOST, histograms=SEEN), page="What-if", is_ascii=True) as screen:
        lines = [line for line in screen.lines if "%" in line]
        assert any("+  16%" in line for line in lines)
        assert any("x 129%" in line for line in lines)
        assert all(line.isascii() for line in screen.lines)


@SIZES
@pytest.mark.parametrize("kind", ["empty", "busy", "gpu", "disconnected"])
async def test_pictures(size: tuple[int, int], kind: str) -> None:
    current = {
        "empty": of(HOST),
        "gpu": of(CARD, histograms=SEEN),
    }.get(kind, of(HOST, histograms=SEEN, active=1024, cached=300, requests=tuple(row(i) for i in range(9))))
    async with running(current, size=size, page="What-if") as screen:
        if kind in ("busy", "gpu"):
            await screen.press("d", "right_square_bracket", "up", "left")
        if kind == "disconnected":
            await screen.lose(ConnectionRefusedError("connection to 127.0.0.1:8000 refused"))
        await screen.pilot.pause()
        assert_picture(screen.app, f"what-if-{kind}-{size[0]}x{size[1]}")
