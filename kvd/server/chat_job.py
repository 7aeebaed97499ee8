"""One conversation's answer, as every chat protocol needs it. Event loop only.

Purpose: chat completions, responses and messages differ in their JSON alone. Each translates its body into a
`ChatRequest`, opens it as a `ChatJob`, and reads the parts of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvd.server.chat_types import ChatRequest
from kvd.server.generation import Generation, GenerationJob, Usage, run_generation
from kvd.server.prompts import clamp_max_tokens, encode_chat_request
from kvd.server.state import ServerState
from kvd.text.output_parser import OutputParser
from kvd.text.parts import Part, TextDelta


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """A part of the answer, and the choice that it belongs to."""

    index: int
    part: Part


@dataclass(frozen=True, slots=True)
class ChatJob:
    """An accepted conversation: rendered, tokenized, and ready to be generated."""

    generation: GenerationJob
    num_choices: int

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generation.prompts[0])


async def open_chat(state: ServerState, body: ChatRequest, *, request_id: str, client: str, endpoint: str) -> ChatJob:
    """Check, render and tokenize a conversation. Raises a `RequestError` that names the field of `body`."""
    body.check(state.vocab_size)
    body.refuse_unsupported()
    prompt = await encode_chat_request(state, body)
    sampling = body.resolve_sampling(
        vocab_size=state.vocab_size,
        defaults=state.settings.default_sampling,
        end_token_ids=state.settings.end_token_ids,
        max_tokens=clamp_max_tokens(state, len(prompt), body.requested_tokens, param="messages"),
        num_logprobs=body.num_logprobs,
    )
    generation = GenerationJob(
        request_id=request_id,
        endpoint=endpoint,
        client=client,
        prompts=(tuple(prompt),),
        samplings=(sampling,),
        stop=body.stop_strings,
        continues_text=bool(body.continue_final_message),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        kv_eviction=body.resolve_eviction(state.settings.kv_eviction),
        kv_budget_tokens=body.kv_budget_tokens,
        choices_per_prompt=body.n or 1,
        make_parser=OutputParser,
    )
    return ChatJob(generation, body.n or 1)


class ChatAnswer:
    """The answer to one job while it is generated; `generation` has its counts."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    @property
    def usage(self) -> Usage:
        """Token counts so far; final when the last part has been read."""
        return self.generation.usage

    async def parts(self) -> AsyncGenerator[ChoicePart, None]:
        """The parts of all choices as they come; each choice ends with a `Finish`.

        Raises a `RequestError` when the engine ends a choice by a fault or abort.
        """
        async for piece in self.generation.pieces():
            for part in piece.parts:
                if isinstance(part, TextDelta) and piece.logprobs:
                    part = replace(part, logprobs=piece.logprobs)
                yield ChoicePart(piece.index, part)


@contextmanager
def run_chat(state: ServerState, job: ChatJob) -> Iterator[ChatAnswer]:
    """Submit a job, and end whatever still runs of it on the way out.

    Raises what the engine refuses a request with; then nothing of the job was started.
    """
    with run_generation(state, job.generation) as generation:
        yield ChatAnswer(generation)
