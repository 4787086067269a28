"""A request that two parsers could read differently is rejected, and nothing after it is served."""

from __future__ import annotations

import pytest
from support.polling import until
from support.raw_client import get, post
from support.running_router import router
from support.scripted_engine import ScriptedEngine, engines

HOST = b"Host: router\r\n"
NEXT_REQUEST = get("/health")
"""Sent after the bad request. It must not be answered."""


def chat_head(*lines: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def chunked(body: bytes) -> bytes:
    return chat_head(b"Transfer-Encoding: chunked") + body


BAD_HEADS = {
    "length and coding": chat_head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "coding and length": chat_head(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n",
    "two lengths": chat_head(b"Content-Length: 2", b"Content-Length: 3") + b"{}",
    "two equal lengths": chat_head(b"Content-Length: 2", b"Content-Length: 2") + b"{}",
    "a list of lengths": chat_head(b"Content-Length: 2, 2") + b"{}",
    "a negative length": chat_head(b"Content-Length: -2") + b"{}",
    "a length with a plus": chat_head(b"Content-Length: +2") + b"{}",
    "a hexadecimal length": chat_head(b"Content-Length: 0x2") + b"{}",
    "a length with an underscore": chat_head(b"Content-Length: 1_0") + b"{}",
    "a length with a point": chat_head(b"Content-Length: 2.0") + b"{}",
    "an empty length": chat_head(b"Content-Length:") + b"{}",
    "a length beyond 64 bits": chat_head(b"Content-Length: 18446744073709551618") + b"{}",
    "a length in other digits": chat_head("Content-Length: ²".encode()) + b"{}",
    "two codings": chat_head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "a coding in HTTP/1.0": b"POST /v1/score HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bare LF after a field": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\nC: d\r\n\r\n",
    "only bare LFs": b"GET /health HTTP/1.1\nHost: router\n\n",
    "a bare LF after the request line": b"GET /health HTTP/1.1\n" + HOST + b"\r\n",
    "a bare CR in a value": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\rC: d\r\n\r\n",
    "a bare CR in the request line": b"GET /health\rX HTTP/1.1\r\n" + HOST + b"\r\n",
    "CR CR LF": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\r\r\n\r\n",
    "a space before the colon": chat_head(b"Content-Length : 2") + b"{}",
    "a tab before the colon": chat_head(b"Transfer-Encoding\t: chunked") + b"0\r\n\r\n",
    "a folded line": chat_head(b"A: b", b" c", b"Content-Length: 2") + b"{}",
    "a first field that begins with a space": b"GET /health HTTP/1.1\r\n Host: router\r\n\r\n",
    "a field without a colon": b"GET /health HTTP/1.1\r\n" + HOST + b"Nonsense\r\n\r\n",
    "a field without a name": b"GET /health HTTP/1.1\r\n" + HOST + b": value\r\n\r\n",
    "NUL in a value": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\0c\r\n\r\n",
    "NUL in a name": b"GET /health HTTP/1.1\r\n" + HOST + b"A\0: b\r\n\r\n",
    "NUL in the target": b"GET /health\0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "DEL in a value": b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\x7fc\r\n\r\n",
    "a vertical tab before the coding": chat_head(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n",
    "a name that is not ASCII": chat_head("Ünter: x".encode()) + b"{}",
    "a space before the method": b" GET /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces in the request line": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab in the request line": b"GET\t/health\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "a space after the version": b"GET /health HTTP/1.1 \r\n" + HOST + b"\r\n",
    "a space in the target": b"GET /health x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target that is not ASCII": "GET /hé HTTP/1.1\r\n".encode() + HOST + b"\r\n",
    "a method that is no token": b"G@T /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an absolute target": b"GET http://router/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an authority as target": b"CONNECT router:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "lower-case http": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "a version with many digits": b"GET /health HTTP/1.10\r\n" + HOST + b"\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "a fragment": b"GET /health#x HTTP/1.1\r\n" + HOST + b"\r\n",
    "an empty fragment": b"GET /health# HTTP/1.1\r\n" + HOST + b"\r\n",
    "two content types": chat_head(b"Content-Type: text/plain", b"Content-Type: application/json", b"Content-Length: 2")
    + b"{}",
    "two equal content types": chat_head(*[b"Content-Type: application/json"] * 2, b"Content-Length: 2") + b"{}",
    "two authorizations": chat_head(b"Authorization: Bearer a", b"authorization: Bearer b"),
    "two API keys": chat_head(b"X-Api-Key: a", b"X-API-KEY: b"),
    "two priorities for vLLM": chat_head(b"X-Vllm-Priority: 1", b"X-Vllm-Priority: -1"),
    **{
        f"{name} named in Connection": chat_head(b"Connection: close, " + name.encode())
        for name in (
            "content-type", "Content-Type", "authorization", "x-api-key", "host", "content-length",
            "transfer-encoding", "content-encoding", "x-request-id", "x-forwarded-for", "expect", "connection",
            "x-priority", "x-queue", "x-deadline-ms", "x-vllm-priority",
        )
    },
    **{
        f"an underscore in {name}": chat_head(name.encode() + b": 1")
        for name in (
            "content_type", "Content_Length", "transfer_encoding", "x_api_key", "X-Data_Parallel-Rank",
            "x_vllm_priority", "proxy_authorization", "x_request_id", "content_encoding",
        )
    },
    "two empty lines before the request": b"\r\n\r\n" + get("/health"),
    "twenty fields named in Connection": b"GET /health HTTP/1.1\r\n" + HOST
    + b"Connection: " + b",".join(b"x%d" % n for n in range(20)) + b"\r\n\r\n",
}  # fmt: skip

BAD_CHUNKS = {
    "no size": chunked(b"\r\n{}\r\n0\r\n\r\n"),
    "a size that is no number": chunked(b"xyz\r\n{}\r\n0\r\n\r\n"),
    "a negative size": chunked(b"-2\r\n{}\r\n0\r\n\r\n"),
    "a size with a plus": chunked(b"+2\r\n{}\r\n0\r\n\r\n"),
    "a size with 0x": chunked(b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a size with an underscore": chunked(b"0_2\r\n{}\r\n0\r\n\r\n"),
    "a space before the size": chunked(b" 2\r\n{}\r\n0\r\n\r\n"),
    "a space after the size": chunked(b"2 \r\n{}\r\n0\r\n\r\n"),
    "a size that overflows": chunked(b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    "a size in sixteen digits": chunked(b"0000000000000002\r\n{}\r\n0\r\n\r\n"),
    "a size line that ends in LF": chunked(b"2\n{}\r\n0\r\n\r\n"),
    "a size line that ends in CR": chunked(b"2\r{}\r\n0\r\n\r\n"),
    "a chunk longer than its size": chunked(b"2\r\n{}}\r\n0\r\n\r\n"),
    "a chunk shorter than its size": chunked(b"3\r\n{}\r\n0\r\n\r\n"),
    "a chunk that ends in LF": chunked(b"2\r\n{}\n0\r\n\r\n"),
    "a chunk that ends in CR CR": chunked(b"2\r\n{}\r\r0\r\n\r\n"),
    "a last chunk that ends in LF": chunked(b"2\r\n{}\r\n0\n\n"),
    "LF in an extension": chunked(b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
    "NUL in an extension": chunked(b"2;a\0b\r\n{}\r\n0\r\n\r\n"),
    "an endless extension": chunked(b"2;" + b"a" * 5000 + b"\r\n{}\r\n0\r\n\r\n"),
    "a folded trailer": chunked(b"2\r\n{}\r\n0\r\nA: b\r\n c\r\n\r\n"),
    "a trailer without a colon": chunked(b"2\r\n{}\r\n0\r\nnonsense\r\n\r\n"),
    "a trailer with a space before its colon": chunked(b"2\r\n{}\r\n0\r\nA : b\r\n\r\n"),
    "a trailer with a bare LF": chunked(b"2\r\n{}\r\n0\r\nA: b\n\r\n"),
    "a hundred trailers": chunked(b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 100 + b"\r\n"),
}

OTHER_CODES = {
    "a compressed body": (415, chat_head(b"Content-Encoding: gzip", b"Content-Length: 2") + b"{}"),
    "a body that is compressed twice": (415, chat_head(b"Content-Encoding: identity", b"Content-Encoding: br")),
    "an empty content encoding": (415, chat_head(b"Content-Encoding:")),
    "gzip, chunked": (501, chat_head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n"),
    "chunked, identity": (501, chat_head(b"Transfer-Encoding: chunked, identity") + b"0\r\n\r\n"),
    "identity": (501, chat_head(b"Transfer-Encoding: identity") + b"{}"),
    "xchunked": (501, chat_head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n"),
    "chunked in quotes": (501, chat_head(b'Transfer-Encoding: "chunked"') + b"0\r\n\r\n"),
    "a comma after chunked": (501, chat_head(b"Transfer-Encoding: chunked,") + b"0\r\n\r\n"),
    "chunked with a parameter": (501, chat_head(b"Transfer-Encoding: chunked;q=1") + b"0\r\n\r\n"),
    "an empty coding": (501, chat_head(b"Transfer-Encoding:") + b"0\r\n\r\n"),
    "cow beside chunked": (501, chat_head(b"Transfer-Encoding: cow", b"Transfer-Encoding: chunked") + b"0\r\n\r\n"),
    "a coding on a folded line": (501, chat_head(b"Transfer-Encoding:", b" chunked") + b"0\r\n\r\n"),
    "the preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/1.2": (505, b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n"),
    "HTTP/3.0": (505, b"GET /health HTTP/3.0\r\n" + HOST + b"\r\n"),
}


async def assert_rejected(request: bytes, status: int, engine: ScriptedEngine) -> None:
    async with router(engine) as r:
        peer = await r.connect()
        peer.write(request + NEXT_REQUEST)
        response = await peer.response()
        assert response.status == status
        assert response.error["type"] == "invalid_request_error"
        assert response.get("connection") == "close"
        assert await peer.is_closed(), "a request after the bad one was answered"
        assert engine.seen == []


@pytest.mark.parametrize("request_", BAD_HEADS.values(), ids=BAD_HEADS)
async def test_an_ambiguous_head_is_rejected_and_closes_the_connection(request_: bytes) -> None:
    async with engines() as [engine]:
        await assert_rejected(request_, 400, engine)


@pytest.mark.parametrize("request_", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
async def test_an_ambiguous_chunked_body_is_rejected_and_closes_the_connection(request_: bytes) -> None:
    async with engines() as [engine]:
        await assert_rejected(request_, 400, engine)


@pytest.mark.parametrize(("status", "request_"), OTHER_CODES.values(), ids=OTHER_CODES)
async def test_unsupported_encodings_and_versions_are_rejected_and_close_the_connection(
    status: int, request_: bytes
) -> None:
    async with engines() as [engine]:
        await assert_rejected(request_, status, engine)


@pytest.mark.parametrize("name", ["two lengths", "a bare CR in a value", "a folded line", "an absolute target"])
async def test_an_ambiguous_head_is_rejected_byte_by_byte(name: str) -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for at in range(len(BAD_HEADS[name])):
            await peer.send(BAD_HEADS[name][at : at + 1])
        assert (await peer.response()).status == 400
        assert await peer.is_closed()


@pytest.mark.parametrize("name", ["a size with 0x", "a chunk longer than its size", "a folded trailer"])
async def test_an_ambiguous_chunk_is_rejected_byte_by_byte(name: str) -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for at in range(len(BAD_CHUNKS[name])):
            await peer.send(BAD_CHUNKS[name][at : at + 1])
        assert (await peer.response()).status == 400
        assert await peer.is_closed()
        assert engine.seen == []


async def test_a_good_request_before_a_bad_one_is_served_and_those_after_it_are_not() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        peer.write(post() + BAD_HEADS["two lengths"] + post())
        assert (await peer.response()).status == 200
        assert (await peer.response()).status == 400
        assert await peer.is_closed()
        assert len(engine.seen) == 1


async def test_bytes_after_a_body_are_never_part_of_it() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        peer.write(post() + b"GARBAGE\r\n\r\n")
        assert (await peer.response()).status == 200
        assert (await peer.response()).status == 400
        assert await peer.is_closed()
        assert [seen.body for seen in engine.seen] == [post().partition(b"\r\n\r\n")[2]]


async def test_chunk_extensions_and_trailers_are_not_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        body = b'{"model":"m","messages":[]}'
        sent = b"%x;a=b\r\n%b\r\n0 ;last\r\nX-Trailer: Content-Length: 3\r\nContent-Length: 4\r\n\r\n" % (
            len(body),
            body,
        )
        assert (await r.request(chunked(sent))).status == 200
        assert engine.seen[0].body == body
        assert engine.seen[0].get(b"content-length") == [b"%d" % len(body)]
        assert engine.seen[0].get(b"x-trailer") == []


async def test_headers_for_this_connection_and_the_rank_are_not_forwarded() -> None:
    async with engines() as [engine], router(engine) as r:
        headers = ["Connection: keep-alive, Upgrade, X-Own, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA",
                   "X-Own: 1", "X-Data-Parallel-Rank: 3", "Content-Encoding: identity", "TE: trailers",
                   "My_Own: 2"]  # fmt: skip
        assert (await r.request(post(headers=headers))).status == 200
        names = {name for name, _ in engine.seen[0].fields}
        assert names.isdisjoint(
            {b"connection", b"upgrade", b"http2-settings", b"x-own", b"x-data-parallel-rank", b"te"}
        )
        assert engine.seen[0].get(b"my_own") == [b"2"] and b"content-encoding" not in names


async def test_one_empty_line_before_a_request_is_ignored() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        await peer.send(b"\r\n")
        await until(lambda: any(client._unparsed is not None for client in r.service.listener.connections))
        await peer.send(get("/health"))
        assert (await peer.response()).status == 200


async def test_an_empty_line_that_arrives_with_the_request_is_ignored() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        peer.write(b"\r\n" + get("/health"))
        assert (await peer.response()).status == 200
