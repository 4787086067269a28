"""Tokens from a node's /tokenize: the request, the bounded cache, and pauses after failures."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import failing, hanging, http_response, script
from support.scripted_engine import ScriptedEngine
from support.vllm_environment import vllm_python

from warmroute.config import Health, NodeConfig
from warmroute.core.node import Node
from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import PROFILE_NAMES, profile
from warmroute.lab.engine.tokenizers import FakeTokenizer
from warmroute.lab.engine.values import EngineConfig
from warmroute.prompt.node_tokenizer import (
    CACHE_TTL_S,
    MAX_FAILURES,
    PAUSE_S,
    NotTokenizable,
    RemoteTokenizer,
    tokenize_request,
)
from warmroute.prompt.tokenizer import pack_token_ids

PROMPT_TESTS = Path(__file__).parent.parent / "prompt"
sys.path.append(str(PROMPT_TESTS))

from sample_requests import SAMPLE_REQUESTS, TOOL, assistant, user  # noqa: E402

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def node_at(port: int, engine: Any = "vllm", name: str = "") -> Node:
    return Node(NodeConfig(url=f"http://127.0.0.1:{port}", engine=engine, name=name), Health())


async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(node.host, node.port)
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: {node.host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
                f"X-Request-Id: 1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error
        finally:
            writer.close()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def tokenized(*tokens: int, count: int | None = None) -> bytes:
    return json.dumps({"count": len(tokens) if count is None else count, "tokens": tokens, "max_model_len": 9}).encode()


@asynccontextmanager
async def an_engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    await engine.listen()
    engine.behave = script(http_response(tokenized(1, 2, 70_000)))
    try:
        yield engine
    finally:
        await engine.close()


# The request.


def request_for(path: bytes, **fields: Any) -> Any:
    request = tokenize_request(path, body(**fields))
    return json.loads(request) if isinstance(request, bytes) else request


def test_a_chat_request_has_all_fields_that_change_the_prompt() -> None:
    given = {
        "messages": [user("hi")],
        "tools": [TOOL],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "x",
        "add_special_tokens": True,
        "chat_template_kwargs": {"a": 1},
    }
    assert request_for(CHAT, **given, temperature=0.5, stream=True, max_tokens=5, user="u") == {"model": "m", **given}


def test_fields_that_tokenize_lacks_become_template_variables() -> None:
    made = request_for(CHAT, messages=[user("hi")], documents=[{"text": "d"}], reasoning_effort="low")
    assert made["chat_template_kwargs"] == {
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    own = request_for(
        CHAT, messages=[user("hi")], reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    )
    assert own["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "none"}
    assert "chat_template_kwargs" not in request_for(CHAT, messages=[user("hi")], reasoning_effort=None)


def test_fields_keep_their_bytes() -> None:
    written = b'{"messages": [{"role":"user",  "content":"\\u00e9 \xc3\xa9"}], "tools": [{"x": 123456789012345678901}]}'
    made = tokenize_request(CHAT, written)
    assert isinstance(made, bytes)
    assert b'{"role":"user",  "content":"\\u00e9 \xc3\xa9"}' in made and b'{"x": 123456789012345678901}' in made


def test_reasoning_content_is_renamed() -> None:
    messages = [assistant("r", reasoning_content="why"), assistant("s", reasoning_content="a", reasoning="b")]
    made = request_for(CHAT, messages=messages)["messages"]
    assert made == [assistant("r", reasoning="why"), assistant("s", reasoning="b")]


def test_a_completion_request_has_the_prompt() -> None:
    assert request_for(COMPLETIONS, prompt="hi") == {"model": "m", "prompt": "hi"}
    assert request_for(COMPLETIONS, prompt=["hi"], add_special_tokens=False) == {
        "model": "m",
        "prompt": "hi",
        "add_special_tokens": False,
    }
    assert request_for(COMPLETIONS, prompt=[5, 6]) == [5, 6] and request_for(COMPLETIONS, prompt=[[7]]) == [7]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (b"/v1/responses", {"input": "hi"}),
        (COMPLETIONS, {"prompt": ["hi", "ho"]}),
        (COMPLETIONS, {"prompt": [[7], [8]]}),
        (b"/v1/messages", {"messages": [user("hi")]}),
        (b"/v1/embeddings", {"input": "hi"}),
        (CHAT, {}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"messages": ["hi"]}),
        (CHAT, {"messages": [user(5)]}),
        (CHAT, {"messages": [user([IMAGE])]}),
        (CHAT, {"messages": [user([{"type": "text", "text": "x", "uuid": "u", "image_url": None}])]}),
        (CHAT, {"messages": [user("hi")], "tools": [TOOL], "tool_choice": "none"}),
        (CHAT, {"messages": [user("hi")], "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": [user("hi")], "chat_template_kwargs": [1]}),
        (CHAT, {"messages": [user("hi")], "kv_transfer_params": {"prompt_token_ids": [1]}}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [True]}),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
        (COMPLETIONS, {"prompt": "x", "prompt_embeds": "AAAA"}),
    ],
)
async def test_prompts_that_tokenize_may_render_differently_are_not_requested(
    path: bytes, fields: dict[str, Any]
) -> None:
    with pytest.raises(NotTokenizable):
        tokenize_request(path, body(**fields))
    async with an_engine() as engine:
        assert await RemoteTokenizer(post, pack_token_ids).tokenize(node_at(engine.port), path, body(**fields)) is None
        assert not engine.seen


@pytest.mark.parametrize("broken", [b"", b"[]", b"5", b'{"messages": [', b'{"messages": "\xff"}', b"[" * 100_000])
async def test_an_invalid_body_has_no_tokens(broken: bytes) -> None:
    async with an_engine() as engine:
        for path in (CHAT, COMPLETIONS):
            assert await RemoteTokenizer(post, pack_token_ids).tokenize(node_at(engine.port), path, broken) is None
        assert not engine.seen


# The response.


async def test_tokens_are_packed_and_cached() -> None:
    async with an_engine() as engine, an_engine() as other:
        remote = RemoteTokenizer(post, pack_token_ids)
        node = node_at(engine.port)
        assert await remote.tokenize(node, CHAT, body(messages=[user("hi")])) == pack_token_ids([1, 2, 70_000])
        (seen,) = engine.seen
        assert seen.line == b"POST /tokenize HTTP/1.1" and json.loads(seen.body)["messages"] == [user("hi")]
        again = body(messages=[user("hi")], temperature=0.3, stream=True)
        assert await remote.tokenize(node_at(other.port), CHAT, again) == pack_token_ids([1, 2, 70_000])
        assert not other.seen and len(engine.seen) == 1
        await remote.tokenize(node, CHAT, body(messages=[user("ho")]))
        await remote.tokenize(node, CHAT, body(messages=[user("hi")], model="lora"))
        assert len(engine.seen) == 3


async def test_token_ids_in_the_body_need_no_request() -> None:
    async with an_engine() as engine:
        remote = RemoteTokenizer(post, pack_token_ids)
        assert await remote.tokenize(node_at(engine.port), COMPLETIONS, body(prompt=[3, 4])) == pack_token_ids([3, 4])
        assert await remote.tokenize(node_at(engine.port), COMPLETIONS, body(prompt=[-3, 1 << 40])) is None
        assert not engine.seen


@pytest.mark.parametrize("engine_name", ["sglang", "trtllm", "auto"])
async def test_only_vllm_is_asked(engine_name: str) -> None:
    async with an_engine() as engine:
        node = node_at(engine.port, engine_name)
        assert await RemoteTokenizer(post, pack_token_ids).tokenize(node, CHAT, body(messages=[user("hi")])) is None
        assert not engine.seen


async def test_the_cache_is_bounded_in_bytes_and_time() -> None:
    clock = Clock()
    async with an_engine() as engine:
        remote = RemoteTokenizer(post, pack_token_ids, cache_bytes=4000, now=clock)
        node = node_at(engine.port)
        engine.behave = script(http_response(tokenized(*range(100))))
        for number in range(20):
            await remote.tokenize(node, COMPLETIONS, body(prompt=f"{number}"))
            assert 0 < remote.used_bytes <= 4000
        assert len(remote._cached) == 5
        await remote.tokenize(node, COMPLETIONS, body(prompt="19"))
        assert len(engine.seen) == 20
        clock.s += CACHE_TTL_S + 1
        await remote.tokenize(node, COMPLETIONS, body(prompt="19"))
        assert len(engine.seen) == 21
        engine.behave = script(http_response(tokenized(*range(5000))))
        assert await remote.tokenize(node, COMPLETIONS, body(prompt="long")) == pack_token_ids(list(range(5000)))
        assert remote.used_bytes == 0 and not remote._cached


BROKEN = [
    failing(500),
    failing(404),
    failing(429),
    script(http_response(b"no json")),
    script(http_response(b"{}")),
    script(http_response(tokenized(1, 2, count=3))),
    script(http_response(tokenized(-1))),
    script(http_response(tokenized(1 << 32))),
    script(b"HTTP/1.1 200 OK\r\n", "close"),
    hanging,
]


@pytest.mark.parametrize("behaviour", BROKEN)
async def test_requests_pause_after_repeated_failures(behaviour: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with an_engine() as engine:
        remote = RemoteTokenizer(post, pack_token_ids, timeout_s=0.05, now=clock)
        node = node_at(engine.port)
        good, engine.behave = engine.behave, behaviour
        for number in range(10):
            assert await remote.tokenize(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert len(engine.seen) == MAX_FAILURES and remote.is_paused(node)
        clock.s += PAUSE_S
        for number in range(5):
            assert await remote.tokenize(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert len(engine.seen) == MAX_FAILURES + 1
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert warning.getMessage().startswith(f"tokenize_failed node={node.name} ")
        clock.s += PAUSE_S
        engine.behave = good
        for number in range(5):
            assert await remote.tokenize(node, COMPLETIONS, body(prompt=f"{number}")) is not None
        assert not remote._failures and not remote.is_paused(node)


async def test_a_refused_connection_is_a_failure() -> None:
    async with an_engine() as engine:
        node = node_at(engine.port)
        await engine.refuse()
        remote = RemoteTokenizer(post, pack_token_ids)
        assert await remote.tokenize(node, COMPLETIONS, body(prompt="x")) is None
        assert remote._failures == {node.name: 1}
        remote.reset(node)
        assert not remote._failures


async def test_client_errors_do_not_count_as_failures() -> None:
    async with an_engine() as engine:
        remote = RemoteTokenizer(post, pack_token_ids)
        node = node_at(engine.port)
        for status in (400, 422, 413):
            engine.behave = failing(status)
            for number in range(MAX_FAILURES):
                assert await remote.tokenize(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert not remote.is_paused(node) and not remote._failures and len(engine.seen) == 3 * MAX_FAILURES


# Engines.


async def test_the_simulated_engine_returns_the_tokens_that_it_prefills() -> None:
    chosen = profile(PROFILE_NAMES[0])
    server = EngineServer(
        ServerConfig(
            engine=EngineConfig(num_blocks=100),
            timing=chosen.timing,
            profile="p",
            tokenizer=FakeTokenizer(),
            port=0,
        )
    )
    await server.start()
    try:
        remote, node = RemoteTokenizer(post, pack_token_ids), node_at(server.port)
        messages = [user("Hello, you."), assistant("Hi!"), user("And now?")]
        chat = {"model": "sim", "messages": messages, "tools": [TOOL]}
        tokens = await remote.tokenize(node, CHAT, json.dumps(chat).encode())
        assert tokens == pack_token_ids(server._planner.chat_tokens(messages, [TOOL], True))
        text = await remote.tokenize(node, COMPLETIONS, body(model="sim", prompt="Hello, you."))
        assert text == pack_token_ids(FakeTokenizer().encode("Hello, you.", True))
        assert not remote._failures
    finally:
        await server.stop()


VLLM = """
import asyncio, json, sys
oracle = {"__name__": "oracle"}
exec(open(sys.argv[1]).read().replace("asyncio.run(main())", ""), oracle)

