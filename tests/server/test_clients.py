"""Clients and compliance suites of others against the server with a scripted engine.

The engine answers with a call where the request is held to a grammar, and with text otherwise.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from llm_comply import config, http, result, runner, schema
from llm_comply.tests import get_tests

from kvd.core import Request
from kvd.engine.streams import TokenStream
from tests.server.conftest import Harness, StartServer
from tests.server.fakes import MODEL, build_info

PROGRAM = Path(__file__).with_name("litellm_program.py")
SPECS = {
    "openai-chat": "openai_chat.json",
    "open-responses": "openresponses.json",
    "anthropic": "anthropic.json",
}
TEXT = "Hello to you."
THINKER = "tiny-o1-claude-sonnet-4"
"""A name by which the suite takes the model for one that can think, and leaves no test out."""

NEEDS_EYES = "image-input"
"""How the id of a test ends that asks what is in a picture: the model reads text, and a picture is never left out in
silence."""


@pytest.fixture
async def scripted(start_server: StartServer) -> Harness:
    harness = await start_server(served_names=(MODEL, THINKER))
    engine, submit = harness.engine, harness.engine.submit
    engine.info = build_info(max_model_len=8192)

    def choose_reply(request: Request) -> TokenStream:
        arguments = {"location": "San Francisco", "place": "Zürich"}
        call = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': arguments})}\n</tool_call>"
        engine.reply = TEXT if request.grammar is None else call
        return submit(request)

    engine.submit = choose_reply  # type: ignore[method-assign]
    return harness


def run_suite(url: str, api_format: str) -> result.SuiteResult:
    headers = {"anthropic-version": "2023-06-01"} if api_format == "anthropic" else None
    settings = config.ComplianceConfig(f"{url}/v1", "none", THINKER, verbose=True, extra_headers=headers)
    spec = Path(llm_comply.__file__).parent / "specs" / SPECS[api_format]
    try:
        return runner.TestRunner(settings, get_tests(api_format), schema.SpecLoader(str(spec))).run_all()
    finally:
        http.close_client()


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated:DeprecationWarning")
@pytest.mark.parametrize("api_format", ["openai-chat", "open-responses", "anthropic"])
async def test_llm_comply(scripted: Harness, api_format: str) -> None:
    suite = await asyncio.to_thread(run_suite, scripted.url, api_format)
    assert len(suite.results) >= 9
    for outcome in suite.results:
        if outcome.id.endswith(NEEDS_EYES):
            assert outcome.errors[0].startswith("HTTP 400"), outcome.id
            assert "image" in str(outcome.response)
        else:
            assert (outcome.id, outcome.status, outcome.errors) == (outcome.id, result.TestStatus.PASSED, [])


async def test_litellm(scripted: Harness) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        scripted.url,
        MODEL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    num_prompt = len(scripted.engine.submitted[0].prompt_token_ids)
    text = {"content": TEXT, "finish_reason": "stop", "calls": [], "tokens": [num_prompt, len(TEXT) + 1]}
    for family in ("chat", "messages"):
        assert found[family]["whole"] == found[family]["async"] == text
        assert found[family]["stream"] == TEXT
        assert found[family]["tools"]["finish_reason"] == "tool_calls"
        assert found[family]["tools"]["calls"][0][0] == "get_weather"
        assert found[family]["tools"]["calls"][0][1]["place"] == "Zürich"
        assert found[family]["error"] == "context window exceeded"
    assert found["native"] == {"stop_reason": "tool_use", "kinds": ["tool_use"]}
