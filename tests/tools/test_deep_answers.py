"""Endpoints that answer with JSON nested beyond all reason: every command says so in one line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from kvd import cli
from tests.server.threaded import scripted_server, serve_in_thread

DEEP = "[" * 200_000


@pytest.fixture(params=[200, 500])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=DEEP, status=request.param, content_type="application/json")

    with serve_in_thread(lambda: scripted_server(web.get("/{path:.*}", answer))) as url:
        yield url


@pytest.mark.parametrize(
    "words",
    [("bench", "--url"), ("profile",), ("doctor",), ("top", "--once"), ("chat", "--url"), ("plan", "x", "--from")],
)
def test_is_one_line(
    url: str,
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert cli.main([*words, url]) in (1, 2)
    errors = capsys.readouterr().err
    assert "internal error" not in errors
    assert len([line for line in errors.splitlines() if line.startswith("kvd: ")]) == 1, errors
