"""Errors of the router on /v1/messages have the shape of Anthropic's API, in responses and in streams."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from support.engine_scripts import CLOSE, SSE_HEAD, chunk, failing, script, sse_event
from support.raw_client import Response, chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.core.router import Router

MESSAGES = "/v1/messages"
KEY = {"sha256": hashlib.sha256(b"secret").hexdigest(), "tenant": "t", "requests_per_min": 1}


def anthropic_error(response: Response) -> dict[str, Any]:
    assert response.get("content-type") == "application/json" and response.get("x-request-id")
    assert set(response.json) == {"type", "error"} and response.json["type"] == "error"
    error: dict[str, Any] = response.json["error"]
    assert set(error) == {"type", "message"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b'{"model":"m"}', 400, "invalid_request_error"),
        (chat(model="nobody"), 404, "not_found_error"),
    ],
)
async def test_a_rejected_request(body: bytes, status: int, kind: str) -> None:
    async with engines() as [engine], router(engine) as r:
        for path in (MESSAGES, MESSAGES + "?beta=true"):
            response = await r.request(post(body, path))
            assert response.status == status and anthropic_error(response)["type"] == kind


async def test_errors_before_the_body_is_read() -> None:
    async with engines() as [engine], router(engine, keys=[KEY], limits={"body_bytes": 1000}) as r:
        response = await r.request(post(path=MESSAGES))
        assert response.status == 401 and anthropic_error(response)["type"] == "authentication_error"
        key = ["x-api-key: secret"]
        response = await r.request(post(chat("x" * 2000), MESSAGES, key))
        assert response.status == 413 and anthropic_error(response)["type"] == "request_too_large"
        assert (await r.request(post(path=MESSAGES, headers=key))).status == 200
        response = await r.request(post(path=MESSAGES, headers=key))
        assert response.status == 429 and anthropic_error(response)["type"] == "rate_limit_error"
        assert response.get("retry-after")


@pytest.mark.parametrize(("node", "status", "kind"), [(500, 502, "api_error"), (503, 503, "overloaded_error")])
async def test_errors_of_all_nodes(node: int, status: int, kind: str) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(node)
        response = await r.request(post(path=MESSAGES))
        assert response.status == status and anthropic_error(response)["type"] == kind


@pytest.mark.interpreted
async def test_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: Any) -> Any:
        raise RuntimeError

    async with engines() as [engine], router(engine) as r:
        monkeypatch.setattr(Router, "decide", broken)
        response = await r.request(post(path=MESSAGES))
        assert response.status == 500 and anthropic_error(response)["type"] == "api_error"


async def test_a_broken_stream_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD + chunk(sse_event(0)), 0.05, CLOSE)
        response = await r.request(post(chat(stream=True), MESSAGES))
        assert response.status == 200 and not response.complete
        assert response.chunks[-1].startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error","mess')


async def test_other_paths_have_openai_errors() -> None:
    async with engines() as [engine], router(engine) as r:
        for path in ("/v1/chat/completions", "/v1/messagesx", "/v1/messages_batches"):
            assert (await r.request(post(b"{", path))).error["code"] == "malformed_json"
