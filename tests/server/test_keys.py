"""Named keys, the file that is read again, limits of keys, and what the errors say about keys and base URLs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.config_docs import resolved_yaml
from kvd.config_keys import ApiKey, ApiKeys, KeyLimits, read_key_file
from kvd.config_kinds import ValueRefused
from kvd.config_load import LoadedConfig, load_config
from kvd.errors import ConfigError, RequestError
from kvd.server.keys import CHECK_SECONDS, Client, KeyRing
from kvd.server.limits import Limits
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MODEL

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": USER}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --------------------------------------------------------------------------- the setting


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("one", [("key 1", "one")]),
        (["one", "two"], [("key 1", "one"), ("key 2", "two")]),
        ('["one", "two"]', [("key 1", "one"), ("key 2", "two")]),
        ({"alice": "one", "bobs box": "two"}, [("alice", "one"), ("bobs box", "two")]),
        ('{"alice": "one"}', [("alice", "one")]),
    ],
)
def test_the_setting_takes_keys_with_and_without_names(raw: Any, expected: list[tuple[str, str]]) -> None:
    kind = ApiKeys()
    keys = kind.parse(raw)
    assert [(each.name, each.key) for each in keys] == expected
    import yaml

    assert kind.parse(yaml.load(kind.show(keys), Loader=yaml.BaseLoader)) == keys


@pytest.mark.parametrize(
    "raw", ["", [], ["a", " "], {"": "k"}, {"a\nb": "k"}, {"a": ""}, "{", '{"a": 1}', '{"a": ["k"]}']
)
def test_other_forms_are_refused(raw: Any) -> None:
    if raw == []:
        assert ApiKeys().parse(raw) == ()
        return
    with pytest.raises(ValueRefused):
        ApiKeys().parse(raw)


def config_of(folder: Path, text: str) -> LoadedConfig:
    path = folder / "kvd.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_a_configuration_with_keys(tmp_path: Path) -> None:
    named = config_of(tmp_path, "host: 0.0.0.0\napi_key: {alice: 0123, bob: sk-b}\n").config
    assert [(each.name, each.key) for each in named.api_key] == [("alice", "0123"), ("bob", "sk-b")]
    assert "sk-b" not in resolved_yaml(named, {})
    assert load_config(environment={"KVD_API_KEY": '{"ci": "x"}'}).config.api_key == (ApiKey("ci", "x"),)
    keys = tmp_path / "keys.yaml"
    keys.write_text("carol: sk-c\n")
    keys.chmod(0o644)
    loaded = config_of(tmp_path, f"host: 0.0.0.0\napi_key_file: {keys}\n")
    assert any("chmod 600" in notice for notice in loaded.notices)
    keys.chmod(0o600)
    assert not config_of(tmp_path, f"api_key_file: {keys}\n").notices


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("api_key: {alice: hush, bob: hush}\n", "twice"),
        ("api_key: {al/ice: hush}\n", "names of 1 to 64"),
        ("api_key: [hush, [hush]]\n", "a key, a list of keys"),
        ("api_key: {alice: }\n", "a key, a list of keys"),
        ("api_key_file: /none/keys.yaml\n", "No such file"),
        ("max_body_size: 2MiB\nmax_body_bytes_in_flight: 1MiB\n", "max_body_bytes_in_flight"),
    ],
)
def test_a_wrong_configuration_is_one_line_that_shows_no_key(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, text)
    assert part in str(caught.value)
    assert "hush" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_key_is_not_in_its_representation() -> None:
    assert "secret" not in repr(ApiKey("alice", "secret"))


# --------------------------------------------------------------------------- the file


def write(path: Path, text: str) -> None:
    """Replace the file as editors do; the new one has another inode or time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def test_the_file_has_names_keys_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "alice: 0123\nbob:\n  key: b\n  max_requests_in_flight: 4\n  queue_share: 0.25\n  isolate_cache: true\n"
    )
    assert read_key_file(path) == (ApiKey("alice", "0123"), ApiKey("bob", "b", KeyLimits(4, 0.25, True)))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "at least one line"),
        ("- a\n", "at least one line"),
        ("alice: [\n", "not valid YAML"),
        ("alice: \xa0\n", "expected a key"),
        ("alice: {queue_share: 1}\n", "expected a key"),
        ("alice: {key: a, color: red}\n", "unknown field 'color'"),
        ("alice: {key: hush-hush, queue_share: 0}\n", "queue_share"),
        ("alice: {key: hush-hush, queue_share: nan}\n", "queue_share"),
        ("alice: {key: hush-hush, max_requests_in_flight: 0}\n", "max_requests_in_flight"),
        ("alice: {key: hush-hush, max_requests_in_flight: 1e3}\n", "max_requests_in_flight"),
        ("alice: {key: hush-hush, isolate_cache: maybe}\n", "isolate_cache"),
        ("alice: {key: hush-hush, isolate_cache: [true]}\n", "isolate_cache"),
        ("alice: hush hush\n", "without blanks"),
        ("alice: hush-hush\nbob: hush-hush\n", "twice"),
        ("{a: {b: c}}: d\n", ""),
        ("ali/ce: hush-hush\n", "a name"),
    ],
)
def test_a_wrong_file_is_one_line_that_shows_no_key(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    message = str(caught.value)
    assert part in message
    assert "keys.yaml" in message
    assert "hush" not in message
    assert len(message.splitlines()) == 1


def test_a_changed_file_is_read_again_and_a_damaged_one_changes_nothing(tmp_path: Path, log_lines: Any) -> None:
    path = tmp_path / "keys.yaml"
    now = [100.0]
    write(path, "alice: a\n")
    ring = KeyRing((ApiKey("key 1", "fixed"),), path, clock=lambda: now[0])

    def names_after(seconds: float) -> list[str]:
        now[0] += seconds
        ring.refresh()
        return [each.name for each in ring.keys]

    write(path, "bob: b\n")
    assert names_after(CHECK_SECONDS / 2) == ["key 1", "alice"]
    assert names_after(CHECK_SECONDS) == ["key 1", "bob"]
    for text in ("bob: [\n", "bob: fixed\n", ""):
        write(path, text)
        log_lines.lines.clear()
        for _ in range(3):
            assert names_after(CHECK_SECONDS) == ["key 1", "bob"]
        assert len(log_lines.lines) == 1, text
        assert "stay so" in log_lines.lines[0]
    path.unlink()
    assert names_after(CHECK_SECONDS) == ["key 1", "bob"]
    write(path, "carol: c\n")
    assert names_after(CHECK_SECONDS) == ["key 1", "carol"]
    assert ring.find("bob") == ApiKey("bob", "b"), "a request of his may still be on its way"


def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyRing((), tmp_path / "missing.yaml")


async def test_a_key_of_the_file_opens_the_server(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path, "alice: a\n")
    harness = await start_server(api_key_file=path)
    assert (await harness.post(CHAT, BODY))[0] == 401
    assert (await harness.post(CHAT, BODY, headers=bearer("a")))[0] == 200
    assert harness.engine.submitted[0].client == "alice"


# --------------------------------------------------------------------------- limits


async def test_a_key_over_its_limit_is_told_when_to_come_back(start_server: StartServer) -> None:
    keys = (ApiKey("busy", "b", KeyLimits(max_requests_in_flight=2)), ApiKey("other", "o"))
    harness = await start_server(api_keys=keys)
    harness.engine.permits = asyncio.Semaphore(0)
    running = [asyncio.create_task(harness.post(CHAT, BODY, headers=bearer("b"))) for _ in range(2)]
    await harness.engine.reach(2)
    async with harness.session.post(harness.url + CHAT, json=BODY, headers=bearer("b")) as response:
        assert response.status == 429
        error = (await response.json())["error"]
        seconds = response.headers["Retry-After"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["message"].endswith(f"try again in {seconds}s")
    assert int(seconds) >= 1
    other = asyncio.create_task(harness.post(CHAT, BODY, headers=bearer("o")))
    await harness.engine.reach(3)
    assert (await harness.call("GET", "/kvd/requests", headers=bearer("b")))[0] == 200
    harness.engine.permits = None
    for task in (*running, other):
        task.cancel()
    await harness.engine.reach(0)
    assert (await harness.post(CHAT, BODY, headers=bearer("b")))[0] == 200


async def test_a_key_fills_its_part_of_the_queue_only(start_server: StartServer) -> None:
    keys = (ApiKey("batch", "b", KeyLimits(queue_share=0.5)),)
    harness = await start_server(api_keys=keys, max_waiting=4)
    harness.engine.permits = asyncio.Semaphore(0)
    headers = bearer("b")
    waiting = [asyncio.create_task(harness.post(CHAT, BODY, headers=headers)) for _ in range(2)]
    await harness.engine.reach(2)
    status, answer = await harness.post(CHAT, BODY, headers=headers)
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(harness.engine.submitted) == 2
    harness.engine.permits.release()  # one of the two gets its first token
    while (status := (await harness.post("/v1/completions", {"prompt": ["a", "b"]}, headers=headers))[0]) == 429:
        assert len(harness.engine.running_ids) <= 3, "nothing of a refused request goes on"
        if len(harness.engine.submitted) > 2:
            break
        await asyncio.sleep(0.01)
    assert status == 429
    await harness.engine.reach(2)
    harness.engine.permits = None
    for task in waiting:
        task.cancel()
    await harness.engine.reach(0)


async def test_an_isolated_key_shares_its_prefixes_with_nobody(start_server: StartServer) -> None:
    keys = (
        ApiKey("alice", "a", KeyLimits(isolate_cache=True)),
        ApiKey("bob", "b", KeyLimits(isolate_cache=True)),
        ApiKey("carol", "c"),
    )
    harness = await start_server(api_keys=keys)
    for key, salt in (("a", "s"), ("a", None), ("b", "s"), ("c", "s"), ("c", None)):
        await harness.post(CHAT, {**BODY, "cache_salt": salt}, headers=bearer(key))
    salts = [request.cache_salt for request in harness.engine.submitted]
    assert len(set(salts)) == 5
    assert salts[3:] == ["s", ""]
    status, _ = await harness.post(CHAT, {**BODY, "cache_salt": salts[1]}, headers=bearer("b"))
    assert status == 200
    assert harness.engine.submitted[-1].cache_salt not in salts, "a salt that leaked opens nothing to another such key"


def test_limits_give_back_what_they_counted() -> None:
    now = [0.0]
    limits, client = Limits(8, clock=lambda: now[0]), Client("x", KeyLimits(max_requests_in_flight=1))

    def hold_for(seconds: float) -> Iterator[None]:
        with limits.hold(client):
            yield
            now[0] += seconds

    for _ in range(50):
        first = hold_for(40.0)
        next(first)
        with pytest.raises(RequestError) as caught, limits.hold(client):
            raise AssertionError("not reached")
        with pytest.raises(StopIteration):
            next(first)
    assert caught.value.retry_after_seconds == 40


# --------------------------------------------------------------------------- errors that help


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"Authorization": "Bearer Bearer right"}, "'Bearer' in front of it twice"),
        ({"Authorization": 'Bearer "right"'}, "quotes around it"),
        ({"Authorization": "Bearer 'right"}, "quotes around it"),
        ({"x-api-key": "right”"}, "quotes around it"),
        ({"Authorization": "Bearer ri ght"}, "a blank in it"),
        ({"Authorization": "Bearer $KVD_API_KEY"}, "the name of a variable"),
        ({"x-api-key": "%KVD_API_KEY%"}, "the name of a variable"),
        ({"Authorization": "Bearer "}, "is empty"),
        ({"Authorization": "Basic right"}, "Authorization: Bearer KEY"),
        ({"Authorization": "right"}, "Authorization: Bearer KEY"),
        ({}, "Authorization: Bearer KEY"),
        ({"Authorization": "Bearer wrong"}, "the API key is wrong"),
    ],
)
async def test_a_mangled_key_is_told_how(start_server: StartServer, headers: dict[str, str], part: str) -> None:
    harness = await start_server(api_keys=(ApiKey("me", "right"),))
    status, answer = await harness.post(CHAT, BODY, headers=headers)
    assert status == 401
    assert part in answer["error"]["message"]
    assert "right" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/v1/chat/completions", "has /v1 twice; it is {}/v1"),
        ("/v1/v1/messages", "has /v1 twice; it is {}"),
        ("/v1/v1/messages/count_tokens", "has /v1 twice; it is {}"),
        ("/v1/chat/completions/chat/completions", "the base URL is {}/v1"),
        ("/v1/chat/completions/v1/models", "has /v1 twice; it is {}/v1"),
        ("/openai/v1/completions", "the base URL is {}/v1"),
        ("/v1//chat/completions", "a slash too many; it is {}/v1"),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_one(start_server: StartServer, path: str, part: str) -> None:
    harness = await start_server()
    status, answer = await harness.post(path, BODY)
    assert status == 404
    assert answer["error"]["message"].endswith(part.format(harness.url))


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/kvd/snapshot"), ("POST", "/kvd/requests/a/abort"), ("GET", "/health")],
)
@pytest.mark.parametrize("slashes", ["/", "//"])
async def test_a_slash_at_the_end_is_too_many(harness: Harness, method: str, path: str, slashes: str) -> None:
    status, answer = await harness.call(method, path + slashes)
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert answer["error"]["message"] == f"there is no route {method} {path}{slashes}: {path} has no slash at its end"


