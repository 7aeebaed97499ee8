"""Ctrl-Z and the signals that it sends: a dashboard neither stops the server with it nor leaves a trap behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

from textual.pilot import Pilot

from kvd.tui.app import Dashboard, Outcome
from kvd.tui.suspension import handlers_kept, stay_awake
from tests.tui.fakes import FakeConsole, snapshot

SIGNALS = (signal.SIGTSTP, signal.SIGCONT)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


async def test_a_dashboard_is_not_suspended_and_gives_the_signals_back() -> None:
    received: list[int] = []

    def before(number: int, frame: FrameType | None) -> None:
        received.append(number)

    async def look(pilot: Pilot[Outcome]) -> None:
        await pilot.pause()
        assert before not in handlers()
        for number in SIGNALS:
            signal.raise_signal(number)
        await pilot.pause()
        await pilot.press("q")

    originals = {number: signal.signal(number, before) for number in SIGNALS}
    try:
        dashboard = Dashboard(FakeConsole(snapshot()), address="x", model="m", on_quit="close", interval_seconds=60.0)
        assert await dashboard.run_async(headless=True, size=(80, 24), auto_pilot=look) == "close"
        assert handlers() == [before, before]
        assert received == []
    finally:
        for number, handler in originals.items():
            signal.signal(number, handler)


def test_they_are_given_back_after_a_failure() -> None:
    originals = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        with contextlib.suppress(ZeroDivisionError), handlers_kept():
            stay_awake()
            assert signal.SIG_DFL not in handlers()
            raise ZeroDivisionError
        assert handlers() == [signal.SIG_DFL, signal.SIG_DFL]
    finally:
        for number, handler in originals.items():
            signal.signal(number, handler)


def test_another_thread_leaves_the_signals_alone() -> None:
    before = handlers()
    seen: list[list[object]] = []

    def show() -> None:
        with handlers_kept():
            stay_awake()
            seen.append(handlers())

    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
    assert seen == [before]
    assert handlers() == before
