"""Checks a conversation of a request, tools and their calls included: message in, values out."""

import json
from typing import Any

from neoflex.v1 import inference_pb2 as pb
from planner_svc.violations import Violations
from svc_common.model.chat_template import Tool, ToolCall, Turn

MAX_TOOLS = 128


def parse_turns(chat: pb.Chat, prefix: str, bad: Violations) -> tuple[Turn, ...]:
    """What is wrong goes into `bad`; `prefix` is what stands before the chat's fields."""
    return tuple(
        Turn(
            role=message.role,
            content=message.content,
            tool_calls=tuple(
                ToolCall(
                    id=call.id,
                    name=call.name,
                    arguments=_object(
                        call.arguments_json, f"{prefix}messages[{turn}].tool_calls[{index}].arguments_json", bad
                    ),
                )
                for index, call in enumerate(message.tool_calls)
            ),
            tool_call_id=message.tool_call_id,
        )
        for turn, message in enumerate(chat.messages)
    )


def parse_tools(chat: pb.Chat, prefix: str, bad: Violations) -> tuple[Tool, ...]:
    """As `parse_turns`. A tool without a schema takes no arguments."""
    num_tools = len(chat.tools)
    bad.require(num_tools <= MAX_TOOLS, f"{prefix}tools", f"must be at most {MAX_TOOLS}, are {num_tools}")
    tools = []
    for index, tool in enumerate(chat.tools[: MAX_TOOLS + 1]):
        path = f"{prefix}tools[{index}]"
        bad.require(tool.name != "", f"{path}.name", "must not be empty")
        schema = tool.parameters_json_schema or '{"type": "object", "properties": {}}'
        tools.append(Tool(tool.name, tool.description, _object(schema, f"{path}.parameters_json_schema", bad)))
    return tuple(tools)


def text_bytes(chat: pb.Chat) -> int:
    """UTF-8 bytes of all that a template may write."""
    texts = [text for turn in chat.messages for text in (turn.role, turn.content, turn.tool_call_id)]
    texts += [
        text for turn in chat.messages for call in turn.tool_calls for text in (call.id, call.name, call.arguments_json)
    ]
    texts += [text for tool in chat.tools for text in (tool.name, tool.description, tool.parameters_json_schema)]
    return sum(len(text.encode()) for text in texts)


def _object(text: str, path: str, bad: Violations) -> dict[str, Any]:
    """A JSON object; an empty one where it is none, which then stands in `bad`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        bad.require(False, path, f"must be a JSON object: {error}")
        return {}
    bad.require(isinstance(value, dict), path, "must be a JSON object")
    return value if isinstance(value, dict) else {}
