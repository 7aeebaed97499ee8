"""Talks to a kvd server through litellm; run as a program of its own, since litellm changes a process for good.

Arguments: the server's URL and a model name. Prints what came back as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks another server for its prices

import litellm

litellm.telemetry = False
litellm.drop_params = False

FUNCTION = {
    "name": "get_weather",
    "description": "Current weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
MESSAGES_TOOL = {"name": FUNCTION["name"], "description": "Weather", "input_schema": FUNCTION["parameters"]}
HELLO = [{"role": "user", "content": "Hi"}]


def main() -> None:
    url, model = sys.argv[1:]
    by_family = {
        "chat": {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"},
        "messages": {"model": f"anthropic/{model}", "api_base": url, "api_key": "none"},
    }
    found: dict[str, Any] = {}
    for family, server in by_family.items():
        request = {**server, "messages": HELLO, "max_tokens": 200, "max_retries": 0}
        found[family] = {
            "whole": describe(litellm.completion(**request)),
            "stream": stream_text(litellm.completion(**request, stream=True)),
            "async": describe(asyncio.run(litellm.acompletion(**request))),
            "tools": describe(litellm.completion(**request, tools=[CHAT_TOOL], tool_choice="required")),
            "error": error_of({**request, "messages": [{"role": "user", "content": "x" * 20_000}]}),
        }
    found["native"] = asyncio.run(native(by_family["messages"]))
    print(json.dumps(found))


def describe(answer: Any) -> dict[str, Any]:
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content,
        "finish_reason": choice.finish_reason,
        "calls": [[call.function.name, json.loads(call.function.arguments)] for call in calls],
        "tokens": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    }


def stream_text(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def error_of(request: dict[str, Any]) -> str:
    try:
        litellm.completion(**request)
    except litellm.ContextWindowExceededError:
        return "context window exceeded"
    return "none"


async def native(server: dict[str, Any]) -> dict[str, Any]:
    """The Messages protocol as litellm passes it on, untranslated."""
    answer = await litellm.anthropic.messages.acreate(
        **server, messages=HELLO, max_tokens=200, tools=[MESSAGES_TOOL], tool_choice={"type": "any"}
    )
    return {"stop_reason": answer["stop_reason"], "kinds": [block["type"] for block in answer["content"]]}


if __name__ == "__main__":
    main()
