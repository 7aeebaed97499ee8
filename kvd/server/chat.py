"""POST /v1/chat/completions. Event loop only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from aiohttp import web

from kvd.server.answer import Answer
from kvd.server.chat_types import ChatRequest
from kvd.server.generation import Generation, GenerationJob, Piece, run_generation
from kvd.server.logprobs import chat_logprobs
from kvd.server.prompts import clamp_max_tokens, encode_chat_request, read_request
from kvd.server.responses import json_response
from kvd.server.sse import frame, respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    state = request.app[STATE]
    request_id = start_request_id(request, "chatcmpl")
    state.check_accepting()
    body = await read_request(request, state, ChatRequest)
    model = state.resolve_model(body.model)
    body.check(state.vocab_size)
    body.refuse_unsupported()
    job = await _make_job(state, body, request_id, describe_client(request))
    answer = _Answer.begin(state, request_id, model, has_logprobs=body.num_logprobs is not None)
    if body.stream:
        events = _stream(state, job, answer, wants_usage=body.wants_usage_chunk)
        return await respond_with_events(request, events, keepalive_seconds=state.settings.keepalive_seconds)
    with run_generation(state, job) as generation:
        pieces = [piece async for piece in generation.pieces()]
        return json_response(answer.whole(pieces, generation))


async def _make_job(state: ServerState, body: ChatRequest, request_id: str, client: str) -> GenerationJob:
    prompt = await encode_chat_request(state, body)
    sampling = body.resolve_sampling(
        vocab_size=state.vocab_size,
        defaults=state.settings.default_sampling,
        end_token_ids=state.settings.end_token_ids,
        max_tokens=clamp_max_tokens(state, len(prompt), body.requested_tokens, param="messages"),
        num_logprobs=body.num_logprobs,
    )
    return GenerationJob(
        request_id=request_id,
        endpoint="chat",
        client=client,
        prompts=(tuple(prompt),),
        samplings=(sampling,),
        stop=body.stop_strings,
        continues_text=bool(body.continue_final_message),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        kv_eviction=body.resolve_eviction(state.settings.kv_eviction),
        kv_budget_tokens=body.kv_budget_tokens,
    )


class _Answer(Answer):
    """The objects of chat completions."""

    __slots__ = ()

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": chat_logprobs(entries) if self.has_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        return self.envelope("chat.completion", [choice], generation)

    def _chunk(self, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return self.envelope("chat.completion.chunk", [choice])

    def role_chunk(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """A content chunk where there is content, and the closing chunk."""
        if piece.text or piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs) if self.has_logprobs else None
            yield self._chunk({"content": piece.text}, logprobs=logprobs)
        if piece.finish_reason is not None:
            yield self._chunk({}, finish_reason=piece.finish_reason)

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", [], generation)


async def _stream(
    state: ServerState, job: GenerationJob, answer: _Answer, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Framed chunks, several in one piece of bytes where they are there at once."""
    empty_usage = {"usage": None} if wants_usage else {}
    with run_generation(state, job) as generation:
        opening = [answer.role_chunk()]
        async for piece in generation.pieces():
            chunks = [*opening, *answer.chunks(piece)]
            opening = []
            if not wants_usage:
                answer.tell_drops(chunks, generation)
            yield b"".join(frame({**chunk, **empty_usage}) for chunk in chunks)
        if wants_usage:
            yield frame(answer.usage_chunk(generation))
