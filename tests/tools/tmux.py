"""A program on the screen of a real terminal emulator, driven by keys: what is tested is what a person would see."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_SECONDS = 90.0

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Screen:
    """`kvd WORDS` in a tmux of its own. `close` it."""

    def __init__(self, folder: Path, *words: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._socket = folder / "tmux"
        settings = folder / "tmux.conf"
        settings.write_text("set -g status off\nset -g escape-time 0\n")
        command = shlex.join([sys.executable, "-m", "kvd", *words])
        size = ("-x", str(columns), "-y", str(rows))
        shell = f"cd {shlex.quote(str(ROOT))}; {command}; echo exit code $?; exec cat"
        variables = os.environ | {"KVD_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
        variables = {
            name: value for name, value in variables.items() if name not in ("TMUX", "NO_COLOR", "KVD_API_KEY")
        }
        self._tmux("-f", str(settings), "new-session", "-d", *size, shell, variables=variables | environment)

    def _tmux(self, *words: str, variables: dict[str, str] | None = None) -> str:
        command = ["tmux", "-u", "-S", str(self._socket), *words]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=30)
        return result.stdout

    @property
    def text(self) -> str:
        """What is on the screen now."""
        return self._tmux("capture-pane", "-p")

    def wait_for(self, *parts: str, without: str | None = None) -> str:
        """The screen once all of `parts`, and not `without`, are on it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            text = self.text
            if all(part in text for part in parts) and (without is None or without not in text):
                return text
            assert time.monotonic() < deadline, f"no {parts} on the screen:\n{text}"
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        """Keys as tmux names them: `x`, `Enter`, `Tab`, `C-c`."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, check=False)
