"""How a panel is painted: only what changed, in slices, and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from textual.app import ComposeResult
from textual.geometry import Region

from kvd.tui.page import Page
from kvd.tui.panel import CELLS_PER_FRAME, FRAME_SECONDS, Panel, Spans
from kvd.tui.view import Link, View
from tests.tui.fakes import snapshot
from tests.tui.screens import Screen, running


class LinesPanel(Panel):
    """As many lines as there is room for, all with the same word."""

    word = "one"
    title = "Lines"

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return self.title, self.word

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        return [((f"{self.word} ", "text"), ("", "cached"), (str(number), "text")) for number in range(height)]


class LinesPage(Page):
    title: ClassVar[str] = "Lines"

    def __init__(self) -> None:
        super().__init__()
        self.panel = LinesPanel(id="lines", classes="box")

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self.panel,)

    def compose(self) -> ComposeResult:
        yield self.panel


def panel_of(screen: Screen) -> LinesPanel:
    return screen.app.query_one(LinesPanel)


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (400, 60)])
async def test_a_frame_paints_no_more_than_it_may(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(snapshot(), size=size, pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        frames: list[list[Region]] = []
        original = panel.refresh

        def spy(*regions: Region, **options: Any) -> Panel:
            frames.append(list(regions))
            return original(*regions, **options)

        monkeypatch.setattr(panel, "refresh", spy)
        panel.word = "two"
        panel.redraw()
        await screen.settle()
        assert all(frames), "a repaint without regions is one of everything"
        most = max(2, CELLS_PER_FRAME // panel.size.width)
        assert all(sum(region.height for region in frame) <= most for frame in frames)
        assert all(frame[-1].bottom - frame[0].y <= most for frame in frames), "what is painted together is together"
        painted = [y for frame in frames for region in frame for y in region.line_range]
        assert painted == sorted(set(painted)), "each line once, from the top"
        assert set(range(panel.size.height)) <= set(painted)
        assert screen.text.count("two ") >= panel.size.height
        assert "one" not in screen.text


async def test_what_changes_meanwhile_is_painted_too() -> None:
    async with running(snapshot(), size=(160, 50), pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        for word in ("two", "three", "four"):
            panel.word = word
            panel.redraw()
        await screen.settle()
        assert screen.text.count("four ") >= panel.size.height
        assert "two" not in screen.text
        assert "three" not in screen.text


async def test_a_terminal_that_shrinks_while_it_is_painted() -> None:
    async with running(snapshot(), size=(160, 50), pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        panel.word = "two"
        panel.redraw()
        assert panel.is_painting
        await screen.pilot.resize_terminal(60, 10)
        await screen.settle()
        assert all("two" in line for line in screen.lines[4 : 4 + panel.size.height])
        await screen.pilot.resize_terminal(160, 50)
        await screen.settle()
        assert screen.text.count("two ") >= panel.size.height


async def test_an_unchanged_panel_is_not_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(snapshot(), pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        painted: list[int] = []
        original = panel.render_line
        monkeypatch.setattr(panel, "render_line", lambda y: (painted.append(y), original(y))[1])
        await screen.refresh()
        assert panel.redraw() == 0
        await screen.settle()
        assert painted == []


@pytest.mark.parametrize("title", ["[bold]x", "[/]", "a[b", "tab\tand \x1b[31m", "\\[x]"])
async def test_a_title_is_text_and_nothing_else(title: str) -> None:
    async with running(snapshot(), pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        panel.title = title
        panel.redraw()
        await screen.settle()
        assert title.replace("\t", "·").replace("\x1b", "·") in screen.text


async def test_a_panel_that_is_gone_is_not_painted() -> None:
    async with running(snapshot(), size=(160, 50), pages=(LinesPage,)) as screen:
        panel = panel_of(screen)
        panel.word = "two"
        panel.redraw()
        assert panel.is_painting
        done: list[str] = []
        panel.in_next_frame(lambda: done.append("painted"))
        is_over = asyncio.Event()
        asyncio.get_running_loop().call_later(FRAME_SECONDS, is_over.set)  # comes after what was asked for before
        await panel.remove()
        await is_over.wait()
        assert done == []
