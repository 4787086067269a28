"""The client listener: TLS, IPv6 and Unix sockets."""

from __future__ import annotations

import asyncio
import socket
import time
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


async def test_plain_http_on_a_tls_listener_fails_without_effect_on_others(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"], check_leaks=False) as r:
        peer = await r.connect()
        peer.write(get("/health"))
        assert b"200 OK" not in await peer.rest()
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
