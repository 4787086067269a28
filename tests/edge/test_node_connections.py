"""Connections to nodes: reuse, TLS, and failures to connect."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from support.engine_scripts import (
    CLOSE,
    RESET,
    Behaviour,
    chunk,
    hanging,
    http_response,
    normal,
    script,
    sse_event,
    stream,
)
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.config import Health, NodeConfig, Upstream
from warmroute.core.messages import LOCAL, REFUSED
from warmroute.core.node import Node
from warmroute.edge import connection_pool
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.node_connection import PIECE_BYTES, NodeConnection, PiecewiseWriter
from warmroute.edge.timer_wheel import TimerWheel

# Reuse.


async def test_connections_to_a_node_are_reused() -> None:
    async with engines() as [engine], router(engine, health={"interval_s": 30}, polling={"interval_s": 30}) as r:
        for _ in range(20):
            assert (await r.request()).status == 200
        assert engine.accepted <= 3
        assert len({seen.connection for seen in engine.seen}) == 1


async def test_a_stream_returns_its_connection_to_the_pool() -> None:
    async with engines() as [engine], router(engine, health={"interval_s": 30}, polling={"interval_s": 30}) as r:
        engine.behave = stream(5)
        for _ in range(10):
            assert (await r.request()).complete
        assert len({seen.connection for seen in engine.seen}) == 1


async def test_concurrent_requests_have_a_connection_each() -> None:
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, http_response())
        asking = [asyncio.ensure_future(r.request()) for _ in range(30)]
        await until(lambda: len(engine.seen) == 30)
        assert r.node(0).inflight == 30
        gate.set()
        assert {response.status for response in await asyncio.gather(*asking)} == {200}
        assert r.node(0).inflight == 0


@pytest.mark.interpreted
async def test_a_pool_keeps_a_limited_number_of_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "MAX_IDLE_CONNECTIONS", 2)
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(gate, http_response())
        asking = [asyncio.ensure_future(r.request()) for _ in range(20)]
        await until(lambda: len(engine.seen) == 20)
        gate.set()
        await asyncio.gather(*asking)
        await until(lambda: engine.connections <= 4)


async def test_an_idle_connection_to_a_node_is_closed_after_the_idle_timeout() -> None:
    quiet = {"interval_s": 30}
    async with (
        engines() as [engine],
        router(engine, upstream={"idle_timeout_s": 0.2}, health=quiet, polling=quiet) as r,
    ):
        await r.request()
        await until(lambda: engine.connections == 0)


@pytest.mark.parametrize("how", [CLOSE, RESET])
async def test_a_stale_connection_costs_no_attempt_and_no_error(how: str) -> None:
    """Clients must not notice that a node closes idle connections, whatever the timing."""
    quiet = {"interval_s": 30}
    async with engines() as [engine], router(engine, upstream={"max_attempts": 1}, health=quiet, polling=quiet) as r:
        for _ in range(10):
            assert (await r.request()).status == 200
            died = len(engine.seen)
            behaved = engine.behave

            async def die_once(
                engine: ScriptedEngine, seen: object, writer: asyncio.StreamWriter, behaved: Behaviour = behaved
            ) -> None:
                engine.behave = behaved
                await script(how)(engine, seen, writer)  # type: ignore[arg-type]

            engine.behave = die_once
            assert (await r.request()).status == 200
            assert len(engine.seen) == died + 2
        assert r.service.counters.stale_connections == 10
        assert r.node(0).outcomes[3] == 0, "the node has no failure"


async def test_a_stale_connection_is_retried_only_once() -> None:
    quiet = {"interval_s": 30}
    async with engines() as [engine], router(engine, health=quiet, polling=quiet) as r:
        assert (await r.request()).status == 200
        engine.behave = script(CLOSE)
        response = await r.request()
        assert response.status == 502 and len(engine.seen) == 3


async def test_idle_connections_that_the_node_has_closed_are_not_used() -> None:
    async with engines() as [engine], router(engine) as r:
        for _ in range(5):
            assert (await r.request()).status == 200
            engine.drop_connections()
            await asyncio.sleep(0.02)
        assert r.service.counters.errors == {}


async def test_a_connection_with_unexpected_bytes_is_not_reused() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(http_response() + http_response(b'{"evil":1}'))
        for _ in range(3):
            assert (await r.request()).body == b'{"ok":true}'
        engine.behave = script(http_response(), 0.05, http_response(b'{"evil":1}'))
        for _ in range(3):
            response = await r.request()
            assert response.body == b'{"ok":true}'
            await asyncio.sleep(0.1)


async def test_connection_close_of_a_node_is_respected() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(headers=b"Connection: close\r\n")
        for _ in range(3):
            response = await r.request()
            assert response.status == 200 and response.get("connection") is None
        assert len({seen.connection for seen in engine.seen}) == 3


async def test_a_connection_to_an_http_1_0_node_is_not_reused() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(http_response().replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSE)
        for _ in range(3):
            response = await r.request()
            assert response.status == 200 and response.head.startswith(b"HTTP/1.1 200")


async def test_a_connection_paused_at_the_end_of_a_response_is_reused() -> None:
    """The client falls behind on the last piece of a response: the connection to the node must not stay paused."""
    quiet = {"interval_s": 30}
    async with (
        engines() as [engine],
        router(engine, health=quiet, polling=quiet, upstream={"first_byte_timeout_s": 1.0}) as r,
    ):

        async def fill_up(engine: ScriptedEngine, seen: object, writer: asyncio.StreamWriter) -> None:
            """Fill the client's buffers until the router buffers a little, then end with more than it may buffer."""
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while (held := held_bytes(r)) < 45_000:
                writer.write(chunk(b"x" * (8_000 if held else 30_000)))
                await writer.drain()
                await asyncio.sleep(0.002)
            writer.write(chunk(b"x" * 30_000) + b"0\r\n\r\n")

        engine.behave = fill_up
        peer = await r.connect()
        peer.pause_reading()
        peer.write(post())
        await until(lambda: engine.seen and engine.seen[0].ended)
        await until(lambda: r.node(0).inflight == 0)
        peer.resume_reading()
        assert (await peer.response()).complete
        engine.behave = normal()
        for _ in range(2):
            assert (await r.request()).status == 200


