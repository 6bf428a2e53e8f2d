"""Calls of tools in an answer: found in each family's format, however the text is cut."""

import pytest

from gateway_svc.call_scanner import CallArguments, CallStart, Content, Piece
from gateway_svc.tool_calls import AnswerParser, ForcedParser, make_parser
from neoflex.v1 import inference_pb2 as pb

NAMES = {"add", "ping"}
HERMES, LLAMA, MISTRAL = (
    pb.TOOL_CALL_FORMAT_HERMES,
    pb.TOOL_CALL_FORMAT_LLAMA_JSON,
    pb.TOOL_CALL_FORMAT_MISTRAL,
)
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}\\""]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}\\""]}'
Calls = list[tuple[str, str]]

CASES: dict[str, tuple[int, str, str, Calls]] = {
    "hermes": (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ARGUMENTS)]),
    "hermes after text": (HERMES, f"Let me see.\n\n<tool_call>{ADD}</tool_call>", "Let me see.", [("add", ARGUMENTS)]),
    "hermes twice": (
        HERMES,
        f'<tool_call>{ADD}</tool_call>\n<tool_call>{{"name": "ping"}}</tool_call>\n',
        "",
        [("add", ARGUMENTS), ("ping", "{}")],
    ),
    "hermes without its end": (HERMES, f"<tool_call>{ADD}", "", [("add", ARGUMENTS)]),
    "hermes text behind": (HERMES, f"<tool_call>{ADD}</tool_call>\nDone.", "Done.", [("add", ARGUMENTS)]),
    "hermes arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 2} , "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 2}')],
    ),
    "hermes quoted arguments": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        "",
        [("add", '{"a": 2}')],
    ),
    "hermes unknown tool": (
        HERMES,
        'See <tool_call>{"name": "rm", "arguments": {}}</tool_call>!',
        'See <tool_call>{"name": "rm", "arguments": {}}</tool_call>!',
        [],
    ),
    "hermes no JSON": (HERMES, "<tool_call>add(1, 2)</tool_call>", "<tool_call>add(1, 2)</tool_call>", []),
    "hermes cut in the name": (HERMES, '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    "hermes cut in the arguments": (HERMES, '<tool_call>{"name": "add", "arguments": {"a', "", [("add", '{"a')]),
    "hermes none": (HERMES, "1 < 2, <tool and more \n", "1 < 2, <tool and more \n", []),
    "hermes ends like a mark": (HERMES, "see <tool", "see <tool", []),
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "llama twice": (
        LLAMA,
        '\n{"name": "add", "parameters": {"a": 1}}; {"type": "function", "name": "ping", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("ping", "{}")],
    ),
    "llama text": (LLAMA, "It is {5}.", "It is {5}.", []),
    "llama other JSON": (LLAMA, ' {"answer": {"name": "add"}}', ' {"answer": {"name": "add"}}', []),
    "llama other name": (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{ADD}, {{"name": "ping", "arguments": {{}}}}]',
        "",
        [("add", ARGUMENTS), ("ping", "{}")],
    ),
    "mistral without its mark": (MISTRAL, f"[{ADD}]", "", [("add", ARGUMENTS)]),
    "mistral text": (MISTRAL, "[1] says so", "[1] says so", []),
    "mistral other array": (MISTRAL, '[{"name": 5}]', '[{"name": 5}]', []),
    "mistral mark and text": (MISTRAL, "[TOOL", "[TOOL", []),
}


def run(parser: AnswerParser, pieces: list[str]) -> tuple[str, Calls]:
    """Content and calls."""
    content, names, arguments = "", [], []
    found: list[Piece] = [item for piece in pieces for item in parser.push(piece)] + parser.end()
    for item in found:
        match item:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(names)
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                assert text
                arguments[index] += text
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_formats(name: str, step: int) -> None:
    call_format, text, content, calls = CASES[name]
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    assert run(make_parser(call_format, NAMES), pieces) == (content, calls)


@pytest.mark.parametrize("at", range(len(ADD)))
def test_arguments_come_as_soon_as_they_are_there(at: int) -> None:
    """No character of them waits for one behind it but white space."""
    parser = make_parser(LLAMA, NAMES)
    given = "".join(item.text for item in parser.push(ADD[: at + 1]) if isinstance(item, CallArguments))
    begin = ADD.index(ARGUMENTS)
    assert given == ADD[begin : at + 1].rstrip()[: len(ARGUMENTS)]


def test_a_forced_call_is_its_arguments() -> None:
    assert run(ForcedParser("add"), ["", '{"a"', ": 1}"]) == ("", [("add", '{"a": 1}')])
