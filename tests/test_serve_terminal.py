"""`kvd serve` in a real (pseudo) terminal: the dashboard shows, asks before it leaves, and gives the screen back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import make_llama
from tests.test_serve import call

ROOT = Path(__file__).resolve().parent.parent
WAIT_SECONDS = 120.0
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A program in a pseudo terminal of 100×30, and everything that it has written."""

    def __init__(self, *words: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = os.environ | {"KVD_HOME": str(home), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvd", *words],
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.written = b""

    def wait_for(self, text: bytes, start: int = 0) -> int:
        """Read until `text` was written after `start`; returns where it ends."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := self.written.find(text, start)) < 0:
            assert time.monotonic() < deadline, self.written[-2000:]
            assert self._read(), self.written[-2000:]
        return found + len(text)

    def _read(self) -> bool:
        """Read what is there, for up to a second; False once the program has closed the terminal."""
        if select.select([self._master], [], [], 1.0)[0]:
            try:
                self.written += os.read(self._master, 65536)
            except OSError:
                return False
        return True

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._read() and time.monotonic() < deadline:
            pass
        try:
            return self.process.wait(10)
        finally:
            self.close()

    def hang_up(self) -> None:
        """The terminal is closed, and the program hears of it."""
        os.close(self._master)
        self.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)


@pytest.mark.parametrize(
    "way", ["stop", pytest.param("close", marks=pytest.mark.full), pytest.param("signal", marks=pytest.mark.full)]
)
def test_the_dashboard_shows_and_gives_the_screen_back(tmp_path: Path, way: str) -> None:
    model = make_llama(tmp_path / "tiny")
    words = (str(model), "--port", "0", "--served-model-name", "tiny-one", "--kv-cache-memory-bytes", "16MiB")
    terminal = Terminal(*words, home=tmp_path / "home")
    try:
        shown = terminal.wait_for(b"tiny-one", terminal.wait_for(ENTER_SCREEN))
        if way == "signal":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.press("q")
            terminal.wait_for(b"stop the server", shown)
            terminal.press("s" if way == "stop" else "c")
        left = terminal.wait_for(LEAVE_SCREEN, shown)
        if way == "close":
            terminal.wait_for(b"serves on at http://127.0.0.1:", left)
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
        after = terminal.written[left:]
        assert b"stopping: running requests" in after
        assert b"Traceback" not in terminal.written
        # Between entering and leaving the screen, the log wrote nothing into it.
        assert b"info serve" not in terminal.written[shown:left]
    finally:
        terminal.close()


@pytest.mark.full
def test_a_terminal_that_goes_away_ends_the_server_in_order(tmp_path: Path) -> None:
    """What runs is answered in full, though nothing can be shown or logged any more."""
    model = make_llama(tmp_path / "tiny", max_position_embeddings=4096)
    words = (str(model), "--port", "0", "--served-model-name", "tiny-one", "--kv-cache-memory-bytes", "16MiB")
    terminal = Terminal(*words, home=tmp_path / "home")
    try:
        shown = terminal.wait_for(b"http://127.0.0.1:", terminal.wait_for(ENTER_SCREEN))
        terminal.wait_for(b"/v1", shown)
        url = "http://127.0.0.1:" + re.match(rb"\d+", terminal.written[shown:])[0].decode()  # type: ignore[index]
        body = {"model": "tiny-one", "prompt": "the", "max_tokens": 2000, "ignore_eos": True}
        answers: list[tuple[int, Any]] = []
        client = threading.Thread(target=lambda: answers.append(call(f"{url}/v1/completions", body)))
        client.start()
        while not call(f"{url}/kvd/requests")[1].get("requests"):
            assert client.is_alive(), answers
        terminal.hang_up()
        client.join()
        assert answers[0][0] == 200, answers
        assert answers[0][1]["usage"]["completion_tokens"] == 2000
        assert terminal.process.wait(WAIT_SECONDS) == 0
    finally:
        terminal.close()
