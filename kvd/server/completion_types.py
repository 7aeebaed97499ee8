"""The body of POST /v1/completions: structure, limits, and its four kinds of prompt."""

from __future__ import annotations

from typing import cast

from kvd.server.common_types import GenerationFields, check_max_tokens
from kvd.server.responses import invalid
from kvd.server.validation import check_range, check_token_ids, unsupported

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
MAX_CHOICES = 2048
"""Of all prompts of one request together."""

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
        if self.best_of is not None and self.best_of < self.num_choices:
            raise invalid("best_of", f"'best_of' is {self.best_of}, but 'n' is {self.num_choices}")
        if len(self.prompts()) * self.num_choices > MAX_CHOICES:
            raise invalid(
                "n", f"{len(self.prompts())} prompts times 'n' {self.num_choices} are more than {MAX_CHOICES} choices"
            )
        for prompt in self.prompts():
            if not prompt and not self.suffix:
                raise invalid("prompt", "a prompt must not be empty")
            if not isinstance(prompt, str):
                check_token_ids("prompt", prompt, vocab_size)

    def refuse_unsupported(self, *, can_infill: bool) -> None:
        """Raise a 400 for what is valid but not offered. can_infill: by the model."""
        if self.best_of is not None and self.best_of > self.num_choices:
            raise unsupported("best_of", "this server returns every choice that it generates; set 'n' instead")
        if self.suffix and not can_infill:
            raise unsupported("suffix", "this model has no fill-in-the-middle tokens")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise unsupported("suffix", "needs prompts that are texts")
        if self.suffix and self.echo:
            raise unsupported("suffix", "cannot be combined with 'echo'")

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return self.n or 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

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
