"""The client listener: TLS, IPv6 and Unix sockets."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import hanging, stream
from support.polling import until
from support.raw_client import RawConnection, get, post
from support.running_router import router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.config import ConfigError


async def test_a_tls_listener_serves_streams_errors_and_keep_alive_connections(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        engine.behave = stream(5, 0.005)
        peer = await r.connect(ssl=certificate["trusting"])
        for _ in range(3):
            peer.write(post())
            assert (await peer.response()).complete
        peer.write(post(b"{"))
        assert (await peer.response()).status == 400
        peer.write(b"GET / HTTP/9.9\r\n\r\n")
        assert (await peer.response()).status == 505


async def test_a_tls_client_that_disconnects_frees_the_node(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        engine.behave = hanging
        peer = await r.connect(ssl=certificate["trusting"])
        peer.write(post())
        await until(lambda: engine.seen)
        left_s = time.monotonic()
        peer.disconnect()
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        assert engine.seen[0].left_s - left_s < 0.5


async def test_a_tls_client_that_still_sends_can_read_its_413(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"], limits={"body_bytes": 1000}) as r:
        peer = await r.connect(ssl=certificate["trusting"])
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 5000000\r\n\r\n")
        for _ in range(5):
            await peer.send(b"x" * 1_000_000)
        assert (await peer.response()).status == 413


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_plain_http_on_a_tls_listener_gets_an_answer_and_a_line_in_the_log(
    certificate: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, unix: bool
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "router.sock"
    listen = certificate["listen"] | ({"unix_socket": str(path)} if unix else {})
    async with engines() as [engine], router(engine, listen=listen) as r:

        async def connect(**more: Any) -> RawConnection:
            if not unix:
                return await r.connect(**more)
            if more:
                more["server_hostname"] = "localhost"
            peer = RawConnection(*await asyncio.open_unix_connection(path, **more))
            r.peers.append(peer)
            return peer

        for request in (get("/health"), b"G", post(b"x" * 300_000)):
            peer = await connect()
            peer.write(request)
            response = await peer.response()
            assert response.status == 400 and response.error["code"] == "http_on_tls_port"
            assert "https://" in response.error["message"] and await peer.rest() == b""
        good = await connect(ssl=certificate["trusting"])
        good.write(get("/health"))
        assert (await good.response()).status == 200
        r.service.alerts.update(time.monotonic())
        [line] = [record for record in caplog.records if "http_on_tls_port" in record.getMessage()]
        assert line.levelname == "WARNING"
        assert ("count=3 source=" + ('"unix socket" ' if unix else "127.0.0.1 ")) in line.getMessage()
        assert "Clients speak plain HTTP on the port where the router speaks TLS." in line.getMessage()
        assert r.service.counters.errors[400, "http_on_tls_port"] == 3
    assert not path.exists()


@pytest.mark.parametrize("early", [False, True])
async def test_the_first_byte_alone_tells_http_from_tls(certificate: dict[str, Any], early: bool) -> None:
    """`early`: the request has arrived before the router accepts the connection."""
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        with socket.create_connection(("127.0.0.1", r.service.port)) as client:
            if not early:
                await until(lambda: r.service.listener.handshakes == 1)
            client.sendall(b"X / HTTP/1.1\r\n\r\n")
            client.setblocking(False)
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65_536), 5.0)
        assert b"http_on_tls_port" in answer


async def test_silent_and_strange_clients_of_a_tls_listener_hold_nothing(certificate: dict[str, Any]) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    limits = {"header_timeout_s": 0.3}
    async with engines() as [engine], router(engine, listen=certificate["listen"], limits=limits) as r:
        before = open_files()
        strange = [b"", b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x00" * 100, b"\x80\x2e\x01", b"\xff" * 9]
        peers = [await r.connect() for _ in range(6 * len(strange))]
        for number, peer in enumerate(peers):
            peer.write(strange[number % len(strange)])
        for number in range(30):
            gone = await r.connect()
            gone.write(b"GET / HT" * (number % 3))
            gone.disconnect()
        good = await r.connect(ssl=certificate["trusting"])
        good.write(post())
        assert (await good.response()).status == 200
        for peer in peers:
            with suppress(ConnectionError):
                await peer.rest()  # the router closes it
            peer.disconnect()
        good.close()
        await until(lambda: open_files() <= before + 4, "connections are left")
        assert not r.loop_errors


async def test_a_tls_listener_without_files_goes_on_when_it_has_some(
    certificate: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.create_connection(("127.0.0.1", r.port))
        try:
            gc.collect()  # what other tests have left must not close a file meanwhile
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
            await until(lambda: "accept_failed" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            waiting.close()
        assert caplog.text.count("accept_failed") == 1
        good = await r.connect(ssl=certificate["trusting"])
        good.write(get("/health"))
        assert (await good.response()).status == 200


async def test_invalid_certificates_are_reported(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nonsense")
    for name in ("x.pem", "none.pem"):
        listen = {"tls_cert": str(tmp_path / name), "tls_key": str(tmp_path / name)}
        with pytest.raises(ConfigError, match=r"listen\.tls_cert and listen\.tls_key: cannot load"):
            async with router(listen=listen):
                pass


async def test_an_ipv6_listener_forwards_the_client_address() -> None:
    async with engines() as [engine], router(engine, listen={"host": "::1"}) as r:
        peer = await r.connect(host="::1")
        peer.write(post())
        assert (await peer.response()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"::1"]


async def test_the_host_with_two_colons_listens_on_ipv4_and_ipv6() -> None:
    async with engines() as [engine], router(engine, listen={"host": "::"}) as r:
        for host in ("::1", "127.0.0.1"):
            peer = await r.connect(host=host)
            peer.write(post())
            assert (await peer.response()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"::1"]


async def test_a_node_can_have_an_ipv6_address() -> None:
    engine = ScriptedEngine()
    server = await asyncio.start_server(engine._connected, "::1", 0, limit=1 << 20)
    port = server.sockets[0].getsockname()[1]
    try:
        async with router({"url": f"http://[::1]:{port}"}) as r:
            assert (await r.request()).status == 200
            assert engine.seen[0].get(b"host") == [b"[::1]:%d" % port]
    finally:
        server.close()
        await engine.close()


async def test_a_unix_socket_forwards_no_client_address(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    async with engines() as [engine], router(engine, listen={"unix_socket": path}) as r:
        peer = RawConnection(*await asyncio.open_unix_connection(path))
        r.peers.append(peer)
        peer.write(post())
        assert (await peer.response()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == []


async def test_a_stale_unix_socket_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with engines() as [engine], router(engine, listen={"unix_socket": path}):
        with pytest.raises(ConfigError, match="another process listens there"):
            async with router(listen={"unix_socket": path}):
                pass
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        async with router(listen={"unix_socket": str(tmp_path / "file")}):
            pass
    assert (tmp_path / "file").read_text() == "precious"
