"""Certificates are reloaded while the router runs: the listener's, and the authorities for nodes."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.polling import until
from support.raw_client import get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.app import reload


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def issue(authority: trustme.CA, folder: Path) -> dict[str, Any]:
    """Write a new certificate and its key."""
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    return {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}


async def serial(r: RunningRouter, authority: trustme.CA) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    peer = await r.connect(ssl=trusting(authority))
    peer.write(get("/health"))
    assert (await peer.response()).status == 200
    found = peer.writer.get_extra_info("ssl_object").getpeercert()
    peer.close()
    return int(found["serialNumber"], 16)


async def test_a_reload_uses_a_new_certificate_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    listen = issue(authority, tmp_path)
    async with engines() as [engine], router(engine, listen=listen) as r:
        caplog.set_level("INFO")
        before = await serial(r, authority)
        kept = await r.connect(ssl=trusting(authority))
        kept.write(post())
        assert (await kept.response()).status == 200
        issue(authority, tmp_path)
        assert r.service.reload("SIGHUP") is None
        assert f"certificates_reloaded files={tmp_path}/cert.pem,{tmp_path}/key.pem" in caplog.text
        assert await serial(r, authority) != before
        kept.write(post())
        assert (await kept.response()).status == 200, "an open connection continues"
        assert r.service.reload("SIGHUP") is None
        assert caplog.text.count("certificates_reloaded") == 1, "nothing has changed"


async def test_an_invalid_certificate_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()
    listen = issue(authority, tmp_path)
    async with engines() as [engine], router(engine, listen=listen) as r:
        before = await serial(r, authority)
        key = (tmp_path / "key.pem").read_bytes()
        issue(authority, tmp_path)
        (tmp_path / "key.pem").write_bytes(key)  # as while somebody replaces one file after the other
        assert "cannot load" in (r.service.reload() or "")
        assert "certificates_rejected" in caplog.text
        r.service.alerts.update(time.monotonic())
        [alert] = [one for one in r.service.alerts.current if one.id == "config_rejected"]
        assert alert.title == "The last reload of the certificates failed"
        assert alert.what_to_do.endswith("The router keeps the previous certificates.")
        assert await serial(r, authority) == before


async def test_changed_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "FILE_CHECK_S", 0.05)
    authority = trustme.CA()
    listen = issue(authority, tmp_path)
    async with engines() as [engine], router(engine, listen=listen) as r:
        before = await serial(r, authority)
        issue(authority, tmp_path)
        for _ in range(100):
            if await serial(r, authority) != before:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the router did not notice the new certificate")


async def test_the_authorities_for_nodes_are_reloaded(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    file = tmp_path / "authorities.pem"
    old.cert_pem.write_to_path(file)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    new.issue_cert("127.0.0.1").configure_cert(tls)
    engine = ScriptedEngine(tls=tls)
    await engine.listen()
    try:
        async with router(engine, upstream={"ca_file": str(file)}, wait=0) as r:
            await until(lambda: r.node(0).health.confirmed_down, "the node is not trusted")
            new.cert_pem.write_to_path(file)
            assert r.service.reload() is None
            await until(lambda: r.node(0).health.state.value == "up", "the node is trusted")
            assert (await r.request()).status == 200
            file.write_text("not a certificate")
            assert "ca_file" in (r.service.reload() or "")
            assert (await r.request()).status == 200
    finally:
        await engine.close()
