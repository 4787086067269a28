"""Anthropic's messages API as a chat request, as vLLM 0.32 maps it (entrypoints/anthropic/serving.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from warmroute.prompt.chat_template import ChatTemplate, Message, Refused
from warmroute.prompt.conversation import NotFollowed

_BILLING_HEADER: Final = "x-anthropic-billing-header"
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


def chat_fields(fields: Mapping[str, Any], effort_without_thinking: str) -> dict[str, Any]:
    """The fields of a chat request that change the prompt. Raises NotFollowed."""
    made: dict[str, Any] = {"chat_template_kwargs": fields.get("chat_template_kwargs")}
    output, thinking = fields.get("output_config"), fields.get("thinking")
    if isinstance(output, dict) and output.get("effort") is not None:
        made["reasoning_effort"] = output["effort"]
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        made["reasoning_effort"] = effort_without_thinking
    tools = fields.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise NotFollowed("tools that are no list")
        made["tools"] = [_tool(tool) for tool in tools]
    return made


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise NotFollowed("a tool without an input_schema")
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {
        "type": "function",
        "function": {**function, "strict": tool.get("strict"), "defer_loading": tool.get("defer_loading")},
    }


def system_messages(system: Any) -> list[Message]:
    """The `system` field as the messages that go first. Raises NotFollowed."""
    text = system if isinstance(system, str) else _system_text(system) if system else ""
    return [{"role": "system", "content": text}] if text else []


def _system_text(blocks: Any) -> str:
    if not isinstance(blocks, list):
        raise NotFollowed("a system prompt that is neither text nor blocks")
    texts = [_block(block).get("text") for block in blocks if _block(block).get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING_HEADER))


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise NotFollowed("a content block that is no object")
    if block.get("type") in ("tool_addition", "tool_removal"):
        raise NotFollowed("tools that come and go within the conversation")
    return block


def chat_messages(message: Any) -> list[Message]:
    """One message as those of a chat request: answers of tools become messages of their own. Raises NotFollowed.

    A system message within the conversation is answered with one; where the template takes none there, the caller
    has to know.
    """
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise NotFollowed("a message without a role")
    role, content = message["role"], message.get("content")
    if role == "system":
        if isinstance(content, str):
            content = "" if content.startswith(_BILLING_HEADER) else content
        return system_messages(content)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise NotFollowed("content that is neither text nor blocks")
    return _from_blocks(role, [_block(block) for block in content])


def _from_blocks(role: str, blocks: list[dict[str, Any]]) -> list[Message]:
    made: Message = {"role": role}
    before: list[Message] = []
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
                raise NotFollowed("the answer of a tool in the assistant's message")
            before += _tool_result(block)
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NotFollowed("a content block of another type")
    if reasoning:
        made["reasoning"] = "".join(reasoning)
    if calls:
        made["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        made["content"] = parts[0]["text"]
    elif parts:
        made["content"] = parts
    return before if role == "user" and "content" not in made else [*before, made]


def _tool_result(block: dict[str, Any]) -> list[Message]:
    content, call = block.get("content"), block.get("tool_use_id") or ""
    items = content if isinstance(content, list) else []
    texts = [str(item.get("text", "")) for item in items if isinstance(item, dict) and item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(texts)
    made: list[Message] = [{"role": "tool", "tool_call_id": call, "content": text}]
    kinds = {item.get("type") for item in items if isinstance(item, dict)}
    if "image" in kinds:
        images = [item.get("source", {}) for item in items if isinstance(item, dict) and item.get("type") == "image"]
        parts = [{"type": "image_url", "image_url": {"url": _url(source)}} for source in images]
        made.append({"role": "user", "content": parts})
    if "tool_reference" in kinds:
        raise NotFollowed("a reference to a tool")
    return made


def _url(source: Any) -> str:
    if not isinstance(source, dict):
        raise NotFollowed("an image without a source")
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def moves_system_messages(template: ChatTemplate) -> bool:
    """Whether vLLM moves system messages to the front, since the template refuses them elsewhere.

    It asks the bare template, without the functions that templates are given otherwise.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(template.source).render(messages=messages, add_generation_prompt=False)
    except Exception:
        return True
    return False


def effort_without_thinking(render: Callable[[str], str]) -> str:
    """Which reasoning_effort vLLM takes for `thinking: disabled`: none, or low where the template ignores or refuses
    none.

    `render` takes an effort and returns a text, or raises Refused.
    """
    try:
        without = render("none")
    except Refused:
        return "low"
    for effort in _EFFORTS:
        try:
            if render(effort) == without:
                return "low"
        except Refused:
            continue
    return "none"
