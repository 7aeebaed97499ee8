"""The body of POST /v1/completions: structure, limits, and its four kinds of prompt."""

from __future__ import annotations

from typing import cast

from kvd.server.common_types import GenerationFields, check_max_tokens
from kvd.server.responses import invalid
from kvd.server.validation import check_range, check_token_ids, unsupported

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids that are taken as they are."""


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self, vocab_size: int) -> None:
        """Raise a 400 that names the first field that is wrong."""
        super().check(vocab_size)
        check_max_tokens("max_tokens", self.max_tokens, self.min_tokens, lowest=0)
        check_range("logprobs", self.logprobs, 0, 5)
        check_range("best_of", self.best_of, 1, 128)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise invalid("best_of", f"'best_of' is {self.best_of}, but 'n' is {self.n}")
        for prompt in self.prompts():
            if not prompt:
                raise invalid("prompt", "a prompt must not be empty")
            if not isinstance(prompt, str):
                check_token_ids("prompt", prompt, vocab_size)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of > 1:
            raise unsupported("best_of", "this server gives one choice per prompt")
        if self.echo:
            raise unsupported("echo", "this server does not repeat the prompt")
        if self.suffix:
            raise unsupported("suffix", "this model has no fill-in-the-middle tokens")
        if self.max_tokens == 0:
            raise unsupported("max_tokens", "0 makes sense with 'echo' only; ask for at least 1")

    def prompts(self) -> list[Prompt]:
        """One entry per prompt; a 400 where kinds are mixed or there are none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if len(kinds) != 1:
            reason = "must not mix strings, token ids and lists" if kinds else "must not be empty"
            raise invalid("prompt", f"'prompt' {reason}")
        if kinds == {int}:
            return [tuple(cast(list[int], self.prompt))]
        if len(self.prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"'prompt' has {len(self.prompt)} prompts; at most {MAX_PROMPTS}")
        return [item if isinstance(item, str) else tuple(item) for item in self.prompt if not isinstance(item, int)]
