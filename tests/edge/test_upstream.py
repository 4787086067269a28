"""The way to a node: connections are reused, a node's failure leads to the next one, and a broken answer shows."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from harness import (
    CLOSE,
    DONE,
    HANG,
    RESET,
    SSE_HEAD,
    Behaviour,
    BlackHole,
    Engine,
    Gone,
    Router,
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
    stream,
    until,
)

from warmroute.config import Upstream
from warmroute.edge.deadlines import Deadlines
from warmroute.edge.upstream import ConnectFault, Connection, NodePool

# Reuse.


async def test_connections_to_a_node_are_reused() -> None:
    async with engines() as [engine], router(engine, health={"interval_s": 30}, metrics={"interval_s": 30}) as r:
        for _ in range(20):
            assert (await r.ask()).status == 200
        assert engine.accepted <= 3
        assert len({seen.connection for seen in engine.seen}) == 1


async def test_a_streamed_answer_gives_its_connection_back_too() -> None:
    async with engines() as [engine], router(engine, health={"interval_s": 30}, metrics={"interval_s": 30}) as r:
        engine.behave = stream(5)
        for _ in range(10):
            assert (await r.ask()).complete
        assert len({seen.connection for seen in engine.seen}) == 1


async def test_many_at_once_have_a_connection_each_and_come_back_to_the_pool() -> None:
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, answer())
        asking = [asyncio.ensure_future(r.ask()) for _ in range(30)]
        await until(lambda: len(engine.seen) == 30)
        assert r.node(0).inflight == 30
        gate.set()
        assert {found.status for found in await asyncio.gather(*asking)} == {200}
        assert r.node(0).inflight == 0


async def test_no_more_idle_connections_are_kept_than_configured() -> None:
    async with engines() as [engine], router(engine, upstream={"idle_connections": 2}) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, answer())
        asking = [asyncio.ensure_future(r.ask()) for _ in range(20)]
        await until(lambda: len(engine.seen) == 20)
        gate.set()
        await asyncio.gather(*asking)
        await until(lambda: engine.connections <= 4)


async def test_an_idle_connection_to_a_node_is_closed_after_its_time() -> None:
    quiet = {"interval_s": 30}
    async with (
        engines() as [engine],
        router(engine, upstream={"idle_timeout_s": 0.2}, health=quiet, metrics=quiet) as r,
    ):
        await r.ask()
        await until(lambda: engine.connections == 0)


@pytest.mark.parametrize("how", [CLOSE, RESET])
async def test_a_reused_connection_that_turns_out_dead_costs_no_try_and_no_error(how: str) -> None:
    """A node that closes idle connections must not be noticed, whatever the timing."""
    quiet = {"interval_s": 30}
    async with engines() as [engine], router(engine, upstream={"attempts": 1}, health=quiet, metrics=quiet) as r:
        for _ in range(10):
            assert (await r.ask()).status == 200
            died = len(engine.seen)
            behaved = engine.behave

            async def die_once(
                engine: Engine, seen: object, writer: asyncio.StreamWriter, behaved: Behaviour = behaved
            ) -> None:
                engine.behave = behaved
                await script(how)(engine, seen, writer)  # type: ignore[arg-type]

            engine.behave = die_once
            assert (await r.ask()).status == 200
            assert len(engine.seen) == died + 2
        assert r.service.counters.stale_connections == 10
        assert r.node(0).outcomes[3] == 0, "no failure is held against the node"


async def test_a_dead_connection_is_tried_again_only_once() -> None:
    quiet = {"interval_s": 30}
    async with engines() as [engine], router(engine, health=quiet, metrics=quiet) as r:
        assert (await r.ask()).status == 200
        engine.behave = script(CLOSE)
        found = await r.ask()
        assert found.status == 502 and len(engine.seen) == 3


async def test_idle_connections_that_the_node_has_closed_are_not_used() -> None:
    async with engines() as [engine], router(engine) as r:
        for _ in range(5):
            assert (await r.ask()).status == 200
            engine.drop_connections()
            await asyncio.sleep(0.02)
        assert r.service.counters.refused == {}


async def test_a_connection_with_something_unasked_on_it_is_not_used_again() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(answer() + answer(b'{"evil":1}'))
        for _ in range(3):
            assert (await r.ask()).body == b'{"ok":true}'
        engine.behave = script(answer(), 0.05, answer(b'{"evil":1}'))
        for _ in range(3):
            found = await r.ask()
            assert found.body == b'{"ok":true}'
            await asyncio.sleep(0.1)


async def test_a_node_that_says_close_is_believed() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(headers=b"Connection: close\r\n")
        for _ in range(3):
            found = await r.ask()
            assert found.status == 200 and found.get("connection") is None
        assert len({seen.connection for seen in engine.seen}) == 3


async def test_an_http_1_0_node_is_not_taken_to_keep_its_connection() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(answer().replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSE)
        for _ in range(3):
            found = await r.ask()
            assert found.status == 200 and found.head.startswith(b"HTTP/1.1 200")


async def test_a_connection_that_was_held_back_at_its_end_serves_the_next_request() -> None:
    """The client falls behind on the last piece of an answer: the node's connection must not stay paused."""
    quiet = {"interval_s": 30}
    async with (
        engines() as [engine],
        router(engine, health=quiet, metrics=quiet, upstream={"first_byte_timeout_s": 1.0}) as r,
    ):

        async def fill_up(engine: Engine, seen: object, writer: asyncio.StreamWriter) -> None:
            """Fills the way to the client until the router holds a little, then ends with more than it may hold."""
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while (held := held_bytes(r)) < 45_000:
                writer.write(chunk(b"x" * (8_000 if held else 30_000)))
                await writer.drain()
                await asyncio.sleep(0.002)
            writer.write(chunk(b"x" * 30_000) + b"0\r\n\r\n")

        engine.behave = fill_up
        peer = await r.connect()
        peer.writer.transport.pause_reading()  # the client reads nothing for now
        peer.write(post())
        await until(lambda: engine.seen and engine.seen[0].ended)
        await until(lambda: r.node(0).inflight == 0)
        peer.writer.transport.resume_reading()
        assert (await peer.answer()).complete
        engine.behave = normal()
        for _ in range(2):
            assert (await r.ask()).status == 200


