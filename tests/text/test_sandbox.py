"""A template cannot run away and cannot reach out. Each one here would need hours, gigabytes or a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jinja2 import Template

from kvd.errors import CheckpointError, RequestError
from kvd.text.chat_template import ChatTemplate
from kvd.text.literals import ControlTokens
from kvd.text.sandbox import BoundedEnvironment, Meter, to_json

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, ControlTokens([]), **options).text


DOUBLING = "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = EXPRESSION %}{% endfor %}{{ s.x }}"

RUNAWAYS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with text": "{% for a in range(99999) %}{% for b in range(9999) %}some text{% endfor %}{% endfor %}",
    "range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "macro recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "concat": DOUBLING.replace("EXPRESSION", "s.x ~ s.x"),
    "plus": DOUBLING.replace("EXPRESSION", "s.x + s.x"),
    "times": DOUBLING.replace("EXPRESSION", "s.x * 9"),
    "join method": DOUBLING.replace("EXPRESSION", "s.x.join([s.x, s.x])"),
    "join filter": DOUBLING.replace("EXPRESSION", "[s.x, s.x]|join(s.x)"),
    "join of a generator": DOUBLING.replace("EXPRESSION", "[s.x, s.x]|map('upper')|join(s.x)"),
    "replace method": DOUBLING.replace("EXPRESSION", "s.x.replace('a', s.x)"),
    "replace filter": DOUBLING.replace("EXPRESSION", "s.x|replace('a', s.x)"),
    "replace in map": DOUBLING.replace("EXPRESSION", "([s.x]|map('replace', 'a', s.x)|list)[0]"),
    "percent": DOUBLING.replace("EXPRESSION", "'%s%s' % (s.x, s.x)"),
    "format method": DOUBLING.replace("EXPRESSION", "'{}{}'.format(s.x, s.x)"),
    "format filter": DOUBLING.replace("EXPRESSION", "'%s%s'|format(s.x, s.x)"),
    "format_map method": DOUBLING.replace("EXPRESSION", "'{a}{a}'.format_map({'a': s.x})"),
    "lists": DOUBLING.replace("'ab'", "[1, 2]").replace("EXPRESSION", "s.x + s.x"),
    "list times": "{{ ([0] * 10 ** 10)|length }}",
    "text times, folded": "{{ 'x' * 10000000000 }}",
    "width, percent": "{{ '%9999999999d' % 1 }}",
    "width, star": "{{ '%*d' % (9999999999, 1) }}",
    "width, format": "{{ '{:9999999999}'.format(1) }}",
    "width, nested": "{{ '{:{}}'.format(1, 9999999999) }}",
    "width, ljust": "{{ 'x'.ljust(9999999999) }}",
    "width, center": "{{ 'x'|center(9999999999) }}",
    "width, indent": "{{ 'x\\ny'|indent(9999999999) }}",
    "width, tojson": "{{ [1]|tojson(indent=9999999999) }}",
    "batch": "{{ [1]|batch(9999999999, 0)|list }}",
    "large power": "{{ 10 ** 9999999999 }}",
    "large product": "{% set s = namespace(x=99) %}{% for i in range(99) %}{% set s.x = s.x * s.x %}{% endfor %}",
    "set block": "{% set x %}{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "scanning": "{% set x = 'x' * 9999999 %}{% for a in range(99999) %}{% set y = x.split('y') %}{% endfor %}",
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS.keys())
def test_runaway_template_is_stopped_with_one_line(source: str) -> None:
    """Stopped by counting work, not by the clock, which stands still here."""
    with pytest.raises((RequestError, CheckpointError)) as refusal:
        render(source, new_meter=lambda: Meter(max_work=1 << 24, clock=lambda: 0.0))
    assert "\n" not in str(refusal.value)
    if isinstance(refusal.value, RequestError):
        assert refusal.value.status == 400
        assert refusal.value.param == "messages"


def test_clock_stops_what_work_does_not_count() -> None:
    times = iter(range(10_000))
    with pytest.raises(RequestError, match="longer"):
        render(
            "{% for a in range(1000) %}{% endfor %}", new_meter=lambda: Meter(max_seconds=50, clock=lambda: next(times))
        )


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by filter": "{{ (''|attr('__class__')) ~ '' }}{{ (''|attr('__class__')).__mro__ }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "globals of a method": "{{ cycler.__init__.__globals__['os'].popen('id').read() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}{{ '{0.__class__}'.format(1).x.y }}",
    "environment": "{{ self.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "change the input": "{{ messages.append(1) }}",
    "change a message": "{{ messages[0].update({'role': 'system'}) }}",
    "lipsum": "{{ lipsum() }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_template_cannot_reach_out(source: str) -> None:
    with pytest.raises((RequestError, CheckpointError)) as refusal:
        render(source)
    assert "\n" not in str(refusal.value)


def run(source: str, **variables: Any) -> str:
    environment = BoundedEnvironment()
    code = environment.compile(source)
    template = Template.from_code(environment, code, environment.make_globals(None))
    return "".join(template.generate(variables))


ORDINARY: list[tuple[str, str]] = [
    ("{{ 1 + 2 }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 'ab' * 3 }} {{ 7 % 4 }}", "3 ab [1, 2] ababab 3"),
    ("{{ 2 ** 10 }}", "1024"),
    ("{{ 'a' ~ 1 ~ none }}", "a1None"),
    ("{{ '%s and %d' % ('x', 1700000000) }} {{ '{:>4}|{a}'.format(1, a='b') }}", "x and 1700000000    1|b"),
    ("{{ 'a,b'.split(',')|join('-') }} {{ ['b', 'a']|sort|first }} {{ 'x'.upper() }}", "a-b a X"),
    ("{{ messages|map(attribute='role')|join(', ') }}", "user"),
    ("{{ 'a-b'|replace('-', '+') }} {{ 'a-b-c'.replace('-', '', 1) }}", "a+b ab-c"),
    ("{{ 'a\nb'|indent(2) }}|{{ 'x'|center(3) }}|{{ 'x'.ljust(3) }}|", "a\n  b| x |x  |"),
    (
        "{% for a in range(5) %}{% if a == 1 %}{% continue %}{% elif a == 3 %}{% break %}{% endif %}"
        "{{ a }}{% endfor %}",
        "02",
    ),
    ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
    (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}"
        "{{ f(1) }}{% call f(3) %}!{% endcall %}",
        "1232!",
    ),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
    ("{% set ns = namespace(n=0) %}{% for a in 'xyz' %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}", "6"),
    ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ("{{ {'b': 'é<>&\\'', 'a': [1, none, true]}|tojson }}", '{"b": "é<>&\'", "a": [1, null, true]}'),
    ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
    ("{{ strftime_now('%%') }}", "%"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_template_code_works_in_the_sandbox(source: str, expected: str) -> None:
    assert run(source, messages=MESSAGES) == expected


def test_renderings_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for a in range(1000) %}{{ a }}{% endfor %}", {})
    for _ in range(5):
        template.render(MESSAGES, ControlTokens([]), new_meter=lambda: Meter(max_work=100_000))


def test_json_has_no_escapes_of_other_formats() -> None:
    assert to_json("ü</script>") == '"ü</script>"'


@pytest.mark.parametrize(
    ("name", "function"),
    [(name, function) for name, function in BoundedEnvironment().filters.items() if " " not in name],
)
def test_every_filter_is_guarded(name: str, function: Callable[..., Any]) -> None:
    assert hasattr(function, "__wrapped__"), name
