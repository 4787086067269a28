"""SIGTERM loses no connection: every client that connects before the listener closes gets its answer."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.polling import until
from support.raw_client import RawConnection, get, post
from support.running_router import router
from support.scripted_engine import engines
from support.serve_process import serve

CLIENTS = 60


def config_file(folder: Path, node: str, listen: dict[str, str]) -> Path:
    file = folder / "router.toml"
    lines = "".join(f'{name} = "{value}"\n' for name, value in listen.items())
    file.write_text(f'[listen]\nport = 0\n{lines}[admin]\nport = 0\n[[nodes]]\nurl = "{node}"\n')
    return file


async def connect(address: int | str, **options: Any) -> RawConnection:
    if isinstance(address, str):
        options |= {"server_hostname": "127.0.0.1"} if "ssl" in options else {}
        return RawConnection(*await asyncio.open_unix_connection(address, **options))
    return RawConnection(*await asyncio.open_connection("127.0.0.1", address, **options))


async def ask_until_refused(address: int | str, options: dict[str, Any], ends: Counter[str]) -> None:
    """Send one request on each connection."""
    while True:
        try:
            peer = await connect(address, **options)
        except (ConnectionRefusedError, FileNotFoundError):
            ends["refused"] += 1
            return
        except (OSError, ssl.SSLError):
            ends["reset in the handshake"] += 1
            continue
        try:
            peer.write(get("/health", "Connection: close"))
            answer = await peer.rest(20.0)
            ends["answered" if answer.startswith(b"HTTP/1.1 200") else "closed without an answer"] += 1
        except ConnectionError:
            ends["reset"] += 1
        finally:
            peer.disconnect()


@pytest.mark.parametrize("edges", [0, 2], ids=["one process", "edges"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_no_connection_is_lost_while_the_router_stops(
    kind: str, edges: int, encryption: dict[str, Any], tmp_path: Path
) -> None:
    async with engines() as [engine]:
        listen = dict(encryption["listen"])
        if kind == "unix":
            listen["unix_socket"] = str(tmp_path / "router.sock")
        file = config_file(tmp_path, engine.url, listen)
        ends: Counter[str] = Counter()
        async with serve("--config", file, *(["--edges", str(edges)] if edges else [])) as served:
            address = listen.get("unix_socket") or served.port
            await until(
                lambda: all(served.logged(f"edge=edge-{number} nodes=") for number in range(1, edges + 1)),
                patience_s=20,
            )
            clients = [
                asyncio.ensure_future(ask_until_refused(address, encryption["connect"], ends)) for _ in range(CLIENTS)
            ]
            await until(lambda: ends["answered"] > 3 * CLIENTS, patience_s=30)
            served.signal(signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(*clients), 30)
            assert await asyncio.wait_for(served.process.wait(), 20) == 0
        print(dict(ends))
        assert set(ends) == {"answered", "refused"} and ends["refused"] == CLIENTS


async def test_a_fresh_connection_has_a_second_for_its_first_request(encryption: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=encryption["listen"], shutdown={"deadline_s": 20.0}) as r:
        speaks, silent, used = [await r.connect(**encryption["connect"]) for _ in range(3)]
        used.write(get("/health"))
        await used.response()
        await until(lambda: len(r.service.listener.connections) == 3)
        stopping_s = time.monotonic()
        stopping = asyncio.ensure_future(r.service.stop())
        assert await used.is_closed()
        speaks.write(post())
        response = await speaks.response()
        assert response.status == 200 and response.get("connection") == "close"
        assert await silent.is_closed()
        assert time.monotonic() - stopping_s > 0.9
        await stopping


async def test_a_client_that_begins_tls_while_the_router_stops_is_served(
    certificate: dict[str, Any], tmp_path: Path
) -> None:
    """It connected before. The router sees only that a handshake has not ended."""
    async with engines() as [engine], serve("--config", config_file(tmp_path, engine.url, certificate["listen"])) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        await asyncio.sleep(0.2)
        r.signal(signal.SIGTERM)
        await until(lambda: r.logged("service_stopping"))
        await asyncio.sleep(0.3)
        await writer.start_tls(certificate["trusting"], server_hostname="127.0.0.1")
        peer = RawConnection(reader, writer)
        peer.write(post())
        assert (await peer.response()).status == 200
        assert await asyncio.wait_for(r.process.wait(), 20) == 0
        peer.disconnect()