def held_bytes(r: RunningRouter) -> int:
    """Return how much the router buffers for its clients."""
    return sum(client.transport.get_write_buffer_size() for client in r.service.listener.connections)


# TLS.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def node_tls(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def test_an_https_node_with_a_trusted_certificate_is_used(authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    engine = ScriptedEngine(tls=node_tls(authority, "127.0.0.1"))
    await engine.listen()
    try:
        async with router(engine, upstream={"ca_file": str(tmp_path / "ca.pem")}) as r:
            engine.behave = stream(3)
            response = await r.request()
            assert response.complete and response.chunks[:3] == [sse_event(0), sse_event(1), sse_event(2)]
    finally:
        await engine.close()


@pytest.mark.interpreted
async def test_a_large_body_is_encrypted_piece_by_piece(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encrypt all of it at once would block the event loop."""
    pieces: list[int] = []
    write = PiecewiseWriter._write

    def counted(writer: PiecewiseWriter) -> None:
        before = len(writer._rest)
        write(writer)
        pieces.append(before - len(writer._rest))

    monkeypatch.setattr(PiecewiseWriter, "_write", counted)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    engine = ScriptedEngine(tls=node_tls(authority, "127.0.0.1"))
    await engine.listen()
    body = chat("0123456789" * 1_000_000)
    try:
        async with router(engine, upstream={"ca_file": str(tmp_path / "ca.pem")}) as r:
            for _ in range(2):
                assert (await r.request(post(body))).status == 200
                assert engine.seen.pop().body == body
            assert max(pieces) == PIECE_BYTES and sum(pieces) == 2 * len(body)
            assert (await r.request()).status == 200
    finally:
        await engine.close()


@pytest.mark.parametrize("trust", ["another authority", "another name", "the system"])
async def test_an_https_node_with_an_untrusted_certificate_never_receives_a_request(
    trust: str, authority: trustme.CA, tmp_path: Path
) -> None:
    (trustme.CA() if trust == "another authority" else authority).cert_pem.write_to_path(tmp_path / "ca.pem")
    engine = ScriptedEngine(tls=node_tls(authority, "other.example" if trust == "another name" else "127.0.0.1"))
    await engine.listen()
    upstream = {} if trust == "the system" else {"ca_file": str(tmp_path / "ca.pem")}
    try:
        async with router({"url": engine.url, "models": ["m"]}, wait=0, upstream=upstream) as r:
            await until(lambda: r.node(0).health.confirmed_down)
            assert "TLS" in r.node(0).health.reason
            assert (await r.request()).status == 503
            assert engine.seen == [] and engine.checks == []
    finally:
        await engine.close()


async def test_a_plain_http_node_with_an_https_url_is_not_used() -> None:
    async with (
        engines() as [engine],
        router({"url": engine.url.replace("http", "https"), "models": ["m"]}, wait=0) as r,
    ):
        await until(lambda: r.node(0).health.state.value == "down")
        assert engine.seen == [] and engine.checks == []


# Failures to connect.


class _ConnectHandler:
    def __init__(self) -> None:
        self.failed: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def connected(self, connection: NodeConnection) -> bool:
        return False

    def connect_failed(self, sign: int, reason: str) -> None:
        self.failed.set_result((sign, reason))


def node_at(url: str) -> Node:
    return Node(NodeConfig(url=url), Health())


async def test_a_local_shortage_of_files_is_not_a_failure_of_the_node() -> None:
    async with engines() as [engine]:
        loop = asyncio.get_running_loop()
        pool = ConnectionPool(node_at(f"http://127.0.0.1:{engine.port}"), Upstream(), TimerWheel(loop.time), None)
        handler = _ConnectHandler()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            pool.connect(handler)  # type: ignore[arg-type]
            failure, reason = await asyncio.wait_for(handler.failed, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "open files" in reason
        assert failure == LOCAL


async def test_an_invalid_host_name_is_a_connect_failure() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    pool = ConnectionPool(node_at("http://" + "a" * 70 + ".example"), Upstream(), TimerWheel(loop.time), None)
    handler = _ConnectHandler()
    pool.connect(handler)  # type: ignore[arg-type]
    await asyncio.wait_for(handler.failed, 3)


async def test_removing_a_node_closes_a_running_health_check() -> None:
    async with engines() as [engine]:
        engine.health = hanging
        async with router(engine, wait=0, health={"timeout_s": 20.0}, health_checks_hang=True) as r:
            await until(lambda: engine.checks)
            r.service.remove_node("node0")
            await asyncio.wait_for(engine.checks[0].left.wait(), 3)


class _NoNameResolution:
    """An event loop whose name resolution fails."""

    def __init__(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        self._loop, self._code = loop, code

    async def create_connection(self, *_arguments: object, **_more: object) -> None:
        raise socket.gaierror(self._code, "Temporary failure in name resolution")


async def test_a_temporary_dns_failure_does_not_mark_the_node_down() -> None:
    loop = asyncio.get_running_loop()
    pool = ConnectionPool(node_at("http://node.example"), Upstream(), TimerWheel(loop.time), None)
    handler = _ConnectHandler()
    with pytest.MonkeyPatch.context() as patch:
        resolver = _NoNameResolution(loop, socket.EAI_AGAIN)
        patch.setattr("warmroute.edge.connection_pool.asyncio.get_running_loop", lambda: resolver)
        await pool._connect(handler)  # type: ignore[arg-type]
    failure, _reason = handler.failed.result()
    assert failure != REFUSED


async def test_a_connection_closed_during_the_tls_handshake_does_not_mark_the_node_down() -> None:
    async def close_at_once(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close_at_once, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    node = node_at(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pool = ConnectionPool(node, Upstream(), TimerWheel(loop.time), ssl.create_default_context())
    handler = _ConnectHandler()
    pool.connect(handler)  # type: ignore[arg-type]
    failure, reason = await asyncio.wait_for(handler.failed, 5)
    server.close()
    assert failure != REFUSED, reason
