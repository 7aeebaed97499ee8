"""Logging: one line per event on stderr, and into whatever else is injected; crash reports.

Purpose: everything under the logger `kvd`, and warnings or worse of libraries, goes through one place, so that
a dashboard that owns the terminal is never written over. Any thread may log. Invariant: while `to_terminal` is
False nothing is written to the terminal; a terminal that went away disturbs nobody.
"""

from __future__ import annotations

import datetime
import logging
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TextIO

EventSink = Callable[[str, str, str], object]
"""Receives (level, kind, message) of each record: level as in the settings, kind is the logger's last part."""

ROOT = "kvd"

P = ParamSpec("P")


def harmless(observe: Callable[P, None]) -> Callable[P, None]:
    """Have a function that only observes never raise an Exception: its first fault is logged, later ones are not.

    What it observes goes on, and nothing depends on what it would have noted. Any thread.
    """
    was_logged = False

    @wraps(observe)
    def observe_harmlessly(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal was_logged
        try:
            observe(*args, **kwargs)
        except Exception:
            if not was_logged:
                was_logged = True
                logging.getLogger(f"{ROOT}.observe").exception("%s failed; the server goes on", observe.__qualname__)

    return observe_harmlessly


class _LineFormatter(logging.Formatter):
    """`12:03:04 warning engine: message`; a traceback only where debugging is on."""

    def __init__(self, *, with_tracebacks: bool) -> None:
        super().__init__()
        self._with_tracebacks = with_tracebacks

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{clock} {record.levelname.lower()} {_kind(record)}: {_message(record)}"
        if record.exc_info and self._with_tracebacks:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _SinkHandler(logging.Handler):
    """Hands records to an event log."""

    def __init__(self, sink: EventSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink(record.levelname.lower().replace("critical", "error"), _kind(record), _message(record))


class Logging:
    """What `setup` installed. `show` switches the terminal on and off while the program runs."""

    def __init__(self, root: logging.Logger, terminal: logging.Handler) -> None:
        self._root = root
        self._terminal = terminal

    def show(self, to_terminal: bool) -> None:
        """Start or stop writing to the terminal."""
        if to_terminal:
            self._root.addHandler(self._terminal)
        else:
            self._root.removeHandler(self._terminal)


def setup(
    level: str, *, to_terminal: bool, sink: EventSink | None = None, debug: bool = False, stream: TextIO | None = None
) -> Logging:
    """Install the handlers, in place of those of an earlier call.

    level: "debug", "info", "warning" or "error"; libraries are heard from "warning" on. debug: show tracebacks.
    """
    logging.raiseExceptions = False  # a closed stderr is no reason to fail
    logging.captureWarnings(True)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "belongs_to_kvd", False)]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    terminal: logging.Handler = logging.StreamHandler(stream or sys.stderr)
    terminal.setFormatter(_LineFormatter(with_tracebacks=debug))
    handlers = [terminal] if sink is None else [terminal, _SinkHandler(sink)]
    for handler in handlers:
        handler.belongs_to_kvd = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    installed = Logging(root, terminal)
    installed.show(to_terminal)
    return installed


def get_logger(kind: str) -> logging.Logger:
    """The logger of one room: `get_logger("engine")` is `kvd.engine`."""
    return logging.getLogger(f"{ROOT}.{kind}")


def write_crash_log(home: Path, error: BaseException, version: str) -> Path | None:
    """Write the traceback of a bug of ours under `home`/crashes; None where that is impossible."""
    now = datetime.datetime.now()
    path = home / "crashes" / f"{now:%Y%m%d-%H%M%S-%f}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f"kvd {version}, Python {sys.version}, {now.isoformat(timespec='seconds')}\n\n"
        path.write_text(head + "".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None
    return path


def _kind(record: logging.LogRecord) -> str:
    return record.name.rpartition(".")[2] if record.name.startswith(f"{ROOT}.") else record.name


def _message(record: logging.LogRecord) -> str:
    """One line, whatever was logged."""
    text = " ".join(record.getMessage().split())
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text += f" ({type(error).__name__}: {' '.join(str(error).split())})"
    return text
