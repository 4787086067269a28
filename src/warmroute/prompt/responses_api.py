"""OpenAI's responses API as a chat request, as vLLM 0.32 maps it (entrypoints/openai/responses/utils.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmroute.prompt.chat_template import Message
from warmroute.prompt.conversation import NotFollowed

_ELSEWHERE = ("previous_response_id", "previous_input_messages", "prompt")


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat request that change the prompt. Raises NotFollowed."""
    if any(fields.get(name) is not None for name in _ELSEWHERE):
        raise NotFollowed("a conversation that the engine has stored")
    reasoning, given = fields.get("reasoning"), fields.get("input")
    continues = _continues(given)
    made: dict[str, Any] = {
        "chat_template_kwargs": fields.get("chat_template_kwargs"),
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tool_choice": fields.get("tool_choice"),
    }
    if tools := fields.get("tools"):
        if not isinstance(tools, list) or any(not isinstance(t, dict) or t.get("type") != "function" for t in tools):
            raise NotFollowed("tools that are no functions")
        made["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return made


def _continues(given: Any) -> bool:
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def chat_messages(instructions: Any, given: Any) -> list[Message]:
    """Raises NotFollowed."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise NotFollowed("an input that is neither text nor items")
    made: list[Message] = []
    for item in given:
        if not isinstance(item, dict):
            raise NotFollowed("an item that is no object")
        _add(made, item)
    return messages + made


def _add(messages: list[Message], item: dict[str, Any]) -> None:
    """Reasoning, text and calls of one assistant's turn come as items of their own, and become one message."""
    kind = item.get("type")
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind == "function_call":
        call = _call(item)
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        _add_field(messages, last, "reasoning", _reasoning(item))
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind not in (None, "message"):
        raise NotFollowed("an item of another type")
    elif item.get("role") == "assistant" and (text := _assistant_text(item)) is not None:
        _add_field(messages, last, "content", text)
    elif "role" in item:
        messages.append(item)
    else:
        raise NotFollowed("an item without a role")


def _add_field(messages: list[Message], last: Message | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("namespace") or not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise NotFollowed("a function call of another form")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item.get("call_id"), "function": function, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise NotFollowed("reasoning that is encrypted")
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            if not isinstance(parts[0], dict) or not isinstance(parts[0].get("text"), str):
                raise NotFollowed("reasoning that is no text")
            return str(parts[0]["text"])
    return ""


def _assistant_text(item: dict[str, Any]) -> str | None:
    content = item.get("content")
    if isinstance(content, list) and content:
        if not isinstance(content[0], dict) or content[0].get("type") == "refusal":
            raise NotFollowed("content of another form")
        content = content[0].get("text")
    return content if isinstance(content, str) else None
