"""`kvd serve` as a process, on a tiny random model: how it starts, what it says, how it ends."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.config_load import load_config
from kvd.errors import CheckpointError, StartupError
from kvd.tools.banner import budget_lines, client_lines, fitting, size
from kvd.tools.listen import base_url, close_all, open_sockets
from kvd.tools.serve import load
from kvd.tools.waiting_room import WaitingRoom
from kvd.views import EngineInfo, MemoryBudget
from tests.model.checkpoints import make_llama

ROOT = Path(__file__).resolve().parent.parent
WAIT_SECONDS = 120.0
LONG = 1500
"""Tokens of an answer that is still under way when a test acts on it: seconds on the reference kernels."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Process:
    """A running `kvd serve`, whose stderr is collected line by line."""

    def __init__(self, home: Path, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "serve", *words],
            cwd=ROOT,
            env=os.environ | {"KVD_HOME": str(home), "OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append("(end)")
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that `pattern` is found in."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or "(end)" in self.lines, WAIT_SECONDS)
            match = found()
        assert match, self.lines
        return match

    def url(self) -> str:
        return self.wait_for(r"base URL +(http://\S+)/v1$").group(1)

    def stop(self, *signals: signal.Signals) -> int:
        """Send the signals, and the exit code; kills what does not end."""
        for number in signals:
            self.process.send_signal(number)
        try:
            return self.process.wait(WAIT_SECONDS)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stdout is not None
            self.output = self.process.stdout.read()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()
            self.process.wait()


def call(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with OPENER.open(request, timeout=WAIT_SECONDS) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_llama(folder / "tiny", max_position_embeddings=4096)


@pytest.fixture
def serve(folder: Path, model: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(*words: str, **environment: str) -> Process:
        small = ("--port", "0", "--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "4", "--drain-timeout", "60")
        started.append(Process(folder / "home", str(model), *small, *words, **environment))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.stop(signal.SIGKILL)


# --------------------------------------------------------------------------- the process


def test_it_says_what_a_client_needs_answers_and_drains(serve: Any) -> None:
    words = ("--served-model-name", "tiny", "--head-quantization", "int8", "--api-key", "hush")
    running = serve(*words, "--backend", "reference")
    url = running.url()
    running.wait_for("model     tiny$")
    text = "\n".join(running.lines)
    assert "API key   required, as set by --api-key" in text
    assert "--head-quantization has no effect in this version" in text
    assert re.search(r"memory: .* free; weights .*, activations .*, KV cache", text)
    assert re.search(r"KV cache: [\d,]+ blocks of 16 tokens, int8, .* per token", text)
    assert "hush" not in text

    key = {"Authorization": "Bearer hush"}
    assert call(f"{url}/v1/models")[0] == 401
    assert call(f"{url}/v1/models", **key)[1]["data"][0]["id"] == "tiny"
    body = {"model": "tiny", "prompt": "the capital", "max_tokens": 4, "ignore_eos": True}
    status, answer = call(f"{url}/v1/completions", body, **key)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 4

    # A request that runs when the first signal comes is answered in full.
    answers: list[tuple[int, Any]] = []
    long = body | {"max_tokens": LONG}
    client = threading.Thread(target=lambda: answers.append(call(f"{url}/v1/completions", long, **key)))
    client.start()
    while not call(f"{url}/kvd/requests", **key)[1].get("requests"):
        assert client.is_alive(), answers
    assert running.stop(signal.SIGINT) == 0
    client.join()
    assert answers[0][0] == 200
    assert answers[0][1]["usage"]["completion_tokens"] == LONG
    text = "\n".join(running.lines)
    assert "stopping: running requests get up to 60 s" in text
    assert "Traceback" not in text
    assert running.output == ""


def test_a_second_signal_ends_what_runs(serve: Any) -> None:
    running = serve("--backend", "reference")
    url = running.url()
    name = call(f"{url}/v1/models")[1]["data"][0]["id"]
    body = {"model": name, "prompt": "the", "max_tokens": LONG, "ignore_eos": True}
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        try:
            answers.append(call(f"{url}/v1/completions", body))
        except (OSError, ValueError) as error:  # the connection may end without an answer
            answers.append((0, str(error)))

    client = threading.Thread(target=ask)
    client.start()
    while not call(f"{url}/kvd/requests")[1].get("requests"):
        assert client.is_alive(), answers
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("stopping: running requests get up to 60 s")
    assert call(f"{url}/health")[0] == 503
    assert running.stop(signal.SIGTERM) == 0
    client.join()
    assert "Traceback" not in "\n".join(running.lines)


def test_a_session_outlives_the_server_and_answers_say_what_was_forgotten(serve: Any) -> None:
    first = serve("--backend", "reference")
    url = first.url()
    name = call(f"{url}/v1/models")[1]["data"][0]["id"]
    text = "the capital of a country " * 12
    prompt = {"model": name, "prompt": text, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    status, cold = call(f"{url}/v1/completions", prompt)
    assert status == 200, cold
    num_tokens = cold["usage"]["prompt_tokens"]
    assert num_tokens > 32
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    status, saved = call(f"{url}/kvd/sessions/mine/save", {"chain": cold["id"]})
    assert status == 200, saved
    assert saved["num_tokens"] == (num_tokens + 7) // 16 * 16, "every full block of prompt and answer"
    assert first.stop(signal.SIGINT) == 0

    second = serve("--backend", "reference", "--kv-eviction", "streaming", "--kv-eviction-tokens", "64")
    url = second.url()
    status, restored = call(f"{url}/kvd/sessions/mine/restore", {})
    assert (status, restored) == (200, saved)
    _, warm = call(f"{url}/v1/completions", prompt | {"kv_eviction": "none"})
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == min(saved["num_tokens"], num_tokens - 1)
    assert warm["choices"] == cold["choices"]
    assert "kvd" not in warm["usage"]
    short = prompt | {"prompt": "the capital", "max_tokens": 160}
    _, forgetful = call(f"{url}/v1/completions", short)
    num_stored = forgetful["usage"]["total_tokens"] - 1
    assert forgetful["usage"]["kvd"]["dropped_tokens"] >= num_stored - 64
    assert call(f"{url}/kvd/sessions/none/restore", {})[0] == 404
    assert call(f"{url}/kvd/sessions/..%2Fmine/restore", {})[0] == 400
    assert second.stop(signal.SIGINT) == 0
    assert "Traceback" not in "\n".join(second.lines)


def test_a_port_in_use_is_said_before_anything_is_loaded(folder: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = Process(folder / "home", str(model), "--port", str(port))
        assert running.stop() == 1
    assert running.lines[0].startswith(f"kvd: port {port} on 127.0.0.1 is in use")
    assert running.lines[1:] == ["(end)"]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("/no/such/model",), 1, "/no/such/model"),
        (("--dashboard",), 2, "there is no terminal"),
        (("--quantization", "awq"), 1, "quantization: awq is asked for"),
        (("--max-model-len", "1m"), 1, "max_model_len"),
    ],
)
def test_what_cannot_start_is_one_line(
    folder: Path, model: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    name = () if words[0].startswith("/") else (str(model),)
    running = Process(folder / "home", "--port", "0", *name, *words)
    assert running.stop() == code
    errors = [line for line in running.lines if line.startswith("kvd: ")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in "\n".join(running.lines)


# --------------------------------------------------------------------------- its parts


def test_sockets_share_one_port_and_a_taken_port_is_named() -> None:
    sockets = open_sockets("localhost", 0)
    try:
        ports = {listening.getsockname()[1] for listening in sockets}
        assert len(ports) == 1
        with pytest.raises(StartupError, match="is in use"):
            open_sockets("localhost", ports.pop())
    finally:
        close_all(sockets)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300])
def test_an_address_of_elsewhere_is_one_line(host: str) -> None:
    with pytest.raises(StartupError, match="address"):
        open_sockets(host, 0)


def test_base_urls() -> None:
    assert base_url("127.0.0.1", 8000) == "http://127.0.0.1:8000/v1"
    assert base_url("0.0.0.0", 8000) == "http://127.0.0.1:8000/v1"
    assert base_url("::", 1) == "http://[::1]:1/v1"


def test_the_waiting_room_answers_and_hands_the_sockets_over(caplog: pytest.LogCaptureFixture) -> None:
    sockets = open_sockets("127.0.0.1", 0)
    try:
        port = sockets[0].getsockname()[1]
        room = WaitingRoom(sockets)
        for path in ("health", "v1/chat/completions"):
            status, body = call(f"http://127.0.0.1:{port}/{path}", None if path == "health" else {})
            assert status == 503
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert body["error"]["code"] == "server_is_overloaded"
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as garbage:
            garbage.sendall(b"\x16\x03\x01\r\n\r\n")
            answer = b"".join(iter(lambda: garbage.recv(65536), b""))
        assert answer.split()[1] == b"400"
        assert "malformed" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as unfinished:
            unfinished.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            assert b"503" in unfinished.recv(65536)
        room.close()
        room.close()
        gc.collect()
        assert not [record for record in caplog.records if "pending" in record.getMessage()]
        # Nobody answers now, but the address is still taken and connections queue up.
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(StartupError, match="is in use"):
            open_sockets("127.0.0.1", port)
    finally:
        close_all(sockets)


def info(**changes: Any) -> EngineInfo:
    budget = MemoryBudget(
        total_bytes=8 * 2**30, weight_bytes=2**27, activation_bytes=2**26, kv_bytes=2**30, num_blocks=1000,
        block_bytes=2**20, bytes_per_token=24_000, bytes_per_token_16bit=48_000,
    )  # fmt: skip
    values: dict[str, Any] = {
        "model": "m", "served_names": ("m", "n"), "architecture": "llama", "quantization": "gguf q4_1",
        "backend": "reference", "device": "cpu", "kv_cache_dtype": "int8", "max_model_len": 8192, "max_num_seqs": 16,
        "max_num_batched_tokens": 256, "vocab_size": 100, "prefix_caching": True, "budget": budget, "created": 0,
        "version": "1.2.3",
    }  # fmt: skip
    return EngineInfo(**values | changes)


def test_the_budget_is_told_in_numbers() -> None:
    lines = budget_lines(info())
    assert lines == [
        "memory: 8.00 GiB free; weights 128 MiB, activations 64 MiB, KV cache 1.00 GiB",
        "KV cache: 1,000 blocks of 16 tokens, int8, 23.44 KiB per token (50% of 16 bits)",
        "fits: 7 requests of 2,048 tokens, 1 of 8,192; at most 16 run at once",
    ]
    assert fitting(info().budget, 100) == "142 requests of 100 tokens"
    assert size(0) == "0 B"
    assert size(1536) == "1.5 KiB"


def test_the_three_things_that_a_client_needs() -> None:
    lines = client_lines("http://x/v1", info(), needs_key=False, key_origin="")
    assert lines[1:] == ["  base URL  http://x/v1", "  API key   none needed", "  model     m, n"]


def test_weights_that_overflow_are_the_checkpoints_fault(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: Any, **__: Any) -> None:
        raise FloatingPointError("logits of row 0 are not finite")

    monkeypatch.setattr("kvd.engine.build.build_engine", overflow)
    config = load_config(None, (), {"KVD_HOME": str(model.parent)}).config
    with pytest.raises(CheckpointError, match="not finite"):
        load(dataclasses.replace(config, model=str(model)))
