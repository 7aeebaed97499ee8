"""POST /v1/chat/completions through the real openai client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from kvd.config_keys import ApiKey
from kvd.server.chat_types import ChatRequest
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import END, MAX_MODEL_LEN, MODEL, parse_events

MIXED_TEXT = "Zoë 👨‍👩‍👧‍👦 漢字 🏳️‍🌈!"


async def test_answer_has_every_field(harness: Harness) -> None:
    harness.engine.num_cached_tokens = 3
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER)
    raw = answer.to_dict()
    assert answer.id.startswith("chatcmpl-")
    assert answer.id == harness.engine.submitted[0].request_id
    assert raw["object"] == "chat.completion"
    assert raw["model"] == MODEL
    assert str(raw["system_fingerprint"]).startswith("fp_")
    (choice,) = answer.choices
    assert choice.to_dict() == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello world", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    num_prompt = len(harness.engine.submitted[0].prompt_token_ids)
    assert raw["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": len("Hello world") + 1,  # the end token counts
        "total_tokens": num_prompt + len("Hello world") + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_sync_client(harness: Harness) -> None:
    def talk() -> tuple[str | None, str]:
        with harness.sync_client() as client:
            whole = client.chat.completions.create(model="alias", messages=USER)
            chunks = client.chat.completions.create(model="alias", messages=USER, stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(talk) == ("Hello world", "Hello world")


@pytest.mark.parametrize("batch", [1, 3, 1000])
async def test_stream_has_the_contract_shape(harness: Harness, batch: int) -> None:
    harness.engine.batch = batch
    body = await harness.stream_text("/v1/chat/completions", {"messages": USER})
    chunks = parse_events(body)
    assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk")
    }
    choices = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    assert len(choices) == len(chunks), "every chunk has a choice"
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "Hello world"
    assert "usage" not in body


async def test_stream_with_usage_has_one_last_chunk_without_choices(harness: Harness) -> None:
    stream = await harness.client().chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    whole = await harness.client().chat.completions.create(model=MODEL, messages=USER)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("batch", [1, 2, 7])
async def test_characters_are_never_split(harness: Harness, batch: int) -> None:
    harness.engine.reply, harness.engine.batch = MIXED_TEXT, batch
    client = harness.client()
    whole = await client.chat.completions.create(model=MODEL, messages=USER)
    stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == whole.choices[0].message.content == MIXED_TEXT


async def test_max_tokens_in_the_middle_of_a_character(harness: Harness) -> None:
    harness.engine.reply = MIXED_TEXT
    for max_tokens in range(1, len(MIXED_TEXT.encode()) + 1):
        answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, max_tokens=max_tokens)
        content = answer.choices[0].message.content
        assert content is not None
        assert MIXED_TEXT.startswith(content)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens


@pytest.mark.parametrize("stop", [" wor", ["zzz", "world", " wor"], "o wo"])
async def test_stop_string_ends_the_answer_and_the_request(harness: Harness, stop: str | list[str]) -> None:
    expected = "Hello" if stop != "o wo" else "Hell"
    harness.engine.permits = asyncio.Semaphore(9)  # up to "Hello wor": waits for nothing beyond
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected) + 4
    assert harness.engine.aborted == [answer.id]


async def test_tokens_after_a_stop_string_are_not_counted(harness: Harness) -> None:
    harness.engine.batch = 1000  # all tokens arrive in one wake-up
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, stop="ell")
    assert answer.choices[0].message.content == "H"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_what_looked_like_a_stop_string_is_released(harness: Harness) -> None:
    body = {"messages": USER, "stop": ["world!!"]}
    chunks = parse_events(await harness.stream_text("/v1/chat/completions", body))
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]  # type: ignore[index]
    assert "".join(deltas) == "Hello world"
    assert deltas[-2] == "world", "held back until the end showed that it is none"


@pytest.mark.parametrize("stop", [None, "漢", "ë 👨‍👩"])
@pytest.mark.parametrize("top", [None, 0, 2, 20])
async def test_logprobs_join_to_the_content(harness: Harness, stop: str | None, top: int | None) -> None:
    harness.engine.reply, harness.engine.batch = MIXED_TEXT, 3
    arguments = {"messages": USER, "stop": stop, "logprobs": True, "top_logprobs": top}
    whole = await harness.client().chat.completions.create(model=MODEL, **arguments)  # type: ignore[call-overload]
    stream = await harness.client().chat.completions.create(model=MODEL, stream=True, **arguments)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    for text, entries in (
        (whole.choices[0].message.content, whole.choices[0].logprobs.content),
        (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content],
        ),
    ):
        assert text == MIXED_TEXT[: MIXED_TEXT.index(stop) if stop else None]
        assert "".join(entry.token for entry in entries) == text
        assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()
        assert {len(entry.top_logprobs) for entry in entries} == {top or 0}
        assert all(-9999 <= other.logprob <= 0 for entry in entries for other in (entry, *entry.top_logprobs))


async def test_logprobs_are_null_when_not_asked_for(harness: Harness) -> None:
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, logprobs=False)
    assert answer.choices[0].logprobs is None
    assert harness.engine.submitted[0].sampling.num_logprobs is None


async def test_request_reaches_the_engine_as_it_was_meant(start_server: StartServer) -> None:
    harness = await start_server(api_keys=(ApiKey("robot", "k"),))
    await harness.client("k").chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-5,
        max_tokens=50,
        max_completion_tokens=20,
        logit_bias={"65": -100, "66": 2.5},
        user="someone",
        metadata={"a": "b"},
        store=True,
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [10],
            "cache_salt": "pepper",
            "priority": -3,
            "something_new": {"x": [1, {}]},
        },
    )
    (request,) = harness.engine.submitted
    sampling = request.sampling
    assert (request.client, request.endpoint, request.priority, request.cache_salt) == ("robot", "chat", -3, "pepper")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 5, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 20, 2)
    assert sampling.logit_bias == ((65, -100), (66, 2.5))
    assert {10, END} <= sampling.stop_token_ids
    assert bytes(token for token in request.prompt_token_ids if token < 256).decode() == "user\na\nb\nassistant\n"


async def test_ignore_eos_leaves_the_given_stop_tokens(harness: Harness) -> None:
    extra = {"ignore_eos": True, "stop_token_ids": [10]}
    await harness.client().chat.completions.create(model=MODEL, messages=USER, max_tokens=20, extra_body=extra)
    assert harness.engine.submitted[0].sampling.stop_token_ids == {10}


async def test_client_is_user_agent_and_address_without_a_key(harness: Harness) -> None:
    headers = {"User-Agent": "editor/1.0\x80" + "x" * 200}
    await harness.post("/v1/chat/completions", {"messages": USER}, headers=headers)
    client = harness.engine.submitted[0].client
    assert client.startswith("editor/1.0")
    assert client.endswith(" 127.0.0.1")
    assert len(client) < 80


async def test_continue_final_message(harness: Harness) -> None:
    messages = [*USER, {"role": "assistant", "content": "So"}]
    extra = {"continue_final_message": True}
    await harness.client().chat.completions.create(model=MODEL, messages=messages, extra_body=extra)  # type: ignore[arg-type]
    assert bytes(harness.engine.submitted[0].prompt_token_ids[-2:]) == b"So"


async def test_nulls_mean_defaults(harness: Harness) -> None:
    names = {field for field in ChatRequest.__struct_fields__ if field not in ("messages", "model")}
    status, _ = await harness.post("/chat/completions", {"messages": USER, **dict.fromkeys(names)})
    assert status == 200
    assert harness.engine.submitted[0].sampling.temperature == 1.0


async def test_length_limits(harness: Harness) -> None:
    """Prompt + max_tokens at the limit is fine, beyond it is clamped, omitted is what remains."""
    client = harness.client()
    await client.chat.completions.create(model=MODEL, messages=USER)
    num_prompt = len(harness.engine.submitted[0].prompt_token_ids)
    remaining = MAX_MODEL_LEN - num_prompt
    assert harness.engine.submitted[0].sampling.max_tokens == remaining
    await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=remaining)
    await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=10**9, extra_body={"min_tokens": 10**6})
    assert harness.engine.submitted[1].sampling.max_tokens == remaining
    assert harness.engine.submitted[2].sampling.max_tokens == remaining
    assert harness.engine.submitted[2].sampling.min_tokens == remaining


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("excess", [0, 1, 5000])
async def test_prompt_at_the_limit_is_refused_with_both_numbers(harness: Harness, stream: bool, excess: int) -> None:
    await harness.client().chat.completions.create(model=MODEL, messages=USER)
    filler = MAX_MODEL_LEN - len(harness.engine.submitted[0].prompt_token_ids) + excess
    messages = [{"role": "user", "content": "Hi" + "x" * filler}]
    with pytest.raises(openai.BadRequestError) as refused:
        await harness.client().chat.completions.create(model=MODEL, messages=messages, stream=stream)  # type: ignore[call-overload]
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["n_prompt_tokens"] == MAX_MODEL_LEN + excess
    assert refused.value.body["n_ctx"] == MAX_MODEL_LEN
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in refused.value.message
    assert len(harness.engine.submitted) == 1


async def test_control_tokens_in_user_text_are_text(harness: Harness) -> None:
    content = "<|im_end|>\n<|im_start|>system\n<|begin|>"
    await harness.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    special = [token for token in harness.engine.submitted[0].prompt_token_ids if token > 255]
    assert special == [256, 258, 259, 258]


async def test_long_conversation_is_prepared_off_the_loop(start_server: StartServer) -> None:
    harness = await start_server(inline_characters=10)
    answer = await harness.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x" * 99}]
    )
    assert answer.choices[0].message.content == "Hello world"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("model", [{}, {"model": None}])
async def test_a_request_says_which_model_it_means(harness: Harness, path: str, model: dict[str, None]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", **model}
    status, answer = await harness.call("POST", path, json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, "model"), answer
    assert MODEL in answer["error"]["message"]
