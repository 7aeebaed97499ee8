"""The routes that explain the engine, and the console of this process, which answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvd.config_keys import ApiKey
from kvd.errors import RequestError
from kvd.insight import BlockMap, DoctorReport, Reveal, Timeline
from kvd.observe.event_log import EventLog
from kvd.observe.local_console import REVEALED_TOKENS, LocalConsole
from kvd.server.snapshot_json import decode_snapshot
from kvd.server.state import STATE
from kvd.text.text_model import TextModel
from kvd.views import LogEvent, SessionInfo
from tests.server.conftest import Harness, StartServer
from tests.server.fake_insight import COUNTS, FINDING, MISS, TIMELINE, FakeDoctor
from tests.server.fakes import END, MODEL, FakeEngine

CHAIN = "ab" * 16
PATHS = [
    "/kvd/blocks",
    "/kvd/requests/req-ended/timeline",
    "/kvd/timelines",
    "/kvd/doctor",
    f"/kvd/reveal/{CHAIN}",
    "/kvd/log",
]

# --------------------------------------------------------------------------- who may


@pytest.mark.parametrize("path", PATHS)
async def test_routes_need_the_key_and_refuse_foreign_pages(start_server: StartServer, path: str) -> None:
    harness = await start_server(api_keys=(ApiKey("me", "secret"),), show_prompts=True)
    assert (await harness.call("GET", path))[0] == 401
    key = {"Authorization": "Bearer secret"}
    assert (await harness.call("GET", path, headers=key | {"Origin": "https://evil.example"}))[0] == 403
    assert (await harness.call("GET", path, headers=key))[0] == 200
    assert (await harness.call("GET", "/v1" + path, headers=key))[0] == 200


async def test_prompt_text_is_shown_only_where_the_setting_says_so(start_server: StartServer) -> None:
    hidden, shown = await start_server(), await start_server(show_prompts=True)
    for name in (CHAIN, MISS.request_id, "nothing"):
        status, answer = await hidden.call("GET", f"/kvd/reveal/{name}")
        assert (status, answer["error"]["code"]) == (403, "prompts_hidden")
        assert "show_prompts" in answer["error"]["message"]
    status, answer = await shown.call("GET", f"/kvd/reveal/{CHAIN}")
    assert (status, answer["ours"]) == (200, "You are helpful.")
    status, answer = await shown.call("GET", f"/kvd/reveal/{MISS.request_id}")
    assert (status, answer["ours"], answer["theirs"]) == (200, "Today is Monday", "Today is Sunday")
    status, answer = await shown.call("GET", "/kvd/reveal/nothing")
    assert (status, answer["error"]["param"]) == (404, "name")
    status, answer = await shown.call("GET", f"/kvd/reveal/{'x' * 201}")
    assert (status, answer["error"]["param"]) == (400, "name")


async def test_no_other_route_has_prompt_text(harness: Harness) -> None:
    await harness.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a-secret-word"}]})
    for path in (*PATHS, "/kvd/snapshot", "/kvd/requests", "/kvd/cache/prefixes", "/metrics"):
        async with harness.session.get(harness.url + path) as response:
            assert "a-secret-word" not in await response.text()


# --------------------------------------------------------------------------- what they say


async def test_block_map(harness: Harness) -> None:
    status, answer = await harness.call("GET", "/kvd/blocks?cells=4&group=1")
    assert status == 200
    assert msgspec.convert(answer, BlockMap) == await harness.engine.block_map(4, 1)
    _, answer = await harness.call("GET", "/kvd/blocks")
    assert (answer["group_id"], len(answer["cells"])) == (0, 10)


async def test_timelines(harness: Harness) -> None:
    status, answer = await harness.call("GET", f"/kvd/requests/{TIMELINE.request_id}/timeline")
    assert (status, msgspec.convert(answer, Timeline)) == (200, TIMELINE)
    status, answer = await harness.call("GET", "/kvd/requests/other/timeline")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")
    status, answer = await harness.call("GET", "/kvd/timelines?limit=1")
    assert (status, msgspec.convert(answer["timelines"], list[Timeline])) == (200, [TIMELINE])


async def test_timeline_of_a_choice_and_not_of_several(harness: Harness) -> None:
    _, answer = await harness.post("/v1/completions", {"prompt": ["a", "b"]})
    status, error = await harness.call("GET", f"/kvd/requests/{answer['id']}/timeline")
    assert (status, error["error"]["param"]) == (400, "request_id")
    choice = f"{answer['id']}-1"
    assert choice in error["error"]["message"]
    harness.engine.ended[choice] = TIMELINE
    assert (await harness.call("GET", f"/kvd/requests/{choice}/timeline"))[0] == 200


async def test_doctor(harness: Harness) -> None:
    status, answer = await harness.call("GET", "/kvd/doctor")
    report = msgspec.convert(answer, DoctorReport)
    assert (status, report.findings, report.recent) == (200, (FINDING,), (MISS,))
    assert report.by_cause == COUNTS


async def test_the_doctor_hears_of_answers(harness: Harness) -> None:
    doctor = harness.server.app[STATE].doctor
    assert isinstance(doctor, FakeDoctor)
    _, answer = await harness.post("/v1/completions", {"prompt": ["a", "b"]})
    reply = (*harness.engine.reply.encode(), END)
    assert sorted(doctor.answers) == [(f"{answer['id']}-{index}", reply) for index in (0, 1)]


async def test_misses_are_in_snapshot_and_events(harness: Harness) -> None:
    async with harness.session.get(harness.url + "/kvd/snapshot") as response:
        assert decode_snapshot(await response.read()).misses == COUNTS
    async with harness.session.get(harness.url + "/kvd/events") as response:
        first = await response.content.readuntil(b"\n\n")
        assert decode_snapshot(first.split(b"data: ", 1)[1]).misses == COUNTS


async def test_log(harness: Harness) -> None:
    for number in range(3):
        harness.event_log.add("info", "kind", str(number))
    _, answer = await harness.call("GET", "/kvd/log?limit=2")
    events = msgspec.convert(answer["events"], list[LogEvent])
    assert [event.message for event in events] == ["1", "2"]
    assert tuple(events) == harness.event_log.recent(2)


async def test_drop(harness: Harness) -> None:
    status, answer = await harness.post("/kvd/cache/drop", {"chain": CHAIN})
    assert (status, answer) == (200, {"chain": CHAIN, "dropped_blocks": 5})
    assert harness.event_log.recent()[-1].kind == "drop"
    status, answer = await harness.post("/kvd/cache/drop", {"chain": CHAIN})
    assert (status, answer["error"]["code"]) == (404, "chain_not_found")


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        ("/kvd/blocks", "cells", ["0", "16385", "x", "-1"]),
        ("/kvd/blocks", "group", ["-1", "x", "1001", "2"]),
        ("/kvd/timelines", "limit", ["0", "1001", "x"]),
        ("/kvd/log", "limit", ["0", "1001", "1.5"]),
        ("/kvd/events", "interval", ["0", "0.05", "61", "x", "nan", "-1", "1e3", ""]),
    ],
)
async def test_bad_parameters_are_named(harness: Harness, path: str, name: str, values: list[str]) -> None:
    for value in values:
        status, answer = await harness.call("GET", f"{path}?{name}={value}")
        assert (status, answer["error"]["param"]) == (400, name), value


async def test_the_reader_of_events_chooses_the_pace(start_server: StartServer) -> None:
    """One that asks for a tenth of a second gets several snapshots from a server whose own pace is a minute."""
    harness = await start_server(snapshot_seconds=60)
    async with harness.session.get(harness.url + "/kvd/events?interval=0.1") as response:
        for _ in range(3):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"event: snapshot")


# --------------------------------------------------------------------------- the console of this process


def open_console(text: TextModel, doctor: FakeDoctor | None) -> tuple[LocalConsole, FakeEngine, EventLog]:
    engine, log = FakeEngine(text), EventLog()
    return LocalConsole(engine, log, doctor, text.decode), engine, log


async def test_without_a_doctor_that_is_said(text_model: TextModel) -> None:
    console, _, _ = open_console(text_model, None)
    assert (await console.snapshot()).misses == ()
    with pytest.raises(RequestError, match="not examined"):
        await console.doctor()
    assert (await console.reveal(CHAIN)).ours == "You are helpful."


async def test_the_doctor_is_told_the_measured_rate(text_model: TextModel) -> None:
    doctor = FakeDoctor()
    console, engine, _ = open_console(text_model, doctor)
    report = await console.doctor()
    assert doctor.rates == [(await engine.snapshot()).prefill_tokens_per_second]
    assert report.prefill_tokens_per_second == doctor.rates[0]


async def test_a_long_prefix_is_shown_from_its_beginning(text_model: TextModel) -> None:
    console, engine, _ = open_console(text_model, FakeDoctor())
    engine.token_ids[CHAIN] = tuple(b"x" * 10_000)
    shown = await console.reveal(CHAIN)
    assert shown == Reveal(shown.title, "x" * REVEALED_TOKENS)
    assert str(REVEALED_TOKENS) in shown.title


ACTS: dict[str, tuple[Callable[[LocalConsole], Any], object]] = {
    "cache_reset": (lambda console: console.reset_cache(), 7),
    "drop": (lambda console: console.drop_prefix(CHAIN), 5),
    "pin": (lambda console: console.pin(CHAIN), 5),
    "session_saved": (lambda console: console.save_session("mine", CHAIN), SessionInfo("mine", 80, 1000)),
}


@pytest.mark.parametrize("kind", ACTS)
async def test_acts_are_logged(text_model: TextModel, kind: str) -> None:
    act, result = ACTS[kind]
    console, _, log = open_console(text_model, None)
    assert await act(console) == result
    assert [event.kind for event in log.recent()] == [kind]


async def test_what_did_nothing_is_not_logged(text_model: TextModel) -> None:
    console, _, log = open_console(text_model, None)
    assert await console.abort("nobody") is False
    assert await console.unpin(CHAIN) is False
    assert await console.pin("nothing") == 0
    assert await console.drop_prefix("nothing") == 0
    assert log.recent() == ()
    assert (await console.snapshot()).info.model == MODEL
