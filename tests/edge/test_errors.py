"""Every error of the router's own: its code, its words as OpenAI-style JSON, and that the client gets to read it."""

from __future__ import annotations

import asyncio
import hashlib
import re

import pytest
from harness import CLOSE, BlackHole, answer, chat, engines, failing, get, hanging, post, router, script, until


async def test_an_unknown_model_is_404() -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.ask(post(chat(model="nobody")))
        assert found.status == 404
        assert found.error["code"] == "model_not_found" and found.error["param"] == "model"
        assert "nobody" in found.error["message"]
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
        b'{"model":"m"} x',
        b"{'model':'m'}",
    ],
)
async def test_malformed_json_is_400(body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        peer.write(post(body))
        found = await peer.answer()
        assert found.status == 400 and found.error["code"] == "malformed_json"
        peer.write(post())
        assert (await peer.answer()).status == 200, "the connection serves on: HTTP itself was well"


HOSTILE_BODIES = {
    "nested a hundred thousand deep": b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of five thousand digits beside a model that is no text": b'{"model":7,"n":' + b"1" * 5000 + b"}",
    "five thousand digits as a prompt": b'{"model":"m","prompt":[' + b"1" * 5000 + b"]}",
    "five thousand digits as a message": b'{"model":"m","messages":[{"role":"user","content":' + b"1" * 5000 + b"}]}",
    "a role of five thousand digits": b'{"model":"m","messages":[{"role":' + b"1" * 5000 + b"}]}",
}


@pytest.mark.parametrize("policy", ["prefix_hash", "session", "round_robin"])
@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES)
async def test_a_hostile_body_gets_an_answer(body: bytes, policy: str) -> None:
    async with engines() as [engine], router(engine, routing={"policy": policy}) as r:
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await r.ask(post(body, path))).status in (200, 400, 404)


async def test_a_lone_surrogate_as_the_model_gets_an_answer() -> None:
    async with engines() as [engine], router(engine, checked=False) as r:
        assert (await r.ask(post(b'{"model":"\\ud800"}', "/v1/completions"))).status in (400, 404)


async def test_a_session_of_five_thousand_digits_gets_an_answer() -> None:
    async with engines() as [engine], router(engine, routing={"policy": "session"}) as r:
        found = await r.ask(post(b'{"model":"m","user":' + b"1" * 5000 + b"}", "/v1/completions"))
        assert found.status in (200, 400)


async def test_no_model_among_several_is_400_and_among_one_is_served() -> None:
    async with engines(1, "a", "b") as [engine], router(engine) as r:
        found = await r.ask(post(b"{}", "/v1/completions"))
        assert found.status == 400 and found.error["code"] == "missing_model"
    async with engines() as [engine], router(engine) as r:
        assert (await r.ask(post(b"{}", "/v1/completions"))).status == 200


async def test_a_body_that_says_it_is_too_large_is_413_before_it_is_sent() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1001\r\n\r\n")
        found = await peer.answer()
        assert found.status == 413 and found.error["code"] == "request_too_large"
        assert "1,000" in found.error["message"]
        assert await peer.is_closed()


async def test_a_chunked_body_is_413_when_it_grows_too_large() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            peer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert (await peer.answer()).status == 413
        assert await peer.is_closed()
        assert engine.seen == []


async def test_a_body_of_just_the_limit_is_taken() -> None:
    body = chat("x" * 500)
    async with engines() as [engine], router(engine, limits={"body_bytes": len(body)}) as r:
        assert (await r.ask(post(body))).status == 200
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await r.ask(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))).status == 200


async def test_a_client_that_is_still_sending_can_read_its_413() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        peer = await r.connect()
        size = 30_000_000
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 1_000_000):
            await peer.send(b"x" * 1_000_000)
        assert (await peer.answer()).status == 413


async def test_a_head_that_does_not_come_to_its_end_is_408() -> None:
    async with engines() as [engine], router(engine, limits={"header_timeout_s": 0.3}) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        found = await peer.answer()
        assert found.status == 408 and "head" in found.error["message"] and "0.3 s" in found.error["message"]
        assert await peer.is_closed()


async def test_a_head_has_its_time_from_its_first_byte_however_often_more_comes() -> None:
    async with engines() as [engine], router(engine, limits={"header_timeout_s": 0.5}) as r:
        peer = await r.connect()
        peer.write(b"GET /health HTTP/1.1\r\nHost: r\r\nX: ")

        async def drip() -> None:
            while True:
                peer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert (await peer.answer()).status == 408
        dripping.cancel()


