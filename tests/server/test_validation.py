"""What is refused with a 400 that names the parameter; the next request is always fine."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest

from kvd.errors import RequestError
from kvd.server.chat_types import ChatRequest
from kvd.server.validation import decode_body
from tests.server.conftest import USER, Harness
from tests.server.fakes import VOCAB_SIZE

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
BAD_PATTERN = {"type": "function", "function": {"name": "bad", "parameters": {"type": "string", "pattern": "("}}}
BAD_TOOL = {"type": "function", "function": {"name": "bad", "parameters": {"type": "strnig"}}}

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", 2.01), ("top_p", 0), ("top_p", 7), ("top_p", -0.1),
    ("top_k", VOCAB_SIZE + 1), ("top_k", -2), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("n", 0), ("n", 129), ("n", -1), ("seed", 2**63),
    ("seed", -(2**63) - 1), ("seed", 10**40), ("max_tokens", 0), ("max_tokens", -1), ("max_completion_tokens", 0),
    ("min_tokens", -1), ("priority", 2**31), ("top_logprobs", 21), ("top_logprobs", -1),
    ("logit_bias", {str(VOCAB_SIZE): 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 100.5}), ("logit_bias", {"1": -101}), ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", [-1]), ("stop", ["x"] * 17), ("stop", ""), ("stop", ["a", ""]),
    ("stop", "x" * 5000), ("messages", []),
]  # fmt: skip

WRONG_TYPE: list[tuple[str, Any]] = [
    ("temperature", "hot"), ("temperature", True), ("max_tokens", 1.5), ("max_tokens", "10"), ("max_tokens", True),
    ("stream", "yes"), ("stream", 1), ("messages", "Hi"), ("messages", {}), ("messages", None), ("stop", 3),
    ("model", 3),
    ("logit_bias", [1]), ("seed", 1.5), ("logprobs", 3), ("top_logprobs", "5"), ("chat_template_kwargs", []),
    ("cache_salt", 5), ("ignore_eos", "no"), ("stop_token_ids", 5), ("response_format", "text"), ("tools", {}),
    ("stream_options", True),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE + WRONG_TYPE)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_value_is_a_400_naming_the_parameter(harness: Harness, field: str, value: Any, stream: bool) -> None:
    error = await harness.chat_error(**{"stream": stream, field: value})
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert len(error["message"]) < 300
    assert harness.engine.submitted == []
    assert (await harness.post("/v1/chat/completions", {"messages": USER}))[0] == 200


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"messages": [], "temperature": NaN}', "temperature"),
        (b'{"messages": [], "top_p" : -Infinity}', "top_p"),
        (b'{"messages": [], "min_p":Infinity, "x": 1}', "min_p"),
        (b'{"messages": [], "temperature": 1e999}', "temperature"),
        (b'{"messages": [NaN]}', None),
    ],
)
async def test_numbers_that_are_not_finite(harness: Harness, raw: bytes, param: str | None) -> None:
    status, answer = await harness.post("/v1/chat/completions", raw)
    assert status == 400
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"{}}", b'{"messages": [}', b"\xff\xfe", b'{"messages": "\xff"}',
        b'{"messages": "\\ud800"}', b"x" * 100_000, b'{"a":' * 100_000, b"[" * 1_000_000,
        b'{"messages": [], "unknown": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages": [], "response_format": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
    ],
    ids=range(15),
)  # fmt: skip
async def test_bad_json(harness: Harness, raw: bytes) -> None:
    status, answer = await harness.post("/v1/chat/completions", raw)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) < 200
    assert (await harness.post("/v1/chat/completions", {"messages": USER}))[0] == 200


def tool_named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def json_schema(**fields: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [BAD_TOOL], "tool_choice": tool_named("bad")}, "tools[0].function.parameters"),
        ({"tools": [BAD_PATTERN], "tool_choice": "required"}, "tools"),
        ({"tools": [tool_named("a b")]}, "tools[0].function.name"),
        ({"tools": [TOOL, tool_named("x" * 65)]}, "tools[1].function.name"),
        ({"tools": [tool_named("")]}, "tools[0].function.name"),
        ({"tools": [tool_named("é")]}, "tools[0].function.name"),
        ({"tools": [tool_named("a\n")]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": tool_named("look_up")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": tool_named("other")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x", "function": {"name": "look_up"}}}, "tool_choice.type"),
        (json_schema(name="x"), "response_format.json_schema.schema"),
        (json_schema(schema=[]), "response_format.json_schema"),
        (json_schema(schema={"type": "strnig"}), "response_format"),
        (json_schema(schema={"type": "object", "not": {}}), "response_format"),
        (json_schema(schema={"$ref": "#/nowhere"}), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"kv_eviction": "window"}, "kv_eviction"),
        ({"kv_eviction": {"kind": "window"}}, "kv_eviction"),
        ({"kv_eviction": "streaming", "kv_budget_tokens": 63}, "kv_budget_tokens"),
        ({"kv_eviction": "streaming", "kv_budget_tokens": 64.5}, "kv_budget_tokens"),
        ({"kv_eviction": "streaming", "kv_budget_tokens": 2**31 + 1}, "kv_budget_tokens"),
        ({"kv_eviction": "none", "kv_budget_tokens": 256}, "kv_budget_tokens"),
        ({"kv_budget_tokens": 256}, "kv_budget_tokens"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "strnig"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 4}, "min_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_combinations_and_what_is_not_offered(harness: Harness, fields: dict[str, Any], param: str) -> None:
    error = await harness.chat_error(**fields)
    assert error["param"] == param
    assert harness.engine.submitted == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "Hi"}, "messages[1].role"),
        ({"content": "Hi"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ("Hi", "messages[1]"),
    ],
)
async def test_bad_messages(harness: Harness, message: Any, param: str) -> None:
    error = await harness.chat_error(messages=[*USER, message])
    assert error["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_other_content_parts_are_refused_by_kind(harness: Harness, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:..."}}]
    error = await harness.chat_error(messages=[{"role": "user", "content": parts}])
    assert error["param"] == "messages[0].content[1].type"
    assert kind in error["message"]


async def test_harmless_values(harness: Harness) -> None:
    fields = {
        "tools": [], "tool_choice": "auto", "n": 1, "response_format": {"type": "text"}, "kv_eviction": "none",
        "parallel_tool_calls": True, "stream": False, "seed": -(2**63), "temperature": 2, "top_p": 1, "top_k": -1,
        "logprobs": False, "top_logprobs": 0, "stop": [], "logit_bias": {}, "verbosity": "low", "service_tier": "auto",
    }  # fmt: skip
    status, _ = await harness.post("/v1/chat/completions", {"messages": USER, **fields})
    assert status == 200
    assert harness.engine.submitted[0].sampling.top_k == 0


async def test_history_with_tool_calls(harness: Harness) -> None:
    messages = [
        {"role": "developer", "content": "Be brief"},
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    status, answer = await harness.post("/v1/chat/completions", {"messages": messages})
    assert status == 200, answer


async def test_input_is_echoed_in_short_pieces_only(harness: Harness) -> None:
    secret = "s" * 10_000
    for fields in ({"model": secret}, {"tool_choice": secret}, {"messages": [{"role": secret, "content": "x"}]}):
        body = {"messages": USER, **fields}
        _, answer = await harness.post("/v1/chat/completions", body)
        assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_unknown_model(harness: Harness, path: str) -> None:
    status, answer = await harness.post(path, {"model": "gpt-9", "messages": USER, "prompt": "a"})
    assert status == 404
    assert (answer["error"]["type"], answer["error"]["code"]) == ("not_found_error", "model_not_found")
    assert "tiny/test-model, alias" in answer["error"]["message"]


async def test_stop_tokens_that_leave_nothing_to_sample(harness: Harness) -> None:
    everything = list(range(harness.engine.info.vocab_size))
    error = await harness.chat_error(min_tokens=1, stop_token_ids=everything)
    assert error["param"] == "stop_token_ids"
    for body in ({"stop_token_ids": everything}, {"min_tokens": 1, "stop_token_ids": everything[4:]}):
        status, _ = await harness.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1, **body})
        assert status == 200


@pytest.mark.parametrize("ending", [b"}", b""], ids=["good", "bad"])
def test_reading_a_large_body_starts_no_collection_and_leaves_the_collector_on(ending: bytes) -> None:
    tree = b"[" + b",".join([b"[{}]"] * 50_000) + b"]"
    body = b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": ' + tree + b"}" + ending
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with nullcontext() if ending else pytest.raises(RequestError):
            decode_body(body, ChatRequest)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert phases.count("start") <= 1, "the one that was due is held when the collector is on again"
