"""Conversations for templates that insist on an order of roles. Pure functions.

Some templates refuse two messages of one role in a row, or a system message; agents send both. Nothing of what was
said is left out: texts of one role are joined by a blank line, and a system message becomes the beginning of the next
thing that the user says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]


def milder_orders(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other forms of a conversation that a template refused, the one that changes least first; none repeats another."""
    joined = join_neighbours(messages)
    if joined != list(messages):
        yield joined
    folded = join_neighbours(fold_system(messages))
    if folded != joined:
        yield folded


def join_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role become one message. Calls of tools and their results stay as they are."""
    joined: list[Message] = []
    for message in messages:
        if joined and _is_text(message) and _is_text(joined[-1]) and message["role"] == joined[-1]["role"]:
            joined[-1] = joined[-1] | {"content": _together(joined[-1], message)}
        else:
            joined.append(message)
    return joined


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Each system message becomes the user's, and so the beginning of what the user says next."""
    return [message | {"role": "user"} if message.get("role") == "system" else message for message in messages]


def _is_text(message: Message) -> bool:
    return message.get("role") in ("system", "user", "assistant") and set(message) <= {"role", "content", "name"}


def _together(first: Message, second: Message) -> str:
    return "\n\n".join(str(message["content"]) for message in (first, second) if message.get("content"))
