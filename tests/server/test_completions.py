"""POST /v1/completions through the real openai client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from kvd.errors import ContextLengthExceeded, ServerOverloaded
from kvd.text.text_model import TextModel
from tests.server.conftest import Harness, StartServer
from tests.server.fakes import (
    BEGIN,
    IM_END,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    build_info,
    build_text_model,
    parse_events,
)


async def test_answer_has_every_field(harness: Harness) -> None:
    answer = await harness.client().completions.create(model=MODEL, prompt="Say", max_tokens=5)
    raw = answer.to_dict()
    assert answer.id.startswith("cmpl-")
    assert raw["object"] == "text_completion"
    assert raw["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert raw["usage"]["prompt_tokens"] == 4  # type: ignore[index]
    assert raw["usage"]["completion_tokens"] == 5  # type: ignore[index]
    assert harness.engine.submitted[0].prompt_token_ids == (BEGIN, *b"Say")
    assert harness.engine.submitted[0].endpoint == "completions"


async def test_sixteen_tokens_when_nothing_is_said(harness: Harness) -> None:
    harness.engine.reply = "x" * 100
    answer = await harness.client().completions.create(model=MODEL, prompt="Say")
    assert answer.choices[0].text == "x" * 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(BEGIN, 97, 98)]),
        (["ab", "c"], [(BEGIN, 97, 98), (BEGIN, 99)]),
        ([97, 259, 98], [(97, 259, 98)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_four_kinds_of_prompt(harness: Harness, prompt: Any, expected: list[tuple[int, ...]]) -> None:
    answer = await harness.client().completions.create(model=MODEL, prompt=prompt, max_tokens=20)
    assert [request.prompt_token_ids for request in harness.engine.submitted] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert {choice.text for choice in answer.choices} == {"Hello world"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == 12 * len(expected)
    assert len({request.request_id for request in harness.engine.submitted}) == len(expected)


async def test_control_tokens_in_a_prompt_are_text(harness: Harness) -> None:
    await harness.client().completions.create(model=MODEL, prompt="<|begin|><|end|>")
    assert [id_ for id_ in harness.engine.submitted[0].prompt_token_ids if id_ > 255] == [BEGIN]


@pytest.mark.parametrize("usage", [False, True])
async def test_stream_of_several_prompts(harness: Harness, usage: bool) -> None:
    body: dict[str, Any] = {"prompt": ["a", "b", "c"], "max_tokens": 20}
    if usage:
        body["stream_options"] = {"include_usage": True}
    chunks: list[Any] = parse_events(await harness.stream_text("/v1/completions", body))
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 36
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in chunks)
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] += choice["finish_reason"]
    assert texts == ["Hello world"] * 3
    assert reasons == ["stop"] * 3
    assert harness.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(harness: Harness, stream: bool) -> None:
    harness.engine.reply = "Zoë!"
    body = {"prompt": "a", "logprobs": 3, "max_tokens": 5}
    if stream:
        chunks: list[Any] = parse_events(await harness.stream_text("/v1/completions", body))
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    else:
        _, answer = await harness.post("/v1/completions", body)
        found = [answer["choices"][0]["logprobs"]]
    joined = {key: [item for part in found for item in part[key]] for key in found[0]}
    assert joined["tokens"] == ["Z", "o", "", "ë", "!"]
    assert joined["text_offset"] == [0, 1, 2, 2, 3]
    assert joined["token_logprobs"] == [-0.25] * 5
    assert joined["top_logprobs"][0] == {"Z": -0.25, "[": -9999.0, "\\": -9999.0}


async def test_logprob_offsets_are_those_of_each_choice(harness: Harness) -> None:
    body = {"prompt": ["a", "b"], "logprobs": 0, "max_tokens": 5}
    chunks: list[Any] = parse_events(await harness.stream_text("/v1/completions", body))
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        if (logprobs := chunk["choices"][0]["logprobs"]) is not None:
            offsets[chunk["choices"][0]["index"]] += logprobs["text_offset"]
    assert offsets == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}


async def test_a_stop_string_ends_its_own_prompt_at_once(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(6)  # all go to the prompt that comes first
    body = {"prompt": ["a", "b"], "stop": "Hello", "max_tokens": 100}
    task = asyncio.create_task(harness.post("/v1/completions", body))
    await harness.engine.reach(2)
    await harness.engine.reach(1)
    for _ in range(6):
        harness.engine.permits.release()
    status, answer = await task
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 10


async def test_logprobs_of_the_sampled_token_alone(harness: Harness) -> None:
    answer = await harness.client().completions.create(model=MODEL, prompt="a", logprobs=0, max_tokens=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"H": -0.25}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ([[]], "empty"),
        ([[1], []], "empty"),
        (["a", 1], "mix"),
        ([1, [2]], "mix"),
        ([260], "vocabulary"),
        ([-1], "vocabulary"),
        ([[1, 10**30]], "vocabulary"),
        ([1.5], "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        ([[["a"]]], "prompt"),
    ],
)
async def test_wrong_prompts(harness: Harness, prompt: Any, message: str) -> None:
    status, answer = await harness.post("/v1/completions", {"prompt": prompt})
    assert status == 400
    assert answer["error"]["param"].startswith("prompt")
    assert message in answer["error"]["message"]
    assert harness.engine.submitted == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 6), ("logprobs", -1), ("logprobs", True), ("best_of", 2), ("best_of", 0), ("suffix", "x"),
        ("n", 0), ("n", 129), ("max_tokens", -1), ("echo", 1), ("response_format", 3),
        ("guided_regex", 7),
    ],
)  # fmt: skip
async def test_wrong_or_unsupported_fields(harness: Harness, field: str, value: object) -> None:
    status, answer = await harness.post("/v1/completions", {"prompt": "a", field: value})
    assert status == 400
    assert answer["error"]["param"] == field
    assert harness.engine.submitted == []


async def test_best_of_below_n(harness: Harness) -> None:
    _, answer = await harness.post("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2})
    assert answer["error"]["param"] == "best_of"


async def test_harmless_values_of_unsupported_fields(harness: Harness) -> None:
    body = {"prompt": "a", "n": 2, "best_of": 2, "echo": False, "suffix": "", "kv_eviction": "none"}
    status, _ = await harness.post("/v1/completions", body)
    assert status == 200


async def test_prompt_at_the_limit(harness: Harness) -> None:
    prompt = [65] * MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError) as refused:
        await harness.client().completions.create(model=MODEL, prompt=[[1], prompt])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    await harness.client().completions.create(model=MODEL, prompt=prompt[1:])
    assert [request.sampling.max_tokens for request in harness.engine.submitted] == [1]


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_refusal_of_a_long_prompt_names_the_field(harness: Harness, stream: bool) -> None:
    harness.engine.refusal = ContextLengthExceeded("too long", num_prompt_tokens=9, limit_tokens=8)
    status, answer = await harness.post("/v1/completions", {"prompt": "a", "stream": stream})
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert answer["error"]["n_ctx"] == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_ends_the_others(harness: Harness, stream: bool) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    harness.engine.refusal, harness.engine.num_accepted_before_refusal = ServerOverloaded("full"), 2
    status, answer = await harness.post("/v1/completions", {"prompt": ["a", "b", "c"], "stream": stream})
    assert status == 503
    assert answer["error"]["code"] == "server_is_overloaded"
    assert sorted(harness.engine.aborted) == [request.request_id for request in harness.engine.submitted]
    assert harness.engine.running_ids == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_one_prompt_ends_the_others(harness: Harness, stream: bool) -> None:
    harness.engine.fail_after = 0
    status, answer = await harness.post("/v1/completions", {"prompt": ["a", "b"], "stream": stream})
    assert status == 500
    assert "planted" in answer["error"]["message"]
    assert harness.engine.running_ids == set()


async def test_tokens_that_only_the_tokenizer_has(start_server: StartServer) -> None:
    """Tokens added to a tokenizer alone would index past the embedding, and fail every request of their step."""
    harness = await start_server()
    highest = max(harness.engine.text.encode_prompt("Hello é"))
    harness.engine.info = build_info(vocab_size=highest)
    for body in ({"prompt": [highest]}, {"prompt": "Hello é"}, {"prompt": "a", "logit_bias": {str(highest): 1}}):
        status, answer = await harness.post("/v1/completions", {**body, "max_tokens": 1})
        assert status == 400, answer
        assert answer["error"]["param"] == ("prompt" if len(body) == 1 else "logit_bias")
        assert str(highest) in answer["error"]["message"]
    status, _ = await harness.post("/v1/completions", {"prompt": [highest - 1], "max_tokens": 1})
    assert status == 200


async def test_a_million_prompts_are_refused_before_one_is_encoded(harness: Harness) -> None:
    for prompts in (["a"] * 2049, [[1]] * 2049):
        status, answer = await harness.post("/v1/completions", {"prompt": prompts})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert answer["error"]["message"] == "'prompt' has 2049 prompts; at most 2048"
    assert not harness.engine.submitted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_an_endless_text_is_refused_by_its_beginning(harness: Harness, path: str) -> None:
    text = "a b " * 200_000
    is_chat = "chat" in path
    body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    status, answer = await harness.post(path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == ("messages" if is_chat else "prompt")
    assert MAX_MODEL_LEN < answer["error"]["n_prompt_tokens"] < len(text) // 2


# ---------------------------------------------------------------------- several choices


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts(harness: Harness, stream: bool) -> None:
    body = {"prompt": ["a", "bc"], "n": 3, "max_tokens": 20, "seed": 5, "temperature": 1}
    if stream:
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = parse_events(await harness.stream_text("/v1/completions", {**body, **options}))
        usage: Any = last["usage"]
        texts = [""] * 6
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):  # type: ignore[attr-defined]
            texts[choice["index"]] += choice["text"]
    else:
        _, answer = await harness.post("/v1/completions", body)
        usage = answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["Hello world"] * 6
    assert usage["prompt_tokens"] == 2 + 3
    assert usage["completion_tokens"] == 6 * 12
    requests = harness.engine.submitted
    assert [request.prompt_token_ids for request in requests] == [(BEGIN, 97)] * 3 + [(BEGIN, 98, 99)] * 3
    assert len({request.request_id for request in requests}) == 6
    for of_prompt in (requests[:3], requests[3:]):
        assert len({(request.sampling.seed, request.choice_index) for request in of_prompt}) == 3


async def test_too_many_choices(harness: Harness) -> None:
    status, answer = await harness.post("/v1/completions", {"prompt": ["a"] * 17, "n": 128})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert harness.engine.submitted == []


# ---------------------------------------------------------------------- suffix


@pytest.fixture(scope="module")
def infilling_text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return build_text_model(tmp_path_factory.mktemp("infill"), ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))


async def test_suffix(start_server: StartServer, infilling_text: TextModel) -> None:
    harness = await start_server(text=infilling_text)
    prefix, suffix, middle = range(VOCAB_SIZE, VOCAB_SIZE + 3)
    harness.engine.info = build_info(vocab_size=VOCAB_SIZE + 3)
    for prompt in ("ab", "", "<|fim_middle|>"):
        status, answer = await harness.post("/v1/completions", {"prompt": prompt, "suffix": "cd", "max_tokens": 5})
        assert status == 200, answer
        assert answer["choices"][0]["text"] == "Hello"
        expected = (BEGIN, prefix, *prompt.encode(), suffix, *b"cd", middle)
        assert harness.engine.submitted[-1].prompt_token_ids == expected


@pytest.mark.parametrize("fields", [{"prompt": [97]}, {"prompt": "a", "echo": True}])
async def test_suffix_that_is_not_offered(
    start_server: StartServer, infilling_text: TextModel, fields: dict[str, Any]
) -> None:
    harness = await start_server(text=infilling_text)
    status, answer = await harness.post("/v1/completions", {"suffix": "b", **fields})
    assert (status, answer["error"]["param"]) == (400, "suffix")
    assert harness.engine.submitted == []


# ---------------------------------------------------------------------- echo


def joined_logprobs(parts: list[Any]) -> dict[str, list[Any]]:
    """One logprobs object from those of the chunks of a stream."""
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


async def completed(harness: Harness, body: dict[str, Any], stream: bool) -> list[tuple[str, Any, str]]:
    """Text, logprobs and finish reason of each choice."""
    if not stream:
        status, answer = await harness.post("/v1/completions", body)
        assert status == 200, answer
        return [(each["text"], each["logprobs"], each["finish_reason"]) for each in answer["choices"]]
    by_choice: dict[int, list[Any]] = {}
    for chunk in parse_events(await harness.stream_text("/v1/completions", body)):
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            by_choice.setdefault(choice["index"], []).append(choice)
    found = []
    for _, choices in sorted(by_choice.items()):
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        text = "".join(choice["text"] for choice in choices)
        found.append((text, joined_logprobs(logprobs) if logprobs else None, choices[-1]["finish_reason"]))
        assert not any(choice["finish_reason"] for choice in choices[:-1])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [("Zoë <|end|>", "Zoë <|end|>"), ([BEGIN, *b"Zo", 0xC3, 0xAB, 0xC3], "Zoë"), ([IM_END, 97, IM_END], "a")],
)
async def test_echo_repeats_the_prompt(harness: Harness, prompt: Any, text: str, stream: bool) -> None:
    ((found, logprobs, reason),) = await completed(harness, {"prompt": prompt, "echo": True, "max_tokens": 5}, stream)
    assert (found, logprobs, reason) == (text + "Hello", None, "length")
    assert harness.engine.submitted[0].num_prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_logprobs", [0, 1, 2])
async def test_echo_with_logprobs(harness: Harness, stream: bool, num_logprobs: int) -> None:
    body = {"prompt": "Zoë", "echo": True, "logprobs": num_logprobs, "max_tokens": 2}
    ((text, logprobs, _),) = await completed(harness, body, stream)
    assert text == "ZoëHe"
    assert logprobs["tokens"] == ["", "Z", "o", "", "ë", "H", "e"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -1, -2, -3, -4, -0.25, -0.25]
    first, *others = logprobs["top_logprobs"][:5]
    assert first is None
    assert others[0] == ({"Z": -1} if num_logprobs == 0 else {"?": -0.5, "Z": -1})
    assert max(others[3].values()) == (-4 if num_logprobs == 0 else -0.5)
    assert harness.engine.submitted[0].num_prompt_logprobs == num_logprobs


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_what_lm_evaluation_harness_asks(harness: Harness, max_tokens: int) -> None:
    """Its loglikelihood requests: batched ids, each split into context and continuation; the last entry is dropped."""
    prompts = [[BEGIN, *b"The sky"], [*b"2+2", BEGIN]]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    for reply in ("Hello", ""):  # the one token may be the end of the text
        harness.engine.reply = reply
        status, answer = await harness.post("/v1/completions", {**body, "temperature": 0})
        assert status == 200
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            scores = choice["logprobs"]["token_logprobs"]
            assert scores == [None, *[-n for n in range(1, len(prompt))], *[-0.25] * max_tokens]
            assert {len(column) for column in choice["logprobs"].values()} == {len(prompt) + max_tokens}
            assert all(max(top.values()) == -0.5 for top in choice["logprobs"]["top_logprobs"][1 : len(prompt)])
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all(harness: Harness, stream: bool) -> None:
    for echo, text in ((False, ""), (True, "ab")):
        body = {"prompt": "ab", "max_tokens": 0, "echo": echo, "stop": "H"}
        assert await completed(harness, body, stream) == [(text, None, "length")]
    assert [request.sampling.max_tokens for request in harness.engine.submitted] == [1, 1]


async def test_a_prompt_that_fails_without_output(harness: Harness) -> None:
    harness.engine.fail_after = 0
    status, _ = await harness.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True})
    assert status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_share_the_scores_of_their_prompt(harness: Harness, stream: bool) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    found = await completed(harness, body, stream)
    assert [request.num_prompt_logprobs for request in harness.engine.submitted] == [1, None, 1, None]
    assert [text for text, _, _ in found] == ["abH", "abH", "cH", "cH"]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][1]["token_logprobs"] == [None, -1, -2, -0.25]


async def test_a_choice_ahead_of_the_scores_is_held_back(harness: Harness) -> None:
    """The second choice finds its prompt in the cache, while the first one still computes all of it."""
    permits = harness.engine.permits_of = {0: asyncio.Semaphore(0), 1: asyncio.Semaphore(100)}
    body = {"prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3}
    task = asyncio.create_task(harness.stream_text("/v1/completions", body))
    await harness.engine.reach(2)
    await harness.engine.reach(1)  # the second choice has ended
    for _ in range(3):
        permits[0].release()
    chunks: list[Any] = parse_events(await task)
    for index in (0, 1):
        chunk = next(chunk for chunk in chunks if chunk["choices"][0]["index"] == index)
        assert chunk["choices"][0]["text"] == "ab"
        assert chunk["choices"][0]["logprobs"]["token_logprobs"] == [None, -1, -2]


async def test_a_long_prompt_is_scored_off_the_event_loop(harness: Harness) -> None:
    prompt = [97] * 300
    ((text, logprobs, _),) = await completed(
        harness, {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1}, False
    )
    assert text == "a" * 300 + "H"
    assert logprobs["text_offset"] == list(range(301))


async def test_a_stop_token_has_its_logprob(harness: Harness) -> None:
    harness.engine.reply = "ab"
    ((text, logprobs, reason),) = await completed(harness, {"prompt": "x", "logprobs": 1, "max_tokens": 9}, False)
    assert (text, reason) == ("ab", "stop")
    assert logprobs["tokens"] == ["a", "b", ""]
    assert logprobs["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(
    "fields",
    [{"guided_choice": ["yes", "no"]}, {"response_format": {"type": "json_object"}}, {"guided_regex": "[ab]+"}],
)
async def test_answers_that_are_held_to_a_grammar(harness: Harness, fields: dict[str, Any]) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5}
    assert (await harness.post("/v1/completions", {**body, **fields}))[0] == 200
    grammars = {id(request.grammar) for request in harness.engine.submitted}
    assert len(grammars) == 1
    assert harness.engine.submitted[0].grammar is not None


async def test_a_grammar_that_does_not_compile(harness: Harness) -> None:
    status, answer = await harness.post("/v1/completions", {"prompt": "a", "guided_regex": "(("})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert harness.engine.submitted == []