def held_bytes(r: Router) -> int:
    """What the router has written and the clients' sockets have not taken."""
    return sum(client.transport.get_write_buffer_size() for client in r.service.listener.connections)


# Failing over.


FAILURES: dict[str, Behaviour] = {
    "500": failing(500),
    "502": failing(502),
    "599": failing(599),
    "429": failing(429),
    "503 with Retry-After": failing(503, b"Retry-After: 3\r\n"),
    "500 without an end": script(b"HTTP/1.1 500 X\r\nContent-Length: 100\r\n\r\nabc", HANG),
    "500 in chunks": script(b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"no"), b"0\r\n\r\n"),
    "500 until close": script(b"HTTP/1.1 500 X\r\n\r\nabc", CLOSE),
    "closes": script(CLOSE),
    "resets": script(RESET),
    "closes within the head": script(b"HTTP/1.1 200 OK\r\nContent-", CLOSE),
    "garbage": script(b"\x16\x03\x01 what is this\r\n\r\n"),
    "not HTTP": script(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "HTTP/2": script(b"HTTP/2 200 OK\r\n\r\n"),
    "a status of four digits": script(b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n"),
    "a status of 600": script(b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n"),
    "two lengths": script(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}"),
    "length and coding": script(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "an unknown coding": script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"),
    "a bare LF": script(b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 2\r\n\r\n{}"),
    "a malformed first chunk": script(SSE_HEAD + b"zz\r\nhello\r\n"),
    "an upgrade": script(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    "an endless head": script(b"HTTP/1.1 200 OK\r\n", *[b"A: " + b"x" * 1000 + b"\r\n"] * 200, HANG),
    "an endless line": script(b"HTTP/1.1 200 OK\r\nA: ", *[b"x" * 10_000] * 20, HANG),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_a_node_that_fails_before_its_answer_leads_to_the_next(failure: Behaviour) -> None:
    async with engines(2) as [bad, good], router(bad, good, health={"failures": 100}) as r:
        bad.behave = failure
        for _ in range(4):
            found = await r.ask()
            assert found.status == 200 and found.body == b'{"ok":true}'
        assert len(good.seen) == 4 and len(bad.seen) >= 2
        assert [seen.body for seen in good.seen] == [chat()] * 4 or len({seen.body for seen in good.seen}) == 1


async def test_a_node_that_nobody_listens_on_leads_to_the_next_and_is_known_at_once() -> None:
    async with engines(2) as [bad, good], router(bad, good, health={"interval_s": 30}) as r:
        await bad.refuse()
        for _ in range(4):
            assert (await r.ask()).status == 200
        assert r.node(0).health.certain_open
        assert r.service.counters.retries == 1, "the second request no longer went there"


async def test_a_node_that_does_not_connect_in_time_leads_to_the_next() -> None:
    async with engines() as [good]:
        hole = BlackHole()
        try:
            async with router(
                hole, good, wait=1, upstream={"connect_timeout_s": 0.2}, health={"interval_s": 0.1, "slow_checks": 1}
            ) as r:
                await until(lambda: r.node(0).health.standing.value == "open")
                r.node(0).health.standing = type(r.node(0).health.standing).UP
                r.service.fleet._rebuild(r.service.fleet.group("m"))  # type: ignore[arg-type]
                for _ in range(2):
                    assert (await r.ask()).status == 200
                assert len(good.seen) == 2
        finally:
            hole.close()


async def test_a_node_that_does_not_begin_in_time_leads_to_the_next() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.3}) as r:
        bad.behave = hanging
        for _ in range(2):
            assert (await r.ask()).status == 200
        assert bad.seen[0].left.is_set() or await asyncio.wait_for(bad.seen[0].left.wait(), 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422])
async def test_other_4xx_are_the_clients_affair(status: int) -> None:
    async with engines(2) as two, router(*two) as r:
        for engine in two:
            engine.behave = failing(status)
        found = await r.ask()
        assert found.status == status and found.body == b'{"error":"no"}'
        assert sum(len(engine.seen) for engine in two) == 1
        assert r.service.counters.retries == 0


@pytest.mark.parametrize("status", [200, 201, 202, 206, 301, 304])
async def test_other_answers_pass_as_they_are(status: int) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(answer(b"" if status == 304 else b"x", status))
        assert (await r.ask()).status == status


async def test_an_answer_without_content_has_no_length() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 204 No Content\r\n\r\n")
        found = await r.ask()
        assert found.status == 204 and found.get("content-length") is None


async def test_the_order_of_the_fallbacks_is_kept() -> None:
    async with engines(4) as four, router(*four, upstream={"attempts": 4}, health={"failures": 100}) as r:
        for engine in four:
            engine.behave = failing(500)

        async def order() -> list[int]:
            for engine in four:
                engine.seen.clear()
            assert (await r.ask()).status == 502
            return sorted(range(4), key=lambda number: four[number].seen[0].at_s)

        assert [await order(), await order()] == [[0, 1, 2, 3], [1, 2, 3, 0]]


async def test_1xx_before_the_answer_is_passed_over() -> None:
    async with engines() as [engine], router(engine) as r:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        engine.behave = script(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05, early + early + answer())
        found = await r.ask()
        assert found.status == 200 and found.get("link") is None


async def test_thousands_of_1xx_do_no_harm() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 102 P\r\n\r\n" * 3000 + answer())
        assert (await r.ask()).status == 200


async def test_a_node_that_says_1xx_for_ever_is_given_up_in_time() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.5}) as r:
        bad.behave = script(*[b"HTTP/1.1 102 Processing\r\n\r\n", 0.05] * 200, HANG)
        for _ in range(2):
            assert (await r.ask()).status == 200


async def test_an_answer_that_comes_before_the_request_is_read_is_passed_on() -> None:
    """A node may answer 413 and close without reading a large body."""
    async with engines() as [engine], router(engine) as r:

        async def too_large(engine: Engine, seen: object, writer: asyncio.StreamWriter) -> None:
            writer.write(answer(b"too large", 413))
            await writer.drain()

        engine.behave = too_large
        found = await r.ask(post(chat("x" * 5_000_000)))
        assert found.status == 413 and found.body == b"too large"


# Answers that break.


async def test_a_stream_that_breaks_between_chunks_ends_with_an_error_event_and_no_end() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), chunk(event(1)), 0.05, CLOSE)
        found = await r.ask()
        assert found.status == 200 and not found.complete
        assert found.body.startswith(event(0) + event(1))
        assert_error_event(found.body)
        assert r.service.counters.broken == 1 and r.node(0).outcomes[4] == 1


