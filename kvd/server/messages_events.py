"""A message while it is written, and the events that tell of it. Event loop only.

Invariants: content blocks follow each other, each opened, filled and closed before the next; the message that a client
puts together from the events is the one that it would have got in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvd.errors import RequestError
from kvd.server.generation import Usage
from kvd.server.messages_errors import messages_error_object
from kvd.server.sse import StreamForm, frame
from kvd.text.parts import (
    Finish,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

SIGNATURE = "kvd"
"""Thinking comes with a signature, without which some clients do not send it back; nothing here checks it."""

PING = frame({"type": "ping"}, event="ping")

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "tool_use": {"type": "tool_use", "caller": {"type": "direct"}, "input": {}},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class Draft:
    """One message; give it the parts of the answer in their order.

    omits_thinking      thinking is shown as a block without text
    num_prompt_tokens   set as soon as it is known, so that a stream can begin before the first token
    """

    def __init__(self, request_id: str, model: str, *, omits_thinking: bool = False) -> None:
        self.num_prompt_tokens: int | None = None
        self._request_id = request_id
        self._model = model
        self._omits_thinking = omits_thinking
        self._has_begun = False
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def message(self, usage: Usage) -> dict[str, Any]:
        """The message as it is now."""
        return {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "container": None,
            "usage": _usage_object(usage),
        }

    # ------------------------------------------------------------------ as a stream

    @property
    def form(self) -> StreamForm:
        return StreamForm(b"", self._fail, self._sign_of_life)

    def events(self, part: Part, usage: Usage) -> bytes:
        """Framed events for one part; `usage` is what has been counted so far."""
        begin = b"" if self._has_begun else self._begin(usage)
        return begin + b"".join(frame(event, event=event["type"]) for event in self.take(part))

    def end(self, usage: Usage) -> bytes:
        """The last events; the counts are final."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence, "stop_details": None}
        event = {"type": "message_delta", "delta": delta, "usage": _delta_usage(usage)}
        return frame(event, event="message_delta") + frame({"type": "message_stop"}, event="message_stop")

    def _begin(self, usage: Usage) -> bytes:
        self._has_begun = True
        message = {**self.message(usage), "content": []}
        return frame({"type": "message_start", "message": message}, event="message_start") + PING

    def _sign_of_life(self) -> bytes:
        """During a long prefill the message begins without knowing what the cache will save; the end tells."""
        if self._has_begun or self.num_prompt_tokens is None:
            return PING
        return self._begin(Usage(self.num_prompt_tokens, 0, 0))

    def _fail(self, error: RequestError) -> bytes:
        return frame(messages_error_object(error, self._request_id), event="error")

    # ------------------------------------------------------------------ parts

    def take(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add one part to the message; yields the events that tell of it, and must be read to the end."""
        match part:
            case TextDelta(text=text):
                yield from self._add("text", text)
            case ReasoningDelta(text=text):
                yield from self._add("thinking", text)
            case ToolCallBegin(call_id=call_id, name=name):
                yield from self._close()
                yield self._begin_block("tool_use", id=call_id, name=name)
            case ToolCallArguments(text=text):
                yield from self._add("tool_use", text)
            case ToolCallEnd():
                yield from self._close()
            case Finish(reason=reason, stop_string=stop_string):
                yield from self._finish(reason, stop_string)

    def _finish(self, reason: str, stop_string: str | None) -> Iterator[dict[str, Any]]:
        yield from self._close()
        if not self._blocks:  # clients read the text of the first block without looking
            yield self._begin_block("text")
            yield from self._close()
        self._stop_reason = _STOP_REASONS[reason] if stop_string is None else "stop_sequence"
        self._stop_sequence = stop_string

    def _add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield self._begin_block(kind)
        if kind == "thinking" and self._omits_thinking:
            return
        self._pieces.append(text)
        delta_kind, field = _DELTAS[kind]
        yield self._delta({"type": delta_kind, field: text})

    def _begin_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._open = {**_EMPTY[kind], **fields}
        self._blocks.append(self._open)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(self._open)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Close the block that is open, if one is."""
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return
        self._open, self._pieces = None, []
        match block["type"]:
            case "tool_use":
                block["input"] = _parse_input(text)
            case "thinking":
                block |= {"thinking": text, "signature": SIGNATURE}
                yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
            case _:
                block["text"] = text
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _parse_input(text: str) -> dict[str, Any]:
    """The arguments of a call. The protocol has objects only: those of a call that was cut off are empty, and
    `stop_reason` says why; a stream has shown what came of them.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


# --------------------------------------------------------------------------- counts


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        **_delta_usage(usage),
        "cache_creation": None,
        "inference_geo": None,
        "service_tier": "standard",
    }


def _delta_usage(usage: Usage) -> dict[str, Any]:
    """Every prompt is cached as it is computed, without being asked: what was not there before is plain input."""
    drops = {} if usage.num_dropped_tokens is None else {"kvd": {"dropped_tokens": usage.num_dropped_tokens}}
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        "server_tool_use": None,
        **drops,
    }
