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
from kvd.text.answer_form import AnswerForm, ChatPrompt
from kvd.text.chat_template import ChatTemplate
from kvd.text.detokenizer import OutputStream
from kvd.text.grammar import GrammarCompiler
from kvd.text.infill import find_infill_tokens
from kvd.text.output_parser import THINK_CLOSE, THINK_OPEN
from kvd.text.tokenizer import Tokenizer
from kvd.text.tool_formats import Mistral
from kvd.text.tool_prompt import as_plain_messages, choose_format, speaks_format, with_short_ids

_END_CHARACTERS = 64
"""Of a rendered prompt, where the mark that opens the reasoning is looked for."""


class TextModel:
    """Tokenizer, chat template and detokenizer of one model.

    tool_format   how it writes tool calls; None: they are not looked for
    reasons       whether its answers may begin with reasoning
    can_infill    whether it may be asked for what belongs between two texts
    """

    def __init__(
        self,
        tokenizer_json: Path,
        *,
        chat_template: str | None,
        adds_bos: bool,
        bos_token_id: int | None,
        special_tokens: dict[str, str],
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """`special_tokens`: the names that templates use (bos_token, eos_token, …) and their text.

        `tool_call_parser`, `reasoning_parser`: the settings of these names; auto goes by the chat template.
        Raises CheckpointError for a tokenizer or template that cannot be read, UnsupportedModel for a kind of
        tokenizer that is not served.
        """
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        template_text = "" if self._template is None else self._template.literal_text
        self._tokenizer = Tokenizer(tokenizer_json, template_text=template_text)
        self._bos_token_id = bos_token_id if adds_bos else None
        self.vocab_size = self._tokenizer.vocab_size
        self._infill_tokens = find_infill_tokens(self._tokenizer.control_ids)
        self.can_infill = self._infill_tokens is not None
        self.tool_format = choose_format(tool_call_parser, self._template)
        self.reasons = reasoning_parser == "think" or (reasoning_parser == "auto" and THINK_OPEN in template_text)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def describe_parsers(self) -> str:
        """One line on how answers are read, for people."""
        if self.tool_format is None:
            calls = "not read"
        elif self._template is not None and speaks_format(self._template, self.tool_format):
            calls = f"{self.tool_format.name}, as in the chat template"
        else:
            calls = f"{self.tool_format.name}, described in messages, since the chat template does not"
        return f"tool calls: {calls}; reasoning: {THINK_OPEN if self.reasons else 'none'}"

    def encode_prompt(self, text: str, *, limit_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt; what looks like a control token in it is text.

        Raises ContextLengthExceeded for text that is far longer than `limit_tokens`; see `Tokenizer.encode`.
        """
        return self._with_bos(self._tokenizer.encode(text, limit_tokens=limit_tokens))

    def encode_infill(self, before: str, behind: str, *, limit_tokens: int | None = None) -> list[int]:
        """Token ids of the prompt whose answer stands between two texts; only where `can_infill`.

        Raises like `encode_prompt`.
        """
        assert self._infill_tokens is not None, "the model has no tokens for this"
        texts = [self._tokenizer.encode(text, limit_tokens=limit_tokens) for text in (before, behind)]
        return self._with_bos(self._infill_tokens.arrange(*texts))

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
        return self.prepare_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            limit_tokens=limit_tokens,
        ).token_ids

    def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        limit_tokens: int | None = None,
    ) -> ChatPrompt:
        """As `encode_chat`, with what the prompt says about the answer."""
        template = self._template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        tool_format = self.tool_format
        if tool_format is not None and not speaks_format(template, tool_format):
            messages, tools = as_plain_messages(messages, tools or (), tool_format, template), None
        elif isinstance(tool_format, Mistral):
            messages = with_short_ids(messages)
        rendered = template.render(
            messages,
            self._tokenizer.control,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        ids = self._with_bos(self._tokenizer.encode(rendered.text, rendered.control_spans, limit_tokens=limit_tokens))
        if not self.reasons:
            return ChatPrompt(ids)
        if continue_final_message:
            begun = str(messages[-1].get("content") or "")
            return ChatPrompt(ids, not begun, begun.rfind(THINK_OPEN) > begun.rfind(THINK_CLOSE))
        end = rendered.text[-_END_CHARACTERS:].rstrip()
        return ChatPrompt(ids, not end.endswith(THINK_CLOSE), add_generation_prompt and end.endswith(THINK_OPEN))

    def answer_form(self, prompt: ChatPrompt, *, tool_names: Iterable[str] = (), one_call: bool = False) -> AnswerForm:
        """How to take the answer to a prompt apart. `tool_names`: what it may call."""
        names = frozenset(tool_names)
        tool_format = self.tool_format if names else None
        markers = () if tool_format is None else tool_format.markers
        if prompt.may_reason or prompt.starts_in_reasoning:
            markers = (*markers, THINK_OPEN, THINK_CLOSE)
        control_ids = self._tokenizer.control_ids
        return AnswerForm(
            tool_format,
            names,
            one_call,
            prompt.may_reason,
            prompt.starts_in_reasoning,
            frozenset(control_ids[marker] for marker in markers if marker in control_ids),
        )

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
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> OutputStream:
        """A new incremental detokenizer, for one choice; see `OutputStream`. Raises RequestError for bad `stop`."""
        return OutputStream(
            self._tokenizer.table,
            stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            continues_text=continues_text,
            track_tokens=track_tokens,
            shown_token_ids=shown_token_ids,
        )

    def open_grammars(self, *, end_token_ids: Iterable[int], num_logits: int) -> GrammarCompiler:
        """What compiles grammars for this vocabulary; see there."""
        return GrammarCompiler(self._tokenizer, end_token_ids=end_token_ids, num_logits=num_logits)
