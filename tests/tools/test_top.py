"""`kvd top`: the state as text and as JSON, and the dashboard over HTTP on a real screen."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.cells import cell_len

from kvd.cli import main
from kvd.config_keys import ApiKey
from kvd.core import Request, SamplingParams
from kvd.server.snapshot_json import decode_snapshot
from kvd.text.text_model import TextModel
from kvd.tools.status_text import status_lines
from kvd.tui.app import PAGES
from kvd.tui.view import History, Link
from kvd.views import Counters, DiskFacts, Snapshot
from tests.model.checkpoints import make_llama
from tests.server.fake_insight import FINDING
from tests.server.fakes import MODEL, FakeEngine, build_text_model
from tests.server.threaded import fake_server, scripted_server, serve_in_thread
from tests.test_serve import Process
from tests.tools.tmux import Screen, needs_tmux
from tests.tui.fakes import INFO, snapshot

HOSTILE_NAME = "a\x1b[31mclient\u202e" + "é" * 200


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return build_text_model(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def busy_server(
    text: TextModel, num_requests: int, engines: list[FakeEngine], **options: Any
) -> AsyncIterator[str]:
    """A server with requests that never end by themselves; its engine is added to `engines`."""
    engine = FakeEngine(text)
    engines.append(engine)
    engine.permits = asyncio.Semaphore(0)
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=9)
        engine.submit(Request(f"req-{number}", (1, 2, 3), sampling, 0.0, client=HOSTILE_NAME, endpoint="chat"))
    async with fake_server(text, engine=engine, **options) as url:
        yield url


def serving(text: TextModel, num_requests: int = 1, **options: Any) -> AbstractContextManager[str]:
    return serve_in_thread(lambda: busy_server(text, num_requests, options.pop("engines", []), **options))


# --------------------------------------------------------------------------- as text


@pytest.mark.parametrize("words", [["--once"], [], ["--readonly"]], ids=" ".join)
def test_without_a_terminal_it_prints_the_state_once(
    text_model: TextModel, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(text_model, 12) as url:
        assert main(["top", f"{url}/v1", *words]) == 0
    printed = capsys.readouterr().out
    for line in printed.splitlines():
        assert line.isprintable()
        assert cell_len(line) <= 80
    parts = (
        MODEL, url, "ready, up 12s", "25% active, 40% cached, 35% free of 100 blocks", "12 running, 2 waiting",
        "context 1,024", "KV int8", "60% of 50 blocks", "TTFT p50 –", "and 2 more", "decode",
        "warning: All 12 slots busy",
    )  # fmt: skip
    for part in parts:
        assert part in printed, part
    said = " ".join(printed[printed.index("doctor: ") :].split())
    assert said == f"doctor: 3,280 tokens lost in 41 requests: {FINDING.words} {FINDING.advice}"
    assert len(re.findall(r"^a·\[31mclient·é+… +decode +3 +0%", printed, re.M)) == 10


def test_ascii(text_model: TextModel, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text_model) as url:
        assert main(["top", url, "--once", "--ascii"]) == 0
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize("words", [["--json"], ["--once", "--json"]], ids=" ".join)
def test_json_is_one_snapshot(text_model: TextModel, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text_model) as url:
        assert main(["top", *words, url]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["num_running"] == 1
    assert decode_snapshot(printed).requests[0].client == HOSTILE_NAME


def text_for(current: Snapshot, *, width: int = 80) -> list[str]:
    view = History().add(current, has_details=True)
    lines = status_lines(view, None, Link("http://127.0.0.1:8000", "m", 0.5), width)
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)
    return lines


def test_what_computes_is_named_as_in_the_dashboard() -> None:
    info = replace(INFO, quantization="awq 4-bit", backend="native avx2, 2 threads", device="cpu")
    assert text_for(snapshot(info=info))[1].startswith("awq 4-bit, CPU avx2, 2 threads, context")


def test_what_went_wrong_since_the_start_is_not_said_to_be_well() -> None:
    assert "ok: All is well" in text_for(snapshot())
    calm = snapshot(counters=Counters(num_preemptions=4, recomputed_tokens=395))
    assert " ".join(text_for(calm)[-2:]).startswith("warning, since the start: 4 preemptions, 395 tokens recomputed")


def test_an_alert_that_is_too_long_goes_on_in_the_next_line() -> None:
    problem = "the disk cache could not be written: /var/cache/kvd/somewhere/deep: Read-only file system"
    lines = text_for(snapshot(disk=DiskFacts(1, 1, 2, problem=problem)))
    said = " ".join(" ".join(lines).split())
    assert f"warning: Disk cache in trouble: {problem}; see the log, check disk_cache" in said


@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_an_output_that_knows_no_other_letters_gets_none(
    text_model: TextModel, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    with serving(text_model) as url:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["top", mode, url]) == 0
    assert MODEL.encode() in written.getvalue()


# --------------------------------------------------------------------------- when it cannot


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """The one line on stderr."""
    assert main(["top", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvd: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_nothing_answers(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        line = refusal(capsys, f"127.0.0.1:{unused.getsockname()[1]}", mode)
    assert "Connection refused; is kvd running?" in line


@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_the_key_comes_by_flag_or_environment(
    text_model: TextModel, mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVD_API_KEY", raising=False)
    with serving(text_model, api_keys=(ApiKey("me", "hush"),)) as url:
        assert "--key, or KVD_API_KEY in the environment" in refusal(capsys, url, mode)
        assert "--key" in refusal(capsys, url, mode, "--key", "wrong")
        assert main(["top", url, mode, "--key", "hush"]) == 0
        monkeypatch.setenv("KVD_API_KEY", "hush")
        assert main(["top", url, mode]) == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--interval", "x"), "--interval: expected 0.1 to 60 seconds"),
        (("--interval", "0.01"), "--interval: expected 0.1 to 60 seconds"),
        (("--interval", "nan"), "--interval: expected 0.1 to 60 seconds"),
        (("--fast",), "--fast"),
        (("ftp://host",), "URL: expected http://HOST:PORT"),
        (("http://a", "http://b"), "http://b"),
    ],
    ids=str,
)
def test_bad_flags(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *words, code=2)


BODIES = [b"{garbage", b"\x00\xff", b'{"error": 3}', b"event: snapshot\ndata: {}\n\n", b"[" * 10_000, b""]


@pytest.mark.parametrize("mode", ["--once", "--json"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:10]))
def test_a_server_that_makes_no_sense(body: bytes, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        kind = "text/event-stream" if request.path == "/kvd/events" else "application/json"
        return web.Response(body=body, content_type=kind)

    with serve_in_thread(lambda: scripted_server(web.get("/{path:.*}", answer))) as url:
        line = refusal(capsys, url, mode)
    assert url in line
    assert line.strip().isprintable()


# --------------------------------------------------------------------------- on a screen


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


@needs_tmux
def test_keys_act_on_the_server(text_model: TextModel, screens: list[Screen], tmp_path: Path) -> None:
    engines: list[FakeEngine] = []
    with serving(text_model, engines=engines) as url:
        screens.append(screen := Screen(tmp_path, "top", url))
        screen.wait_for(MODEL, "1 running", "ready", f"{url}/v1")
        screen.press("x")
        screen.wait_for("Abort this request", "req-0")
        screen.press("y")
        screen.wait_for("req-0 aborted", "0 running")
        screen.press("q")
        after = screen.wait_for("exit code 0")
    assert engines[0].aborted == ["req-0"]
    assert "Traceback" not in after


@needs_tmux
def test_readonly_refuses_acts(text_model: TextModel, screens: list[Screen], tmp_path: Path) -> None:
    engines: list[FakeEngine] = []
    with serving(text_model, engines=engines) as url:
        screens.append(screen := Screen(tmp_path, "top", url, "--readonly", "--ascii"))
        shown = screen.wait_for("1 running")
        assert shown.isascii()
        screen.press("x")
        screen.wait_for("this dashboard only reads")
        screen.press("R")
        screen.wait_for("reset: this dashboard only reads")
        screen.press("C-c")
        screen.wait_for("exit code 0")
    assert not engines[0].aborted
    assert engines[0].num_resets == 0


@needs_tmux
def test_nothing_to_show_is_one_line_and_no_dashboard(screens: list[Screen], tmp_path: Path) -> None:
    screens.append(screen := Screen(tmp_path, "top", "http://127.0.0.1:9"))
    shown = screen.wait_for("exit code 1")
    assert "kvd: nothing answers at http://127.0.0.1:9: Connection refused" in shown


@needs_tmux
def test_the_dashboard_of_a_real_server_outlives_its_restart(screens: list[Screen], tmp_path: Path) -> None:
    """At 80×24, through all pages, while resized, while the server is away, and once it is back on the same port."""
    model = make_llama(tmp_path / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = (str(model), "--port", port, "--served-model-name", "tiny-one", "--kv-cache-memory-bytes", "16MiB")

    def start() -> Process:
        running = Process(tmp_path / "home", *words)
        running.url()
        return running

    running = start()
    try:
        screens.append(screen := Screen(tmp_path / "screen", "top", f"127.0.0.1:{port}"))
        screen.wait_for("tiny-one", "ready", "[1 Overview]")
        for number, page in [*enumerate(PAGES, 1), (1, PAGES[0])]:
            screen.press(str(number))
            screen.wait_for(f"[{number} {page.title}]", "ready")
        for columns, rows in ((200, 60), (60, 15), (80, 24)):
            screen.resize(columns, rows)
            screen.wait_for("tiny-one", "Requests")
        running.stop(signal.SIGTERM)
        screen.wait_for("disconnected")
        running = start()
        screen.wait_for("ready", without="disconnected")
        screen.press("q")
        assert "Traceback" not in screen.wait_for("exit code 0")
    finally:
        running.stop(signal.SIGKILL)
