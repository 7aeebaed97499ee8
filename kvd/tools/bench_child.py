"""A `kvd serve` of our own to measure, and its end in every way out.

Purpose: start it on a free loopback port, wait until it serves, and stop it when the benchmark ends, fails or is
interrupted. Owner: the main thread; one more thread reads what the child says, so that it never waits for us.
Invariant: when the context is left, the process is gone.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvd.tools.bench_answer import BenchFailed

STOP_SECONDS = 10.0
"""How long the child gets to end after each signal."""

_BASE_URL = re.compile(r"^\s*base URL +(http://\S+)/v1$")


@contextlib.contextmanager
def own_server(words: Sequence[str]) -> Iterator[str]:
    """`http://host:port` of a `kvd serve` with these flags, ready; it is stopped on the way out.

    Raises BenchFailed with its own last words where it does not start.
    """
    held = _HeldSignals()  # an exception inside Popen would leave a child that nobody knows
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd", "serve", *words, "--no-dashboard", "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # a Ctrl-C in the terminal is for us; we end the child
    )
    listener = _Listener(process)
    try:
        held.release()
        yield listener.wait_for_url()
    except BenchFailed as error:
        if listener.url is None:
            raise
        # A connection breaks a moment before its process is gone.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        if code is None:
            raise
        raise BenchFailed(f"{error}; kvd serve ended with exit code {code}: {listener.last_words()}") from None
    finally:
        _stop(process)
        listener.close()


class _HeldSignals:
    """Notes SIGINT, SIGTERM and SIGHUP from now on; `release` restores the handlers and delivers what came. A child
    that is started meanwhile has the default handlers."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run on the main thread alone
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: self._received.append(number))

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._received:
            signal.raise_signal(self._received[0])


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask, ask again, and make sure."""
    try:
        for _ in range(2):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
    finally:
        process.kill()  # nothing happens where it has ended
        process.wait()


class _Listener:
    """Reads the child's stderr to its end; keeps the base URL and the latest lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.url: str | None = None
        self._process = process
        self._lines: deque[str] = deque(maxlen=20)
        self._ready_or_ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kvd-serve-stderr", daemon=True)
        self._thread.start()

    def wait_for_url(self) -> str:
        self._ready_or_ended.wait()
        if self.url is None:
            code = self._process.wait()
            raise BenchFailed(f"kvd serve did not start (exit code {code}): {self.last_words()}")
        return self.url

    def last_words(self) -> str:
        """The latest line of ours, such as the one error line of a failed start; else the latest line."""
        own = [line.removeprefix("kvd: ") for line in self._lines if line.startswith("kvd: ")]
        return [*(list(self._lines) or ["it said nothing"]), *own][-1]

    def close(self) -> None:
        """The process has ended, hence its stderr too."""
        self._thread.join(STOP_SECONDS)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.strip())
            found = _BASE_URL.match(line)
            if found:
                self.url = found.group(1)
                self._ready_or_ended.set()
        self._ready_or_ended.set()
