"""One streamed completion as the client saw it: when which chunk came, and how many tokens the endpoint counted.

Purpose: turn the bytes of a server-sent event stream, each piece with its arrival time, into an `Answer`. This is done
after the stream has ended, so that the client spends as little as possible while it measures.
Invariant: token counts are the endpoint's own `usage`, never counted from chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.errors import KvdError


class BenchFailed(KvdError):
    """An endpoint could not be measured; the message names it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds of `time.perf_counter`.

    `arrivals`: of every chunk that carried text, in order; of the closing chunk where no chunk carried text.
    `last`: of the last chunk that carried text or a finish reason. `cached_tokens`: prompt tokens that the endpoint
    says it found in its cache; None where it does not say.
    """

    sent: float
    arrivals: tuple[float, ...]
    last: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    max_tokens: int

    @property
    def first(self) -> float:
        """When the first chunk came."""
        return self.arrivals[0]

    @property
    def ttft_seconds(self) -> float:
        """Time to first token: from the moment before the request was sent to its first chunk."""
        return self.first - self.sent

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first one: (tokens − 1) ÷ (last chunk − first chunk); None for one chunk."""
        seconds = self.last - self.first
        return (self.completion_tokens - 1) / seconds if seconds > 0 and self.completion_tokens > 1 else None

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that came after `begin` and not after `end`, every chunk taken as an equal share of the tokens."""
        num_inside = sum(begin < arrival <= end for arrival in self.arrivals)
        return num_inside * self.completion_tokens / len(self.arrivals)


def read_answer(sent: float, pieces: Sequence[tuple[float, bytes]], max_tokens: int) -> Answer:
    """The answer of a whole event stream.

    pieces: (arrival, bytes) as the socket gave them; an event belongs to the piece that completes it. Raises
    BenchFailed where the stream reports an error, breaks off, or carries no usage.
    """
    arrivals: list[float] = []
    last: float | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] = {}
    for arrival, event in _events(pieces):
        if event.get("error"):
            raise BenchFailed(f"error in mid-stream: {error_text(event)}")
        choices = event.get("choices") or []
        if choices:
            if choices[0].get("text"):
                arrivals.append(arrival)
                last = arrival
            elif choices[0].get("finish_reason"):
                last = arrival
        usage = event.get("usage") or usage
        timings = event.get("timings") or timings
    if last is None:
        raise BenchFailed("the stream ended without a token")
    if usage is None:
        raise BenchFailed("the stream has no usage (stream_options.include_usage), so its tokens cannot be counted")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", timings.get("cache_n"))
    return Answer(
        sent=sent,
        arrivals=tuple(arrivals) or (last,),
        last=last,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=cached,
        max_tokens=max_tokens,
    )


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """(arrival, JSON object) of every data line; comments, other fields and [DONE] are left out."""
    rest = b""
    for arrival, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise BenchFailed(f"not JSON in the stream: {data[:60]!r}") from None
            if isinstance(event, dict):
                yield arrival, event


def error_text(body: object) -> str:
    """What a JSON error body says, in OpenAI's form or in others that are about."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return " ".join(str(error).split())[:300]
