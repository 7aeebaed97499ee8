"""The doctor on real weights: `kvd serve` as a process, real chat requests, causes and numbers known beforehand.

What the generator knows of a prompt it takes from /tokenize and from the usage of the answers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvd.cli import main
from kvd.model.files import ModelFiles
from kvd.observe.doctor_memory import HOLDERS
from tests.observe.doctor_cases import common, repeated
from tests.test_serve import Process, call

MODEL = "smollm2-135m-instruct"
NUM_BLOCKS = 300
WAIT_SECONDS = 60.0
WORDS = [
    "river", "stone", "garden", "winter", "letter", "music", "window", "paper", "market", "silver", "yellow", "harbor",
    "engine", "ticket", "kitchen", "bridge", "forest", "candle", "summer", "button", "planet", "sugar", "cotton",
]  # fmt: skip

TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""ChatML that drops what an assistant thought before it answered, as templates of reasoning models do."""

Message = dict[str, str]


class Server:
    """A server, and every prompt that it was sent through here, as token ids."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prompts: list[list[int]] = []

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        status, answer = call(f"{self.url}/tokenize", {"messages": list(messages)})
        assert status == 200, answer
        ids: list[int] = answer["tokens"]
        return ids

    def ask(self, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
        """The answer; its prompt is the last of `prompts` then."""
        body = {"model": MODEL, "messages": list(messages), "max_tokens": 1, "temperature": 0, **more}
        status, answer = call(f"{self.url}/v1/chat/completions", body)
        assert status == 200, answer
        self.prompts.append(self.tokens(messages))
        assert answer["usage"]["prompt_tokens"] == len(self.prompts[-1])
        found: dict[str, Any] = answer
        return found

    def report(self) -> dict[str, Any]:
        """As soon as everything that was asked has been examined."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            status, report = call(f"{self.url}/kvd/doctor")
            assert status == 200, report
            if report["num_examined"] + report["num_skipped"] >= len(self.prompts):
                assert not report["num_skipped"]
                found: dict[str, Any] = report
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {WAIT_SECONDS} s: {len(self.prompts)} prompts examined")

    def miss(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What the doctor says about the request that was answered so."""
        found: dict[str, Any] = next(each for each in self.report()["recent"] if each["request_id"] == answer["id"])
        assert found["num_cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found["num_prompt_tokens"] == answer["usage"]["prompt_tokens"]
        return found

    def has_no_miss(self, answer: dict[str, Any]) -> bool:
        return all(each["request_id"] != answer["id"] for each in self.report()["recent"])


@pytest.fixture(scope="module")
def server(
    kvd_home: Path, default_model_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    process = Process(
        kvd_home, MODEL, "--port", "0", "--no-dashboard", "--max-model-len", "2048", "--show-prompts",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--chat-template", str(template),
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
    )  # fmt: skip
    try:
        yield Server(process.url())
    finally:
        process.stop(signal.SIGTERM)


def sentences(generator: random.Random, number: int) -> str:
    return " ".join(f"The {' '.join(generator.choices(WORDS, k=9))}." for _ in range(number))


def chat(system: str, question: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@pytest.mark.parametrize("seed", range(3))
def test_a_first_line_that_changes(server: Server, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 13: the position, both texts, and the lost tokens."""
    generator = random.Random(seed)
    rest, num_earlier = sentences(generator, generator.randint(5, 20)), generator.randint(3, 8)
    days = generator.sample(range(10, 29), num_earlier + 1)
    lines = [f"Chat {seed}. Today is 2026-11-{day} 00:{generator.randint(10, 59)}" for day in days]
    own: list[list[int]] = []
    for line in lines:
        answer = server.ask(chat(f"{line}\n{rest}", sentences(generator, 1)))
        own.append(server.prompts[-1])
    miss = server.miss(answer)
    *earlier, prompt = own
    assert miss["cause"] == "volatile_line"
    assert miss["position"] == min(common(prompt, other) for other in earlier)
    assert miss["num_alike"] == num_earlier
    least, most = (repeated(prompt, those, miss["num_cached_tokens"]) for those in (earlier[-HOLDERS:], earlier))
    assert len(server.tokens(chat(rest, ""))) // 2 < least <= miss["lost_tokens"] <= most
    assert miss["words"] == (
        f"differs from {num_earlier} earlier requests at token {miss['position']}; "
        f"{miss['lost_tokens']} equal tokens after it were recomputed"
    )
    status, shown = call(f"{server.url}/kvd/reveal/{answer['id']}")
    assert status == 200, shown
    assert lines[-1] in shown["ours"]
    assert any(line in shown["theirs"] for line in lines[:-1])
    assert main(["doctor", server.url]) == 0
    assert "volatile line, chat, client" in capsys.readouterr().out


def test_a_template_that_drops_reasoning_from_history(server: Server) -> None:
    """Case 15: the model thinks and answers; the next turn sends the answer alone."""
    generator = random.Random(15)
    first = chat(sentences(generator, 6), sentences(generator, 1))
    form = "1[a-z ]{60,80}</think>[A-Z][a-z ,]{240,260}\\."
    answer = server.ask(first, max_tokens=400, guided_regex=form)
    said = answer["choices"][0]["message"]["content"]
    assert "</think>" in said
    cold = server.prompts[-1]
    turn = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": sentences(generator, 1)}]
    miss = server.miss(server.ask(turn))
    prompt = server.prompts[-1]
    kept = server.tokens([*first, {"role": "assistant", "content": said.partition("</think>")[2]}])
    assert prompt[: len(cold)] == cold
    assert miss["cause"] == "history_rewritten"
    assert miss["position"] == miss["num_cached_tokens"] == len(cold)
    # The answer may begin with another token than behind the reasoning, and its last one was never computed.
    num_answer = common(prompt, kept) - len(cold)
    assert 32 <= num_answer - 8 <= miss["lost_tokens"] <= num_answer


def test_a_chat_whose_history_stays_is_no_miss(server: Server) -> None:
    generator = random.Random(16)
    messages = chat(sentences(generator, 6), sentences(generator, 1))
    for _ in range(3):
        answer = server.ask(messages, max_tokens=40)
        said = answer["choices"][0]["message"]["content"]
        messages = [
            *messages, {"role": "assistant", "content": said}, {"role": "user", "content": sentences(generator, 1)}
        ]  # fmt: skip
        assert server.has_no_miss(answer)


def test_a_common_beginning_of_less_than_a_block(server: Server) -> None:
    """Case 10: it is reused token by token, so there is nothing to report."""
    generator = random.Random(10)
    word = generator.choice(WORDS)
    first, second = ([{"role": "user", "content": f"{word} {word} {sentences(generator, 3)}"}] for _ in range(2))
    server.ask(first)
    answer = server.ask(second)
    shared = common(*server.prompts[-2:])
    assert 0 < shared < 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= shared
    assert server.has_no_miss(answer)


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_documents(server: Server, seed: int) -> None:
    generator = random.Random(100 + seed)
    system = sentences(generator, 2)
    documents = [f"\n\n{sentences(generator, generator.randint(4, 8))}" for _ in range(4)]
    server.ask(chat(system + "".join(documents), sentences(generator, 1)))
    earlier = server.prompts[-1]
    order = documents[1:] + documents[:1]
    miss = server.miss(server.ask(chat(system + "".join(order), sentences(generator, 1))))
    prompt = server.prompts[-1]
    assert (miss["cause"], miss["position"]) == ("reordered", common(prompt, earlier))
    assert miss["lost_tokens"] == repeated(prompt, [earlier], miss["num_cached_tokens"]) > 100


def test_another_system_prompt(server: Server) -> None:
    generator = random.Random(200)
    tail = "\n\n" + sentences(generator, 15)
    earlier = []
    for _ in range(3):
        answer = server.ask(chat(sentences(generator, 9) + tail, sentences(generator, 1)))
        earlier.append(server.prompts[-1])
    miss = server.miss(answer)
    *earlier, prompt = earlier
    assert miss["cause"] == "system_prompt"
    assert miss["position"] == max(common(prompt, other) for other in earlier)
    assert miss["lost_tokens"] == repeated(prompt, earlier, miss["num_cached_tokens"]) > 100


def test_white_space(server: Server) -> None:
    generator = random.Random(300)
    head, tail = sentences(generator, 5), sentences(generator, 10)
    server.ask(chat(f"{head}\n{tail}", "Go on."))
    earlier = server.prompts[-1]
    miss = server.miss(server.ask(chat(f"{head}\n\n{tail}", sentences(generator, 1))))
    prompt = server.prompts[-1]
    assert (miss["cause"], miss["position"]) == ("white_space", common(prompt, earlier))
    assert miss["lost_tokens"] >= repeated(prompt, [earlier], miss["num_cached_tokens"]) > 50


def test_another_salt(server: Server) -> None:
    generator = random.Random(400)
    system = sentences(generator, 12)
    server.ask(chat(system, "One?"), cache_salt="one")
    earlier = server.prompts[-1]
    miss = server.miss(server.ask(chat(system, "Two?"), cache_salt="two"))
    assert (miss["cause"], miss["num_cached_tokens"]) == ("other_salt", 0)
    assert miss["lost_tokens"] == common(server.prompts[-1], earlier)


def test_evicted_by_others(server: Server) -> None:
    """The pool is filled with other prompts; it is known for whom, and how many tokens went."""
    generator = random.Random(500)
    messages = chat(sentences(generator, 30), "Well?")
    server.ask(messages)
    length = 0
    while length < NUM_BLOCKS * 16:
        server.ask(chat(sentences(generator, 120), "Well?"))
        length += len(server.prompts[-1])
    miss = server.miss(server.ask(messages))
    assert miss["cause"] == "evicted"
    assert miss["lost_tokens"] == len(server.prompts[-1]) - 1 - miss["num_cached_tokens"] > 100
    assert " had been evicted for " in miss["words"]
    assert " ago, after " in miss["words"]


def test_metrics_by_cause_are_those_of_the_report(server: Server) -> None:
    report = server.report()
    status, snapshot = call(f"{server.url}/kvd/snapshot")
    assert status == 200
    assert snapshot["misses"] == report["by_cause"]
    assert report["lost_tokens"] == sum(lost for _, _, lost in report["by_cause"])
    assert report["prefill_tokens_per_second"] > 0
