"""Chat templates: messages in, one text out, in the sandbox.

Purpose: what `transformers` renders for the same messages, and for everything else one readable line.
Owner: compiled once, read-only after; `render` may run in any number of threads at once, since each rendering has
an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from kvd.errors import CheckpointError, RequestError
from kvd.text.literals import ControlTokens, Literals, Rendered
from kvd.text.role_order import milder_orders
from kvd.text.sandbox import BoundedEnvironment, Meter

_RESERVED_NAMES = frozenset({
    "add_generation_prompt", "continue_final_message", "dict", "false", "joiner", "cycler", "loop", "messages",
    "namespace", "none", "raise_exception", "range", "self", "strftime_now", "tools", "true",
})  # fmt: skip
_MAX_MESSAGE_CHARACTERS = 300


class ChatTemplate:
    """One model's chat template.

    literal_text   every string the template itself may write, to tell which tokens it uses
    offers_tools   it has a way of its own to show tools to the model
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: names a template may use, such as bos_token. Raises CheckpointError on bad syntax."""
        environment = BoundedEnvironment()
        try:
            tree = environment.parse(source)
            code = environment.compile(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template cannot be used: {_one_line(error)}") from error
        self._code: CodeType = code
        self._special_tokens = special_tokens
        literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literal_text = "\0".join(literals)
        self.offers_tools = "tools" in meta.find_undeclared_variables(tree)
        self._knows_developer = "developer" in self.literal_text

    def render(
        self,
        messages: list[dict[str, Any]],
        control: ControlTokens,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        new_meter: Callable[[], Meter] = Meter,
    ) -> Rendered:
        """The prompt's text and the places of the control tokens that the template wrote.

        `continue_final_message` leaves the last message, which must be the assistant's, open at its end.
        Raises RequestError when the template refuses the messages or goes beyond its budget.
        """
        literals = Literals(control)
        self._check_kwargs(template_kwargs or {})
        try:
            marked = [self._prepare(message, index, literals) for index, message in enumerate(messages)]
            marked_tools = literals.mark(tools) if tools else None
            marked_kwargs = literals.mark(template_kwargs or {})
        except RecursionError as error:
            raise RequestError("messages, tools or chat_template_kwargs are nested too deeply") from error
        if continue_final_message:
            if not marked or marked[-1].get("role") != "assistant":
                raise RequestError(
                    "continue_final_message needs a last message with the role assistant",
                    param="continue_final_message",
                )
            if not isinstance(marked[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with content", param="continue_final_message"
                )
            # The space shows whether the template trims the message: then it is gone from the result.
            marked[-1]["content"] = f"{marked[-1]['content']}{literals.final} "
        variables: dict[str, Any] = {
            **self._special_tokens,
            **marked_kwargs,
            "messages": marked,
            "tools": marked_tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        rendered = self._run_in_some_order(variables, literals, new_meter)
        if continue_final_message:
            before, mark, after = rendered.rpartition(literals.final)
            if not mark:
                raise RequestError(
                    "continue_final_message: the chat template does not show the last message",
                    param="continue_final_message",
                )
            rendered = before if after.startswith(" ") else before.rstrip()
        return literals.resolve(rendered)

    def _run_in_some_order(self, variables: dict[str, Any], literals: Literals, new_meter: Callable[[], Meter]) -> str:
        """What the template makes of the messages, or of them in a milder order of roles; its first refusal if none."""
        try:
            return self._run(variables, literals, new_meter())
        except RequestError as refusal:
            for messages in milder_orders(variables["messages"]):
                with contextlib.suppress(RequestError):
                    return self._run(variables | {"messages": messages}, literals, new_meter())
            raise refusal

    def _run(self, variables: dict[str, Any], literals: Literals, meter: Meter) -> str:
        environment = BoundedEnvironment(meter)
        template = Template.from_code(environment, self._code, environment.make_globals(None))
        try:
            return "".join(template.generate(variables))
        # A template is a foreign program: whatever it raises is its verdict on these messages.
        except Exception as error:
            message = _one_line(literals.remove_marks(str(error)) or type(error).__name__)
            raise RequestError(f"the chat template refuses these messages: {message}", param="messages") from error

    def _check_kwargs(self, template_kwargs: dict[str, Any]) -> None:
        for name in template_kwargs:
            if name in _RESERVED_NAMES or name in self._special_tokens:
                raise RequestError(
                    f"chat_template_kwargs: {name[:40]} is set by the server", param="chat_template_kwargs"
                )
            if not name.isidentifier() or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs: {name[:40]!r} is not a variable name", param="chat_template_kwargs"
                )

    def _prepare(self, message: dict[str, Any], index: int, literals: Literals) -> dict[str, Any]:
        """A marked copy in the form that templates expect: no nulls, content one string, arguments parsed."""
        prepared = {key: value for key, value in message.items() if value is not None}
        role = prepared.get("role")
        if role == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        content = prepared.get("content")
        if isinstance(content, list | tuple):
            prepared["content"] = "\n".join(_text_of_part(part, index) for part in content)
        if isinstance(prepared.get("tool_calls"), list):
            prepared["tool_calls"] = [_parse_arguments(call) for call in prepared["tool_calls"]]
        marked = literals.mark(prepared, from_model=role == "assistant")
        assert isinstance(marked, dict)
        return marked


def _text_of_part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"messages[{index}].content: parts of type {str(kind)[:40]} are not served", param="messages"
        )
    text: str = part["text"]
    return text


def _parse_arguments(call: Any) -> Any:
    """OpenAI clients send a call's arguments as a JSON string; templates print them with `tojson`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _one_line(message: object) -> str:
    line = " ".join(str(message).split())
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else line[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
