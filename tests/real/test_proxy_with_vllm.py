"""The proxy in front of two real vLLM engines, used through the openai client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from real_engine import RealEngine, free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
LONG: list[ChatCompletionMessageParam] = [{"role": "user", "content": "tell me more about this " * 40}]
SHORT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@dataclass
class Router:
    url: str
    admin_url: str

    def nodes(self) -> list[dict[str, Any]]:
        answer = urllib.request.urlopen(f"{self.admin_url}/admin/nodes", timeout=5).read()
        found: list[dict[str, Any]] = json.loads(answer)["nodes"]
        return found

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def router(real_engines: list[RealEngine]) -> Iterator[Router]:
    port, admin_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("warmroute")), "serve", "--port", str(port)]
    command += ["--admin-port", str(admin_port)]
    for engine in real_engines:
        command += ["--node", engine.url]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).read()
                break
            except OSError:
                assert time.monotonic() < deadline, "the router did not become ready"
                time.sleep(0.1)
        yield Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    finally:
        process.terminate()
        assert process.wait(40) == 0


def test_models_of_the_engines_are_listed(router: Router) -> None:
    assert [model.id for model in router.client().models.list()] == ["tiny"]


def test_a_repeated_prompt_finds_its_cache(router: Router) -> None:
    client = router.client()
    for expect_hit in (False, True):
        answer = client.chat.completions.create(model="tiny", messages=LONG, max_tokens=4)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        assert cached > 0 or not expect_hit


def test_streams_arrive_whole(router: Router) -> None:
    stream = router.client().chat.completions.create(
        model="tiny", messages=SHORT, max_tokens=20, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_many_async_streams_at_once(router: Router) -> None:
    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> int:
                messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"count to {number}"}]
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=16, stream=True, extra_body={"ignore_eos": True},
                    stream_options={"include_usage": True},
                )  # fmt: skip
                # vLLM puts tokens that come fast into one chunk: the usage in the last one has the number
                usages = [chunk.usage async for chunk in stream]
                assert usages[-1] is not None
                return usages[-1].completion_tokens

            return await asyncio.gather(*(one(number) for number in range(24)))

    counts = asyncio.run(all_of_them())
    assert counts == [16] * 24
    assert all(node["outcomes"]["ok"] > 0 for node in router.nodes())


def test_tools_pass_through(router: Router) -> None:
    parameters: dict[str, object] = {"type": "object", "properties": {}}
    tool: ChatCompletionToolUnionParam = {
        "type": "function",
        "function": {"name": "look_up", "parameters": parameters},
    }
    answer = router.client().chat.completions.create(
        model="tiny", messages=SHORT, tools=[tool], tool_choice="none", max_tokens=4,
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_the_engines_own_error_reaches_the_client(router: Router) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        router.client().completions.create(model="tiny", prompt="word " * 5000)


def test_a_client_that_leaves_stops_the_engine(router: Router, real_engines: list[RealEngine]) -> None:
    before = _left(router)
    stream = router.client().chat.completions.create(
        model="tiny", messages=SHORT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while any(node["requests_in_flight"] for node in router.nodes()) or any(map(_running, real_engines)):
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.02)
    assert _left(router) == before + 1


def test_an_engine_killed_and_restarted_in_place(router: Router, real_engines: list[RealEngine]) -> None:
    client = router.client()
    real_engines[0].kill()
    for number in range(20):
        prompt: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"question {number}"}]
        client.chat.completions.create(model="tiny", messages=prompt, max_tokens=2)
    real_engines[0].start()
    real_engines[0].wait_until_ready()
    deadline = time.monotonic() + 30
    while not all(node["state"] == "up" for node in router.nodes()):
        client.chat.completions.create(model="tiny", messages=SHORT, max_tokens=2)
        assert time.monotonic() < deadline, "the restarted engine did not come back"
        time.sleep(0.1)


def _left(router: Router) -> int:
    return sum(node["outcomes"]["cancelled"] for node in router.nodes())


def _running(engine: RealEngine) -> bool:
    page = urllib.request.urlopen(f"{engine.url}/metrics", timeout=5).read().decode()
    return any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in page.splitlines())
