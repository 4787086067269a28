"""Anthropic's messages API and OpenAI's responses API as chat requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from warmroute.prompt.chat_template import Message, TemplateRejected
from warmroute.prompt.template_messages import BILLING_HEADER, UnsupportedRequest

# Convert a request of Anthropic's messages API to a chat request, as vLLM 0.32 does (anthropic/serving.py).

_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


def anthropic_chat_fields(fields: Mapping[str, Any], effort_without_thinking: str) -> dict[str, Any]:
    """Return the fields of the chat request that change the prompt. Raises UnsupportedRequest."""
    result: dict[str, Any] = {"chat_template_kwargs": fields.get("chat_template_kwargs")}
    output, thinking = fields.get("output_config"), fields.get("thinking")
    if isinstance(output, dict) and output.get("effort") is not None:
        result["reasoning_effort"] = output["effort"]
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        result["reasoning_effort"] = effort_without_thinking
    tools = fields.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise UnsupportedRequest("tools is not a list")
        result["tools"] = [_tool(tool) for tool in tools]
    return result


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise UnsupportedRequest("a tool has no input_schema")
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {
        "type": "function",
        "function": {**function, "strict": tool.get("strict"), "defer_loading": tool.get("defer_loading")},
    }


def system_messages(system: Any) -> list[Message]:
    """Return the `system` field as the first messages. Raises UnsupportedRequest."""
    text = system if isinstance(system, str) else _system_text(system) if system else ""
    return [{"role": "system", "content": text}] if text else []


def _system_text(blocks: Any) -> str:
    if not isinstance(blocks, list):
        raise UnsupportedRequest("system is neither text nor a list of blocks")
    texts = [_block(block).get("text") for block in blocks if _block(block).get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING_HEADER))


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise UnsupportedRequest("a content block is not an object")
    if block.get("type") in ("tool_addition", "tool_removal"):
        raise UnsupportedRequest("the conversation adds or removes tools")
    return block


def anthropic_chat_messages(message: Any) -> list[Message]:
    """Convert one message to messages of a chat request; each tool result becomes one. Raises UnsupportedRequest.

    A system message within the conversation stays where it is. The caller must check whether the template allows that.
    """
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise UnsupportedRequest("a message has no role")
    role, content = message["role"], message.get("content")
    if role == "system":
        if isinstance(content, str):
            content = "" if content.startswith(BILLING_HEADER) else content
        return system_messages(content)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise UnsupportedRequest("a message's content is neither text nor a list of blocks")
    return _from_blocks(role, [_block(block) for block in content])


def _from_blocks(role: str, blocks: list[dict[str, Any]]) -> list[Message]:
    result: Message = {"role": role}
    tool_results: list[Message] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            if block.get("source"):
                parts.append({"type": "image_url", "image_url": {"url": _url(block["source"])}})
        elif kind == "thinking":
            if block.get("thinking") is not None:
                reasoning.append(str(block["thinking"]))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "tool_result":
            if role != "user":
                raise UnsupportedRequest("an assistant's message contains a tool_result")
            tool_results += _tool_result(block)
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise UnsupportedRequest("a content block has an unsupported type")
    if reasoning:
        result["reasoning"] = "".join(reasoning)
    if calls:
        result["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        result["content"] = parts[0]["text"]
    elif parts:
        result["content"] = parts
    return tool_results if role == "user" and "content" not in result else [*tool_results, result]


def _tool_result(block: dict[str, Any]) -> list[Message]:
    content, call = block.get("content"), block.get("tool_use_id") or ""
    items = content if isinstance(content, list) else []
    texts = [str(item.get("text", "")) for item in items if isinstance(item, dict) and item.get("type") == "text"]
    # vLLM joins the texts of one tool result with newlines. Each rule here is copied from its converter: one other
    # character makes all tokens after it wrong.
    text = content if isinstance(content, str) else "\n".join(texts)
    messages: list[Message] = [{"role": "tool", "tool_call_id": call, "content": text}]
    kinds = {item.get("type") for item in items if isinstance(item, dict)}
    if "image" in kinds:
        images = [item.get("source", {}) for item in items if isinstance(item, dict) and item.get("type") == "image"]
        parts = [{"type": "image_url", "image_url": {"url": _url(source)}} for source in images]
        messages.append({"role": "user", "content": parts})
    if "tool_reference" in kinds:
        raise UnsupportedRequest("a tool_result contains a tool_reference")
    return messages


def _url(source: Any) -> str:
    if not isinstance(source, dict):
        raise UnsupportedRequest("an image has no source")
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


# Called for each request of the messages API, and takes a render.
@lru_cache(64)
def moves_system_messages(template_source: str) -> bool:
    """Return whether vLLM moves system messages to the front, because the template refuses them elsewhere.

    vLLM checks that in a bare jinja2 sandbox, without the functions that templates can otherwise use.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(template_source).render(messages=messages, add_generation_prompt=False)
    except Exception:
        return True
    return False


def effort_without_thinking(render: Callable[[str], str]) -> str:
    """Return the reasoning_effort that vLLM uses for `thinking: disabled`: "none", or "low" if the template ignores or
    refuses "none".

    `render` renders a chat with an effort. It may raise TemplateRejected.
    """
    try:
        without = render("none")
    except TemplateRejected:
        return "low"
    for effort in _EFFORTS:
        try:
            if render(effort) == without:
                return "low"
        except TemplateRejected:
            continue
    return "none"


# Convert a request of OpenAI's responses API to a chat request, as vLLM 0.32 does (openai/responses/utils.py).

_STORED_CONVERSATION_FIELDS = ("previous_response_id", "previous_input_messages", "prompt")


def responses_chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
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


def responses_chat_messages(instructions: Any, items: Any) -> list[Message]:
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
