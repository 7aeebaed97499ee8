"""How a measurement that may take minutes shows where it is, and unwinds when it is told to end.

Main thread; `unless_ended` runs inside the event loop. Invariant: every handler of a signal is put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

Result = TypeVar("Result")


class StatusLine:
    """One line on a terminal; nothing elsewhere. A context: leaving it clears the line."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.say("")

    def say(self, text: str) -> None:
        if self._shows:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


async def unless_ended(measuring: Coroutine[Any, Any, Result]) -> Result | int:
    """What `measuring` returns, or the number of the signal that cancelled it.

    An exception out of a signal handler would surface wherever the event loop happens to be; a cancelled task unwinds.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def leave(number: int) -> None:
        received.append(number)
        task.cancel()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # handlers belong to the main thread
    for number in handled:
        loop.add_signal_handler(number, leave, number)
    try:
        return await measuring
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a server of ours does not outlive us."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
