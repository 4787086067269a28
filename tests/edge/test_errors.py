"""Every error that the router itself sends: its status, code and JSON, and that the client can read it."""

from __future__ import annotations

import asyncio
import hashlib
import re

import pytest
from support.engine_scripts import CLOSE, failing, hanging, http_response, script
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import router
from support.scripted_engine import BlackHole, engines


async def test_an_unknown_model_is_404() -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(post(chat(model="nobody")))
        assert response.status == 404
        assert response.error["code"] == "model_not_found" and response.error["param"] == "model"
        assert "nobody" in response.error["message"]
        assert engine.seen == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"model":"m"',
        b'{"model":"m",}',
        b"\xff\xfe{}",
        b'{"model":"m","\xff":1}',
        b'{"model":"m","unread":"\xed\xa0\xbd"}',
        b'{"model":"m","unread":{"a":["' + b"x" * 300_000 + b'\xc0\x80"]}}',
        b'{"model":"m"} x',
        b"{'model':'m'}",
    ],
)
async def test_malformed_json_is_400(body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        peer.write(post(body))
        response = await peer.response()
        assert response.status == 400 and response.error["code"] == "malformed_json"
        peer.write(post())
        assert (await peer.response()).status == 200, "the connection stays open: the HTTP was valid"


HOSTILE_BODIES = {
    "nested a hundred thousand deep": b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of five thousand digits and a model that is not a string": b'{"model":7,"n":' + b"1" * 5000 + b"}",
    "five thousand digits as a prompt": b'{"model":"m","prompt":[' + b"1" * 5000 + b"]}",
    "five thousand digits as a message": b'{"model":"m","messages":[{"role":"user","content":' + b"1" * 5000 + b"}]}",
    "a role of five thousand digits": b'{"model":"m","messages":[{"role":' + b"1" * 5000 + b"}]}",
}


@pytest.mark.parametrize("policy", ["prefix_hash", "session", "round_robin"])
@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES)
async def test_a_hostile_body_gets_a_response(body: bytes, policy: str) -> None:
    async with engines() as [engine], router(engine, routing={"policy": policy}) as r:
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await r.request(post(body, path))).status in (200, 400, 404)


async def test_a_lone_surrogate_as_the_model_gets_a_response() -> None:
    async with engines() as [engine], router(engine, check_leaks=False) as r:
        assert (await r.request(post(b'{"model":"\\ud800"}', "/v1/completions"))).status in (400, 404)


async def test_a_session_of_five_thousand_digits_gets_a_response() -> None:
    async with engines() as [engine], router(engine, routing={"policy": "session"}) as r:
        response = await r.request(post(b'{"model":"m","user":' + b"1" * 5000 + b"}", "/v1/completions"))
        assert response.status in (200, 400)


async def test_a_missing_model_is_400_unless_only_one_model_is_served() -> None:
    async with engines(1, "a", "b") as [engine], router(engine) as r:
        response = await r.request(post(b"{}", "/v1/completions"))
        assert response.status == 400 and response.error["code"] == "missing_model"
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(b"{}", "/v1/completions"))).status == 200


async def test_a_too_large_content_length_is_413_before_the_body_is_sent() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1001\r\n\r\n")
        response = await peer.response()
        assert response.status == 413 and response.error["code"] == "request_too_large"
        assert "1,000" in response.error["message"]
        assert await peer.is_closed()


async def test_a_chunked_body_is_413_when_it_grows_too_large() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            peer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert (await peer.response()).status == 413
        assert await peer.is_closed()
        assert engine.seen == []


async def test_a_body_of_exactly_the_limit_is_accepted() -> None:
    body = chat("x" * 500)
    async with engines() as [engine], router(engine, limits={"body_bytes": len(body)}) as r:
        assert (await r.request(post(body))).status == 200
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await r.request(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))).status == 200


async def test_a_client_that_is_still_sending_can_read_its_413() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        size = 30_000_000
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 1_000_000):
            await peer.send(b"x" * 1_000_000)
        assert (await peer.response()).status == 413


