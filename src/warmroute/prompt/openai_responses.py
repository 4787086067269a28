"""Convert a request of OpenAI's responses API to a chat request, as vLLM 0.32 does (openai/responses/utils.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmroute.prompt.chat_template import Message
from warmroute.prompt.template_messages import UnsupportedRequest

_STORED_CONVERSATION_FIELDS = ("previous_response_id", "previous_input_messages", "prompt")


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat request that change the prompt. Raises UnsupportedRequest."""
    if any(fields.get(name) is not None for name in _STORED_CONVERSATION_FIELDS):
        raise UnsupportedRequest("the engine has stored a part of the conversation")
    reasoning = fields.get("reasoning")
    continues = _continues_last_item(fields.get("input"))
    result: dict[str, Any] = {
        "chat_template_kwargs": fields.get("chat_template_kwargs"),
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tool_choice": fields.get("tool_choice"),
    }
    if tools := fields.get("tools"):
        if not isinstance(tools, list) or any(not isinstance(t, dict) or t.get("type") != "function" for t in tools):
            raise UnsupportedRequest("a tool is not a function")
        result["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return result


def _continues_last_item(items: Any) -> bool:
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def chat_messages(instructions: Any, items: Any) -> list[Message]:
    """Return the messages of the chat request. Raises UnsupportedRequest."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise UnsupportedRequest("input is neither text nor a list of items")
    conversation: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise UnsupportedRequest("an input item is not an object")
        _add_item(conversation, item)
    return messages + conversation


def _add_item(messages: list[Message], item: dict[str, Any]) -> None:
    """Add an item; reasoning, text and calls of one assistant's turn are separate items and become one message."""
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
        raise UnsupportedRequest("an input item has an unsupported type")
    elif item.get("role") == "assistant" and (text := _assistant_text(item)) is not None:
        _add_field(messages, last, "content", text)
    elif "role" in item:
        messages.append(item)
    else:
        raise UnsupportedRequest("an input item has no role")


def _add_field(messages: list[Message], last: Message | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("namespace") or not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise UnsupportedRequest("a function call has an unsupported form")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item.get("call_id"), "function": function, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnsupportedRequest("reasoning is encrypted")
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            if not isinstance(parts[0], dict) or not isinstance(parts[0].get("text"), str):
                raise UnsupportedRequest("reasoning is not text")
            return str(parts[0]["text"])
    return ""


def _assistant_text(item: dict[str, Any]) -> str | None:
    content = item.get("content")
    if isinstance(content, list) and content:
        if not isinstance(content[0], dict) or content[0].get("type") == "refusal":
            raise UnsupportedRequest("an assistant's content has an unsupported form")
        content = content[0].get("text")
    return content if isinstance(content, str) else None
