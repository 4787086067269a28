"""Tokens that a node tells: asked as its engine understands it, remembered within bounds, and never insisted on."""

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
from harness import Engine, answer, failing, hanging, script

from warmroute.config import Health, NodeConfig
from warmroute.engines.remote_tokens import FAILURES, KEPT_S, REST_S, NotAsked, RemoteTokens, tokenize_request
from warmroute.fake_engine.core import EngineConfig
from warmroute.fake_engine.profiles import PROFILE_NAMES, profile
from warmroute.fake_engine.server.app import EngineServer, ServerConfig
from warmroute.fake_engine.server.tokens import StandInTokenizer
from warmroute.fleet.node import Node
from warmroute.prompt.tokenizer import packed

PROMPT_TOKENS = Path(__file__).parent.parent / "prompt_tokens"
sys.path.append(str(PROMPT_TOKENS))

from asks import ASKS, TOOL, assistant, user  # noqa: E402
from oracle import oracle_python  # noqa: E402

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


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
                f"Content-Length: {len(body)}\r\n\r\n".encode()
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


def told(*tokens: int, count: int | None = None) -> bytes:
    return json.dumps({"count": len(tokens) if count is None else count, "tokens": tokens, "max_model_len": 9}).encode()


@asynccontextmanager
async def an_engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.listen()
    engine.behave = script(answer(told(1, 2, 70_000)))
    try:
        yield engine
    finally:
        await engine.close()


# ---- What is asked ----


def asked(path: bytes, **fields: Any) -> Any:
    made = tokenize_request(path, body(**fields))
    return json.loads(made) if isinstance(made, bytes) else made


def test_a_chat_is_asked_for_with_what_changes_its_text() -> None:
    given = {
        "messages": [user("hi")],
        "tools": [TOOL],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "x",
        "add_special_tokens": True,
        "chat_template_kwargs": {"a": 1},
    }
    assert asked(CHAT, **given, temperature=0.5, stream=True, max_tokens=5, user="u") == {"model": "m", **given}