@pytest.mark.parametrize("cut", [1, 5, len(event(0)) - 1, len(event(0)), len(event(0)) + 1])
async def test_a_stream_that_breaks_within_a_chunk_ends_with_an_error_event_and_no_end(cut: int) -> None:
    size_line, _, rest = chunk(event(0)).partition(b"\r\n")
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(7)), size_line + b"\r\n" + rest[:cut], 0.05, CLOSE)
        found = await r.ask()
        assert not found.complete
        assert_error_event(found.body)


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_however_a_stream_breaks_the_client_sees_it(how: str) -> None:
    async with engines() as [engine], router(engine, upstream={"between_chunks_timeout_s": 0.3}) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), 0.05, how)
        found = await r.ask()
        assert not found.complete
        assert_error_event(found.body)


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_a_node_that_fails_between_its_head_and_its_body_leads_to_the_next(how: str) -> None:
    """Engines send a stream's head when they have taken a request, long before its first token."""
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.5}) as r:
        bad.behave = script(SSE_HEAD, 0.05, how)
        for _ in range(2):
            found = await r.ask()
            assert found.status == 200 and found.body == b'{"ok":true}'
        assert len(bad.seen) == 1 and r.service.counters.broken == 0


@pytest.mark.parametrize("cut", [b"1", b"1a\r", b"0", b"00", b"5;a", b"5 ", b"0\r", b"0\r\n"])
async def test_a_stream_that_breaks_within_a_size_line_is_unfinished(cut: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), cut, 0.05, CLOSE)
        found = await r.ask()
        assert not found.complete
        if not cut.startswith(b"0\r"):  # there the end itself has begun: it can only stay away
            assert_error_event(found.body)


