"""POST /v1/chat/completions. Event loop only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvd.server.answer import Answer
from kvd.server.chat_job import ChatAnswer, ChatJob, open_chat, run_chat
from kvd.server.chat_types import ChatRequest
from kvd.server.logprobs import TokenLogprob, chat_logprobs
from kvd.server.prompts import read_request
from kvd.server.responses import json_response
from kvd.server.sse import frame, respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id
from kvd.text.parts import Finish, Part, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin, ToolCallEnd


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    state = request.app[STATE]
    request_id = start_request_id(request, "chatcmpl")
    state.check_accepting()
    body = await read_request(request, state, ChatRequest)
    model = state.required_model(body.model)
    job = await open_chat(state, body, request_id=request_id, client=describe_client(request), endpoint="chat")
    answer = _Answer.begin(state, request_id, model, has_logprobs=body.num_logprobs is not None)
    if body.stream:
        events = _stream(state, job, answer, wants_usage=body.wants_usage_chunk)
        return await respond_with_events(request, events, keepalive_seconds=state.settings.keepalive_seconds)
    with run_chat(state, job) as running:
        choices = [_Choice() for _ in range(job.num_choices)]
        async with aclosing(running.parts()) as parts:
            async for each in parts:
                choices[each.index].add(each.part)
        return json_response(answer.whole(choices, running))


@dataclass(slots=True)
class _Choice:
    """A whole choice, gathered from its parts."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, part: Part) -> None:
        match part:
            case TextDelta():
                self.text.append(part.text)
                self.logprobs += part.logprobs
            case ReasoningDelta():
                self.reasoning.append(part.text)
            case ToolCallBegin():
                function = {"name": part.name, "arguments": ""}
                self.calls.append({"id": part.call_id, "type": "function", "function": function})
            case ToolCallArguments():
                self.calls[part.call_index]["function"]["arguments"] += part.text
            case ToolCallEnd():
                pass
            case Finish():
                self.finish_reason = part.reason

    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning:
            message |= _reasoning("".join(self.reasoning))
        return message


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


class _Answer(Answer):
    """The objects of chat completions."""

    __slots__ = ()

    def whole(self, choices: Iterable[_Choice], running: ChatAnswer) -> dict[str, Any]:
        objects = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": chat_logprobs(choice.logprobs) if self.has_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self.envelope("chat.completion", objects, running.generation)

    def chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return self.envelope("chat.completion.chunk", [choice])

    def role_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        return [self.chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def chunks(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        """The chunk of one part; the end of a call has none."""
        match part:
            case TextDelta():
                logprobs = chat_logprobs(part.logprobs) if self.has_logprobs else None
                yield self.chunk(index, {"content": part.text}, logprobs=logprobs)
            case ReasoningDelta():
                yield self.chunk(index, dict(_reasoning(part.text)))
            case ToolCallBegin():
                function = {"name": part.name, "arguments": ""}
                call = {"index": part.call_index, "id": part.call_id, "type": "function", "function": function}
                yield self.chunk(index, {"tool_calls": [call]})
            case ToolCallArguments():
                call = {"index": part.call_index, "function": {"arguments": part.text}}
                yield self.chunk(index, {"tool_calls": [call]})
            case Finish():
                yield self.chunk(index, {}, finish_reason=part.reason)

    def usage_chunk(self, running: ChatAnswer) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", [], running.generation)


async def _stream(
    state: ServerState, job: ChatJob, answer: _Answer, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Framed chunks, several in one piece of bytes where they are there at once."""
    empty_usage = {"usage": None} if wants_usage else {}
    with run_chat(state, job) as running:
        opening = answer.role_chunks(job.num_choices)
        async with aclosing(running.batches()) as batches:
            async for batch in batches:
                chunks = [*opening, *(chunk for each in batch for chunk in answer.chunks(each.index, each.part))]
                opening = []
                if not wants_usage and chunks:
                    answer.tell_drops(chunks, running.generation)
                yield b"".join(frame({**chunk, **empty_usage}) for chunk in chunks)
        if wants_usage:
            yield frame(answer.usage_chunk(running))
