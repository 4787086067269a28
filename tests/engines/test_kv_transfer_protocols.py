"""What the prefill and the decode request contain, for each engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warmroute._kernel import outline_body
from warmroute.config import Health, NodeConfig
from warmroute.core.node import Node
from warmroute.core.tables import row_of
from warmroute.edge.tries import may_split
from warmroute.engines import KV_TRANSFERS
from warmroute.engines.trtllm import MAX_IDS_BYTES
from warmroute.prompt.request_body import splice

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
NODE = row_of(Node(NodeConfig(url="http://[::1]:1", name="p", bootstrap_port=9000), Health()))


def bodies(engine: str, response: Any, **fields: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the prefill request, and the decode request if the response names a KV cache."""
    protocol = KV_TRANSFERS[engine]
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    outline = outline_body(body)
    prefill = json.loads(splice(body, outline, protocol.prefill_fields(outline.fields, NODE, 7)))
    transfer = protocol.read_transfer(response if isinstance(response, bytes) else json.dumps(response).encode())
    if transfer is None:
        return prefill, None
    return prefill, json.loads(splice(body, outline, protocol.decode_fields(outline.fields, NODE, 7, transfer)))


def test_vllm() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h", "remote_port": 5600}
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9, "temperature": 0}
    prefill, decode = bodies("vllm", {"choices": [], "kv_transfer_params": params}, **fields, min_tokens=3)
    assert prefill == {
        "model": "m", "messages": MESSAGES, "stream": False, "stream_options": None, "max_completion_tokens": 1,
        "temperature": 0, "min_tokens": 0, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    assert decode == {"model": "m", "messages": MESSAGES, **fields, "min_tokens": 3, "kv_transfer_params": params}
    assert bodies("vllm", {}, max_tokens=5)[0]["max_tokens"] == 1
    assert bodies("vllm", {})[0]["max_tokens"] == 1


@pytest.mark.parametrize(
    "response", [b"", b"{", b"[]", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}', b"[" * 100_000,
                 b'{"kv_transfer_params":5}', b'{"kv_transfer_params":"x"}', b'{"kv_transfer_params":{"a":}}']
)  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_an_answer_without_a_kv_cache(engine: str, response: bytes) -> None:
    assert bodies(engine, response)[1] is None


def test_sglang() -> None:
    prefill, decode = bodies("sglang", {}, stream=True)
    assert prefill == decode == {
        "model": "m", "messages": MESSAGES, "stream": True, "bootstrap_host": "[::1]", "bootstrap_port": 9000,
        "bootstrap_room": 7,
    }  # fmt: skip


def test_trtllm() -> None:
    params = {"request_type": "context_only", "first_gen_tokens": [5], "ctx_request_id": 3, "encoded_opaque_state": "A"}
    response = {
        "choices": [{"index": 0, "finish_reason": "length", "disaggregated_params": params}],
        "prompt_token_ids": [1, 2, 3],
    }
    prefill, decode = bodies("trtllm", response, stream=True, max_tokens=9)
    assert prefill["disaggregated_params"] == {"request_type": "context_only"} and prefill["stream"] is False
    assert decode is not None and decode["stream"] is True and decode["max_tokens"] == 9
    assert decode["disaggregated_params"] == {**params, "request_type": "generation_only"}
    assert decode["prompt_token_ids"] == [1, 2, 3]
    response["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    assert bodies("trtllm", response)[1] is None, "the answer is complete: there is nothing to decode"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"n": 1, "best_of": None, "tool_choice": "auto", "logprobs": True, "tools": []}, True),
        ({"n": 2}, False),
        ({"best_of": 3}, False),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"prompt_logprobs": 1}, False),
        ({"echo": True}, False),
        ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, False),
        ({"bootstrap_room": 5}, False),
        ({"disaggregated_params": {}}, False),
    ],
)
def test_which_requests_may_be_split(fields: dict[str, Any], expected: bool) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    assert may_split(CHAT.encode(), body, outline_body(body)) is expected
    assert not may_split(b"/v1/embeddings", body, outline_body(body))
    assert not may_split(CHAT.encode(), body, None)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("messages", {"max_tokens": 9}, True),
        ("messages", {"tool_choice": {"type": "auto"}}, True),
        ("messages", {"tool_choice": {"type": "any"}}, False),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, False),
        ("messages", {"kv_transfer_params": {}}, False),
        ("responses", {}, True),
        ("responses", {"tools": [{"type": "function", "name": "f"}], "tool_choice": "auto", "background": False}, True),
        ("responses", {"tools": None, "store": True}, True),
        ("responses", {"tools": [{"type": "web_search"}]}, False),
        ("responses", {"tools": 5}, False),
        ("responses", {"background": True}, False),
        ("responses", {"previous_response_id": "resp_1"}, False),
        ("responses", {"conversation": "c"}, False),
    ],
)
def test_which_messages_and_responses_may_be_split(path: str, fields: dict[str, Any], expected: bool) -> None:
    prompt = {"messages": MESSAGES} if path == "messages" else {"input": "hi"}
    body = json.dumps({"model": "m", **prompt, **fields}).encode()
    assert may_split(f"/v1/{path}".encode(), body, outline_body(body)) is expected


def test_vllm_responses() -> None:
    body = b'{"model":"m","input":"hi","max_output_tokens":90,"stream":true}'
    outline = outline_body(body)
    prefill = json.loads(splice(body, outline, KV_TRANSFERS["vllm"].prefill_fields(outline.fields, NODE, 7)))
    assert prefill == {
        "model": "m", "input": "hi", "max_output_tokens": 1, "stream": False, "store": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip


def answer_with(engine: str, params: bytes, ids: bytes = b"[1]") -> bytes:
    if engine == "vllm":
        return b'{"kv_transfer_params":%b}' % params
    choice = b'{"finish_reason":"length","disaggregated_params":%b}' % params
    return b'{"choices":[%b],"prompt_token_ids":%b}' % (choice, ids)


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_parameters_are_valid_and_of_a_limited_size(engine: str) -> None:
    assert bodies(engine, answer_with(engine, b'{"a":"%b"}' % (b"x" * 1_000_000)))[1] is not None
    assert bodies(engine, answer_with(engine, b'{"a":"%b"}' % (b"x" * 1_100_000)))[1] is None
    for params in (b'{"a":"\xff"}', b'{"\xff":1}', b'{"a":"\xed\xa0\x80"}', b'{"a":%b}' % (b"[" * 5000)):
        assert bodies(engine, answer_with(engine, params))[1] is None
    assert bodies("trtllm", answer_with("trtllm", b'{"a":1}', b'["\xff"]'))[1] is None
    ids = b"[%b1]" % (b"1," * 1000)
    assert bodies("trtllm", answer_with("trtllm", b'{"a":1}', ids))[1] is not None
    ids = b"[%b1]" % (b"1," * (MAX_IDS_BYTES // 2))
    assert bodies("trtllm", answer_with("trtllm", b'{"a":1}', ids))[1] is None