async def test_a_stream_whose_framing_breaks_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), 0.05, b"zz\r\n", HANG)
        found = await r.ask()
        assert not found.complete
        assert_error_event(found.body)


async def test_a_stream_whose_framing_breaks_is_never_as_if_it_had_finished() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), 0.05, b"zz\r\n0\r\n\r\n", HANG)
        found = await r.ask()
        assert not found.complete and found.body.startswith(event(0))


async def test_a_stream_that_breaks_within_an_enormous_chunk_ends() -> None:
    async with engines() as [engine], router(engine, checked=False) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), b"7fffffffffffff\r\nabc", 0.05, CLOSE)
        peer = await r.connect()
        peer.write(post())
        assert not (await peer.answer(patience_s=3)).complete


async def test_timeouts_go_on_after_a_node_fell_silent_within_an_enormous_chunk() -> None:
    limits = {"header_timeout_s": 0.3}
    async with (
        engines() as [engine],
        router(engine, upstream={"between_chunks_timeout_s": 0.2}, limits=limits, checked=False) as r,
    ):
        engine.behave = script(SSE_HEAD, chunk(event(0)), b"7fffffffffffff\r\nabc", HANG)
        peer = await r.connect()
        peer.write(post())
        await asyncio.sleep(0.6)
        slow = await r.connect()
        slow.write(b"GET /health HT")
        assert (await slow.answer(patience_s=3)).status == 408


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_a_sized_answer_that_breaks_is_seen_to_be_short(how: str) -> None:
    async with engines(2) as two, router(*two, upstream={"between_chunks_timeout_s": 0.3}) as r:
        for engine in two:
            engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 0.05, how)
        found = await r.ask()
        assert found.status == 200 and not found.complete and found.body == b"abc"
        assert sum(len(engine.seen) for engine in two) == 1, "never tried again after the first byte"


