"""Bytes pass untouched: a body reaches the node as the client sent it, and so do fields but one connection's own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json

import pytest
from harness import (
    CLOSE,
    DONE,
    SSE_HEAD,
    answer,
    chat,
    chunk,
    engines,
    event,
    failing,
    get,
    hanging,
    normal,
    post,
    router,
    script,
    serve,
    stream,
    until,
)

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
        assert (await r.ask(post(body, "/v1/completions"))).status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].get(b"content-length") == [b"%d" % len(body)]


@pytest.mark.parametrize("size", [1, 7, 1000, 70_000])
async def test_a_chunked_body_reaches_the_node_byte_for_byte_with_a_length(size: int) -> None:
    body = chat("z" * 5000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: Chunked\r\n\r\n"
    chunks = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))
    async with engines() as [engine], router(engine) as r:
        assert (await r.ask(head + chunks + b"0\r\n\r\n")).status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].get(b"transfer-encoding") == []


async def test_a_request_in_any_pieces_is_the_same_request() -> None:
    request = post(chat("é" * 30), headers=["X-A: b"])
    async with engines() as [engine], router(engine) as r:
        for size in (1, 3, 50):
            peer = await r.connect()
            for at in range(0, len(request), size):
                await peer.send(request[at : at + size])
            assert (await peer.answer()).status == 200
        assert len({seen.body for seen in engine.seen}) == 1


async def test_an_answer_passes_byte_for_byte() -> None:
    async with engines() as [engine], router(engine) as r:
        body = bytes(range(256)) * 2000
        engine.behave = normal(body, headers=b"X-Custom: a b\r\nx-lower: c\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n")
        found = await r.ask()
        assert found.body == body
        assert found.get("x-custom") == "a b" and found.all("set-cookie") == ["a", "b"]
        assert b"\r\nX-Custom: a b\r\nx-lower: c\r\n" in found.head, "as it was written"


async def test_a_stream_passes_chunk_by_chunk_as_it_comes() -> None:
    async with engines() as [engine], router(engine) as r:
        gates = [asyncio.Event() for _ in range(3)]
        engine.behave = script(
            SSE_HEAD, chunk(event(0)), gates[0], chunk(event(1)), gates[1], chunk(event(2)), gates[2], DONE
        )
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        head = await peer.head()
        assert head.get("content-type") == "text/event-stream; charset=utf-8"
        for number in range(3):
            assert await asyncio.wait_for(peer.reader.readexactly(len(chunk(event(number)))), 10) == chunk(
                event(number)
            )
            gates[number].set()
        assert await asyncio.wait_for(peer.reader.readexactly(len(DONE)), 10) == DONE


async def test_extensions_and_trailers_of_an_answer_pass_as_they_came() -> None:
    async with engines() as [engine], router(engine) as r:
        raw = b"5;a=b\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"
        engine.behave = script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
        peer = await r.connect()
        peer.write(post())
        await peer.head()
        assert await asyncio.wait_for(peer.reader.readexactly(len(raw)), 10) == raw


# Fields.


async def test_fields_pass_as_they_were_written_in_their_order() -> None:
    async with engines() as [engine], router(engine) as r:
        lines = ["X-One:  spaced ", "accept: */*", "X-One: again", "OpenAI-Beta: x=1", "X-Üml: nope".replace("Ü", "U")]
        await r.ask(post(headers=lines))
        assert b"\r\n".join(line.encode() for line in lines) in engine.seen[0].head


async def test_bytes_beyond_ascii_in_a_value_pass() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask(post(headers=["X-Name: caf\xe9"]))
        assert engine.seen[0].get(b"x-name") == [b"caf\xe9"]


async def test_fields_of_one_connection_go_no_further() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask(
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


async def test_fields_of_the_nodes_connection_do_not_reach_the_client() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(
            headers=b"Connection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\n"
            b"Upgrade: h2\r\nTrailer: X\r\nX-Stays: 1\r\n"
        )
        found = await r.ask()
        assert {name for name, _ in found.fields} == {"content-type", "content-length", "x-stays", "x-request-id"}


async def test_the_node_is_told_its_own_name_as_host() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask()
        assert engine.seen[0].get(b"host") == [b"127.0.0.1:%d" % engine.port]


async def test_a_request_id_is_kept_and_returned() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(headers=b"X-Request-Id: the-nodes-own\r\n")
        found = await r.ask(post(headers=["x-request-id: abc-123"]))
        assert found.all("x-request-id") == ["abc-123"]
        assert engine.seen[0].get(b"x-request-id") == [b"abc-123"]


@pytest.mark.parametrize("given", [[], ["X-Request-Id:"], ["X-Request-Id: with space"], ["X-Request-Id: " + "x" * 201]])
async def test_a_request_id_is_made_where_none_can_be_used(given: list[str]) -> None:
    async with engines() as [engine], router(engine) as r:
        first, second = await r.ask(post(headers=given)), await r.ask(post(headers=given))
        ids = [first.get("x-request-id"), second.get("x-request-id")]
        assert all(ids) and ids[0] != ids[1]
        assert [seen.get(b"x-request-id") for seen in engine.seen] == [[str(each).encode()] for each in ids]


async def test_the_request_id_stays_the_same_over_a_fallback() -> None:
    async with engines(2) as two, router(*two) as r:
        two[0].behave = failing(500)
        found = await r.ask()
        ids = {value for engine in two for seen in engine.seen for value in seen.get(b"x-request-id")}
        assert ids == {str(found.get("x-request-id")).encode()}


async def test_the_clients_address_is_appended_to_forwarded_for() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask()
        await r.ask(post(headers=["X-Forwarded-For: 10.0.0.1"]))
        assert [seen.get(b"x-forwarded-for") for seen in engine.seen] == [[b"127.0.0.1"], [b"10.0.0.1, 127.0.0.1"]]


async def test_several_forwarded_for_fields_are_joined_in_order() -> None:
    """In a process of its own: it has been seen to crash."""
    async with engines() as [engine], serve("--port", "0", "--admin-port", "0", "--node", engine.url) as command:
        await command.ready()
        found = await command.ask(post(headers=["X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.2, 10.0.0.3"]))
        assert found.status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"10.0.0.1, 10.0.0.2, 10.0.0.3, 127.0.0.1"]


# Authorization.

KEY = {"sha256": hashlib.sha256(b"secret").hexdigest(), "tenant": "t"}


async def test_without_keys_here_authorization_is_the_nodes_affair() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask(post(headers=["authorization: Bearer for-the-node"]))
        assert engine.seen[0].get(b"authorization") == [b"Bearer for-the-node"]


async def test_an_api_key_field_passes_where_there_are_no_keys_here() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.ask(post(headers=["X-Api-Key: secret"]))
        assert engine.seen[0].get(b"x-api-key") == [b"secret"]


async def test_an_api_key_field_is_a_key_too_and_stays_here() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.ask(post(headers=["X-Api-Key: wrong"]))).status == 401
        assert (await r.ask(post(path="/v1/messages", headers=["X-Api-Key: secret"]))).status == 200
        assert engine.seen[0].get(b"x-api-key") == []


async def test_the_engines_own_administration_is_not_reached() -> None:
    async with engines() as [engine], router(engine) as r:
        for path in (
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load%5flora_adapter", "/v1//load_lora_adapter",
            "/v1/load_lora_adapter/", "/v1/x/../load_lora_adapter", "/v1/load_lora_adapter?x=1",
        ):  # fmt: skip
            assert (await r.ask(post(path=path))).status == 404, path
        assert engine.seen == []


async def test_a_redirect_of_a_node_does_not_lead_around_the_router() -> None:
    async with engines() as [engine], router(engine) as r:
        own = f"http://127.0.0.1:{engine.port}"
        for said, passed in ((f"{own}/v1/x?y=1", "/v1/x?y=1"), ("http://elsewhere/z", "http://elsewhere/z")):
            engine.behave = script(
                b"HTTP/1.1 307 Over there\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % said.encode()
            )
            found = await r.ask()
            assert found.status == 307 and found.get("location") == passed


async def test_every_error_of_the_router_has_a_request_id() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.ask(post(chat(model="nope")))).get("x-request-id")
        assert (await r.ask(post(b"{"))).get("x-request-id")
        assert (await r.ask(b"GET / HTTP/3\r\n\r\n")).get("x-request-id")
        kept = await r.ask(post(chat(model="nope"), headers=["X-Request-Id: mine"]))
        assert kept.get("x-request-id") == "mine"


async def test_a_body_that_is_too_large_is_refused_under_the_clients_own_request_id() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 100}) as r:
        found = await r.ask(post(chat("x" * 200_000), headers=["X-Request-Id: mine"]))
        assert found.status == 413 and found.get("x-request-id") == "mine"


async def test_a_key_for_the_router_stays_here() -> None:
    async with engines() as [engine], router(engine, keys=[KEY]) as r:
        assert (await r.ask(post(headers=["Authorization: Bearer secret"]))).status == 200
        assert b"secret" not in engine.seen[0].head


@pytest.mark.parametrize("keys", [[], [KEY]])
async def test_a_node_with_a_key_of_its_own_gets_that(
    keys: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_KEY", "node-secret")
    async with engines() as [engine], router({"url": engine.url, "api_key_env": "NODE_KEY"}, keys=keys) as r:
        assert (await r.ask(post(headers=["Authorization: Bearer secret"]))).status == 200
        for seen in (engine.seen[0], engine.checks[0]):
            assert seen.get(b"authorization") == [b"Bearer node-secret"]


# Versions and connections.


async def test_expect_100_continue_is_answered_before_the_body_comes() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        head, _, body = post(headers=["Expect: 100-Continue"]).partition(b"\r\n\r\n")
        await peer.send(head + b"\r\n\r\n")
        assert (await peer.head()).head == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.write(body)
        assert (await peer.answer()).status == 200
        assert engine.seen[0].get(b"expect") == []


async def test_a_request_that_will_be_refused_gets_no_100_continue() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 10}) as r:
        peer = await r.connect()
        peer.write(post(headers=["Expect: 100-continue"]).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert (await peer.head()).status == 413


async def test_an_http_1_0_client_is_answered_and_the_connection_closed() -> None:
    async with engines() as [engine], router(engine) as r:
        for request in (post(), get("/health"), b"GET /health HTTP/1.0\r\n\r\n"):
            peer = await r.connect()
            peer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            found = await peer.answer()
            assert found.status == 200 and found.get("connection") == "close"
            assert await peer.is_closed()


async def test_an_http_1_0_client_that_asks_for_it_is_kept_and_told_so() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for request in (post(headers=["Connection: Keep-Alive"]), get("/health", "Connection: keep-alive")) * 2:
            peer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            found = await peer.answer()
            assert found.status == 200 and (found.get("connection") or "").lower() == "keep-alive"


async def test_an_http_1_0_client_gets_a_stream_without_chunks() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = stream(5, 0.01)
        peer = await r.connect()
        peer.write(post(headers=["Connection: keep-alive"]).replace(b"HTTP/1.1", b"HTTP/1.0"))
        found = await peer.answer()
        assert found.get("transfer-encoding") is None and found.get("connection") == "close"
        assert found.body == b"".join(event(n) for n in range(5)) + b"data: [DONE]\n\n"


async def test_a_connection_serves_many_requests_of_every_kind() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for number in range(30):
            engine.behave = (normal(), stream(3), failing(400))[number % 3]
            peer.write(post())
            found = await peer.answer()
            assert found.complete and found.status == (200, 200, 400)[number % 3]
        assert r.service.listener.accepted == 1


async def test_connection_close_is_kept_to() -> None:
    async with engines() as [engine], router(engine) as r:
        for request in (
            post(headers=["Connection: x, Close"]),
            get("/health", "Connection: close"),
            post(b"{", headers=["Connection: close"]),
        ):
            peer = await r.connect()
            peer.write(request)
            assert (await peer.answer()).get("connection") == "close"
            assert await peer.is_closed()


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with engines(3) as three, router(*three) as r:
        for number, engine in enumerate(three):
            engine.behave = script((2 - number) * 0.1, answer(b"%d" % number))
        peer = await r.connect()
        peer.write(post() + post() + get("/health") + post())
        bodies = [(await peer.answer()).body for _ in range(4)]
        assert bodies == [b"0", b"1", b'{"status":"alive"}', b"2"]


async def test_pipelined_requests_with_bodies_are_all_answered() -> None:
    async with engines() as [engine], router(engine) as r:
        bodies = [chat(f"{number} " + "x" * 1500) for number in range(30)]
        peer = await r.connect()
        peer.write(b"".join(map(post, bodies)))
        for _ in bodies:
            assert (await peer.answer()).status == 200
        assert [seen.body for seen in engine.seen] == bodies


async def test_who_sends_too_much_ahead_still_gets_the_answer_at_hand() -> None:
    """The rest is the client's to repeat: none of it was begun."""
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(event(0)), gate, chunk(b"x" * 200_000), DONE)
        peer = await r.connect()
        peer.write(post())
        await peer.head()
        sending = asyncio.ensure_future(peer.send(post(chat("x" * 50_000)) * 100))
        await asyncio.sleep(0.2)
        gate.set()
        got = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(peer.reader.read(65_536), 10):
                got += data
        with contextlib.suppress(ConnectionError):
            await sending
        assert got.endswith(DONE)
        assert len(engine.seen) == 1


