"""What the JSON of an OpenAI completion has in common, whole and streamed, chat and text. Event loop only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

from kvd.server.generation import Generation
from kvd.server.state import ServerState, system_fingerprint


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything in one answer that does not change from chunk to chunk; each endpoint adds its choices."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    has_logprobs: bool

    @classmethod
    def begin(cls, state: ServerState, request_id: str, model: str, *, has_logprobs: bool) -> Self:
        """The answer to a request that has just been accepted."""
        return cls(request_id, int(time.time()), model, system_fingerprint(state.engine.info), has_logprobs)

    def tell_drops(self, chunks: list[dict[str, Any]], generation: Generation) -> None:
        """For a stream without a usage chunk: if tokens may be forgotten, the very last chunk carries the usage."""
        if generation.forgets_tokens and generation.is_complete:
            chunks[-1]["usage"] = generation.usage.to_json()

    def envelope(
        self, kind: str, choices: list[dict[str, Any]], generation: Generation | None = None
    ) -> dict[str, Any]:
        """One object of `kind`; with a generation, its usage so far is in it."""
        usage = {} if generation is None else {"usage": generation.usage.to_json()}
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **usage,
        }