@pytest.mark.parametrize("path", ["/", "//", "/nothing/", "/v1/"])
async def test_a_slash_behind_no_route_gets_no_advice(harness: Harness, path: str) -> None:
    status, answer = await harness.call("GET", path)
    assert status == 404
    assert ":" not in answer["error"]["message"]


async def test_other_unknown_routes_get_no_advice(start_server: StartServer) -> None:
    harness = await start_server()
    assert "base URL" not in (await harness.post("/v1/images/generations", BODY))[1]["error"]["message"]


# --------------------------------------------------------------------------- bodies in flight


async def until_status(harness: Harness, body: bytes, status: int) -> None:
    """Ask until the server has noticed what another connection did."""
    async with asyncio.timeout(30):
        while (await harness.post("/tokenize", body))[0] != status:
            pass


async def test_bodies_in_flight_are_counted_together(start_server: StartServer) -> None:
    harness = await start_server(max_body_bytes=1000, max_body_bytes_in_flight=1500)
    reader, writer = await harness.connect()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head + b'{"prompt": "' + b"x" * 888)  # 900 bytes; the rest does not come yet
    await writer.drain()
    large = b'{"prompt": "abc"}'.ljust(900)
    await until_status(harness, large, 503)
    async with harness.session.post(harness.url + "/tokenize", data=large) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert "max_body_bytes_in_flight" in (await response.json())["error"]["message"]
    assert (await harness.post("/tokenize", b'{"prompt": "abc"}'.ljust(500)))[0] == 200
    writer.write(b"y" * 98 + b'"}')
    assert b"200 OK" in await reader.readline()
    assert (await harness.post("/tokenize", large))[0] == 200


async def test_a_client_that_leaves_gives_its_bytes_back(start_server: StartServer) -> None:
    harness = await start_server(max_body_bytes=1000, max_body_bytes_in_flight=1000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    large = b'{"prompt": "abc"}'.ljust(900)
    for _ in range(5):
        _, writer = await harness.connect()
        writer.write(head + b"x" * 900)
        await writer.drain()
        await until_status(harness, large, 503)
        writer.close()
        await until_status(harness, large, 200)