# The surface.

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
    "/v1/score", "/tokenize", "/detokenize", "/v1/audio/transcriptions", "/v1/some/thing/new",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_of_the_surface_is_forwarded_with_its_query(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        for query in ("", "?a=b&c=%2F..%2F", "?"):
            assert (await r.ask(post(path=path + query))).status == 200
            assert engine.seen[-1].line == f"POST {path}{query} HTTP/1.1".encode()


async def test_a_multipart_form_goes_by_its_model_untouched() -> None:
    async with engines(1, "whisper") as [ears], engines(1, "m") as [other], router(ears, other) as r:
        audio = bytes(range(256)) * 200
        body = (
            b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
            + audio + b'\r\n--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--XX--\r\n'
        )  # fmt: skip
        found = await r.ask(post(body, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=XX"))
        assert found.status == 200
        assert ears.seen[0].body == body and other.seen == []
        assert ears.seen[0].get(b"content-type") == [b"multipart/form-data; boundary=XX"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/m"])
async def test_what_can_be_got_can_be_asked_for_its_head(path: str) -> None:
    async with engines() as [engine], router(engine) as r:
        whole = await r.ask(get(path))
        peer = await r.connect()
        peer.write(get(path, method="HEAD") + get("/health"))
        head = await peer.answer(without_body=True)
        assert head.status == whole.status == 200
        assert head.get("content-length") == whole.get("content-length") == str(len(whole.body))
        assert (await peer.answer()).body == b'{"status":"alive"}', "no body came in between"


async def test_models_are_merged_over_the_fleet() -> None:
    async with engines(1, "a", "b") as [one], engines(1, "b", "org/c") as [two], router(one, two) as r:
        listed = (await r.ask(get("/v1/models"))).json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["a", "b", "org/c"]
        assert listed["data"][0]["owned_by"] == "fake", "as the node describes it"
        assert (await r.ask(get("/v1/models/b"))).json["id"] == "b"
        assert (await r.ask(get("/v1/models/org/c"))).json["id"] == "org/c"
        assert (await r.ask(get("/v1/models/none"))).status == 404


async def test_a_model_with_a_slash_is_found_by_its_quoted_name() -> None:
    async with engines(1, "org/c") as [engine], router(engine) as r:
        assert (await r.ask(get("/v1/models/org%2Fc"))).status == 200


async def test_health_is_alive_and_ready_says_whether_somebody_can_serve() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.ask(get("/ready"))).status == 200
        await engine.refuse()
        await until(lambda: not r.service.fleet.can_serve)
        found = await r.ask(get("/ready?verbose"))
        assert found.status == 503 and found.get("retry-after")
        assert (await r.ask(get("/health?x=y"))).status == 200


async def test_a_clients_header_cannot_name_a_node() -> None:
    """Only configuration and the admin API name nodes."""
    async with engines() as [engine], engines() as [other_load], router(engine) as r:
        address = f"127.0.0.1:{other_load.port}"
        for name in ("Host", "X-Node", "X-Forwarded-Host", "Forwarded", "X-Upstream", "X-Target"):
            request = post(headers=[f"{name}: {address}"] if name != "Host" else [])
            if name == "Host":
                request = request.replace(b"Host: router", b"Host: " + address.encode())
            assert (await r.ask(request)).status == 200
        assert other_load.seen == [] and len(engine.seen) == 6


async def test_the_openai_client_works_unchanged() -> None:
    openai = pytest.importorskip("openai")
    async with engines() as [engine], router(engine) as r:
        completion = {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                      "choices": [{"index": 0, "finish_reason": "stop",
                                   "message": {"role": "assistant", "content": "yes"}}]}  # fmt: skip
        engine.behave = normal(json.dumps(completion).encode())
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="x", max_retries=0)
        messages = [{"role": "user", "content": "?"}]
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
        for behave in (hanging, normal(), script(CLOSE), script(SSE_HEAD, chunk(event(0)), 0.02, CLOSE)):
            two[1].behave = behave
            await r.ask(post(secret))
        await r.ask(post(secret[:-1]))
        await r.ask(post(b'{"model":"my-secret-words"}'))
    assert "my-secret-words" not in caplog.text
