"""From token events to text: what all generating endpoints share between engine and wire. Event loop only.

A `Generation` owns the engine requests of one HTTP request. Invariant: when its context is left, however that
happens, none of them goes on running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from kvd.core import KVEviction, Logprobs, Request, SamplingParams, TokenEvent
from kvd.errors import EngineFailure, RequestError, ServerOverloaded
from kvd.server.interfaces import TokenStream
from kvd.server.logprobs import LogprobTracker, TokenLogprob
from kvd.server.state import ServerState
from kvd.text.answer_form import AnswerForm
from kvd.text.detokenizer import OutputStream
from kvd.text.grammar import Grammar
from kvd.text.output_parser import OutputParser
from kvd.text.parts import Part, join_parts

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one wake-up adds to one choice; the last piece of a choice has a finish reason.

    parts: the same text as an answer's parts, where the job has parsers.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: StopReason | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its choices; a prompt that several choices share counts once.

    Dropped tokens: None where none may be.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_dropped_tokens: int | None = None
    num_reasoning_tokens: int = 0

    def to_json(self) -> dict[str, object]:
        drops = {} if self.num_dropped_tokens is None else {"kvd": {"dropped_tokens": self.num_dropped_tokens}}
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            **drops,
        }


class Choice:
    """One sequence that is being generated."""

    def __init__(
        self,
        index: int,
        stream: TokenStream,
        output: OutputStream,
        tracker: LogprobTracker | None,
        parser: OutputParser | None,
    ) -> None:
        self.index = index
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_dropped_tokens = 0
        self.num_reasoning_tokens = 0
        self.prompt_logprobs: tuple[Logprobs | None, ...] | None = None  # None: not asked for, or not known yet
        self._stream = stream
        self._output = output
        self._tracker = tracker
        self._parser = parser
        self._has_ended = False
        self.token_ids: list[int] = []  # as sampled, the stop token included

    @property
    def request_id(self) -> str:
        """The engine's id."""
        return self._stream.request_id

    def abort(self) -> None:
        self._stream.abort()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; raises a `RequestError` when the engine ends the request by a fault or abort."""
        async for events in self._stream:
            piece = self._take(events)
            if piece.text or piece.logprobs or piece.parts or piece.finish_reason is not None:
                yield piece
            if self._has_ended:
                return
        assert self._has_ended, "a token stream ends with a finish reason"

    def _take(self, events: Sequence[TokenEvent]) -> Piece:
        texts: list[str] = []
        parts: list[Part] = []
        finish_reason: StopReason | None = None
        for event in events:
            self._count(event)
            if event.token_id is not None and event.finish_reason != "stop":
                if self._tracker is not None:
                    self._tracker.add(event.logprobs)
                texts.append(self._output.push([event.token_id]))
                self._parse(texts[-1], parts)
            elif event.token_id is not None and self._tracker is not None:
                self._tracker.add_stop(event.token_id, event.logprobs)
            if self._output.stopped or (self._parser is not None and self._parser.is_complete):
                self._stream.abort("stop")  # the engine may be a few tokens ahead; they are neither sent nor counted
                finish_reason = "stop"
                break
            if event.finish_reason is not None:
                finish_reason = _stop_reason(event)
                texts.append(self._output.finish())
                self._parse(texts[-1], parts)
        self._has_ended = finish_reason is not None
        if finish_reason is not None and self._parser is not None:
            parts += self._parser.finish(finish_reason, self._output.stop_string)
        logprobs = () if self._tracker is None else tuple(self._tracker.take())
        return Piece(self.index, "".join(texts), logprobs, finish_reason, tuple(join_parts(parts)))

    def _parse(self, text: str, parts: list[Part]) -> None:
        """A token that begins, continues or ends the reasoning counts as a part of it."""
        parser = self._parser
        if parser is None:
            return
        was_reasoning = parser.is_reasoning
        if text:
            parts += parser.push(text)
        self.num_reasoning_tokens += was_reasoning or parser.is_reasoning

    def _count(self, event: TokenEvent) -> None:
        self.num_prompt_tokens = event.num_prompt_tokens
        self.num_cached_tokens = event.num_cached_tokens
        self.num_output_tokens = event.num_output_tokens
        self.num_dropped_tokens = event.num_dropped_tokens
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs


class SilentChoice(Choice):
    """A prompt that is computed and not continued: the one token that the engine samples is not counted or shown."""

    def _take(self, events: Sequence[TokenEvent]) -> Piece:
        for event in events:
            self._count(event)
            self.num_output_tokens = 0
            if event.finish_reason is not None:
                _stop_reason(event)
                self._has_ended = True
        return Piece(self.index, "", (), "length" if self._has_ended else None)


def _stop_reason(event: TokenEvent) -> StopReason:
    """Either "stop" or "length"; raises the error that any other end is."""
    match event.finish_reason:
        case "stop" | "length" as reason:
            return reason
        case "refused":
            raise RequestError(f"request {event.request_id} cannot be completed: {event.error}")
        case "timeout":
            raise RequestError(
                f"request {event.request_id} ran out of time", status=504, kind="server_error", code="timeout"
            )
        case "abort":
            # A status that clients do not retry by themselves: an operator wanted the request gone.
            raise RequestError(
                f"request {event.request_id} was aborted", status=499, kind="server_error", code="request_aborted"
            )
        case _:
            raise EngineFailure(f"request {event.request_id} failed: {event.error or 'no reason given'}")


class Generation:
    """The choices of one HTTP request, submitted together."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        choices: list[Choice],
        *,
        forgets_tokens: bool,
        choices_per_prompt: int,
    ) -> None:
        self.request_id = request_id
        self.forgets_tokens = forgets_tokens
        self._choices_per_prompt = choices_per_prompt
        self._state = state
        self._choices = choices
        self._num_complete = 0

    @property
    def is_complete(self) -> bool:
        """The last piece of every choice has been handed out."""
        return self._num_complete == len(self._choices)

    @property
    def usage(self) -> Usage:
        first_of_prompts = self._choices[:: self._choices_per_prompt]
        return Usage(
            sum(choice.num_prompt_tokens for choice in first_of_prompts),
            sum(choice.num_cached_tokens for choice in first_of_prompts),
            sum(choice.num_output_tokens for choice in self._choices),
            sum(choice.num_dropped_tokens for choice in self._choices) if self.forgets_tokens else None,
            sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def prompt_logprobs(self, prompt: int) -> tuple[Logprobs | None, ...] | None:
        """Of the tokens of one prompt, as soon as they are known; see `GenerationJob.num_prompt_logprobs`."""
        return self._choices[prompt * self._choices_per_prompt].prompt_logprobs

    def engine_id(self, index: int) -> str:
        """The engine's id of one choice."""
        return self._choices[index].request_id

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices in the order in which they come."""
        source = self._choices[0].pieces() if len(self._choices) == 1 else _merge(self._choices)
        try:
            async for piece in source:
                self._num_complete += piece.finish_reason is not None
                yield piece
        except RequestError as error:
            if error.code == "request_aborted" and self._state.is_draining:
                raise ServerOverloaded("the server shut down before the answer was complete") from None
            raise
        finally:
            await source.aclose()


async def _merge(choices: Sequence[Choice]) -> AsyncGenerator[Piece, None]:
    """Interleave the pieces of several choices; the first failure ends all."""
    arrivals: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                arrivals.put_nowait(piece)
            arrivals.put_nowait(None)
        except Exception as error:
            arrivals.put_nowait(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        num_running = len(tasks)
        while num_running:
            arrival = await arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            if arrival is None:
                num_running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What an endpoint wants generated: `choices_per_prompt` engine requests per prompt.

    The choice `j` of prompt `i` has the index `i * choices_per_prompt + j`. With a `form` each choice's text is taken
    apart by a parser of its own.
    """

    request_id: str
    endpoint: str
    client: str
    prompts: Sequence[tuple[int, ...]]
    samplings: Sequence[SamplingParams]
    stop: tuple[str, ...]
    continues_text: bool  # the output goes on where the prompt ends, within one text
    priority: int
    cache_salt: str
    kv_eviction: KVEviction
    kv_budget_tokens: int | None
    choices_per_prompt: int = 1
    num_prompt_logprobs: int | None = None  # asked of the first choice of each prompt
    is_silent: bool = False  # only the prompts are computed
    tells_stop_token: bool = False  # a stop token has its place among the logprobs
    form: AnswerForm | None = None
    grammar: Grammar | None = None

    def requests(self) -> list[Request]:
        arrival = time.monotonic()
        is_single = len(self.prompts) * self.choices_per_prompt == 1
        choices = [
            (prompt, _with_own_seed(sampling, number), None if number else self.num_prompt_logprobs)
            for prompt, sampling in zip(self.prompts, self.samplings, strict=True)
            for number in range(self.choices_per_prompt)
        ]
        return [
            Request(
                request_id=self.request_id if is_single else f"{self.request_id}-{index}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_time=arrival,
                client=self.client,
                endpoint=self.endpoint,
                priority=self.priority,
                cache_salt=self.cache_salt,
                choice_index=index,
                kv_eviction=self.kv_eviction,
                kv_budget_tokens=self.kv_budget_tokens,
                num_prompt_logprobs=num_prompt_logprobs,
                grammar=self.grammar,
            )
            for index, (prompt, sampling, num_prompt_logprobs) in enumerate(choices)
        ]


def _with_own_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    """Choices of one prompt differ from each other, and a seeded request still gives the same ones every time."""
    if not number or sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + number + 2**63) % 2**64 - 2**63)


