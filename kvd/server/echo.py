"""Prompts as the answer repeats them, where a completion asks for that. Event loop; long ones go to a worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.core import Logprobs
from kvd.server.completion_types import Prompt
from kvd.server.logprobs import prompt_logprobs
from kvd.text.detokenizer import TokenText
from kvd.text.text_model import TextModel

INLINE_TOKENS = 64
"""Prompts with more tokens have their log probabilities made into JSON in a worker thread: each costs some 10 µs."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a choice that repeats its prompt begins with."""

    text: str
    logprobs: dict[str, Any] | None


class Echo:
    """The prompts of one request, as they came and as token ids."""

    def __init__(
        self, text: TextModel, prompts: Sequence[Prompt], token_ids: Sequence[tuple[int, ...]], *, has_logprobs: bool
    ) -> None:
        self.has_logprobs = has_logprobs
        self._text = text
        self._prompts = prompts
        self._token_ids = token_ids
        self._openings: dict[int, Opening] = {}

    async def opening(self, prompt: int, logprobs: Sequence[Logprobs | None] | None) -> Opening:
        """Of one prompt, made once. A text is repeated as it came, whatever the tokenizer makes of it."""
        if prompt not in self._openings:
            if len(self._token_ids[prompt]) > INLINE_TOKENS:
                self._openings[prompt] = await asyncio.to_thread(self._open, prompt, logprobs)
            else:
                self._openings[prompt] = self._open(prompt, logprobs)
        return self._openings[prompt]

    def _open(self, prompt: int, logprobs: Sequence[Logprobs | None] | None) -> Opening:
        given = self._prompts[prompt]
        text = given if isinstance(given, str) else self._text.decode(given)
        if not self.has_logprobs:
            return Opening(text, None)
        assert logprobs is not None
        return Opening(text, prompt_logprobs(self._text, self._tokens(prompt), logprobs))

    def _tokens(self, prompt: int) -> list[TokenText]:
        stream = self._text.open_output(track_tokens=True)
        stream.push(self._token_ids[prompt])
        stream.finish()
        return stream.take_tokens()