async def test_an_incomplete_head_is_408() -> None:
    async with engines() as [engine], router(engine, limits={"header_timeout_s": 0.3}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        response = await peer.response()
        assert response.status == 408 and "head" in response.error["message"] and "0.3 s" in response.error["message"]
        assert await peer.is_closed()


async def test_the_header_timeout_counts_from_the_first_byte() -> None:
    async with engines() as [engine], router(engine, limits={"header_timeout_s": 0.5}) as r:
        peer = await r.connect()
        peer.write(b"GET /health HTTP/1.1\r\nHost: r\r\nX: ")

        async def drip() -> None:
            while True:
                peer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert (await peer.response()).status == 408
        dripping.cancel()


@pytest.mark.parametrize("framing", ["Content-Length: 50", "Transfer-Encoding: chunked"])
async def test_an_incomplete_body_is_408(framing: str) -> None:
    async with engines() as [engine], router(engine, limits={"body_timeout_s": 0.3}) as r:
        peer = await r.connect()
        peer.write(f"POST /v1/completions HTTP/1.1\r\nHost: r\r\n{framing}\r\n\r\n5".encode())
        response = await peer.response()
        assert response.status == 408 and "body" in response.error["message"]
        assert await peer.is_closed()
        assert engine.seen == []


async def test_no_available_node_is_503_with_retry_after_and_no_address() -> None:
    async with engines() as [engine], router(engine) as r:
        await engine.refuse()
        await until(lambda: not r.service.fleet.can_serve)
        response = await r.request()
        assert response.status == 503 and response.error["code"] == "no_node_available"
        assert int(response.get("retry-after") or 0) >= 1
        assert_no_address(response.head + response.body, engine.port)


async def test_a_model_is_503_not_404_until_a_node_has_listed_its_models() -> None:
    async with engines() as [engine]:
        engine.health = hanging
        async with router(engine, wait=0, health_checks_hang=True) as r:
            response = await r.request()
            assert response.status == 503 and response.get("retry-after")


async def test_without_nodes_every_request_is_503() -> None:
    async with router() as r:
        assert (await r.request()).status == 503
        assert (await r.request(get("/ready"))).status == 503


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_when_all_nodes_fail_it_is_502_with_the_number_tried_and_no_address(attempts: int) -> None:
    async with (
        engines(4) as four,
        router(*four, upstream={"max_attempts": attempts}, health={"consecutive_failures": 100}) as r,
    ):
        for engine in four:
            engine.behave = failing(500)
        response = await r.request()
        assert response.status == 502 and response.error["type"] == "server_error"
        assert response.error["message"].startswith(f"The router tried {attempts} node")
        assert sum(len(engine.seen) for engine in four) == attempts
        for engine in four:
            assert_no_address(response.head + response.body, engine.port)


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_nodes_are_429_with_the_smallest_retry_after(status: int) -> None:
    async with engines(3) as three, router(*three) as r:
        for engine, seconds in zip(three, (9, 7, 8), strict=True):
            engine.behave = failing(status, b"Retry-After: %d\r\n" % seconds)
        response = await r.request()
        assert response.status == 429 and response.error["code"] == "overloaded"
        assert response.error["type"] == "rate_limit_error" and response.get("retry-after") == "7"
        assert r.service.counters.rejected["nodes_busy", 1] == 1


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("date", [b"1 Jan 2024 0:0:0 +99999999999999", b"1 Jan 99999999999 0:0:0 GMT", b"x"])
async def test_a_nodes_absurd_retry_after_is_ignored(status: int, date: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(status, b"Retry-After: %b\r\n" % date)
        assert (await r.request()).status == status


async def test_busy_nodes_without_a_time_are_429_with_retry_after_1() -> None:
    async with engines(2) as two, router(*two) as r:
        for engine in two:
            engine.behave = failing(429)
        response = await r.request()
        assert response.status == 429 and response.get("retry-after") == "1"


async def test_503_of_all_nodes_without_retry_after_is_503() -> None:
    async with engines(2) as [unavailable, busy], router(unavailable, busy) as r:
        unavailable.behave = failing(503)
        busy.behave = failing(429, b"Retry-After: 5\r\n")
        response = await r.request()
        assert response.status == 503 and response.error["code"] == "no_node_available"
        assert response.get("retry-after") == "5"


async def test_a_failed_and_a_busy_node_are_502_with_the_busy_nodes_retry_after() -> None:
    async with engines(2) as [failed, busy], router(failed, busy) as r:
        failed.behave = failing(500)
        busy.behave = failing(429, b"Retry-After: 5\r\n")
        response = await r.request()
        assert response.status == 502 and response.get("retry-after") == "5"


async def test_a_retry_after_may_be_a_date() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(503, b"Retry-After: Wed, 21 Oct 2065 07:28:00 GMT\r\n")
        response = await r.request()
        assert response.status == 429 and response.get("retry-after") == "3600"


@pytest.mark.parametrize("value", [b"soon", b"-5", b"9" * 5000, b"Wed, 99 Oct 2065 07:28:00 GMT", b""])
async def test_an_invalid_retry_after_of_a_node_is_ignored(value: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(503, b"Retry-After: " + value + b"\r\n")
        response = await r.request()
        assert response.status == 503 and response.get("retry-after") == "1"


async def test_a_too_large_head_is_431() -> None:
    async with engines() as [engine], router(engine, limits={"header_bytes": 1000}) as r:
        for big in (b"X: " + b"x" * 1000 + b"\r\n\r\n", b"X: " + b"x" * 100_000):
            peer = await r.connect()
            peer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n" + big)
            response = await peer.response()
            assert response.status == 431 and response.error["code"] == "headers_too_large"
            assert await peer.is_closed()


async def test_too_many_header_fields_are_431() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(get("/health", *["A: b"] * 99))).status == 200
        response = await r.request(get("/health", *["A: b"] * 100))
        assert response.status == 431 and response.error["code"] == "too_many_headers"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/embeddings?x=1", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("PUT", "/ready", "GET"),
    ],
)
async def test_a_wrong_method_is_405_and_names_the_right_one(method: str, path: str, allowed: str) -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(get(path, "Content-Length: 0", method=method))
        assert (
            response.status == 405
            and response.get("allow") == allowed
            and response.error["code"] == "method_not_allowed"
        )


