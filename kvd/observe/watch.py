"""Facts that take a while to read, kept at hand. Owner: whoever makes a `Watch`; any thread may ask it.

A thread of its own reads, and only while somebody asks: a driver or a file system may take its time. Invariant: whoever
asks is answered at once, by facts that are one interval and one reading old at most while somebody asks steadily.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class Watch(Generic[T]):
    """The latest facts.

    open_reader: called once, on the reading thread, when somebody asks for the first time. What it gives is entered,
    called for every reading, and left at the end; None: there are no facts, ever.
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], AbstractContextManager[Callable[[], T | None]] | None],
        *,
        interval_seconds: float,
    ) -> None:
        self._name = name
        self._open_reader = open_reader
        self._interval_seconds = interval_seconds
        self._facts: T | None = None
        self._asked_at = float("-inf")
        self._wanted = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def latest(self) -> T | None:
        """What was read last, at once; has newer facts read where these are too old. None before the first reading."""
        now = time.monotonic()
        if not self._is_closed and now - self._asked_at >= self._interval_seconds:
            self._asked_at = now
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wanted.set()
        return self._facts

    def close(self) -> None:
        """End the thread; `latest` then repeats itself."""
        self._is_closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        opened = self._open_reader()
        if opened is None:
            return
        with opened as read:
            while True:
                self._wanted.wait()
                self._wanted.clear()
                if self._is_closed:
                    return
                self._facts = read()