async def test_a_chunked_json_answer_that_breaks_has_no_event_and_no_end() -> None:
    async with engines() as [engine], router(engine) as r:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        engine.behave = script(head, chunk(b'{"a":'), 0.05, CLOSE)
        found = await r.ask()
        assert not found.complete and found.body == b'{"a":'


async def test_an_answer_until_close_passes_whole() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab", 0.05, b"cd", CLOSE)
        found = await r.ask()
        assert found.body == b"abcd" and found.get("connection") == "close"


async def test_a_stream_until_close_that_is_reset_says_so() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", event(0), 0.05, RESET)
        assert_error_event((await r.ask()).body)


async def test_an_answer_until_close_that_is_reset_is_not_ended_cleanly() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab", 0.05, RESET)
        assert not (await r.ask()).complete


async def test_a_broken_answer_to_an_http_1_0_client_is_not_ended_cleanly() -> None:
    async with engines() as [engine], router(engine) as r:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        engine.behave = script(head, chunk(b'{"a":'), 0.05, CLOSE)
        found = await r.ask(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert not found.complete


async def test_a_broken_stream_to_an_http_1_0_client_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(event(0)), 0.05, CLOSE)
        found = await r.ask(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert found.body.startswith(event(0)) and found.get("transfer-encoding") is None
        assert_error_event(found.body)


async def test_a_silence_shorter_than_the_limit_breaks_nothing() -> None:
    async with (
        engines() as [engine],
        router(engine, upstream={"between_chunks_timeout_s": 2.0, "first_byte_timeout_s": 2.0}) as r,
    ):
        engine.behave = script(0.2, SSE_HEAD, *[chunk(event(0)), 0.2] * 5, DONE)
        assert (await r.ask()).complete


def assert_error_event(body: bytes) -> None:
    last = body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert last.startswith(b"event: error\ndata: {"), body
    assert b"upstream_broken" in last and b"127.0.0.1" not in last
    assert b"[DONE]" not in body


# https nodes.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def node_tls(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def test_an_https_node_is_served_when_its_certificate_is_trusted(authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    engine = Engine(tls=node_tls(authority, "127.0.0.1"))
    await engine.listen()
    try:
        async with router(engine, upstream={"ca_file": str(tmp_path / "ca.pem")}) as r:
            engine.behave = stream(3)
            found = await r.ask()
            assert found.complete and found.chunks[:3] == [event(0), event(1), event(2)]
    finally:
        await engine.close()


@pytest.mark.parametrize("trust", ["another authority", "another name", "the system"])
async def test_an_https_node_that_is_not_trusted_is_never_sent_a_request(
    trust: str, authority: trustme.CA, tmp_path: Path
) -> None:
    (trustme.CA() if trust == "another authority" else authority).cert_pem.write_to_path(tmp_path / "ca.pem")
    engine = Engine(tls=node_tls(authority, "other.example" if trust == "another name" else "127.0.0.1"))
    await engine.listen()
    upstream = {} if trust == "the system" else {"ca_file": str(tmp_path / "ca.pem")}
    try:
        async with router({"url": engine.url, "models": ["m"]}, wait=0, upstream=upstream) as r:
            await until(lambda: r.node(0).health.certain_open)
            assert "TLS" in r.node(0).health.reason
            assert (await r.ask()).status == 503
            assert engine.seen == [] and engine.checks == []
    finally:
        await engine.close()


async def test_a_plain_node_called_https_is_not_used() -> None:
    async with (
        engines() as [engine],
        router({"url": engine.url.replace("http", "https"), "models": ["m"]}, wait=0) as r,
    ):
        await until(lambda: r.node(0).health.standing.value == "open")
        assert engine.seen == [] and engine.checks == []


# What is not the node's fault.


class _Asker:
    def __init__(self) -> None:
        self.told: asyncio.Future[tuple[ConnectFault, str]] = asyncio.get_running_loop().create_future()

    def connected(self, connection: Connection) -> bool:
        return False

    def connect_failed(self, fault: ConnectFault, reason: str) -> None:
        self.told.set_result((fault, reason))


async def test_running_out_of_files_here_is_not_held_against_the_node() -> None:
    async with engines() as [engine]:
        loop = asyncio.get_running_loop()
        pool = NodePool("http", "127.0.0.1", engine.port, Upstream(), Deadlines(loop.time), None)
        asker = _Asker()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            pool.open(asker)  # type: ignore[arg-type]
            fault, reason = await asyncio.wait_for(asker.told, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "open files" in reason
        assert fault is ConnectFault.OURS


async def test_a_node_name_that_is_no_name_fails_like_any_other() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    pool = NodePool("http", "a" * 70 + ".example", 80, Upstream(), Deadlines(loop.time), None)
    asker = _Asker()
    pool.open(asker)  # type: ignore[arg-type]
    await asyncio.wait_for(asker.told, 3)


async def test_a_removed_node_is_left_at_once_even_within_a_check() -> None:
    async with engines() as [engine]:
        engine.health = hanging
        async with router(engine, wait=0, health={"timeout_s": 20.0}, checks_hang=True) as r:
            await until(lambda: engine.checks)
            r.service.remove_node("node0")
            await asyncio.wait_for(engine.checks[0].left.wait(), 3)


async def test_a_client_of_a_broken_answer_gets_no_second_answer() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 0.05, CLOSE)
        peer.write(post() + get("/health"))
        assert not (await peer.answer()).complete
        with pytest.raises(Gone):
            await peer.answer()


class _NoNames:
    """A resolver that is down for a while."""

    def __init__(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        self._loop, self._code = loop, code

    async def create_connection(self, *_arguments: object, **_more: object) -> None:
        raise socket.gaierror(self._code, "Temporary failure in name resolution")


async def test_a_resolver_that_is_down_for_a_moment_is_not_held_against_the_nodes() -> None:
    loop = asyncio.get_running_loop()
    pool = NodePool("http", "node.example", 80, Upstream(), Deadlines(loop.time), None)
    asker = _Asker()
    with pytest.MonkeyPatch.context() as patch:
        resolver = _NoNames(loop, socket.EAI_AGAIN)
        patch.setattr("warmroute.edge.upstream.asyncio.get_running_loop", lambda: resolver)
        await pool._open(asker)  # type: ignore[arg-type]
    fault, _reason = asker.told.result()
    assert fault is not ConnectFault.REFUSED


async def test_an_https_node_that_closes_within_the_handshake_is_only_suspected() -> None:
    async def slam(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(slam, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    pool = NodePool(
        "https",
        "127.0.0.1",
        server.sockets[0].getsockname()[1],
        Upstream(),
        Deadlines(loop.time),
        ssl.create_default_context(),
    )
    asker = _Asker()
    pool.open(asker)  # type: ignore[arg-type]
    fault, reason = await asyncio.wait_for(asker.told, 5)
    server.close()
    assert fault is not ConnectFault.REFUSED, reason
