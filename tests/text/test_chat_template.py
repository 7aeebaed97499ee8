"""Chat templates: the text that transformers renders, and one clear line where it would raise."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvd.errors import CheckpointError, RequestError
from kvd.text.chat_template import ChatTemplate
from kvd.text.literals import ControlTokens

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = ControlTokens(["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>", "</s>"])
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & Zeit",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Łódź", "days": 2}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaces around \n"}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello 😀"},
        {"role": "user", "content": "日本語 {{ not_a_template }} {% raw %}"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"temperature": 3}', "tool_call_id": "call_1"},
    ],
    "assistant last": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}],
    "assistant last, not trimmed": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}],
}
NAMES = ["chatml", "llama2", "llama3", "qwen"]


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers(
    templates: dict[str, str], name: str, conversation: str, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    tools = [TOOL] if conversation == "tools" else None
    rendered = ChatTemplate(templates[name], SPECIAL).render(
        messages, CONTROL, add_generation_prompt=add_generation_prompt, tools=tools
    )
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    assert rendered.text == reference(templates[name], messages, **options)


@pytest.mark.parametrize("conversation", ["assistant last", "assistant last, not trimmed"])
@pytest.mark.parametrize("name", NAMES)
def test_continues_the_final_message_as_transformers(templates: dict[str, str], name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    rendered = ChatTemplate(templates[name], SPECIAL).render(messages, CONTROL, continue_final_message=True)
    assert rendered.text == reference(templates[name], messages, continue_final_message=True)
    assert rendered.text.rstrip().endswith("Sure,")


def test_continued_message_may_look_like_anything(templates: dict[str, str]) -> None:
    content = "<|im_end|>\n<|im_start|>"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    rendered = ChatTemplate(templates["chatml"], SPECIAL).render(messages, CONTROL, continue_final_message=True)
    assert rendered.text.endswith("assistant\n" + content)
    assert rendered.control_spans[-1][1] <= len(rendered.text) - len(content)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant"}],
    ],
)
def test_continuing_needs_an_assistant_message(templates: dict[str, str], messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate(templates["chatml"], SPECIAL).render(messages, CONTROL, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"
    assert refusal.value.status == 400


def test_continuing_what_the_template_hides_is_refused() -> None:
    with pytest.raises(RequestError, match="does not show"):
        ChatTemplate("{{ messages|length }}", {}).render(
            [{"role": "assistant", "content": "x"}], CONTROL, continue_final_message=True
        )


def test_template_kwargs_reach_the_template(templates: dict[str, str]) -> None:
    template = ChatTemplate(templates["qwen"], SPECIAL)
    messages = CONVERSATIONS["one"]
    assert "<think>" not in template.render(messages, CONTROL).text
    assert "<think>" in template.render(messages, CONTROL, template_kwargs={"enable_thinking": False}).text


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "raise_exception",
        "range",
        "_x",
        "a b",
        "",
        "__class__",
    ],
)
def test_reserved_and_bad_kwargs_are_refused(templates: dict[str, str], name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate(templates["chatml"], SPECIAL).render(CONVERSATIONS["one"], CONTROL, template_kwargs={name: 1})
    assert refusal.value.param == "chat_template_kwargs"
    assert name in str(refusal.value)


def test_kwargs_cannot_bring_control_tokens() -> None:
    template = ChatTemplate("{{ title }}<|im_end|>{{ data|tojson }}", SPECIAL)
    kwargs = {"title": "<|im_end|>", "data": {"<|im_end|>": ["<|im_end|>"]}}
    rendered = template.render(CONVERSATIONS["one"], CONTROL, template_kwargs=kwargs)
    assert rendered.control_spans == [(10, 20)]


def test_tools_and_calls_cannot_bring_control_tokens(templates: dict[str, str]) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"</s>": "<s>"}}}
    call = {"function": {"name": "<|im_start|>", "arguments": '{"<|im_end|>": "<|im_end|>"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate(templates["qwen"], SPECIAL)
    rendered = template.render(messages, CONTROL, tools=[tool])
    clean = template.render(
        [messages[0], {**messages[1], "tool_calls": [{"function": {"name": "n", "arguments": {}}}]}],
        CONTROL,
        tools=[{**tool, "function": {"name": "f"}}],
    )
    tokens = [rendered.text[start:end] for start, end in rendered.control_spans]
    assert tokens == [clean.text[start:end] for start, end in clean.control_spans]


def test_call_arguments_given_as_json_text_render_as_the_object(templates: dict[str, str]) -> None:
    template = ChatTemplate(templates["qwen"], SPECIAL)
    messages = CONVERSATIONS["tools"]
    as_text = [
        messages[0],
        {
            **messages[1],
            "tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Łódź", "days": 2}'}}],
        },
        messages[2],
    ]
    assert template.render(as_text, CONTROL).text == template.render(messages, CONTROL).text
    broken = [{**messages[1], "tool_calls": [{"function": {"name": "f", "arguments": "{not json"}}]}]
    assert '"{not json"' in template.render(broken, CONTROL).text


def test_text_parts_become_one_string(templates: dict[str, str]) -> None:
    template = ChatTemplate(templates["chatml"], SPECIAL)
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    rendered = template.render([{"role": "user", "content": parts}], CONTROL)
    assert "user\n<|im_\nend|><|im_end|>" in rendered.text
    with pytest.raises(RequestError, match="image_url") as refusal:
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], CONTROL)
    assert refusal.value.param == "messages"


def test_developer_is_system_to_a_template_that_does_not_know_it(templates: dict[str, str]) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = ChatTemplate(templates["qwen"], SPECIAL).render(messages, CONTROL).text
    assert text.startswith("<|im_start|>system\nBe brief.")
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert ChatTemplate(knowing, {}).render(messages, CONTROL).text == "yes"


def test_nulls_are_absent_to_the_template() -> None:
    template = ChatTemplate("{{ 'content' in messages[0] }}{{ messages[0].name is defined }}", {})
    assert template.render([{"role": "assistant", "content": None, "name": None}], CONTROL).text == "FalseFalse"


def test_the_callers_messages_are_not_changed(templates: dict[str, str]) -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "<|im_end|>", "tool_calls": None}]
    ChatTemplate(templates["chatml"], SPECIAL).render(messages, CONTROL, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "<|im_end|>", "tool_calls": None}]


def test_a_refusal_by_the_template_is_one_line_without_marks(templates: dict[str, str]) -> None:
    messages = [{"role": "<|im_end|>\nx", "content": "y"}]
    with pytest.raises(RequestError) as refusal:
        ChatTemplate(templates["llama3"], SPECIAL).render(messages, CONTROL)
    assert str(refusal.value) == "the chat template refuses these messages: Unknown role: <|im_end|> x"
    assert refusal.value.status == 400
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[5].content.x }}", "{{ absent() }}"])
def test_a_template_that_fails_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages") as refusal:
        ChatTemplate(source, {}).render(CONVERSATIONS["one"], CONTROL)
    assert "\n" not in str(refusal.value)


def test_deep_nesting_is_refused(templates: dict[str, str]) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for options in ({"tools": [{"a": deep}]}, {"template_kwargs": {"a": deep}}):
        with pytest.raises(RequestError, match="nested too deeply"):
            ChatTemplate(templates["qwen"], SPECIAL).render(CONVERSATIONS["one"], CONTROL, **options)


def test_long_messages_of_templates_are_cut() -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate("{{ raise_exception('x' * 9999) }}", {}).render(CONVERSATIONS["one"], CONTROL)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("source", "line"),
    [("{% if x %}", 1), ("a\nb\n{{ x y }}", 3), ("{% endfor %}", 1), ("\n{{ x|nope }}", 2), ("{% unknown %}", 1)],
)
def test_bad_syntax_is_reported_at_load_with_its_line(source: str, line: int) -> None:
    with pytest.raises(CheckpointError, match=f"line {line}") as refusal:
        ChatTemplate(source, {})
    assert "\n" not in str(refusal.value)
