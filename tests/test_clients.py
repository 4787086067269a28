"""Clients of other projects, unchanged, against the router: the openai library, curl and Python's http.client."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

from warmroute.lab.demo.processes import Children, free_port

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are terse. " * 30},
    {"role": "user", "content": "What is a prefix cache?"},
]
TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]},
        },
    }
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A router and two simulated engines, each a process of its own."""
    with Children() as children:
        ports = [free_port(22_000), free_port(22_100)]
        for port in ports:
            children.start("engine", "--port", str(port), "--model", "m", "--speed", "20")
        port, admin_port = free_port(22_200), free_port(22_300)
        nodes = [argument for engine in ports for argument in ("--node", f"http://127.0.0.1:{engine}")]
        children.start("serve", "--port", str(port), "--admin-port", str(admin_port), *nodes)
        deadline_s = time.monotonic() + 30
        while not _all_up(admin_port):
            assert time.monotonic() < deadline_s, "the router did not become ready"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"


def _all_up(admin_port: int) -> bool:
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/admin/nodes", timeout=1).read()
    except OSError:
        return False
    return all(node["state"] == "up" for node in json.loads(page)["nodes"])


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-none", max_retries=0) as client:
        yield client


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"


def test_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_openai_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_openai_client_hits_the_cache_on_the_second_turn(client: openai.OpenAI) -> None:
    """Of three conversations at least two: on a machine that stands still for a moment, a node may look busy."""
    hits = 0
    for number in range(3):
        conversation: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": f"conversation {number} of its own " * 60},
            MESSAGES[1],
        ]
        first = client.chat.completions.create(model="m", messages=conversation, max_tokens=8)
        conversation += [
            {"role": "assistant", "content": first.choices[0].message.content or ""},
            {"role": "user", "content": "go on"},
        ]
        second = client.chat.completions.create(model="m", messages=conversation, max_tokens=8)
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        hits += (second.usage.prompt_tokens_details.cached_tokens or 0) > 100
    assert hits >= 2


def test_openai_client_with_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, tool_choice="auto", max_tokens=4
    )  # fmt: skip
    assert answer.choices


def test_openai_client_completes(client: openai.OpenAI) -> None:
    assert client.completions.create(model="m", prompt="once upon a time", max_tokens=5).choices[0].text


def test_openai_client_reads_our_errors(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"


def test_openai_async_client(url: str) -> None:
    async def send_all() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-none", max_retries=0) as client:

            async def whole(number: int) -> int:
                messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"number {number}"}]
                answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
                assert answer.usage is not None
                return answer.usage.completion_tokens

            async def streamed(number: int) -> int:
                messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"number {number}"}]
                stream = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=6, stream=True
                )  # fmt: skip
                return sum([bool(chunk.choices[0].delta.content) async for chunk in stream])

            counts = await asyncio.gather(*map(whole, range(20)), *map(streamed, range(20)))
            assert set(counts) == {6}

    asyncio.run(send_all())


JSON = ("-H", "Content-Type: application/json")


def _curl() -> str:
    found = shutil.which("curl")
    assert found is not None, "the tests need curl"
    return found


def test_curl_streams(url: str) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 5, "stream": True})
    command = [_curl(), "-sS", "-N", "--noproxy", "*", *JSON, "-d", body, f"{url}/v1/chat/completions"]
    output = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert output.endswith(b"data: [DONE]\n\n")


def test_curl_uploads_a_large_body_in_chunks_with_expect(url: str) -> None:
    body = json.dumps({"model": "m", "prompt": "word " * 4000, "max_tokens": 2}).encode()
    command = [
        _curl(),
        "-sS",
        "--noproxy",
        "*",
        "-H",
        "Transfer-Encoding: chunked",
        "-H",
        "Expect: 100-continue",
        *JSON,
        "--data-binary",
        "@-",
        f"{url}/v1/completions",
    ]
    output = subprocess.run(command, input=body, capture_output=True, check=True, timeout=30).stdout
    assert json.loads(output)["usage"]["completion_tokens"] == 2


def test_fifty_connections_of_http_client_find_no_errors(url: str) -> None:
    address = urlsplit(url)

    def statuses(_number: int) -> set[int]:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
        found = set()
        for _ in range(20):
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            found.add(response.status)
            assert not response.will_close and json.loads(response.read())["data"]
        connection.close()
        return found

    with ThreadPoolExecutor(50) as threads:
        assert set().union(*threads.map(statuses, range(50))) == {200}
