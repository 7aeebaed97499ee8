"""POST /v1/completions. Event loop only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from aiohttp import web

from kvd.errors import ContextLengthExceeded
from kvd.server.answer import Answer
from kvd.server.completion_types import DEFAULT_MAX_TOKENS, CompletionRequest
from kvd.server.generation import Generation, GenerationJob, Piece, run_generation
from kvd.server.logprobs import completion_logprobs
from kvd.server.prompts import clamp_max_tokens, encode_prompt, read_request
from kvd.server.responses import json_response
from kvd.server.sse import frame, respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id

KIND = "text_completion"


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or as a stream of chunks."""
    state = request.app[STATE]
    request_id = start_request_id(request, "cmpl")
    state.check_accepting()
    body = await read_request(request, state, CompletionRequest)
    model = state.resolve_model(body.model)
    body.check(state.vocab_size)
    body.refuse_unsupported()
    job = await _make_job(state, body, request_id, describe_client(request))
    answer = _Answer.begin(state, request_id, model, has_logprobs=body.logprobs is not None)
    try:
        if body.stream:
            events = _stream(state, job, answer, wants_usage=body.wants_usage_chunk)
            return await respond_with_events(request, events, keepalive_seconds=state.settings.keepalive_seconds)
        with run_generation(state, job) as generation:
            pieces = [piece async for piece in generation.pieces()]
            return json_response(answer.whole(pieces, len(job.prompts), generation))
    except ContextLengthExceeded as error:
        error.param = "prompt"  # the engine does not know which endpoint asks
        raise


async def _make_job(state: ServerState, body: CompletionRequest, request_id: str, client: str) -> GenerationJob:
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [await encode_prompt(state, prompt) for prompt in body.prompts()]
    samplings = [
        body.resolve_sampling(
            vocab_size=state.vocab_size,
            defaults=state.settings.default_sampling,
            end_token_ids=state.settings.end_token_ids,
            max_tokens=clamp_max_tokens(state, len(prompt), wanted, param="prompt"),
            num_logprobs=body.logprobs,
        )
        for prompt in prompts
    ]
    return GenerationJob(
        request_id=request_id,
        endpoint="completions",
        client=client,
        prompts=prompts,
        samplings=samplings,
        stop=body.stop_strings,
        continues_text=True,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        kv_eviction=body.resolve_eviction(state.settings.kv_eviction),
        kv_budget_tokens=body.kv_budget_tokens,
    )


class _Answer(Answer):
    """The objects of text completions, which are of one kind, whole and streamed."""

    __slots__ = ()

    def choice(self, index: int, pieces: Sequence[Piece], offset: int, finish_reason: str | None) -> dict[str, Any]:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": completion_logprobs(entries, offset) if self.has_logprobs else None,
            "finish_reason": finish_reason,
        }

    def whole(self, pieces: Sequence[Piece], num_choices: int, generation: Generation) -> dict[str, Any]:
        by_choice: list[list[Piece]] = [[] for _ in range(num_choices)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = [self.choice(index, own, 0, own[-1].finish_reason) for index, own in enumerate(by_choice)]
        return self.envelope(KIND, choices, generation)

    def chunks(self, piece: Piece, offset: int) -> Iterator[dict[str, Any]]:
        """A text chunk where there is text, and the closing chunk."""
        if piece.text or piece.logprobs:
            yield self.envelope(KIND, [self.choice(piece.index, (piece,), offset, None)])
        if piece.finish_reason is not None:
            closing = {"index": piece.index, "text": "", "logprobs": None, "finish_reason": piece.finish_reason}
            yield self.envelope(KIND, [closing])


async def _stream(
    state: ServerState, job: GenerationJob, answer: _Answer, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Framed chunks, several in one piece of bytes where they are there at once."""
    empty_usage = {"usage": None} if wants_usage else {}
    offsets = [0] * len(job.prompts)  # characters of each choice that its log probabilities have covered
    with run_generation(state, job) as generation:
        async for piece in generation.pieces():
            chunks = [*answer.chunks(piece, offsets[piece.index])]
            if not wants_usage:
                answer.tell_drops(chunks, generation)
            yield b"".join(frame({**chunk, **empty_usage}) for chunk in chunks)
            offsets[piece.index] += sum(len(entry.chosen.token) for entry in piece.logprobs)
        if wants_usage:
            yield frame(answer.envelope(KIND, [], generation))
