"""The router's endpoints: which paths are forwarded, and which the router answers itself."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from support.engine_scripts import (
    CLOSE,
    DONE,
    SSE_HEAD,
    chunk,
    failing,
    hanging,
    normal,
    script,
    sse_event,
)
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import router
from support.scripted_engine import engines

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
    "/v1/score", "/tokenize", "/detokenize", "/v1/audio/transcriptions", "/v1/some/thing/new",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_path_is_forwarded_with_its_query(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        for query in ("", "?a=b&c=%2F..%2F", "?"):
            assert (await r.request(post(path=path + query))).status == 200
            assert engine.seen[-1].line == f"POST {path}{query} HTTP/1.1".encode()


async def test_a_multipart_form_is_routed_by_its_model_and_forwarded_unchanged() -> None:
    async with engines(1, "whisper") as [ears], engines(1, "m") as [other], router(ears, other) as r:
        audio = bytes(range(256)) * 200
        body = (
            b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
            + audio + b'\r\n--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--XX--\r\n'
        )  # fmt: skip
        response = await r.request(
            post(body, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=XX")
        )
        assert response.status == 200
        assert ears.seen[0].body == body and other.seen == []
        assert ears.seen[0].get(b"content-type") == [b"multipart/form-data; boundary=XX"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/m"])
async def test_get_endpoints_answer_head_requests(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        whole = await r.request(get(path))
        peer = await r.connect()
        peer.write(get(path, method="HEAD") + get("/health"))
        head = await peer.response(without_body=True)
        assert head.status == whole.status == 200
        assert head.get("content-length") == whole.get("content-length") == str(len(whole.body))
        assert (await peer.response()).body == b'{"status":"alive"}', "the HEAD response had no body"


async def test_models_are_merged_over_the_fleet() -> None:
    async with engines(1, "a", "b") as [one], engines(1, "b", "org/c") as [two], router(one, two) as r:
        listed = (await r.request(get("/v1/models"))).json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["a", "b", "org/c"]
        assert listed["data"][0]["owned_by"] == "fake", "as the node describes it"
        assert (await r.request(get("/v1/models/b"))).json["id"] == "b"
        assert (await r.request(get("/v1/models/org/c"))).json["id"] == "org/c"
        assert (await r.request(get("/v1/models/none"))).status == 404


async def test_a_model_with_a_slash_is_found_by_its_escaped_name() -> None:
    async with engines(1, "org/c") as [engine], router(engine) as r:
        assert (await r.request(get("/v1/models/org%2Fc"))).status == 200


async def test_health_is_always_200_and_ready_only_if_a_node_can_serve() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(get("/ready"))).status == 200
        await engine.refuse()
        await until(lambda: not r.service.fleet.can_serve)
        response = await r.request(get("/ready?verbose"))
        assert response.status == 503 and response.get("retry-after")
        assert (await r.request(get("/health?x=y"))).status == 200


async def test_a_clients_header_cannot_name_a_node() -> None:
    """Only configuration and the admin API name nodes."""
    async with engines() as [engine], engines() as [other], router(engine) as r:
        address = f"127.0.0.1:{other.port}"
        for name in ("Host", "X-Node", "X-Forwarded-Host", "Forwarded", "X-Upstream", "X-Target"):
            request = post(headers=[f"{name}: {address}"] if name != "Host" else [])
            if name == "Host":
                request = request.replace(b"Host: router", b"Host: " + address.encode())
            assert (await r.request(request)).status == 200
        assert other.seen == [] and len(engine.seen) == 6


async def test_the_openai_client_works_unchanged() -> None:
    async with engines() as [engine], router(engine) as r:
        completion = {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                      "choices": [{"index": 0, "finish_reason": "stop",
                                   "message": {"role": "assistant", "content": "yes"}}]}  # fmt: skip
        engine.behave = normal(json.dumps(completion).encode())
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="x", max_retries=0)
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "?"}]
        said = await client.chat.completions.create(model="m", messages=messages)
        assert said.choices[0].message.content == "yes"
        part = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m",
                "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}  # fmt: skip
        data = chunk(b"data: " + json.dumps(part).encode() + b"\n\n")
        engine.behave = script(SSE_HEAD, data, data, DONE)
        pieces = [
            each async for each in await client.chat.completions.create(model="m", messages=messages, stream=True)
        ]
        assert len(pieces) == 2
        engine.behave = script(SSE_HEAD, data, 0.05, CLOSE)
        with pytest.raises((openai.APIError, Exception)) as broken:
            async for _ in await client.chat.completions.create(model="m", messages=messages, stream=True):
                pass
        assert "not complete" in str(broken.value) or "peer closed" in str(broken.value)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="none", messages=messages)
        await client.close()


async def test_nothing_a_user_typed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with (
        engines(2) as two,
        router(*two, log={"requests": True, "level": "debug"}, upstream={"first_byte_timeout_s": 0.2}) as r,
    ):
        two[0].behave = failing(500)
        secret = chat("my-secret-words")
        for behave in (hanging, normal(), script(CLOSE), script(SSE_HEAD, chunk(sse_event(0)), 0.02, CLOSE)):
            two[1].behave = behave
            await r.request(post(secret))
        await r.request(post(secret[:-1]))
        await r.request(post(b'{"model":"my-secret-words"}'))
    assert "my-secret-words" not in caplog.text
