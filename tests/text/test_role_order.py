"""Conversations of agents, for templates that insist on an order of roles."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.errors import RequestError
from kvd.text.chat_template import ChatTemplate
from kvd.text.role_order import fold_system, join_neighbours, milder_orders
from tests.text.test_chat_template import CONTROL

ALTERNATES = (
    "{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}<{{ messages[0].content }}>"
    "{% else %}{% set rest = messages %}{% endif -%}"
    "{%- for m in rest -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}"
    "[{{ m.role }}: {{ m.content }}]"
    "{%- endfor -%}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATES


def said(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (ALTERNATES, ("s:S", "u:one", "u:two"), "<S>[user: one\n\ntwo]"),
        (ALTERNATES, ("u:one", "a:x", "a:y", "u:two"), "[user: one][assistant: x\n\ny][user: two]"),
        (ALTERNATES, ("u:one", "a:x", "s:note", "u:two"), "[user: one][assistant: x][user: note\n\ntwo]"),
        (NO_SYSTEM, ("s:S", "u:one"), "[user: S\n\none]"),
        (NO_SYSTEM, ("s:S", "u:<s>", "u:two"), "[user: S\n\n<s>\n\ntwo]"),
        ("{{ messages | length }}", ("u:one", "u:two"), "2"),
    ],
)
def test_what_a_template_refuses_it_gets_in_a_milder_order(template: str, turns: tuple[str, ...], text: str) -> None:
    rendered = ChatTemplate(template, {}).render(said(*turns), CONTROL)
    assert rendered.text == text
    assert not rendered.control_spans, "what a user wrote is no control token, joined or not"


def test_the_first_refusal_is_told_where_nothing_helps() -> None:
    template = ChatTemplate("{{ raise_exception('I saw ' ~ messages | length) }}", {})
    with pytest.raises(RequestError, match=r"refuses these messages: I saw 3$"):
        template.render(said("s:S", "u:one", "u:two"), CONTROL)


def test_calls_and_results_of_tools_are_not_joined() -> None:
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "s", "tool_call_id": "2"},
    ]
    assert join_neighbours(messages) == messages


def test_no_order_is_tried_twice() -> None:
    assert list(milder_orders(said("u:one", "a:x"))) == []
    assert len(list(milder_orders(said("s:S", "u:one", "u:two")))) == 2
    assert len(list(milder_orders(said("s:S", "u:one")))) == 1
    assert fold_system(said("s:S")) == said("u:S")
