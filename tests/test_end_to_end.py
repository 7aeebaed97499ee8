"""The main job on real weights: `kvd serve` as a process, real sockets, the official client.

One server for the whole file; every test leaves it idle. Greedy texts are compared only where the margin is clear.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd.core import BLOCK_SIZE
from kvd.model.files import ModelFiles
from tests.test_serve import OPENER, Process, call

MODEL = "smollm2-135m-instruct"
CHUNK = 64
NUM_BLOCKS = 160


@pytest.fixture(scope="module")
def server(kvd_home: Path, default_model_files: ModelFiles) -> Iterator[Process]:
    process = Process(
        kvd_home, MODEL, "--port", "0", "--no-dashboard", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs",
        "16",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "2048", "--log-level", "info",
        "--max-waiting", "400", OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
    )  # fmt: skip
    try:
        process.url()
        yield process
    finally:
        if process.process.poll() is None:
            process.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def url(server: Process) -> str:
    return server.url()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
    ) as client:
        yield client


def series(url: str) -> dict[str, float]:
    with OPENER.open(urllib.request.Request(f"{url}/metrics"), timeout=60) as response:
        text = response.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def is_idle(url: str) -> bool:
    now = series(url)
    return not (now["vllm:num_requests_running"] or now["vllm:num_requests_waiting"] or now["vllm:kv_cache_usage_perc"])


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


def test_chat_streaming_and_not_give_the_same_right_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)  # type: ignore[arg-type]
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_in_a_pipe(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "chat", "--url", url],
        input="What is the capital of France?", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The answer is sampled; a small model may go on until the context is full.
    assert done.stderr in ("", "(cut off: the context or the length limit is full)\n")
    assert len(done.stdout.split()) > 2


def test_completions_streaming_and_not(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4)
    assert whole.choices[0].text.startswith(" Paris")
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_stop_strings_and_logprobs_on_real_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6, 7,", temperature=0, max_tokens=24, stop=["10"], logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == " 8, 9, "
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_prompt_of_three_chunks_twice(url: str, client: openai.OpenAI) -> None:
    """Own chunks are no hits; the second time all is reused but for the last token."""
    prompt = "Read this list of numbers: " + ", ".join(str(n * 37 % 1000) for n in range(40))
    before = series(url)
    first, second = (
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=2).usage for _ in range(2)
    )
    assert first is not None
    assert second is not None
    num_tokens = first.prompt_tokens
    assert num_tokens > 2 * CHUNK
    assert first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details is not None
    assert second.prompt_tokens_details.cached_tokens == num_tokens - 1 > CHUNK
    after = series(url)
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    assert hits == second.prompt_tokens_details.cached_tokens


async def test_the_gauge_of_used_blocks_counts_them(url: str) -> None:
    """A prompt holds its blocks from its admission on, so the count stands still while it is computed."""
    num_tokens = 1900
    prompt = random.Random(35).choices(range(100, 40000), k=num_tokens)
    expected = -(-num_tokens // BLOCK_SIZE)
    asking = asyncio.create_task(
        asyncio.to_thread(call, f"{url}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    )
    found: dict[str, Any] = {}

    def prefills() -> bool:
        found.update(call(f"{url}/kvd/snapshot")[1])
        return asking.done() or any(row["state"] == "prefill" for row in found["requests"])

    await until(prefills, "the prompt is being computed")
    usage = series(url)["vllm:kv_cache_usage_perc"]
    assert not asking.done(), "it was too quick to be looked at"
    assert found["requests"][0]["num_blocks"] == found["num_blocks_active"] == expected
    assert usage == pytest.approx(expected / NUM_BLOCKS)
    assert (await asking)[0] == 200
    after = call(f"{url}/kvd/snapshot")[1]
    assert after["num_blocks_active"] == 0
    assert after["num_blocks_cached"] >= num_tokens // BLOCK_SIZE
    assert series(url)["vllm:kv_cache_usage_perc"] == 0


def scored(url: str, prompt: list[int], num_logprobs: int = 1) -> dict[str, Any]:
    """As lm-evaluation-harness asks how likely a text is; the usage beside it."""
    body = {"model": MODEL, "prompt": [prompt], "echo": True, "logprobs": num_logprobs, "max_tokens": 1}
    status, answer = call(f"{url}/v1/completions", {**body, "temperature": 0})
    assert status == 200, answer
    logprobs: dict[str, Any] = answer["choices"][0]["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(prompt) + 1}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    return {**logprobs, "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}


def test_scores_of_a_cached_prompt_are_those_of_a_cold_one(url: str) -> None:
    text = "The sky is blue because air scatters short waves more than long ones. " * 12
    prompt = call(f"{url}/tokenize", {"prompt": text})[1]["tokens"]
    assert len(prompt) > 2 * CHUNK
    cold, again = scored(url, prompt), scored(url, prompt)
    assert cold == again
    assert cold["cached"] == 0
    assert "".join(cold["tokens"][:-1]) == text
    known = cold["token_logprobs"][len(prompt) // 2 : -1]  # by then it has come several times
    assert sum(known) / len(known) > -0.5
    status, answer = call(f"{url}/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


def test_a_long_prompt_is_scored_while_the_pool_is_full(url: str) -> None:
    """With as many alternatives as may be asked for, beside others that want the same blocks."""
    generator = random.Random(6)
    long = generator.choices(range(100, 40000), k=1900)

    async def ask_all() -> list[Any]:
        others = [generator.choices(range(100, 40000), k=150) for _ in range(6)]
        body = {"model": MODEL, "max_tokens": 40, "ignore_eos": True}
        calls = [asyncio.to_thread(call, f"{url}/v1/completions", {**body, "prompt": ids}) for ids in others]
        return list(await asyncio.gather(asyncio.to_thread(scored, url, long, 5), *calls))

    logprobs, *answers = asyncio.run(ask_all())
    num_shown = [len(top) for top in logprobs["top_logprobs"][1:]]  # fewer where tokens look alike
    assert sum(num_shown) > 5 * len(num_shown)
    assert all(status == 200 for status, _ in answers)
    assert len(long) + 6 * 190 > NUM_BLOCKS * 16
    status, answer = call(f"{url}/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    assert status == 200, answer


def test_a_prompt_that_fits_the_model_but_not_the_limit_is_refused_and_the_next_one_served(
    url: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt="word " * 2100, max_tokens=4)
    assert refusal.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in str(refusal.value)
    status, answer = call(f"{url}/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    assert status == 200, answer


def test_health_and_models(url: str) -> None:
    assert call(f"{url}/health") == (200, {"status": "ok"})
    models = call(f"{url}/v1/models")[1]["data"]
    assert [model["id"] for model in models] == [MODEL]
    assert models[0]["max_model_len"] == 2048


def test_messages_with_a_forced_call_and_its_result(url: str) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "Current weather of a place",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    }
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    request: dict[str, Any] = {"model": MODEL, "tools": [tool], "messages": turns}
    with anthropic.Anthropic(
        base_url=url,
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=anthropic.DefaultHttpxClient(trust_env=False, verify=False),
    ) as client:
        forced: dict[str, Any] = {**request, "tool_choice": {"type": "tool", "name": "get_weather"}}
        num_tokens = client.messages.count_tokens(**forced).input_tokens
        with client.messages.stream(**forced, max_tokens=100, extra_body={"temperature": 0}) as events:
            message = events.get_final_message()
        (call,) = message.content
        assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
        assert isinstance(call.input["place"], str)
        usage = message.usage
        assert num_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
        turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(**request, max_tokens=32, extra_body={"temperature": 0})
    assert answer.content[0].type == "text"
    assert answer.usage.cache_read_input_tokens is not None
    assert answer.usage.cache_read_input_tokens > num_tokens, "the first turn is cached, the call included"


async def _one_of_many(session: aiohttp.ClientSession, url: str, index: int, chance: random.Random) -> str:
    """A mixed request; some hang up at a random moment. Returns how it ended."""
    words = chance.sample(["cache", "block", "token", "river", "stone", "green", "seven", "lamp"], 4)
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.randint(1, 8),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "stream": chance.random() < 0.6,
        "ignore_eos": chance.random() < 0.5,
    }
    if chance.random() < 0.15:
        body |= {"top_p": 0.9, "top_k": 40, "presence_penalty": 0.5, "logit_bias": {"30": -5}}
    path, prompt = "completions", " ".join(words)
    if chance.random() < 0.03:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    patience = chance.choice([0.0, 0.05, 0.5, 2.0, 5.0]) if index % 3 == 0 else 600.0
    try:
        async with asyncio.timeout(patience), session.post(f"{url}/v1/{path}", json=body) as response:
            text = await response.text()
    except TimeoutError:
        return "gone"
    assert response.status == 200, text
    if body["stream"]:
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text
    else:
        assert json.loads(text)["choices"][0]["finish_reason"] in ("stop", "length")
    return "answered"


async def test_three_hundred_mixed_requests_with_random_aborts(server: Process, url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        ends = await asyncio.gather(*(_one_of_many(session, url, i, random.Random(i)) for i in range(300)))
    assert ends.count("answered") >= 200
    assert ends.count("gone") > 20
    await until(lambda: is_idle(url), "nothing running, nothing waiting, no block in use")
    assert not [line for line in server.lines if " error " in line.lower() or "Traceback" in line]
    status, answer = call(f"{url}/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    assert status == 200, answer


async def test_two_hundred_sockets_closed_at_random_moments(server: Process, url: str) -> None:
    """Queued, in mid-prefill, in mid-decode, streaming and not: all of it is free soon after."""
    host, port = url.removeprefix("http://").split(":")
    chance = random.Random(11)

    async def hang_up(index: int) -> None:
        body = json.dumps(
            {"model": MODEL, "prompt": f"{index} " + "word " * chance.choice([3, 200, 600]), "max_tokens": 500,
             "stream": index % 2 == 0, "ignore_eos": True}
        ).encode()  # fmt: skip
        await asyncio.sleep(chance.random() * 2)
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body[: len(body) if index % 10 else len(body) // 2])
        await writer.drain()
        await asyncio.sleep(chance.random() * 3)
        writer.transport.abort()

    await asyncio.gather(*(hang_up(index) for index in range(200)))
    await until(lambda: is_idle(url), "all that the closed sockets had asked for is gone")
    assert not [line for line in server.lines if " error " in line.lower() or "Traceback" in line]
    status, answer = call(f"{url}/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    assert status == 200, answer


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
NEEDS_WEATHER = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def check_weather(arguments: str) -> None:
    parsed = json.loads(arguments)
    assert set(parsed) == {"city", "unit"}
    assert isinstance(parsed["city"], str)
    assert parsed["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_small_model_calls_a_tool_when_it_must(client: openai.OpenAI, temperature: float) -> None:
    body: dict[str, Any] = {
        "model": MODEL, "messages": NEEDS_WEATHER, "tools": [WEATHER], "tool_choice": "required", "seed": 3,
        "parallel_tool_calls": False, "temperature": temperature, "max_tokens": 400,
    }  # fmt: skip
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert deltas[0].function.name == "get_weather"
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_named_tool_and_a_turn_after_its_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
    choice = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, tools=[WEATHER, ADD], tool_choice=choice, temperature=0, max_tokens=100
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "add"
    assert all(isinstance(value, int) for value in json.loads(call.function.arguments).values())
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    following = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, tools=[WEATHER, ADD], tool_choice="none", temperature=0, max_tokens=8
    )
    assert following.choices[0].message.content


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
        "required": ["country", "size"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris."}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}},  # type: ignore[arg-type]
        temperature=1,
        seed=5,
        max_tokens=200,
    )
    assert answer.choices[0].finish_reason == "stop"
    place = json.loads(answer.choices[0].message.content or "")
    assert set(place) == {"country", "size"}
    assert len(place["country"]) <= 20
    assert place["size"] in ("small", "large")


def test_choices_compute_their_prompt_once(url: str, client: openai.OpenAI) -> None:
    content = "Go on with this list: " + ", ".join(str(n * 61 % 997) for n in range(50))
    before = series(url)
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], n=3, temperature=1, seed=1, max_tokens=12
    )
    assert answer.usage is not None
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    hits = series(url)["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    assert hits >= 2 * (answer.usage.prompt_tokens - 16), "all but the last, not yet complete block"
