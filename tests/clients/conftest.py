"""`kvd serve` with the default model, and other people's programs, each in an environment of its own.

`make test-clients` builds the environments and runs these tests; `make test` leaves them out.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_serve import ROOT, Process

FOLDER = ROOT / "build" / "clients"
PROGRAMS = Path(__file__).resolve().parent / "programs"
API_KEY = "sk-local-clients"
MODEL, ALIAS = "smollm2", "smollm2-alias"
WAIT_SECONDS = 900.0
"""A limit for a client that hangs; answers are short, but machines may be slow."""


@dataclass(frozen=True)
class Endpoint:
    """What a client has to be told, and a place for its own files."""

    base_url: str
    api_key: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the caller's settings, and no way to anywhere but loopback."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "HTTP_PROXY": "http://127.0.0.1:9",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_OFFLINE": "1",
            "KVD_TEST_URL": self.base_url,
            "KVD_TEST_KEY": self.api_key,
            "KVD_TEST_MODEL": MODEL,
            "KVD_TEST_ALIAS": ALIAS,
        }

    def run(self, environment: str, program: str, *words: str, **variables: str) -> str:
        """Run a program of `build/clients/<environment>/bin` to its end, which must be a success; gives its output."""
        path = FOLDER / environment / "bin" / program
        return self.run_path(path, *words, variables=variables)

    def run_path(self, path: Path, *words: str, variables: Mapping[str, str]) -> str:
        result = subprocess.run(
            [path, *words],
            cwd=self.folder,
            env=self.environment | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
        return result.stdout


@pytest.fixture(scope="session")
def server_url(kvd_home: Path) -> Iterator[str]:
    if not (FOLDER / ".made").exists():
        pytest.skip("the clients are not installed; make test-clients installs and runs them")
    words = ("--port", "0", "--api-key", API_KEY, "--served-model-name", MODEL, ALIAS)
    running = Process(kvd_home, *words, "--kv-cache-memory-bytes", "1GiB")
    try:
        yield running.url()
    finally:
        running.stop(signal.SIGINT)


@pytest.fixture
def endpoint(server_url: str, tmp_path: Path) -> Endpoint:
    return Endpoint(f"{server_url}/v1", API_KEY, tmp_path)
