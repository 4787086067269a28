"""Sample requests for every endpoint. The router must tokenize them as vLLM does."""

from __future__ import annotations

from typing import Any

SampleRequest = tuple[str, dict[str, Any]]
"""Path and body."""

TOOL = {
    "type": "function",
    "extra": 1,
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in Zürich",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
BARE_TOOL = {"function": {"parameters": {"x": 1.0}, "name": "g"}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Z\\u00fcrich", "n": 1e3}'},
    "index": 0,
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "call_1", **more}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("hi")]},
    {"messages": [user("")]},
    {"messages": [system("be kind"), user("hi"), assistant("hello"), user("again")]},
    {"messages": [user(text("a", "", "b"))]},
    {"messages": [user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])]},
    {"messages": [user("hi"), assistant(None, tool_calls=[CALL]), tool("sunny"), assistant("<think>"), user("thx")]},
    {
        "messages": [
            user("hi"),
            assistant("<think>\nhm\n</think>\n\nok", tool_calls=[CALL]),
            tool(text("p", "q"), name="n"),
            tool("second"),
        ],
        "tools": [TOOL, BARE_TOOL],
    },
    {"messages": [user("hi"), assistant("r", reasoning_content="why"), user("q"), assistant("s", reasoning="so")]},
    {"messages": [user("hi"), assistant("r", reasoning_content="why", reasoning="other")]},
    {"messages": [{"role": "developer", "content": "dev"}, user("hi")]},
    {"messages": [{"role": "developer", "content": "dev"}, user("hi"), system("later"), user("x")]},
    {"messages": [system("x-anthropic-billing-header: 1\nreal"), user("hi")]},
    {"messages": [system(text("x-anthropic-billing-header: 1", "real")), user("hi")]},
    {"messages": [user("hi")], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [user("hi")], "chat_template_kwargs": {"enable_thinking": None, "date_string": "today", "x": 1}},
    {"messages": [user("hi")], "reasoning_effort": "none"},
    {"messages": [user("hi")], "reasoning_effort": "low"},
    {"messages": [user("hi"), assistant("part")], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [user("hi"), assistant("part  ")], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [user("hi"), assistant("part")], "add_generation_prompt": False},
    {"messages": [user("hi"), assistant("whole")]},
    {"messages": [user("hi")], "add_special_tokens": True},
    {"messages": [user("hi"), assistant("", tool_calls=[]), user("x")]},
    {"messages": [user("hi"), assistant("", tool_calls=[call("not json")]), tool("x")]},
    {"messages": [user("hi"), assistant("", tool_calls=[call(""), call("[1]")]), tool("x")]},
    {"messages": [user("<tool_response>x</tool_response>"), assistant("y"), user("<tool_response>z</tool_response>")]},
    {"messages": [user("hi <|im_end|> there </s> <s> <|end|> <think>")]},
    {"messages": [user("hi")], "tools": [TOOL], "tool_choice": "none"},
    {"messages": [user("hi")], "documents": [{"title": "a", "text": "b"}]},
    {"messages": [assistant("first"), user("x")]},
    {"messages": [user("one"), user("two"), system("three"), assistant("four", name="anna"), user("five")]},
]

RESPONSES: list[dict[str, Any]] = [
    {"input": "hi"},
    {"input": "hi", "instructions": "be nice"},
    {
        "input": [
            user("a"),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            user([{"type": "input_text", "text": "c"}]),
        ]
    },
    {
        "input": [
            user("a"),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"X"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        "tools": [{"type": "function", "name": "get_weather", "description": "d", "parameters": {}, "strict": False}],
    },
    {"input": [user("a"), assistant("b"), user("c")], "reasoning": {"effort": "low"}},
    {
        "input": [
            user("a"),
            {
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "id": "m1",
                "content": [{"type": "output_text", "text": "partial", "annotations": []}],
            },
        ]
    },
]

MESSAGES: list[dict[str, Any]] = [
    {"messages": [user("hi")]},
    {"messages": [user(text("hi", "ho"))], "system": "be kind"},
    {
        "system": text("x-anthropic-billing-header: z", "A", "B"),
        "messages": [
            user("hi"),
            assistant(
                [
                    {"type": "thinking", "thinking": "hmm", "signature": "s"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1.50}},
                ]
            ),
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": text("r1", "r2")},
                    {"type": "text", "text": "go on"},
                ]
            ),
        ],
        "tools": [{"name": "get", "description": "d", "input_schema": {"properties": {}}}],
    },
    {
        "messages": [
            user("hi"),
            assistant([{"type": "tool_use", "id": "t1", "name": "get", "input": {}}]),
            user([{"type": "tool_result", "tool_use_id": "t1", "content": "plain"}]),
        ],
        "tools": [{"name": "get", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"},
    },
    {"messages": [user("hi"), system("inline"), user("ho")], "output_config": {"effort": "high"}},
]

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Hello é"},
    {"prompt": ["Hello", "b"], "add_special_tokens": False},
    {"prompt": [1, 2, 3]},
    {"prompt": [[4, 5], [6]]},
]

SAMPLE_REQUESTS: list[SampleRequest] = [
    *(("/v1/chat/completions", {"model": "m", **body}) for body in CONVERSATIONS),
    *(("/v1/responses", {"model": "m", **body}) for body in RESPONSES),
    *(("/v1/messages", {"model": "m", "max_tokens": 9, **body}) for body in MESSAGES),
    *(("/v1/completions", {"model": "m", **body}) for body in COMPLETIONS),
]
