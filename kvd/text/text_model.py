"""What the server needs of a model's text: prompts to token ids, token ids to text.

Purpose: one object per model, injected into the server.
Owner: made at start-up, read-only after. `encode_prompt` and `encode_chat` take milliseconds for long prompts and may
run in worker threads, several at once, while the event loop decodes.
Invariant: with `adds_bos` every prompt has exactly one BOS, at its beginning, whatever the template or the
tokenizer's own post-processor would do.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvd.errors import RequestError
from kvd.text.chat_template import ChatTemplate
from kvd.text.detokenizer import OutputStream
from kvd.text.grammar import GrammarCompiler
from kvd.text.tokenizer import Tokenizer


class TextModel:
    """Tokenizer, chat template and detokenizer of one model."""

    def __init__(
        self,
        tokenizer_json: Path,
        *,
        chat_template: str | None,
        adds_bos: bool,
        bos_token_id: int | None,
        special_tokens: dict[str, str],
    ) -> None:
        """`special_tokens`: the names that templates use (bos_token, eos_token, …) and their text.

        Raises CheckpointError for a tokenizer or template that cannot be read, UnsupportedModel for a kind of
        tokenizer that is not served.
        """
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        template_text = "" if self._template is None else self._template.literal_text
        self._tokenizer = Tokenizer(tokenizer_json, template_text=template_text)
        self._bos_token_id = bos_token_id if adds_bos else None
        self.vocab_size = self._tokenizer.vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, text: str, *, limit_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt; what looks like a control token in it is text.

        Raises ContextLengthExceeded for text that is far longer than `limit_tokens`; see `Tokenizer.encode`.
        """
        return self._with_bos(self._tokenizer.encode(text, limit_tokens=limit_tokens))

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        limit_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation (OpenAI's message objects), rendered by the model's chat template.

        `continue_final_message` renders without generation prompt and leaves the last message, the assistant's,
        open. Raises RequestError (400) when there is no template, or when it refuses the messages, and
        ContextLengthExceeded like `encode_prompt`.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        rendered = self._template.render(
            messages,
            self._tokenizer.control,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._with_bos(self._tokenizer.encode(rendered.text, rendered.control_spans, limit_tokens=limit_tokens))

    def _with_bos(self, token_ids: list[int]) -> list[int]:
        bos = self._bos_token_id
        if bos is None:
            return token_ids
        num_bos = next((index for index, id_ in enumerate(token_ids) if id_ != bos), len(token_ids))
        return [bos, *token_ids[num_bos:]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that users see: without special tokens, and without an incomplete character at the end.

        Bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary have no text.
        """
        table = self._tokenizer.table
        data = b"".join(map(table.visible_bytes, token_ids))
        if table.strips_leading_space:
            data = data.removeprefix(b" ")
        return codecs.utf_8_decode(data, "replace", False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens included; none for an id outside the vocabulary."""
        table = self._tokenizer.table.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def open_output(
        self,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        continues_text: bool = False,
        track_tokens: bool = False,
    ) -> OutputStream:
        """A new incremental detokenizer, for one choice; see `OutputStream`. Raises RequestError for bad `stop`."""
        return OutputStream(
            self._tokenizer.table,
            stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            continues_text=continues_text,
            track_tokens=track_tokens,
        )

    def open_grammars(self, *, end_token_ids: Iterable[int], num_logits: int) -> GrammarCompiler:
        """What compiles grammars for this vocabulary; see there."""
        return GrammarCompiler(self._tokenizer, end_token_ids=end_token_ids, num_logits=num_logits)
