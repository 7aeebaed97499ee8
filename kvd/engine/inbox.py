"""What crosses between the event loop and the engine thread: commands and questions one way, answers the other.

Commands are callables that the engine thread runs between two steps, in the order in which they came. Answers and
token events cross back by `call_soon_threadsafe`. Each method says which thread may call it.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any, TypeVar

from kvd.errors import KvdError

T = TypeVar("T")


class Inbox:
    """The queue to the engine thread, and the way back."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._closed_by: Callable[[], KvdError] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Answers go to the running event loop from now on. Event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_open(self) -> bool:
        """Whether somebody will answer."""
        return self._loop is not None and self._closed_by is None

    def put(self, command: Callable[[], object]) -> None:
        """Have the engine thread run `command` between two steps; what it returns is dropped. Any thread."""
        self._commands.put(command)

    def run_all(self, timeout: float | None) -> None:
        """Run all commands that have come; wait for the first up to `timeout` s (None: until it comes). Engine."""
        try:
            self._commands.get(timeout != 0, timeout)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def call_loop(self, callback: Callable[[], None]) -> bool:
        """Have the event loop call `callback`; False if the loop is gone, and nobody is left to serve. Engine."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    async def ask(self, question: Callable[[], T]) -> T:
        """Have the engine thread answer between two steps. Who asks may give up; the question is acted on anyway."""
        if self._loop is None or self._closed_by is not None:
            raise self._closed_by() if self._closed_by else RuntimeError("the engine was not started")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)

        def run() -> None:
            try:
                outcome: T | Exception = question()
            except Exception as error:
                outcome = error
            self.call_loop(lambda: _settle(answer, outcome))

        self._commands.put(run)
        return await answer

    def ask_from_worker(self, question: Callable[[], T]) -> T:
        """`ask` for a worker thread, which waits."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.ask(question), self._loop).result()

    def close(self, make_error: Callable[[], KvdError]) -> None:
        """The engine thread has ended: every question, also those to come, fails with `make_error()`. Event loop."""
        self._closed_by = make_error
        for answer in list(self._unanswered):
            _settle(answer, make_error())


def _settle(answer: asyncio.Future[T], outcome: T | Exception) -> None:
    """Answer, unless nobody waits any more."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