@pytest.mark.parametrize("framing", ["Content-Length: 50", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_come_to_its_end_is_408(framing: str) -> None:
    async with engines() as [engine], router(engine, limits={"body_timeout_s": 0.3}) as r:
        peer = await r.connect()
        peer.write(f"POST /v1/completions HTTP/1.1\r\nHost: r\r\n{framing}\r\n\r\n5".encode())
        found = await peer.answer()
        assert found.status == 408 and "body" in found.error["message"]
        assert await peer.is_closed()
        assert engine.seen == []


async def test_nobody_to_serve_is_503_with_retry_after_and_no_address() -> None:
    async with engines() as [engine], router(engine) as r:
        await engine.refuse()
        await until(lambda: not r.service.fleet.can_serve)
        found = await r.ask()
        assert found.status == 503 and found.error["code"] == "no_node_available"
        assert int(found.get("retry-after") or 0) >= 1
        assert_no_address(found.head + found.body, engine.port)


async def test_before_any_node_has_said_what_it_serves_a_model_is_503_not_404() -> None:
    async with engines() as [engine]:
        engine.health = hanging
        async with router(engine, wait=0, checks_hang=True) as r:
            found = await r.ask()
            assert found.status == 503 and found.get("retry-after")


async def test_without_nodes_it_is_503() -> None:
    async with router() as r:
        assert (await r.ask()).status == 503
        assert (await r.ask(get("/ready"))).status == 503


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_all_failed_is_502_with_how_many_were_tried_and_no_address(attempts: int) -> None:
    async with engines(4) as four, router(*four, upstream={"attempts": attempts}, health={"failures": 100}) as r:
        for engine in four:
            engine.behave = failing(500)
        found = await r.ask()
        assert found.status == 502 and found.error["type"] == "server_error"
        assert found.error["message"] == f"all upstream nodes failed ({attempts} tried)"
        assert sum(len(engine.seen) for engine in four) == attempts
        for engine in four:
            assert_no_address(found.head + found.body, engine.port)


async def test_a_fleet_that_says_429_is_502_with_the_nodes_retry_after() -> None:
    async with engines(2) as two, router(*two) as r:
        for engine in two:
            engine.behave = failing(429, b"Retry-After: 7\r\n")
        found = await r.ask()
        assert found.status == 502 and found.get("retry-after") == "7"


@pytest.mark.parametrize("value", [b"soon", b"-5", b"Wed, 21 Oct 2065 07:28:00 GMT", b"9" * 30, b""])
async def test_an_odd_retry_after_of_a_node_does_no_harm(value: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(503, b"Retry-After: " + value + b"\r\n")
        found = await r.ask()
        assert found.status == 502 and 1 <= int(found.get("retry-after") or 0) <= 3600


async def test_a_retry_after_of_five_thousand_digits_does_no_harm() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(503, b"Retry-After: " + b"9" * 5000 + b"\r\n")
        assert (await r.ask()).status == 502


async def test_a_head_that_is_too_large_is_431() -> None:
    async with engines() as [engine], router(engine, limits={"header_bytes": 1000}) as r:
        for big in (b"X: " + b"x" * 1000 + b"\r\n\r\n", b"X: " + b"x" * 100_000):
            peer = await r.connect()
            peer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n" + big)
            found = await peer.answer()
            assert found.status == 431 and found.error["code"] == "head_too_large"
            assert await peer.is_closed()


async def test_too_many_header_fields_are_431() -> None:
    async with engines() as [engine], router(engine, limits={"header_count": 10}) as r:
        assert (await r.ask(get("/health", *["A: b"] * 9))).status == 200
        found = await r.ask(get("/health", *["A: b"] * 10))
        assert found.status == 431 and found.error["code"] == "too_many_headers"


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
async def test_the_wrong_method_is_405_and_says_the_right_one(method: str, path: str, allowed: str) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.ask(get(path, "Content-Length: 0", method=method))
        assert found.status == 405 and found.get("allow") == allowed and found.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    ["/", "/metrics", "/admin/nodes", "/v2/x", "/v1", "/v1/../health", "/v1/%2e%2e/x",
     "/v1/a/..%2fb", "/v1/a/.%2E/x", "/v1/a\\..\\b", "*"],
)  # fmt: skip
async def test_a_path_that_is_not_served_is_404(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.ask(post(path=path))
        assert found.status == 404 and found.error["code"] == "not_found"
        assert engine.seen == []


async def test_another_path_under_v1_without_a_model_is_404() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.ask(post(b"{}", "/v1/other"))).status == 404
        assert (await r.ask(post(b'{"model":"m"}', "/v1/other"))).status == 200


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
async def test_without_a_known_key_it_is_401(header: str) -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        found = await r.ask(post(headers=[header]))
        assert found.status == 401 and found.error["code"] == "invalid_api_key"
        assert found.get("www-authenticate") == "Bearer"
        assert engine.seen == []


async def test_with_a_known_key_it_is_served_and_health_needs_none() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.ask(post(headers=["Authorization: bearer secret"]))).status == 200
        assert (await r.ask(get("/health"))).status == 200
        assert (await r.ask(get("/ready"))).status == 200
        assert (await r.ask(get("/v1/models"))).status == 401


async def test_a_large_body_without_a_key_is_refused_before_it_is_read() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        peer = await r.connect()
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100000\r\n\r\n")
        assert (await peer.answer()).status == 401
        assert await peer.is_closed()


async def test_another_expectation_than_100_continue_is_417() -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.ask(post(headers=["Expect: a-miracle"]))
        assert found.status == 417 and found.error["code"] == "expectation_failed"


async def test_every_status_has_its_words() -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.ask(post(headers=["Expect: a-miracle"]))
        assert found.head.startswith(b"HTTP/1.1 417 Expectation Failed\r\n")


async def test_one_connection_too_many_is_told_503_and_others_serve_on() -> None:
    async with engines() as [engine], router(engine, limits={"connections": 3}) as r:
        held = [await r.connect() for _ in range(3)]
        for peer in held:
            peer.write(get("/health"))
            assert (await peer.answer()).status == 200
        extra = await r.connect()
        found = await extra.answer()
        assert found.status == 503 and found.error["code"] == "too_many_connections" and found.get("retry-after")
        assert await extra.is_closed()
        extra.close()
        held[0].write(post())
        assert (await held[0].answer()).status == 200
        held[1].close()
        await until(lambda: len(r.service.listener.connections) < 3)
        assert (await r.ask()).status == 200


async def test_bodies_beyond_what_may_be_held_in_all_are_503() -> None:
    body = chat("x" * 3000)
    async with engines() as [engine], router(engine, limits={"buffered_bytes": 5000}) as r:
        engine.behave = hanging
        first = await r.connect()
        first.write(post(body))
        await until(lambda: engine.seen)
        found = await r.ask(post(body))
        assert found.status == 503 and found.error["code"] == "bodies_full" and found.get("retry-after")
        first.leave()
        await until(lambda: r.service.listener.buffered_bytes == 0)
        engine.behave = script(answer())
        assert (await r.ask(post(body))).status == 200


async def test_a_body_that_is_only_announced_takes_no_room() -> None:
    async with (
        engines() as [engine],
        router(engine, limits={"buffered_bytes": 1_000_000, "body_bytes": 1_000_000}) as r,
    ):
        announcer = await r.connect()
        await announcer.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000000\r\n\r\n")
        announced = get("/health")
        peer = await r.connect()
        peer.write(announced)
        await peer.answer()
        assert (await r.ask()).status == 200


async def test_errors_carry_no_address_whatever_the_node_does() -> None:
    async with engines(1) as [engine]:
        hole = BlackHole()
        try:
            async with router(engine, hole, wait=1, upstream={"connect_timeout_s": 0.2}) as r:
                engine.behave = script(CLOSE)
                found = await r.ask()
                assert found.status == 502
                assert_no_address(found.head + found.body, engine.port)
                assert_no_address(found.head + found.body, hole.port)
        finally:
            hole.close()


async def test_an_error_returns_the_request_id_too() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = failing(500)
        found = await r.ask(post(headers=["X-Request-Id: abc"]))
        assert found.status == 502 and found.get("x-request-id") == "abc"


async def test_every_refusal_is_counted_once() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask(post(b"{"))
        await r.ask(post(chat(model="nobody")))
        await r.ask(post(chat(model="nobody")))
        refused = r.service.counters.refused
        assert refused == {(400, "malformed_json"): 1, (404, "model_not_found"): 2}


def assert_no_address(text: bytes, port: int) -> None:
    assert b"127.0.0.1" not in text and b"localhost" not in text
    assert not re.search(rb"(?<!\d)%d(?!\d)" % port, text)
