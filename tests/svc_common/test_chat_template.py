"""Conversations with tools, through templates in the manner of the families that are served."""

from typing import Any

import pytest
from support import tiny_tokenizers

from svc_common.model import chat_template
from svc_common.model.chat_template import (
    ChatTemplateError,
    Tool,
    ToolCall,
    ToolCallFormat,
    ToolsUnknownError,
    Turn,
    render,
)
from svc_common.model.tokenizer import Tokenizer

HERMES = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'tool' %} of {{ m.name }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA = (
    '{% if tools %}{"name": function name, "parameters": dictionary of argument name and its value}{% endif %}'
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.tool_call_id is defined %}{{ m.tool_call_id }}{% endif %}{% endfor %}{{ tools | length if tools }}"
)
CALL = ToolCall("call-1", "add", {"a": 1})
CONVERSATION = (Turn("user", "Add"), Turn("assistant", "", (CALL,)), Turn("tool", "3", tool_call_id="call-1"))
ADD = Tool("add", "Adds.", {"type": "object"})


def backend(template: Any) -> Any:
    made = tiny_tokenizers.byte_level()
    made.chat_template = template
    return made


def test_tools_calls_and_results_are_rendered() -> None:
    text = render(backend(HERMES), CONVERSATION, [ADD])
    function = '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}'
    assert text == (
        f'[tools]{{"type": "function", "function": {function}}}<tool_call>{{...}}</tool_call>'
        '[user]Add[assistant]<tool_call>{"a": 1}</tool_call>[tool]3 of add[assistant]'
    )
    call = '{"id": "call-1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
    assert render(backend(MISTRAL), CONVERSATION, [ADD]) == f"Add[TOOL_CALLS][{call}]3call-11"


def test_absent_fields_stay_away() -> None:
    """Templates ask whether a turn has them."""
    assert render(backend(LLAMA), CONVERSATION) == "Addadd3"
    assert render(backend(MISTRAL), [Turn("user", "Hi")]) == "Hi"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, ToolCallFormat.HERMES),
        (LLAMA, ToolCallFormat.LLAMA_JSON),
        (MISTRAL, ToolCallFormat.MISTRAL),
        (tiny_tokenizers.CHAT_TEMPLATE, None),
        (None, None),
        ({"default": tiny_tokenizers.CHAT_TEMPLATE, "tool_use": HERMES}, ToolCallFormat.HERMES),
        ({"other": HERMES}, None),
    ],
)
def test_the_format_of_calls(template: Any, expected: ToolCallFormat | None) -> None:
    assert chat_template.tool_call_format(backend(template)) is expected
    assert Tokenizer(backend(template)).tool_call_format is expected


def test_what_the_template_would_leave_out_is_refused() -> None:
    plain = backend("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ToolsUnknownError, match="knows no tools"):
        render(plain, [Turn("user", "Hi")], [ADD])
    with pytest.raises(ToolsUnknownError, match="knows no tool calls"):
        render(plain, CONVERSATION)
    assert render(plain, [Turn("user", "Hi")]) == "Hi"


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(ChatTemplateError, match="one call at a time"):
        render(backend(LLAMA), [Turn("assistant", "", (CALL, CALL))])


def test_another_template() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level())
    other = tokenizer.with_chat_template("{{ messages[0].content }}!")
    assert other.decode(other.encode_chat([Turn("user", "the")])) == "the!"
    assert tokenizer.decode(tokenizer.encode_chat([Turn("user", "the")])) == "user:theassistant:"
    # One may refuse some conversations and be sound.
    tokenizer.with_chat_template("{{ raise_exception('never') }}")
    with pytest.raises(ChatTemplateError, match=r"^line 2: "):
        tokenizer.with_chat_template("x\n{% if %}")


def test_names_of_tokens() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level())
    [end] = tokenizer.eos_token_ids
    assert (tokenizer.token_bytes(end), tokenizer.token_name(end)) == (b"", tiny_tokenizers.END)
    assert tokenizer.token_name(10**6) == ""