async def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    from pydantic import TypeAdapter
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest
    kind = TypeAdapter(TokenizeRequest)
    for line in sys.stdin:
        ask = json.loads(line)
        online = oracle["renderer"](ask["tokenizer"])
        given = kind.validate_python(ask["tokenize"])
        if hasattr(given, "messages"):
            tools = None if given.tools is None else [tool.model_dump() for tool in given.tools]
            made = (await online.preprocess_chat(given, given.messages, None, "auto", {}, tools))[1]
        else:
            made = await online.preprocess_completion(given, given.prompt, None)
        tokens = [token for one in made for token in one["prompt_token_ids"]]
        print(json.dumps([tokens, list(await oracle["render"](ask)), sorted(given.model_extra)]), file=answers)

asyncio.run(main())
"""
"""Prints the tokens of our /tokenize request, those of the client's request, and our fields that vLLM does not know."""


@pytest.mark.real
def test_vllm_returns_the_tokens_that_it_prefills() -> None:
    lines = []
    for path, fields in SAMPLE_REQUESTS:
        try:
            made = tokenize_request(path.encode(), json.dumps(fields).encode())
        except NotTokenizable:
            continue
        if isinstance(made, bytes):
            folder = str(PROMPT_TESTS / "small-model")
            lines.append({"tokenizer": folder, "path": path, "body": fields, "tokenize": json.loads(made)})
    done = subprocess.run(
        [str(vllm_python()), "-c", VLLM, str(PROMPT_TESTS / "vllm_reference_script.py")],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines) > 30, done.stderr[-2000:]
    for line, (tokens, prefilled, unknown) in zip(lines, answers, strict=True):
        assert tokens == prefilled and not unknown, line["body"]
