"""The answer of Responses while it is made: output items, and the events that tell of them. Event loop only.

A `Draft` takes the parts of an answer and keeps the response object; a whole answer is what its events add up to.
Invariant: sequence numbers rise by one in the order in which bytes are handed out, which is the order of writing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from kvd.errors import RequestError
from kvd.server.generation import Usage
from kvd.server.sse import COMMENT, frame
from kvd.text.parts import Finish, Part, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin, ToolCallEnd

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, dict[str, Any]]
"""Kind without the leading "response.", and its fields."""

_FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded", 503: "server_is_overloaded"}
_KNOWN_CODES = frozenset({"context_length_exceeded", *_FAILURE_CODES.values()})


class _TextItem:
    """An item with one part of text: a message, or reasoning."""

    prefix: str
    part_type: str

    def __init__(self) -> None:
        self.item_id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.texts: list[str] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        raise NotImplementedError

    def part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": "".join(self.texts)}

    def extra(self) -> dict[str, Any]:
        """Further fields of the event that ends the text."""
        return {}

    def opening(self) -> Iterator[Event]:
        place = {"item_id": self.item_id, "content_index": 0}
        yield "content_part.added", {**place, "part": self.part()}

    def closing(self) -> Iterator[Event]:
        place = {"item_id": self.item_id, "content_index": 0}
        yield f"{self.part_type}.done", {**place, "text": "".join(self.texts), **self.extra()}
        yield "content_part.done", {**place, "part": self.part()}


class _Message(_TextItem):
    prefix = "msg"
    part_type = "output_text"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[dict[str, Any]] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        content = [self.part()] if self.texts or status != "in_progress" else []
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self) -> dict[str, Any]:
        return {**super().part(), "annotations": [], "logprobs": self.logprobs}

    def extra(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs}

    def add(self, delta: TextDelta) -> Iterator[Event]:
        self.texts.append(delta.text)
        logprobs = [
            {**entry.chosen.to_json(), "top_logprobs": [other.to_json() for other in entry.top]}
            for entry in delta.logprobs
        ]
        self.logprobs += logprobs
        place = {"item_id": self.item_id, "content_index": 0}
        yield "output_text.delta", {**place, "delta": delta.text, "logprobs": logprobs}


class _Reasoning(_TextItem):
    prefix = "rs"
    part_type = "reasoning_text"

    def item(self, status: ItemStatus) -> dict[str, Any]:
        content = [self.part()] if self.texts or status != "in_progress" else []
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def add(self, delta: ReasoningDelta) -> Iterator[Event]:
        self.texts.append(delta.text)
        yield "reasoning_text.delta", {"item_id": self.item_id, "content_index": 0, "delta": delta.text}


class _Call:
    """A call of a function. One that was cut off is never told to be done, since clients execute what is done."""

    def __init__(self, begin: ToolCallBegin) -> None:
        self.item_id = f"fc_{uuid.uuid4().hex}"
        self._begin = begin
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._begin.call_id,
            "name": self._begin.name,
            "arguments": "".join(self._texts),
        }

    def opening(self) -> Iterator[Event]:
        yield from ()

    def add(self, delta: ToolCallArguments) -> Iterator[Event]:
        self._texts.append(delta.text)
        yield "function_call_arguments.delta", {"item_id": self.item_id, "delta": delta.text}

    def closing(self) -> Iterator[Event]:
        arguments = "".join(self._texts)
        yield (
            "function_call_arguments.done",
            {"item_id": self.item_id, "name": self._begin.name, "arguments": arguments},
        )


_Item = _Message | _Reasoning | _Call


class Draft:
    """One response from its creation to its end.

    Owner: the handler of one request. `begin` comes first; then parts; then one of `complete` and `fail`.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        """`head`: every field of the response object that does not change while it is made."""
        self._head = head
        self._created = int(time.time())
        self._status = "in_progress"
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._finish: Finish | None = None
        self._error: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None

    # ------------------------------------------------------------------ streams

    def begin(self) -> bytes:
        """The first two events; nothing where a sign of life has brought them already."""
        if self._num_events:
            return b""
        return self._frame("created", self._lifecycle()) + self._frame("in_progress", self._lifecycle())

    def sign_of_life(self) -> bytes:
        """An event while nothing else happens: clients with an idle timer count events, not comments."""
        if self._status != "in_progress":
            return COMMENT
        return self._frame("in_progress", self._lifecycle()) if self._num_events else self.begin()

    def events(self, part: Part) -> bytes:
        """A part of the answer as framed events."""
        return b"".join(self._frame(kind, fields) for kind, fields in self.take(part))

    def complete(self, usage: Usage) -> bytes:
        """The last event, after the last part."""
        self.close(usage)
        return self._frame(self._status, self._lifecycle())

    def fail(self, error: RequestError) -> bytes:
        """The last event of an answer that an error ended."""
        first = self.begin()
        self._status = "failed"
        self._error = {"code": _failure_code(error), "message": str(error)}
        return first + self._frame("failed", self._lifecycle())

    def _lifecycle(self) -> dict[str, Any]:
        return {"response": self.response()}

    def _frame(self, kind: str, fields: dict[str, Any]) -> bytes:
        name = f"response.{kind}"
        number, self._num_events = self._num_events, self._num_events + 1
        return frame({"type": name, "sequence_number": number, **fields}, event=name)

    # ------------------------------------------------------------------ parts

    def take(self, part: Part) -> Iterator[Event]:
        """Add a part to the output; gives the events that tell of it. The output grows as the events are read."""
        match part:
            case TextDelta():
                message = self._open if isinstance(self._open, _Message) else None
                if message is None:
                    yield from self._start(message := _Message())
                yield from self._placed(message.add(part))
            case ReasoningDelta():
                reasoning = self._open if isinstance(self._open, _Reasoning) else None
                if reasoning is None:
                    yield from self._start(reasoning := _Reasoning())
                yield from self._placed(reasoning.add(part))
            case ToolCallBegin():
                yield from self._start(_Call(part))
            case ToolCallArguments():
                assert isinstance(self._open, _Call), "arguments come within a call"
                yield from self._placed(self._open.add(part))
            case ToolCallEnd():
                yield from self._end("completed")
            case Finish():
                self._finish = part
                if self._open is None and not self._output:
                    yield from self._start(_Message())  # a client is owed an item, also for an empty answer
                is_cut_call = part.stop_string is not None and isinstance(self._open, _Call)
                yield from self._end("incomplete" if part.reason == "length" or is_cut_call else "completed")

    def close(self, usage: Usage) -> None:
        """After the last part: the response is what it will be."""
        assert self._finish is not None, "an answer ends with a finish"
        self._status = "incomplete" if self._finish.reason == "length" else "completed"
        self._usage = _usage_object(usage)

    def _start(self, item: _Item) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self._output), "item": item.item("in_progress")}
        yield from self._placed(item.opening())

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        item = self._open
        if status == "completed" or not isinstance(item, _Call):
            yield from self._placed(item.closing())
            yield "output_item.done", {"output_index": len(self._output), "item": item.item(status)}
        self._output.append(item.item(status))
        self._open = None

    def _placed(self, events: Iterator[Event]) -> Iterator[Event]:
        for kind, fields in events:
            yield kind, {"output_index": len(self._output), **fields}

    # ------------------------------------------------------------------ the response object

    def response(self) -> dict[str, Any]:
        """The response object as it stands. Items are in it when it has ended, as OpenAI has it."""
        is_over = self._status != "in_progress"
        unfinished = [self._open.item("incomplete")] if is_over and self._open is not None else []
        return {
            **self._head,
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [*self._output, *unfinished] if is_over else [],
            "usage": self._usage,
        }


def _failure_code(error: RequestError) -> str:
    """The code by which clients decide between trying again, shortening the input, and giving up."""
    if error.code in _KNOWN_CODES:
        return error.code
    return _FAILURE_CODES.get(error.status, "server_error")


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Newer clients require `cache_write_tokens`, which are charged apart elsewhere; here nothing is."""
    counts = usage.to_json()
    drops = {"kvd": counts["kvd"]} if "kvd" in counts else {}
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
        **drops,
    }