@pytest.mark.parametrize(
    "path",
    ["/", "/metrics", "/admin/nodes", "/v2/x", "/v1", "/v1/../health", "/v1/%2e%2e/x",
     "/v1/a/..%2fb", "/v1/a/.%2E/x", "/v1/a\\..\\b", "*"],
)  # fmt: skip
async def test_a_path_that_is_not_served_is_404(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(post(path=path))
        assert response.status == 404 and response.error["code"] == "not_found"
        assert engine.seen == []


async def test_an_unknown_path_under_v1_without_a_model_is_404() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(b"{}", "/v1/other"))).status == 404
        assert (await r.request(post(b'{"model":"m"}', "/v1/other"))).status == 200


KEY = {"sha256": hashlib.sha256(b"secret").hexdigest(), "tenant": "t"}


@pytest.mark.parametrize(
    "header",
    [
        "X: y",
        "Authorization: Bearer wrong",
        "Authorization: Basic secret",
        "Authorization: secret",
        "Authorization: Bearer",
    ],
)
async def test_an_unknown_key_is_401(header: str) -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        response = await r.request(post(headers=[header]))
        assert response.status == 401 and response.error["code"] == "invalid_api_key"
        assert response.get("www-authenticate") == "Bearer"
        assert engine.seen == []


async def test_a_known_key_is_served_and_health_needs_no_key() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.request(post(headers=["Authorization: bearer secret"]))).status == 200
        assert (await r.request(get("/health"))).status == 200
        assert (await r.request(get("/ready"))).status == 200
        assert (await r.request(get("/v1/models"))).status == 401


async def test_a_large_body_without_a_key_is_rejected_before_it_is_read() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100000\r\n\r\n")
        assert (await peer.response()).status == 401
        assert await peer.is_closed()


async def test_an_expectation_other_than_100_continue_is_417() -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(post(headers=["Expect: a-miracle"]))
        assert response.status == 417 and response.error["code"] == "expectation_failed"


async def test_a_status_line_has_its_reason_phrase() -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(post(headers=["Expect: a-miracle"]))
        assert response.head.startswith(b"HTTP/1.1 417 Expectation Failed\r\n")


async def test_a_connection_above_the_limit_gets_503_and_the_others_are_served() -> None:
    async with engines() as [engine], router(engine, limits={"connections": 3}) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, http_response())
        held = [await r.connect() for _ in range(3)]
        for peer in held:
            peer.write(post())
        await until(lambda: len(engine.seen) == 3)
        extra = await r.connect()
        response = await extra.response()
        assert (
            response.status == 503 and response.error["code"] == "too_many_connections" and response.get("retry-after")
        )
        assert await extra.is_closed()
        extra.close()
        gate.set()
        for peer in held:
            assert (await peer.response()).status == 200
        assert (await r.request()).status == 200


async def test_bodies_above_the_memory_limit_are_503() -> None:
    body = chat("x" * 3000)
    async with engines() as [engine], router(engine, limits={"buffered_bytes": 5000}) as r:
        engine.behave = hanging
        first = await r.connect()
        first.write(post(body))
        await until(lambda: engine.seen)
        response = await r.request(post(body))
        assert (
            response.status == 503 and response.error["code"] == "request_buffer_full" and response.get("retry-after")
        )
        first.disconnect()
        await until(lambda: r.service.listener.buffered_bytes == 0)
        engine.behave = script(http_response())
        assert (await r.request(post(body))).status == 200


async def test_a_body_counts_against_memory_only_when_it_arrives() -> None:
    async with (
        engines() as [engine],
        router(engine, limits={"buffered_bytes": 1_000_000, "body_bytes": 1_000_000}) as r,
    ):
        announcer = await r.connect()
        await announcer.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000000\r\n\r\n")
        announced = get("/health")
        peer = await r.connect()
        peer.write(announced)
        await peer.response()
        assert (await r.request()).status == 200


async def test_errors_contain_no_address_of_a_node() -> None:
    async with engines(1) as [engine]:
        hole = BlackHole()
        try:
            async with router(engine, hole, wait=1, upstream={"connect_timeout_s": 0.2}) as r:
                engine.behave = script(CLOSE)
                response = await r.request()
                assert response.status == 502
                assert_no_address(response.head + response.body, engine.port)
                assert_no_address(response.head + response.body, hole.port)
        finally:
            hole.close()


async def test_an_error_returns_the_request_id() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(500)
        response = await r.request(post(headers=["X-Request-Id: abc"]))
        assert response.status == 502 and response.get("x-request-id") == "abc"


async def test_every_error_is_counted_once() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request(post(b"{"))
        await r.request(post(chat(model="nobody")))
        await r.request(post(chat(model="nobody")))
        refused = r.service.counters.errors
        assert refused == {(400, "malformed_json"): 1, (404, "model_not_found"): 2}


def assert_no_address(text: bytes, port: int) -> None:
    assert b"127.0.0.1" not in text and b"localhost" not in text
    assert not re.search(rb"(?<!\d)%d(?!\d)" % port, text)
