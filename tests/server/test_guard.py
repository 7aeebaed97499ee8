"""Keys, Host, Origin and CORS."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from kvd.config_keys import ApiKey
from kvd.server.app import ROUTES
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MODEL

KEYS = (ApiKey("alice", "key-a"), ApiKey("bob", "clé-b"))
LOCAL_PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


def real_paths() -> list[tuple[str, str]]:
    """Every route with its variables filled in, with and without /v1."""
    return [
        (method, prefix + path.replace("{model:.+}", MODEL).replace("{request_id}", "none").replace("{name}", "none"))
        for method, path, _ in ROUTES
        for prefix in ("", "/v1")
    ]


async def test_every_route_but_two_needs_the_key(start_server: StartServer) -> None:
    harness = await start_server(api_keys=KEYS)
    for method, path in real_paths():
        async with harness.session.request(method, harness.url + path) as response:
            if path.endswith(("/health", "/metrics")):
                assert response.status == 200
                continue
            assert response.status == 401, path
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = (await response.json())["error"]
            assert error["type"] == "authentication_error"
            assert "/messages" in path or error["code"] == "invalid_api_key"
    assert harness.engine.num_resets == 0


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ({"Authorization": "Bearer key-a"}, "alice"),
        ({"Authorization": "bearer  clé-b"}, "bob"),
        ({"x-api-key": "key-a"}, "alice"),
        ({"Authorization": "Bearer wrong", "x-api-key": "clé-b"}, "bob"),
    ],
)
async def test_both_headers_carry_a_key(start_server: StartServer, headers: dict[str, str], client: str) -> None:
    harness = await start_server(api_keys=KEYS)
    status, _ = await harness.post("/v1/chat/completions", {"messages": USER}, headers=headers)
    assert status == 200
    assert harness.engine.submitted[0].client == client


async def test_without_keys_a_client_is_its_program_and_address(harness: Harness) -> None:
    body = {"prompt": "a"}
    for agent in ("aider/1.0", "x" * 100):
        headers = {"User-Agent": agent, "X-Forwarded-For": "8.8.8.8"}
        assert (await harness.post("/v1/completions", body, headers=headers))[0] == 200
    clients = [request.client for request in harness.engine.submitted]
    assert clients == ["aider/1.0 127.0.0.1", "x" * 59 + "… 127.0.0.1"]


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": "key-a"}, {"Authorization": "Basic key-a"}, {"Authorization": "Bearer key-a2"},
        {"Authorization": "Bearer key-"}, {"Authorization": "Bearer"}, {"x-api-key": ""}, {"x-api-key": "KEY-A"},
    ],
)  # fmt: skip
async def test_anything_else_is_a_401(start_server: StartServer, headers: dict[str, str]) -> None:
    harness = await start_server(api_keys=KEYS)
    assert (await harness.post("/v1/chat/completions", {"messages": USER}, headers=headers))[0] == 401
    assert harness.engine.submitted == []


async def test_client_raises_its_authentication_error(start_server: StartServer) -> None:
    harness = await start_server(api_keys=KEYS)
    with pytest.raises(openai.AuthenticationError):
        await harness.client("wrong").chat.completions.create(model=MODEL, messages=USER, stream=True)


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("localhost:8000", {}, 200),
        ("LOCALHOST", {}, 200),
        ("kvd.localhost:1", {}, 200),
        ("127.0.0.1:8000", {}, 200),
        ("127.8.0.1", {}, 200),
        ("[::1]:8000", {}, 200),
        ("evil.example", {}, 403),
        ("localhost.evil.example:8000", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("192.168.1.5:8000", {}, 403),
        ("", {}, 403),
        ("192.168.1.5:8000", {"api_keys": KEYS}, 200),
        ("[fe80::1]", {"api_keys": KEYS}, 200),
        ("evil.example", {"api_keys": KEYS}, 403),
        ("box.lan:8000", {"allowed_hosts": ("box.lan",)}, 200),
        ("BOX.lan.", {"allowed_hosts": ("box.lan",)}, 200),
        ("other.lan", {"allowed_hosts": ("box.lan",)}, 403),
        ("anything", {"allowed_hosts": ("*",)}, 200),
        ("10.0.0.7", {"host": "10.0.0.7"}, 200),
    ],
)
async def test_host(start_server: StartServer, host: str, settings: dict[str, Any], status: int) -> None:
    harness = await start_server(**settings)
    found, answer = await harness.call("GET", "/health", headers={"Host": host})
    assert found == status
    if status == 403:
        assert (answer["error"]["type"], answer["error"]["code"]) == ("permission_error", None)
        assert "allowed_hosts" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "settings", "is_allowed"),
    [
        (LOCAL_PAGE, {}, True),
        ("https://127.0.0.1:9", {}, True),
        ("http://[::1]:80", {}, True),
        ("https://chat.example.org", {}, False),
        ("http://localhost.evil.example", {}, False),
        ("null", {}, False),
        ("file://", {}, False),
        ("ftp://localhost", {}, False),
        ("http://localhost:x", {}, True),
        ("chrome-extension://abc", {}, False),
        ("http://[", {}, False),
        ("https://chat.example.org", {"allowed_origins": ("https://chat.example.org",)}, True),
        ("HTTPS://chat.example.org", {"allowed_origins": ("https://Chat.example.org/",)}, True),
        ("http://chat.example.org", {"allowed_origins": ("https://chat.example.org",)}, False),
        ("https://chat.example.org:444", {"allowed_origins": ("https://chat.example.org",)}, False),
        ("https://anyone", {"allowed_origins": ("*",)}, True),
    ],
)
async def test_origin(start_server: StartServer, origin: str, settings: dict[str, Any], is_allowed: bool) -> None:
    harness = await start_server(**settings)
    for method, path in (("GET", "/v1/models"), ("POST", "/kvd/cache/reset"), ("GET", "/nothing")):
        async with harness.session.request(method, harness.url + path, headers={"Origin": origin}) as response:
            assert (response.status != 403) == is_allowed
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
            assert "Origin" in response.headers["Vary"]
    assert harness.engine.num_resets == int(is_allowed)


async def test_preflight_needs_no_key(start_server: StartServer) -> None:
    harness = await start_server(api_keys=KEYS)
    for _, path in real_paths():
        headers = {"Origin": LOCAL_PAGE, **PREFLIGHT}
        async with harness.session.options(harness.url + path, headers=headers) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == LOCAL_PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    headers["Origin"] = "https://evil.example"
    async with harness.session.options(harness.url + "/v1/models", headers=headers) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_real_call_without_key_is_a_401_with_cors(start_server: StartServer) -> None:
    harness = await start_server(api_keys=KEYS)
    for stream in (False, True):
        body = {"model": MODEL, "messages": USER, "stream": stream}
        headers = {"Origin": LOCAL_PAGE}
        async with harness.session.post(harness.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == LOCAL_PAGE


async def test_stream_has_cors_and_request_id(harness: Harness) -> None:
    headers = {"Origin": LOCAL_PAGE}
    body = {"model": MODEL, "messages": USER, "stream": True}
    async with harness.session.post(harness.url + "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.headers["Access-Control-Allow-Origin"] == LOCAL_PAGE
        assert response.headers["X-Request-Id"] == harness.engine.submitted[0].request_id
        assert response.headers["Cache-Control"] == "no-cache"
        await response.read()


async def test_keys_and_queries_are_never_logged(start_server: StartServer, log_lines: Any) -> None:
    harness = await start_server(api_keys=KEYS)
    headers = {"Authorization": "Bearer key-a", "User-Agent": "é\u2028y"}
    await harness.post("/v1/chat/completions?token=SECRET", {"messages": USER}, headers=headers)
    assert await log_lines.find("/v1/chat/completions 200")
    assert not any("key-a" in line or "SECRET" in line or "Hi" in line for line in log_lines.lines)


async def test_who_only_watches_fills_no_log(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A dashboard asks several times a second; what it does, and what fails, is told all the same."""
    with caplog.at_level(logging.INFO, logger="kvd.server"):
        for path in ("/kvd/snapshot", "/v1/kvd/blocks", "/health", "/metrics"):
            async with harness.session.get(harness.url + path) as response:
                assert response.status == 200
        async with harness.session.get(harness.url + "/kvd/events") as response:
            await response.content.readuntil(b"\n\n")
        assert not caplog.messages
        await harness.call("GET", "/kvd/requests/nobody/timeline")
        await harness.call("POST", "/kvd/cache/reset")
    assert [message.split()[1:3] for message in caplog.messages] == [
        ["/kvd/requests/nobody/timeline", "404"],
        ["/kvd/cache/reset", "200"],
    ]
