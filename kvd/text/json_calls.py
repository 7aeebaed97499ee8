"""Reads a tool call that a model wrote as a JSON object, character by character.

Rule: until name and arguments have both begun, anything unexpected makes the whole thing text. From then on the call
stands: its arguments are what the model wrote, up to the brace that closes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from kvd.text.answer_source import AnswerSource, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


def read_json_call(
    source: AnswerSource, accepts: Callable[[str], bool], *, only_call_keys: bool = False
) -> Steps[bool]:
    """The rest of `{"name": …, "arguments": {…}}` after its first brace; False: it is no call, and all of it is held.

    `accepts` says whether a name can be one. `only_call_keys`: an object with any other key but "type" is no call.
    True: the call has ended. Then nothing is held but, where the object did not close properly, what stands there
    instead; its last character is read again.
    """
    name: str | None = None
    arguments: str | None = None
    has_begun = False
    char = yield from source.skip_spaces()
    while char == '"':
        key = yield from _read_string(source)
        if key is None or (yield from source.skip_spaces()) != ":":
            break
        char = yield from source.skip_spaces()
        if key == "name" and name is None:
            name = (yield from _read_string(source)) if char == '"' else None
            if not name or not accepts(name):
                break
        elif key in ARGUMENT_KEYS and arguments is None:
            if char == "{" and name is not None:
                source.begin_call(name, num_held=1)
                yield from read_arguments(source)
                has_begun, arguments = True, ""
            else:
                arguments = yield from _read_arguments_early(source, char)
                if arguments is None:
                    break
        elif (only_call_keys and key != "type") or not (yield from _skip_value(source, char)):
            break
        char = yield from source.skip_spaces()
        if char == ",":
            char = yield from source.skip_spaces()
            if char == '"':
                continue
        elif char == "}" and name is not None:
            if has_begun:
                source.drop()
            else:
                source.begin_call(name)
                source.add_arguments(arguments or "{}")
                source.end_call()
            return True
        break
    if has_begun:
        source.unread()
    return has_begun


def read_arguments(source: AnswerSource) -> Steps[None]:
    """Release the arguments of a call that has begun, whose first brace is held, and end the call."""
    source.release_arguments()
    yield from _read_nested(source, source.release_arguments)
    source.end_call()


def _read_arguments_early(source: AnswerSource, char: str) -> Steps[str | None]:
    """Arguments that stand before the name, or in a string; None for what can be none."""
    start = len(source.held) - 1
    if char == "{":
        yield from _read_nested(source)
        text: str | None = "".join(source.held[start:])
        return text if isinstance(_parsed(text), dict) else None
    if char == '"':
        text = yield from _read_string(source)
        return text if isinstance(_parsed(text), dict) else None
    if char == "n" and (yield from _skip_value(source, char)):
        return "{}"
    return None


def _read_nested(source: AnswerSource, after_each: Callable[[], None] | None = None) -> Steps[None]:
    """Up to the bracket that closes the one that was read last."""
    depth = 1
    in_string = is_escaped = False
    while depth:
        char = yield from source.next()
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped = char == "\\"
            in_string = char != '"'
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        if after_each is not None:
            after_each()


def _read_string(source: AnswerSource) -> Steps[str | None]:
    """The string whose first quote was read; None when it is not valid."""
    start = len(source.held) - 1
    is_escaped = False
    while True:
        char = yield from source.next()
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            value = _parsed("".join(source.held[start:]))
            return value if isinstance(value, str) else None


def _skip_value(source: AnswerSource, char: str) -> Steps[bool]:
    """Read any value that begins with `char`; False when there is none."""
    if char == '"':
        return (yield from _read_string(source)) is not None
    if char in "{[":
        yield from _read_nested(source)
        return True
    start = len(source.held) - 1
    while (yield from source.next()) not in ",}] \n\r\t":
        pass
    source.unread()
    return _parsed("".join(source.held[start:])) is not None or "".join(source.held[start:]) == "null"


def _parsed(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
