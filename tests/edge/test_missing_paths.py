"""A path that the engine lacks gets an error that says so; errors of the engine itself pass untouched."""

from __future__ import annotations

import openai
import pytest
from support.engine_scripts import CLOSE, RESET, chunk, http_response, script
from support.polling import until
from support.raw_client import post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.edge.response import MAX_JUDGED_BYTES

NOT_FOUND = b'{"detail":"Not Found"}'
CHUNKED = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
HEAD, BODY = http_response(NOT_FOUND, 404).split(b"\r\n\r\n")
MISSING: dict[str, list[bytes | float | str]] = {
    "FastAPI": [http_response(NOT_FOUND, 404)],
    "FastAPI in two pieces": [HEAD + b"\r\n\r\n", 0.05, BODY],
    "byte by byte": [HEAD + b"\r\n\r\n", *(step for byte in BODY for step in (bytes((byte,)), 0.002))],
    "chunked": [CHUNKED + chunk(NOT_FOUND) + b"0\r\n\r\n"],
    "chunked in pieces": [CHUNKED, 0.02, chunk(NOT_FOUND[:5]), 0.02, chunk(NOT_FOUND[5:]), 0.02, b"0\r\n\r\n"],
    "until the end of the connection": [UNTIL_CLOSE, 0.02, b"404 page not found", CLOSE],
    "no body": [http_response(b"", 404, b"text/plain")],
    "a page": [http_response(b"<html><h1>404</h1></html>", 404, b"text/html")],
    "a text": [http_response(b'"nothing"', 404)],
    "a list": [http_response(b"[]", 404)],
    "deep": [http_response(b"[" * 9000, 404)],
    "not UTF-8": [http_response(b'{"error":"\xff"}', 404)],
    "OpenAI's form without a word": [http_response(b'{"error":{"message":"Not Found","code":404}}', 404)],
    "llama.cpp": [http_response(b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}', 404)],
    "an empty error": [http_response(b'{"error":null,"object":"x"}', 404)],
}
PROPER = {
    "vLLM": b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}',
    "older vLLM": b'{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","code":404}',
    "a response": b'{"error":{"message":"Response with id \'resp_1\' not found.","type":"invalid_request_error"}}',
    "Anthropic": b'{"type":"error","error":{"type":"not_found_error","message":"model: x"}}',
    "Ollama": b'{"error":"model \'x\' not found"}',
    "long": b'{"error":{"message":"%b"}}' % (b"x" * 2 * MAX_JUDGED_BYTES),
    "long and of no form": b"x" * (MAX_JUDGED_BYTES + 1),
}


@pytest.mark.parametrize("steps", MISSING.values(), ids=MISSING)
async def test_a_path_that_the_engine_lacks(steps: list[bytes | float | str]) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(*steps)
        peer = await r.connect()
        for _ in range(2):
            peer.write(post(path="/v1/rerank?a=b"))
            response = await peer.response()
            assert response.status == 404 and response.error["code"] == "path_not_served"
            assert "The engine answered 404 to POST /v1/rerank:" in response.error["message"]
            assert response.get("x-request-id") and str(engine.port) not in response.error["message"]
        assert r.node(0).health.state.value == "up" and r.inflight() == 0
        assert r.service.counters.errors == {(404, "path_not_served"): 2}


@pytest.mark.parametrize("body", PROPER.values(), ids=PROPER)
@pytest.mark.parametrize("framing", ["sized", "pieces", "chunked"])
async def test_errors_of_the_engine_pass_untouched(body: bytes, framing: str) -> None:
    whole = http_response(body, 404, headers=b"X-Engine: 1\r\n")
    async with engines() as [engine], router(engine) as r:
        engine.behave = {
            "sized": script(whole),
            "pieces": script(whole[:-40], 0.02, whole[-40:-3], 0.02, whole[-3:]),
            "chunked": script(CHUNKED, 0.02, chunk(body[:9]), 0.02, chunk(body[9:]), b"0\r\n\r\n"),
        }[framing]
        peer = await r.connect()
        for _ in range(2):
            peer.write(post(path="/v1/completions"))
            response = await peer.response()
            assert response.status == 404 and response.body == body and response.complete
            assert framing == "chunked" or response.get("x-engine") == "1"


async def test_a_compressed_404_passes_untouched() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(http_response(b"\x1f\x8b123", 404, headers=b"Content-Encoding: gzip\r\n"))
        assert (await r.request()).body == b"\x1f\x8b123"


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_404_that_breaks_off_is_no_complete_response(end: str) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(HEAD + b"\r\n\r\n" + BODY[:4], 0.05, end)
        response = await r.request()
        assert response.status == 404 and not response.complete and response.body == BODY[:4]


async def test_the_error_has_the_form_of_anthropic_on_its_paths() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(*MISSING["FastAPI"])
        response = await r.request(post(path="/v1/messages/count_tokens"))
        assert response.status == 404 and response.json["error"]["type"] == "not_found_error"
        assert "POST /v1/messages/count_tokens:" in response.json["error"]["message"]


async def test_a_client_that_leaves_meanwhile_is_gone() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(HEAD + b"\r\n\r\n" + BODY[:4], "hang")
        peer = await r.connect()
        peer.write(post())
        await until(lambda: r.node(0).inflight == 1 and bool(engine.seen))
        peer.disconnect()
        await until(lambda: r.inflight() == 0)


async def test_the_openai_client_raises_not_found() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(*MISSING["FastAPI in two pieces"])
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="none", max_retries=0)
        async with client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.embeddings.create(model="m", input="x")
        assert caught.value.code == "path_not_served"
