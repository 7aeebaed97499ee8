"""Ctrl-Z and what it sends, while a dashboard is shown and afterwards. Main thread; elsewhere nothing happens.

Textual handles SIGTSTP and SIGCONT by taking its screen down and up again, from within the signal, and keeps doing so
when its screen is long gone. Both would hold up the server that shares the process. Invariant: while a dashboard is
shown SIGTSTP does nothing; after it, both signals do what they did before it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTSTP, signal.SIGCONT)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN it is not inherited by programs that are started meanwhile."""


def stay_awake() -> None:
    """From now on the process is not suspended by SIGTSTP, and SIGCONT only continues it."""
    if _is_main_thread():
        for number in _SIGNALS:
            signal.signal(number, _do_nothing)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Whatever is done to the handlers of SIGTSTP and SIGCONT meanwhile, they are afterwards what they are now."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
