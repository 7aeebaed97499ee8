"""A jinja2 environment in which a template can neither reach out nor run away.

Purpose: a chat template is a program that came with a model, and its input is a request. It gets no files, no
attributes of Python objects beyond the sandbox's, and a budget: every loop round and every value that could be
larger than its parts is charged to a `Meter`, *before* it is made.
Owner: one environment and one meter per rendering, used by the one thread that renders.
Invariant: no single value is longer than `MAX_VALUE_LENGTH`; the work of a rendering is at most `max_work` units,
or `max_seconds`, whichever is reached first (the clock catches what C code does out of our sight).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_VALUE_LENGTH = 1 << 24
"""Characters of the rendered text, and items or characters of any value on the way: no prompt is longer."""

MAX_WORK = 1 << 28
"""Units of work for one rendering: a character made costs 1, a loop round `ROUND_WORK`."""

MAX_SECONDS = 10.0
MAX_PADDING = 100_000
ROUND_WORK = 64
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
_PADDING_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson"})
_ROUND, _JOIN = "start round", "join values"  # filters that no template can name
_REMOVED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateLimitExceeded(TemplateError):
    """A rendering was stopped because it did too much work or made too large a value."""


class Meter:
    """What one rendering has used so far."""

    def __init__(
        self,
        *,
        max_work: int = MAX_WORK,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work_left = max_work
        self._output_left = MAX_VALUE_LENGTH
        self._clock = clock
        self._deadline = clock() + max_seconds

    def charge(self, length: int) -> None:
        """Account for a value of `length` that is about to be made, or for reading one."""
        if length > MAX_VALUE_LENGTH:
            raise TemplateLimitExceeded(f"it makes a value longer than {MAX_VALUE_LENGTH} characters or items")
        self._work_left -= length
        if self._work_left < 0:
            raise TemplateLimitExceeded("it does more work than a chat template may")
        if self._clock() > self._deadline:
            raise TemplateLimitExceeded("it runs longer than a chat template may")

    def charge_output(self, length: int) -> None:
        self._output_left -= length
        if self._output_left < 0:
            raise TemplateLimitExceeded(f"it renders more than {MAX_VALUE_LENGTH} characters")
        self.charge(length)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote, for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a class attribute of this shape)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Puts a charge at the head of every loop body and macro, and sends `~` through a bounded function."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _charge_statement(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _charge_statement(node))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter(_JOIN, node.nodes, node.lineno)


def _charge_statement(owner: nodes.For | nodes.Macro) -> nodes.ExprStmt:
    """A round costs a constant and the literal text of the body, which no expression accounts for."""
    literal = sum(len(data.data) for part in owner.body for data in _template_data(part))
    statement = nodes.ExprStmt(_call_filter(_ROUND, [nodes.Const(literal)], owner.lineno))
    return statement.set_lineno(owner.lineno)  # type: ignore[return-value]


def _call_filter(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Expr:
    """Filters are called directly; a call of anything else takes the sandbox several microseconds."""
    first, *rest = arguments
    return nodes.Filter(first, name, rest, [], None, None, lineno=lineno)


def _template_data(node: nodes.Node) -> Iterable[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else node.find_all(nodes.TemplateData)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering (or of one compilation, whose constant folding is bounded too)."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=self._finalize,
        )
        self.filters["tojson"] = to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _guarded_filter(name, function, self.meter)
        self.filters[_ROUND] = _start_round
        self.filters[_JOIN] = _join_values
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Instrument().visit(template)  # changes it in place
        template.set_environment(self)
        return template

    # ---- called by compiled templates

    def _finalize(self, value: object) -> object:
        if isinstance(value, str):
            self.meter.charge_output(len(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.charge(_binop_length(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | int):
            __self.meter.charge(_call_length(owner, getattr(__obj, "__name__", ""), args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            self.meter.charge(_format_length(value.__self__, (*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return checked


# With a context as first argument these two are never run, and optimised away, by the compiler.
@pass_context
def _start_round(context: Context, literal_length: int) -> None:
    meter = _meter(context)
    meter.charge(ROUND_WORK)
    if literal_length:
        meter.charge_output(literal_length)


@pass_context
def _join_values(context: Context, *values: object) -> str:
    texts = [str(value) for value in values]
    _meter(context).charge(sum(map(len, texts)))
    return "".join(texts)


def _meter(context: Context) -> Meter:
    assert isinstance(context.environment, BoundedEnvironment)
    return context.environment.meter


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained to read it: jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# --------------------------------------------------------------------------- how long a value will be


def _binop_length(operator: str, left: Any, right: Any) -> int:
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            return _check_integer(left) + _check_integer(right)
        if isinstance(left, int):
            left, right = right, left
        return _length(left) * max(right, 0) if isinstance(right, int) else 0
    if operator == "%":
        return _format_length(left, right if isinstance(right, tuple) else (right,)) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int) and (abs(right) > 64 or left.bit_length() > 64):
        raise TemplateLimitExceeded("it raises a number to a large power")
    return 0


def _call_length(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if name in _PADDING_METHODS:
        _check_paddings((*args, *kwargs.values()))
    if isinstance(owner, int):
        return _check_integer(owner)
    if isinstance(owner, str):
        if name == "replace":
            return _replace_length(owner, *args, **kwargs)
        if name == "join" and args:
            return _join_length(args[0], owner)
        if name in ("translate", "expandtabs"):
            raise TemplateLimitExceeded(f"it calls str.{name}, which a chat template may not")
    return len(owner)


def _guarded_filter(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """`functools.wraps` keeps jinja's mark that says which implicit first argument the filter takes."""
    num_implicit = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[num_implicit], args[num_implicit + 1 :]
        named = tuple(kwargs.values())
        if name in _PADDING_FILTERS:
            _check_paddings((*rest, *named))
        length = _length(value)
        if name == "replace":
            length = _replace_length(str(value), *rest[:2], **kwargs)
        elif name == "join":
            if not isinstance(value, str | list | tuple | Mapping):
                value = list(value)
                args = (*args[:num_implicit], value, *rest)
            separator = rest[0] if rest else kwargs.get("d", "")
            length = _join_length(value, separator)
        elif name == "format":
            length = _format_length(str(value), (*rest, *named))
        elif name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            unit = width if isinstance(width, int) else _length(width)
            length += unit * (str(value).count("\n") + 1)
        meter.charge(length)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            meter.charge(len(result))
        return result

    return guarded


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | Mapping | range) else 0


def _replace_length(text: str, old: Any = "", new: Any = "", count: Any = -1, **_: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    return len(text) + text.count(old) * len(new)


def _join_length(values: Any, separator: Any) -> int:
    if not isinstance(values, str | list | tuple | Mapping):
        return 0
    return sum(_length(value) for value in values) + len(values) * len(str(separator))


def _format_length(template: str, values: Iterable[Any]) -> int:
    if re.search(r"\d{6}", template):
        raise TemplateLimitExceeded(f"it formats to a width of over {MAX_PADDING}")
    flat: list[Any] = []
    for value in values:
        flat.append(value)
        if isinstance(value, Mapping):
            flat.extend(value.values())
        elif isinstance(value, list | tuple):
            flat.extend(value)
    if re.search(r"\*|\{[^{}]*\{", template):
        _check_paddings(flat)
    num_fields = template.count("%") + template.count("{")
    return len(template) + num_fields * max(map(_length, flat), default=0)


def _check_paddings(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_PADDING:
            raise TemplateLimitExceeded(f"it passes a number over {MAX_PADDING} to a function that could pad with it")


def _check_integer(value: int) -> int:
    if value.bit_length() > 4096:
        raise TemplateLimitExceeded("it makes a very large number")
    return 0
