"""One conversation's answer, as every chat protocol needs it. Event loop only.

Purpose: chat completions, responses and messages differ in their JSON alone. Each translates its body into a
`ChatRequest`, opens it as a `ChatJob`, and reads the parts of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from kvd.errors import RequestError
from kvd.server.chat_types import ChatRequest, FunctionDefinition
from kvd.server.generation import Generation, GenerationJob, Usage, run_generation
from kvd.server.logprob_alignment import LogprobAlignment
from kvd.server.prompts import clamp_max_tokens, encode_chat_request
from kvd.server.state import ServerState
from kvd.server.structured import requested_grammar
from kvd.server.validation import unsupported
from kvd.text.answer_form import ChatPrompt
from kvd.text.grammar import Grammar, GrammarSpec
from kvd.text.output_parser import THINK_CLOSE, THINK_OPEN
from kvd.text.parts import Finish, Part
from kvd.text.tool_formats import Tool


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """A part of the answer, and the choice that it belongs to."""

    index: int
    part: Part


@dataclass(frozen=True, slots=True)
class ChatJob:
    """An accepted conversation: rendered, tokenized, and ready to be generated."""

    generation: GenerationJob

    @property
    def num_choices(self) -> int:
        return self.generation.choices_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generation.prompts[0])


async def open_chat(state: ServerState, body: ChatRequest, *, request_id: str, client: str, endpoint: str) -> ChatJob:
    """Check, render and tokenize a conversation, and compile what its answer is held to.

    Raises a `RequestError` that names the field of `body`.
    """
    body.check(state.vocab_size)
    if body.tools and state.text.tool_format is None:
        raise unsupported("tools", "this server is set not to read tool calls (setting tool_call_parser)")
    kv_eviction = body.resolve_eviction(state.settings.kv_eviction)
    spec = _grammar_spec(state, body)
    prompt = await encode_chat_request(state, body)
    sampling = body.resolve_sampling(
        vocab_size=state.vocab_size,
        defaults=state.settings.default_sampling,
        end_token_ids=state.settings.end_token_ids,
        max_tokens=clamp_max_tokens(state, len(prompt.token_ids), body.requested_tokens, param="messages"),
        num_logprobs=body.num_logprobs,
    )
    generation = GenerationJob(
        request_id=request_id,
        endpoint=endpoint,
        client=client,
        prompts=(tuple(prompt.token_ids),),
        samplings=(sampling,),
        stop=body.stop_strings,
        continues_text=bool(body.continue_final_message) or spec is not None,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        kv_eviction=kv_eviction,
        kv_budget_tokens=body.kv_budget_tokens,
        choices_per_prompt=body.n or 1,
        form=state.text.answer_form(
            prompt, tool_names=[function.name for function in body.offered_functions], one_call=body.is_one_call
        ),
        grammar=None if spec is None else await _compile(state, spec, prompt),
    )
    return ChatJob(generation)


def _grammar_spec(state: ServerState, body: ChatRequest) -> GrammarSpec | None:
    """Calls where they are required; else what the request asks for, beside which an offered tool may be called."""
    answer = requested_grammar(body)
    tool_format = state.text.tool_format
    if tool_format is None:
        return answer
    if required := body.required_functions:
        return tool_format.grammar([_tool(function) for function in required], one_call=body.is_one_call)
    if answer is not None and (offered := body.offered_functions):
        calls = tool_format.grammar([_tool(function) for function in offered], one_call=body.is_one_call)
        return replace(answer, alternative=calls)
    return answer


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.parameters, is_strict=bool(function.strict))


async def _compile(state: ServerState, spec: GrammarSpec, prompt: ChatPrompt) -> Grammar:
    """The grammar, behind the reasoning if there may be one. Raises a 400 for one that cannot be compiled."""
    if prompt.starts_in_reasoning:
        spec = replace(spec, begins_after=THINK_CLOSE)
    elif prompt.may_reason:
        spec = replace(spec, begins_after=THINK_CLOSE, opens_with=THINK_OPEN)
    return await asyncio.to_thread(state.grammars.compile, spec)


class ChatAnswer:
    """The answer to one job while it is generated; `generation` has its counts."""

    def __init__(self, state: ServerState, job: ChatJob, generation: Generation) -> None:
        self.generation = generation
        self._state = state
        self._has_logprobs = job.generation.samplings[0].num_logprobs is not None
        self._alignments = [LogprobAlignment() for _ in range(job.num_choices)]

    @property
    def usage(self) -> Usage:
        """Token counts so far; final when the last part has been read."""
        return self.generation.usage

    async def batches(self) -> AsyncGenerator[list[ChoicePart], None]:
        """The parts of all choices as they come, those that come at once together; each choice ends with a `Finish`.

        Raises a `RequestError` when the engine ends a choice by a fault or abort.
        """
        calling: list[int] = []
        async with aclosing(self.generation.pieces()) as pieces:
            async for piece in pieces:
                parts = piece.parts
                if self._has_logprobs:
                    parts = self._alignments[piece.index].align(parts, piece.logprobs)
                if any(isinstance(part, Finish) and part.reason == "tool_calls" for part in parts):
                    calling.append(piece.index)
                yield [ChoicePart(piece.index, part) for part in parts]
        for index in calling:
            await self._keep(self.generation.engine_id(index))

    async def parts(self) -> AsyncGenerator[ChoicePart, None]:
        """As `batches`, one by one."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for part in batch:
                    yield part

    async def _keep(self, engine_id: str) -> None:
        """The result of a tool comes soon: its turn's blocks had better stay."""
        with contextlib.suppress(RequestError):  # an engine that has just stopped takes nothing from this answer
            await self._state.engine.keep_turn(engine_id)


@contextmanager
def run_chat(state: ServerState, job: ChatJob) -> Iterator[ChatAnswer]:
    """Submit a job, and end whatever still runs of it on the way out.

    Raises what the engine refuses a request with; then nothing of the job was started.
    """
    with run_generation(state, job.generation) as generation:
        yield ChatAnswer(state, job, generation)