def test_what_tokenize_does_not_take_goes_by_way_of_the_templates_variables() -> None:
    made = asked(CHAT, messages=[user("hi")], documents=[{"text": "d"}], reasoning_effort="low")
    assert made["chat_template_kwargs"] == {
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    own = asked(CHAT, messages=[user("hi")], reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert own["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "none"}
    assert "chat_template_kwargs" not in asked(CHAT, messages=[user("hi")], reasoning_effort=None)


def test_what_is_passed_on_stays_as_it_was_written() -> None:
    written = b'{"messages": [{"role":"user",  "content":"\\u00e9 \xc3\xa9"}], "tools": [{"x": 123456789012345678901}]}'
    made = tokenize_request(CHAT, written)
    assert isinstance(made, bytes)
    assert b'{"role":"user",  "content":"\\u00e9 \xc3\xa9"}' in made and b'{"x": 123456789012345678901}' in made


def test_reasoning_has_the_name_that_tokenize_takes() -> None:
    messages = [assistant("r", reasoning_content="why"), assistant("s", reasoning_content="a", reasoning="b")]
    made = asked(CHAT, messages=messages)["messages"]
    assert made == [assistant("r", reasoning="why"), assistant("s", reasoning="b")]


def test_completions_are_asked_for_by_their_first_prompt() -> None:
    assert asked(COMPLETIONS, prompt="hi") == {"model": "m", "prompt": "hi"}
    assert asked(COMPLETIONS, prompt=["hi", "ho"], add_special_tokens=False) == {
        "model": "m",
        "prompt": "hi",
        "add_special_tokens": False,
    }
    assert asked(COMPLETIONS, prompt=[5, 6]) == [5, 6] and asked(COMPLETIONS, prompt=[[7], [8]]) == [7]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (b"/v1/responses", {"input": "hi"}),
        (b"/v1/messages", {"messages": [user("hi")]}),
        (b"/v1/embeddings", {"input": "hi"}),
        (CHAT, {}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"messages": ["hi"]}),
        (CHAT, {"messages": [user(5)]}),
        (CHAT, {"messages": [user([PICTURE])]}),
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
async def test_what_the_answer_would_not_hold_for_is_not_asked(path: bytes, fields: dict[str, Any]) -> None:
    with pytest.raises(NotAsked):
        tokenize_request(path, body(**fields))
    async with an_engine() as engine:
        assert await RemoteTokens(post).tokens(node_at(engine.port), path, body(**fields)) is None
        assert not engine.seen


@pytest.mark.parametrize("broken", [b"", b"[]", b"5", b'{"messages": [', b'{"messages": "\xff"}', b"[" * 100_000])
async def test_a_body_that_is_none_has_no_tokens(broken: bytes) -> None:
    async with an_engine() as engine:
        for path in (CHAT, COMPLETIONS):
            assert await RemoteTokens(post).tokens(node_at(engine.port), path, broken) is None
        assert not engine.seen


# ---- What comes of it ----


async def test_the_answer_is_packed_and_remembered() -> None:
    async with an_engine() as engine, an_engine() as other:
        remote = RemoteTokens(post)
        node = node_at(engine.port)
        assert await remote.tokens(node, CHAT, body(messages=[user("hi")])) == packed([1, 2, 70_000])
        (seen,) = engine.seen
        assert seen.line == b"POST /tokenize HTTP/1.1" and json.loads(seen.body)["messages"] == [user("hi")]
        again = body(messages=[user("hi")], temperature=0.3, stream=True)
        assert await remote.tokens(node_at(other.port), CHAT, again) == packed([1, 2, 70_000])
        assert not other.seen and remote.hits == 1 and remote.asked == 1
        await remote.tokens(node, CHAT, body(messages=[user("ho")]))
        await remote.tokens(node, CHAT, body(messages=[user("hi")], model="lora"))
        assert len(engine.seen) == 3


async def test_token_ids_need_nobody() -> None:
    async with an_engine() as engine:
        remote = RemoteTokens(post)
        assert await remote.tokens(node_at(engine.port), COMPLETIONS, body(prompt=[3, 4])) == packed([3, 4])
        assert await remote.tokens(node_at(engine.port), COMPLETIONS, body(prompt=[-3, 1 << 40])) is None
        assert not engine.seen


@pytest.mark.parametrize("engine_name", ["sglang", "trtllm", "auto"])
async def test_only_engines_that_can_are_asked(engine_name: str) -> None:
    async with an_engine() as engine:
        node = node_at(engine.port, engine_name)
        assert await RemoteTokens(post).tokens(node, CHAT, body(messages=[user("hi")])) is None
        assert not engine.seen


async def test_the_memory_is_bounded_in_bytes_and_in_time() -> None:
    clock = Clock()
    async with an_engine() as engine:
        remote = RemoteTokens(post, cache_bytes=4000, now=clock)
        node = node_at(engine.port)
        engine.behave = script(answer(told(*range(100))))
        for number in range(20):
            await remote.tokens(node, COMPLETIONS, body(prompt=f"{number}"))
            assert 0 < remote.used_bytes <= 4000
        assert len(remote._known) == 5
        await remote.tokens(node, COMPLETIONS, body(prompt="19"))
        assert len(engine.seen) == 20
        clock.s += KEPT_S + 1
        await remote.tokens(node, COMPLETIONS, body(prompt="19"))
        assert len(engine.seen) == 21
        engine.behave = script(answer(told(*range(5000))))
        assert await remote.tokens(node, COMPLETIONS, body(prompt="long")) == packed(list(range(5000)))
        assert remote.used_bytes == 0 and not remote._known


BROKEN = [
    failing(500),
    failing(404),
    failing(429),
    script(answer(b"no json")),
    script(answer(b"{}")),
    script(answer(told(1, 2, count=3))),
    script(answer(told(-1))),
    script(answer(told(1 << 32))),
    script(b"HTTP/1.1 200 OK\r\n", "close"),
    hanging,
]


@pytest.mark.parametrize("behaviour", BROKEN)
async def test_a_node_that_fails_again_and_again_is_rested(behaviour: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with an_engine() as engine:
        remote = RemoteTokens(post, timeout_s=0.05, now=clock)
        node = node_at(engine.port)
        good, engine.behave = engine.behave, behaviour
        for number in range(10):
            assert await remote.tokens(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert len(engine.seen) == FAILURES == remote.failed and remote.rests(node)
        clock.s += REST_S
        for number in range(5):
            assert await remote.tokens(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert len(engine.seen) == FAILURES + 1
        (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert node.name in said.getMessage()
        clock.s += REST_S
        engine.behave = good
        for number in range(5):
            assert await remote.tokens(node, COMPLETIONS, body(prompt=f"{number}")) is not None
        assert not remote._failures and not remote.rests(node)


async def test_nobody_listening_is_a_failure_like_others() -> None:
    async with an_engine() as engine:
        node = node_at(engine.port)
        await engine.refuse()
        remote = RemoteTokens(post)
        assert await remote.tokens(node, COMPLETIONS, body(prompt="x")) is None and remote.failed == 1
        remote.forget(node)
        assert not remote._failures


async def test_a_request_that_the_engine_refuses_says_nothing_about_the_node() -> None:
    async with an_engine() as engine:
        remote = RemoteTokens(post)
        node = node_at(engine.port)
        for status in (400, 422, 413):
            engine.behave = failing(status)
            for number in range(FAILURES):
                assert await remote.tokens(node, COMPLETIONS, body(prompt=f"{number}")) is None
        assert not remote.rests(node) and remote.failed == 0 and len(engine.seen) == 3 * FAILURES


# ---- Engines ----


async def test_the_simulated_engine_tells_what_it_would_prefill() -> None:
    chosen = profile(PROFILE_NAMES[0])
    server = EngineServer(
        ServerConfig(
            engine=EngineConfig(num_blocks=100),
            timing=chosen.timing,
            profile="p",
            tokenizer=StandInTokenizer(),
            port=0,
        )
    )
    await server.start()
    try:
        remote, node = RemoteTokens(post), node_at(server.port)
        chat = {"model": "sim", "messages": [user("Hello, you."), assistant("Hi!"), user("And now?")], "tools": [TOOL]}
        tokens = await remote.tokens(node, CHAT, json.dumps(chat).encode())
        assert tokens == packed(server._planner.chat_tokens(chat["messages"], chat["tools"], True))
        text = await remote.tokens(node, COMPLETIONS, body(model="sim", prompt="Hello, you."))
        assert text == packed(StandInTokenizer().encode("Hello, you.", True))
        assert remote.failed == 0
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
        told = [token for one in made for token in one["prompt_token_ids"]]
        print(json.dumps([told, list(await oracle["render"](ask)), sorted(given.model_extra)]), file=answers)

asyncio.run(main())
"""
"""What vLLM's /tokenize does with our request, what its chat completions do with the client's, and which of our fields
it does not know."""


@pytest.mark.skipif(oracle_python() is None, reason="no environment with vLLM (make test-real makes one)")
def test_vllm_tells_the_tokens_that_it_would_prefill() -> None:
    lines = []
    for path, fields in ASKS:
        try:
            made = tokenize_request(path.encode(), json.dumps(fields).encode())
        except NotAsked:
            continue
        if isinstance(made, bytes):
            folder = str(PROMPT_TOKENS / "small-model")
            lines.append({"tokenizer": folder, "path": path, "body": fields, "tokenize": json.loads(made)})
    done = subprocess.run(
        [str(oracle_python()), "-c", VLLM, str(PROMPT_TOKENS / "engine_oracle.py")],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines) > 30, done.stderr[-2000:]
    for line, (told_tokens, prefilled, unknown) in zip(lines, answers, strict=True):
        assert told_tokens == prefilled and not unknown, line["body"]
