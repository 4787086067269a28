"""Bytes pass unchanged: bodies, responses, and all headers except hop-by-hop ones."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from support.engine_scripts import (
    DONE,
    SSE_HEAD,
    chunk,
    failing,
    normal,
    script,
    sse_event,
)
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines
from support.serve_process import serve

BODIES = {
    "odd whitespace": b' {\t"model" :\r\n "m" , "messages":[ ]\n}\n ',
    "unknown fields": b'{"model":"m","x_new":{"a":[1,2,{"b":null}]},"z":1e400}',
    "duplicate keys": b'{"model":"m","n":1,"n":2}',
    "escapes": b'{"model":"\\u006d","messages":[{"role":"user","content":"\\ud83d\\ude00 \\u00e9"}]}',
    "unicode": '{"model":"m","messages":[{"role":"user","content":"😀 é 漢字"}]}'.encode(),
    "large numbers": b'{"model":"m","seed":123456789012345678901234567890,"t":0.1000000000000000055}',
    "every byte in a string": b'{"model":"m","x":"' + bytes(range(0x80, 0xC0)).decode("latin-1").encode() + b'"}',
    "128 KB": chat("y" * 131_072),
    "3 MB": chat("y" * 3_000_000),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_reaches_the_node_byte_for_byte(body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(body, "/v1/completions"))).status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].get(b"content-length") == [b"%d" % len(body)]


@pytest.mark.parametrize("size", [1, 7, 1000, 70_000])
async def test_a_chunked_body_reaches_the_node_byte_for_byte_with_a_length(size: int) -> None:
    body = chat("z" * 5000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: Chunked\r\n\r\n"
    chunks = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(head + chunks + b"0\r\n\r\n")).status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].get(b"transfer-encoding") == []


async def test_a_request_in_any_pieces_is_the_same_request() -> None:
    request = post(chat("é" * 30), headers=["X-A: b"])
    async with engines() as [engine], router(engine) as r:
        for size in (1, 3, 50):
            peer = await r.connect()
            for at in range(0, len(request), size):
                await peer.send(request[at : at + size])
            assert (await peer.response()).status == 200
        assert len({seen.body for seen in engine.seen}) == 1


async def test_a_response_passes_byte_for_byte() -> None:
    async with engines() as [engine], router(engine) as r:
        body = bytes(range(256)) * 2000
        engine.behave = normal(body, headers=b"X-Custom: a b\r\nx-lower: c\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n")
        response = await r.request()
        assert response.body == body
        assert response.get("x-custom") == "a b" and response.all("set-cookie") == ["a", "b"]
        assert b"\r\nX-Custom: a b\r\nx-lower: c\r\n" in response.head, "headers pass unchanged"


async def test_a_stream_passes_chunk_by_chunk_as_it_arrives() -> None:
    async with engines() as [engine], router(engine) as r:
        gates = [asyncio.Event() for _ in range(3)]
        engine.behave = script(
            SSE_HEAD, chunk(sse_event(0)), gates[0], chunk(sse_event(1)), gates[1], chunk(sse_event(2)), gates[2], DONE
        )
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        head = await peer.head()
        assert head.get("content-type") == "text/event-stream; charset=utf-8"
        for number in range(3):
            assert await asyncio.wait_for(peer.reader.readexactly(len(chunk(sse_event(number)))), 10) == chunk(
                sse_event(number)
            )
            gates[number].set()
        assert await asyncio.wait_for(peer.reader.readexactly(len(DONE)), 10) == DONE


async def test_chunk_extensions_and_trailers_of_a_response_pass_unchanged() -> None:
    async with engines() as [engine], router(engine) as r:
        raw = b"5;a=b\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"
        engine.behave = script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
        peer = await r.connect()
        peer.write(post())
        await peer.head()
        assert await asyncio.wait_for(peer.reader.readexactly(len(raw)), 10) == raw


# Headers.


async def test_headers_pass_unchanged_in_their_order() -> None:
    async with engines() as [engine], router(engine) as r:
        lines = ["X-One:  spaced ", "accept: */*", "X-One: again", "OpenAI-Beta: x=1", "X-Üml: nope".replace("Ü", "U")]
        await r.request(post(headers=lines))
        assert b"\r\n".join(line.encode() for line in lines) in engine.seen[0].head


async def test_non_ascii_bytes_in_a_header_value_pass() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request(post(headers=["X-Name: caf\xe9"]))
        assert engine.seen[0].get(b"x-name") == [b"caf\xe9"]


async def test_hop_by_hop_headers_are_not_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request(
            post(
                headers=[
                    "Connection: keep-alive, X-Hop, x-HOP-two",
                    "X-Hop: 1", "X-Hop-Two: 2", "x-hop: 3", "X-Hop-Three: stays",
                    "Keep-Alive: timeout=5", "Proxy-Connection: keep-alive", "Proxy-Authorization: Basic x",
                    "TE: trailers", "Trailer: X-Sum", "Upgrade: h2c",
                ]
            )
        )  # fmt: skip
        names = {name for name, _ in engine.seen[0].fields}
        assert names == {
            b"host",
            b"content-length",
            b"content-type",
            b"x-request-id",
            b"x-forwarded-for",
            b"x-hop-three",
        }


async def test_hop_by_hop_headers_of_a_node_do_not_reach_the_client() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(
            headers=b"Connection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\n"
            b"Upgrade: h2\r\nTrailer: X\r\nX-Stays: 1\r\n"
        )
        response = await r.request()
        assert {name for name, _ in response.fields} == {"content-type", "content-length", "x-stays", "x-request-id"}


async def test_the_host_header_names_the_node() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request()
        assert engine.seen[0].get(b"host") == [b"127.0.0.1:%d" % engine.port]


async def test_a_request_id_is_kept_and_returned() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(headers=b"X-Request-Id: the-nodes-own\r\n")
        response = await r.request(post(headers=["x-request-id: abc-123"]))
        assert response.all("x-request-id") == ["abc-123"]
        assert engine.seen[0].get(b"x-request-id") == [b"abc-123"]


@pytest.mark.parametrize("given", [[], ["X-Request-Id:"], ["X-Request-Id: with space"], ["X-Request-Id: " + "x" * 201]])
async def test_a_request_id_is_created_if_the_client_sends_no_valid_one(given: list[str]) -> None:
    async with engines() as [engine], router(engine) as r:
        first, second = await r.request(post(headers=given)), await r.request(post(headers=given))
        ids = [first.get("x-request-id"), second.get("x-request-id")]
        assert all(ids) and ids[0] != ids[1]
        assert [seen.get(b"x-request-id") for seen in engine.seen] == [[str(each).encode()] for each in ids]


async def test_the_request_id_stays_the_same_over_a_retry() -> None:
    async with engines(2) as two, router(*two) as r:
        two[0].behave = failing(500)
        response = await r.request()
        ids = {value for engine in two for seen in engine.seen for value in seen.get(b"x-request-id")}
        assert ids == {str(response.get("x-request-id")).encode()}


async def test_the_clients_address_is_appended_to_x_forwarded_for() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request()
        await r.request(post(headers=["X-Forwarded-For: 10.0.0.1"]))
        assert [seen.get(b"x-forwarded-for") for seen in engine.seen] == [[b"127.0.0.1"], [b"10.0.0.1, 127.0.0.1"]]


async def test_several_x_forwarded_for_headers_are_joined_in_order() -> None:
    """In a process of its own, because a bug here once crashed the interpreter."""
    async with engines() as [engine], serve("--port", "0", "--admin-port", "0", "--node", engine.url) as command:
        await command.ready()
        response = await command.request(
            post(headers=["X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.2, 10.0.0.3"])
        )
        assert response.status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"10.0.0.1, 10.0.0.2, 10.0.0.3, 127.0.0.1"]


# Authorization.

KEY = {"sha256": hashlib.sha256(b"secret").hexdigest(), "tenant": "t"}


async def test_without_configured_keys_authorization_is_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request(post(headers=["authorization: Bearer for-the-node"]))
        assert engine.seen[0].get(b"authorization") == [b"Bearer for-the-node"]


async def test_without_configured_keys_x_api_key_is_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request(post(headers=["X-Api-Key: secret"]))
        assert engine.seen[0].get(b"x-api-key") == [b"secret"]


async def test_x_api_key_is_accepted_as_a_key_and_not_forwarded() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.request(post(headers=["X-Api-Key: wrong"]))).status == 401
        assert (await r.request(post(path="/v1/messages", headers=["X-Api-Key: secret"]))).status == 200
        assert engine.seen[0].get(b"x-api-key") == []


async def test_administration_paths_of_engines_are_not_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        for path in (
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load%5flora_adapter", "/v1//load_lora_adapter",
            "/v1/load_lora_adapter/", "/v1/x/../load_lora_adapter", "/v1/load_lora_adapter?x=1",
        ):  # fmt: skip
            assert (await r.request(post(path=path))).status == 404, path
        assert engine.seen == []


async def test_a_redirect_to_a_node_leads_back_to_the_router() -> None:
    async with engines() as [engine], router(engine) as r:
        own = f"http://127.0.0.1:{engine.port}"
        for said, passed in ((f"{own}/v1/x?y=1", "/v1/x?y=1"), ("http://elsewhere/z", "http://elsewhere/z")):
            engine.behave = script(
                b"HTTP/1.1 307 Over there\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % said.encode()
            )
            response = await r.request()
            assert response.status == 307 and response.get("location") == passed


async def test_every_error_of_the_router_has_a_request_id() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(chat(model="nope")))).get("x-request-id")
        assert (await r.request(post(b"{"))).get("x-request-id")
        assert (await r.request(b"GET / HTTP/3\r\n\r\n")).get("x-request-id")
        kept = await r.request(post(chat(model="nope"), headers=["X-Request-Id: mine"]))
        assert kept.get("x-request-id") == "mine"


async def test_a_413_has_the_clients_request_id() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 100}) as r:
        response = await r.request(post(chat("x" * 200_000), headers=["X-Request-Id: mine"]))
        assert response.status == 413 and response.get("x-request-id") == "mine"


async def test_a_key_of_the_router_is_not_forwarded() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.request(post(headers=["Authorization: Bearer secret"]))).status == 200
        assert b"secret" not in engine.seen[0].head


@pytest.mark.parametrize("keys", [[], [KEY]])
async def test_a_node_with_an_api_key_receives_it(keys: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_KEY", "node-secret")
    async with engines() as [engine], router({"url": engine.url, "api_key_env": "NODE_KEY"}, keys=keys) as r:
        assert (await r.request(post(headers=["Authorization: Bearer secret"]))).status == 200
        for seen in (engine.seen[0], engine.checks[0]):
            assert seen.get(b"authorization") == [b"Bearer node-secret"]
