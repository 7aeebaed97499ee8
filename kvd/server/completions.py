"""POST /v1/completions. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from kvd.errors import ContextLengthExceeded
from kvd.server.answer import Answer
from kvd.server.completion_types import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from kvd.server.echo import Echo, Opening
from kvd.server.generation import Generation, GenerationJob, Piece, run_generation
from kvd.server.logprobs import completion_logprobs
from kvd.server.prompts import clamp_max_tokens, encode_prompt, read_request
from kvd.server.responses import json_response
from kvd.server.sse import frame, respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id
from kvd.server.structured import requested_grammar

KIND = "text_completion"


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or as a stream of chunks."""
    state = request.app[STATE]
    request_id = start_request_id(request, "cmpl")
    state.check_accepting()
    body = await read_request(request, state, CompletionRequest)
    model = state.required_model(body.model)
    body.check(state.vocab_size)
    body.refuse_unsupported(can_infill=state.text.can_infill)
    prompts = body.prompts()
    job = await _make_job(state, body, prompts, request_id, describe_client(request))
    answer = _Answer.begin(state, request_id, model, has_logprobs=body.logprobs is not None)
    echo = Echo(state.text, prompts, job.prompts, has_logprobs=answer.has_logprobs) if body.echo else None
    try:
        if body.stream:
            events = _stream(state, job, answer, echo, wants_usage=body.wants_usage_chunk)
            return await respond_with_events(request, events, keepalive_seconds=state.settings.keepalive_seconds)
        with run_generation(state, job) as generation:
            pieces = [piece async for piece in generation.pieces()]
            return json_response(await answer.whole(pieces, job, echo, generation))
    except ContextLengthExceeded as error:
        error.param = "prompt"  # the engine does not know which endpoint asks
        raise


async def _make_job(
    state: ServerState, body: CompletionRequest, prompts: Sequence[Prompt], request_id: str, client: str
) -> GenerationJob:
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    spec = requested_grammar(body)
    encoded = [await encode_prompt(state, prompt, body.suffix or "") for prompt in prompts]
    samplings = [
        body.resolve_sampling(
            vocab_size=state.vocab_size,
            defaults=state.settings.default_sampling,
            end_token_ids=state.settings.end_token_ids,
            max_tokens=clamp_max_tokens(state, len(prompt), max(1, wanted), param="prompt"),
            num_logprobs=body.logprobs,
        )
        for prompt in encoded
    ]
    return GenerationJob(
        request_id=request_id,
        endpoint="completions",
        client=client,
        prompts=encoded,
        samplings=samplings,
        stop=body.stop_strings,
        continues_text=True,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        kv_eviction=body.resolve_eviction(state.settings.kv_eviction),
        kv_budget_tokens=body.kv_budget_tokens,
        choices_per_prompt=body.num_choices,
        num_prompt_logprobs=body.num_prompt_logprobs,
        is_silent=wanted == 0,
        tells_stop_token=True,
        grammar=None if spec is None else await asyncio.to_thread(state.grammars.compile, spec),
    )


class _Answer(Answer):
    """The objects of text completions, which are of one kind, whole and streamed."""

    __slots__ = ()

    def choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        """Of the tokens of some pieces, the first of which begins at `offset` of the choice's text."""
        if not self.has_logprobs:
            return None
        return completion_logprobs([entry for piece in pieces for entry in piece.logprobs], offset)

    async def whole(
        self, pieces: Sequence[Piece], job: GenerationJob, echo: Echo | None, generation: Generation
    ) -> dict[str, Any]:
        by_choice: list[list[Piece]] = [[] for _ in range(len(job.prompts) * job.choices_per_prompt)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = []
        for index, own in enumerate(by_choice):
            prompt = index // job.choices_per_prompt
            opening = _NO_OPENING
            if echo is not None:
                opening = await echo.opening(prompt, generation.prompt_logprobs(prompt))
            logprobs = self._logprobs(own, len(opening.text))
            if opening.logprobs is not None and logprobs is not None:
                logprobs = {key: opening.logprobs[key] + logprobs[key] for key in logprobs}
            text = opening.text + "".join(piece.text for piece in own)
            choices.append(self.choice(index, text, logprobs, own[-1].finish_reason))
        return self.envelope(KIND, choices, generation)

    def opening_chunk(self, index: int, opening: Opening) -> dict[str, Any]:
        return self.envelope(KIND, [self.choice(index, opening.text, opening.logprobs)])

    def chunks(self, piece: Piece, offset: int) -> list[dict[str, Any]]:
        """A text chunk where there is text, and the closing chunk."""
        choices = []
        if piece.text or piece.logprobs:
            choices.append(self.choice(piece.index, piece.text, self._logprobs([piece], offset)))
        if piece.finish_reason is not None:
            choices.append(self.choice(piece.index, "", None, piece.finish_reason))
        return [self.envelope(KIND, [choice]) for choice in choices]


_NO_OPENING = Opening("", None)


async def _stream(
    state: ServerState, job: GenerationJob, answer: _Answer, echo: Echo | None, *, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Framed chunks, several in one piece of bytes where they are there at once."""
    empty_usage = {"usage": None} if wants_usage else {}
    offsets: dict[int, int] = {}  # characters of the choices that have begun which their log probabilities have covered
    with run_generation(state, job) as generation:
        async with aclosing(_ready_pieces(job, echo, generation)) as ready:
            async for pieces in ready:
                chunks: list[dict[str, Any]] = []
                for piece in pieces:
                    if piece.index not in offsets:
                        offsets[piece.index] = 0
                        if echo is not None:
                            prompt = piece.index // job.choices_per_prompt
                            opening = await echo.opening(prompt, generation.prompt_logprobs(prompt))
                            chunks.append(answer.opening_chunk(piece.index, opening))
                            offsets[piece.index] = len(opening.text)
                    chunks += answer.chunks(piece, offsets[piece.index])
                    offsets[piece.index] += sum(len(entry.chosen.token) for entry in piece.logprobs)
                if not wants_usage:
                    answer.tell_drops(chunks, generation)
                yield b"".join(frame({**chunk, **empty_usage}) for chunk in chunks)
        if wants_usage:
            yield frame(answer.envelope(KIND, [], generation))


async def _ready_pieces(
    job: GenerationJob, echo: Echo | None, generation: Generation
) -> AsyncGenerator[list[Piece], None]:
    """Pieces as they come, those of a prompt that is still being scored held back until that is done.

    One choice of a prompt has it scored for all. The others may be ahead of it: they may find the prompt in the cache.
    """
    held: dict[int, list[Piece]] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            prompt = piece.index // job.choices_per_prompt
            if echo is not None and echo.has_logprobs and generation.prompt_logprobs(prompt) is None:
                held.setdefault(prompt, []).append(piece)
            else:
                yield [*held.pop(prompt, ()), piece]
    assert not held, "a prompt that is computed is scored"