@contextmanager
def run_generation(state: ServerState, job: GenerationJob) -> Iterator[Generation]:
    """Submit a job and end whatever still runs of it on the way out.

    Raises what the engine refuses a request with; then nothing of the job was started.
    """
    requests = job.requests()
    choices: list[Choice] = []
    state.note_choices(job.request_id, tuple(request.request_id for request in requests))
    try:
        for request in requests:
            choices.append(_start(state, job, request))
        yield Generation(
            state,
            job.request_id,
            choices,
            forgets_tokens=job.kv_eviction != "none",
            choices_per_prompt=job.choices_per_prompt,
        )
    finally:
        for choice in choices:
            choice.abort()
            state.note_answer(choice.request_id, choice.token_ids)
        del state.active[job.request_id]


def _start(state: ServerState, job: GenerationJob, request: Request) -> Choice:
    sampling = request.sampling
    wants_logprobs = sampling.num_logprobs is not None
    output = state.text.open_output(
        job.stop,
        min_tokens=sampling.min_tokens,
        continues_text=job.continues_text,
        track_tokens=wants_logprobs,
        shown_token_ids=frozenset() if job.form is None else job.form.shown_token_ids,
    )
    tracker = LogprobTracker(state.text, output, tells_stop_token=job.tells_stop_token) if wants_logprobs else None
    parser = None if job.form is None else job.form.open_parser()
    kind = SilentChoice if job.is_silent else Choice
    return kind(request.choice_index, state.submit(request), output, tracker, parser)
