"""How long-running preparation tells a person that it is alive.

Purpose: one small protocol for downloads, hashing and loading; nothing in here knows a terminal library.
Owner thread: whoever runs the task; one task at a time per Progress.
Invariant: progress goes to stderr only, so that stdout stays usable by scripts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

REDRAW_SECONDS = 0.1
BAR_WIDTH = 24
PLAIN_STEP_PERCENT = 25


class Task(Protocol):
    """One running task."""

    def advance(self, amount: int) -> None:
        """Add `amount` units; negative where a download had to start over."""
        ...


class Progress(Protocol):
    """Where tasks are shown."""

    def task(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Task]:
        """Show a task of `total` units ("B" for bytes; None: unknown) until its context ends."""
        ...


class _SilentTask:
    def advance(self, amount: int) -> None:
        pass


class QuietProgress:
    """Shows nothing."""

    @contextmanager
    def _run(self) -> Iterator[Task]:
        yield _SilentTask()

    def task(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Task]:
        return self._run()


def format_amount(amount: float, unit: str) -> str:
    """`amount` for people: bytes in powers of ten, as download pages state them; else a count."""
    if unit != "B":
        return f"{amount:,.0f} {unit}"
    for suffix in ("B", "KB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {suffix}" if suffix == "B" else f"{amount:.1f} {suffix}"
        amount /= 1000
    return f"{amount:.2f} GB"


class _TerminalTask:
    def __init__(self, stream: TextIO, is_tty: bool, label: str, total: int | None, unit: str) -> None:
        self._stream = stream
        self._is_tty = is_tty
        self._label = label
        self._total = total
        self._unit = unit
        self._done = 0
        self._started = time.monotonic()
        self._last_draw = 0.0
        self._last_percent = -PLAIN_STEP_PERCENT

    def advance(self, amount: int) -> None:
        self._done += amount
        self.draw()

    def draw(self, *, final: bool = False) -> None:
        if self._is_tty:
            now = time.monotonic()
            if final or now - self._last_draw >= REDRAW_SECONDS:
                self._last_draw = now
                # \x1b[K clears what a longer line left behind.
                self._stream.write(f"\r{self._line()}\x1b[K" + ("\n" if final else ""))
                self._stream.flush()
            return
        percent = min(100, self._done * 100 // self._total) if self._total else 0
        step = percent // PLAIN_STEP_PERCENT * PLAIN_STEP_PERCENT
        if step > self._last_percent or (final and not self._total):
            self._last_percent = step
            self._stream.write(self._line() + "\n")
            self._stream.flush()

    def _line(self) -> str:
        done = format_amount(self._done, self._unit)
        if not self._total:
            return f"{self._label}: {done}"
        share = min(1.0, max(0.0, self._done / self._total))
        total = format_amount(self._total, self._unit)
        if not self._is_tty:
            return f"{self._label}: {int(share * 100):d}% of {total}"
        filled = int(share * BAR_WIDTH)
        line = f"{self._label} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%} {done} of {total}"
        seconds = time.monotonic() - self._started
        if self._unit == "B" and seconds > 0.5:
            line += f", {format_amount(self._done / seconds, 'B')}/s"
        return line


class TerminalProgress:
    """Writes to stderr: a bar that redraws itself on a terminal, else lines at 0, 25, 50, 75 and 100%."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_tty = self._stream.isatty()

    @contextmanager
    def _run(self, label: str, total: int | None, unit: str) -> Iterator[Task]:
        task = _TerminalTask(self._stream, self._is_tty, label, total, unit)
        task.draw()
        try:
            yield task
        finally:
            task.draw(final=True)

    def task(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Task]:
        return self._run(label, total, unit)
