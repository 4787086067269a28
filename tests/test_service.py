"""The service from start over reloads to its end: nothing that runs is dropped, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from harness import (
    DONE,
    SSE_HEAD,
    Engine,
    Gone,
    Peer,
    chat,
    chunk,
    engines,
    event,
    get,
    hanging,
    post,
    quick_table,
    router,
    script,
    serve,
    stream,
    until,
)

from warmroute.config import Config, ConfigError, from_table, load
from warmroute.service import Service

FLAGS = ("--port", "0", "--admin-port", "0")


def toml(engine: Engine, more: str = "", port: int = 0) -> str:
    return f"""
[listen]
port = {port}
[admin]
port = 0
[health]
interval_s = 0.1
[[nodes]]
url = "{engine.url}"
name = "node0"
{more}
"""


# Reloading.


async def reloaded(r: Any, nodes: list[Any], **tables: Any) -> str | None:
    changed: Config = from_table(quick_table(nodes, **tables))
    r.service._read_config = lambda: changed
    return r.service.reload()


async def test_a_running_request_survives_a_reload_that_changes_everything_around_it() -> None:
    async with engines(2) as [old, new], router(old) as r:
        gate = asyncio.Event()
        old.behave = script(SSE_HEAD, chunk(event(0)), gate, chunk(event(1)), DONE)
        peer = await r.connect()
        peer.write(post())
        await until(lambda: old.seen)
        node = r.node(0)
        assert await reloaded(
            r, [{"url": new.url, "name": "fresh"}], upstream={"attempts": 1, "idle_timeout_s": 1.0},
            routing={"policy": "least_loaded"}, limits={"body_bytes": 100}, health={"failures": 9},
        ) is None  # fmt: skip
        assert node.inflight == 1
        await until(lambda: r.service.fleet.can_serve)
        assert (await r.ask()).status == 200 and len(new.seen) == 1 and len(old.seen) == 1
        assert (await r.ask(post(chat("x" * 200)))).status == 413, "the new limits count"
        gate.set()
        found = await peer.answer()
        assert found.complete and found.chunks[:2] == [event(0), event(1)]
        assert node.inflight == 0
        await until(lambda: old.connections == 0)


async def test_a_reload_that_leaves_a_node_alone_does_not_make_it_start_again() -> None:
    async with engines(2) as [kept, added], router(kept) as r:
        before = r.node(0)
        await reloaded(r, [kept, added])
        assert r.node(0) is before and before.health.standing.value == "up"
        assert (await r.ask()).status == 200
        await until(lambda: r.node(1).health.standing.value == "up")


async def test_the_same_configuration_is_no_change() -> None:
    async with engines() as [engine], router(engine) as r:
        assert await reloaded(r, [engine]) is None
        assert r.service.reload() is None


async def test_a_node_described_anew_at_the_same_address_goes_on_serving() -> None:
    async with engines() as [engine], router(engine) as r:
        node = r.node(0)
        assert (
            await reloaded(r, [{"url": engine.url, "name": "node0", "island": "aws/eu", "models": ["other"]}]) is None
        )
        assert r.node(0) is node and node.island == "aws/eu"
        assert (await r.ask(post(chat(model="other")))).status == 200, "at once, without a check"
        assert (await r.ask()).status == 404


async def test_a_file_that_is_half_written_is_waited_for(tmp_path: Path) -> None:
    async with engines() as [engine]:
        path = tmp_path / "warmroute.toml"
        node = f'[[nodes]]\nurl = "{engine.url}"\nname = "node0"\n'
        keys = f'[[keys]]\ntenant = "t"\nsha256 = "{"0" * 64}"\n'
        listen = "[listen]\nport = 0\n[admin]\nport = 0\n[health]\ninterval_s = 0.05\n"
        path.write_text(listen + node + keys)
        service = Service(lambda: load(path), path)
        await service.start()
        try:
            await until(lambda: service.fleet.can_serve)
            path.write_text("")
            await asyncio.sleep(0.7)
            path.write_text(listen + node)
            await asyncio.sleep(0.3)
            path.write_text(listen + node + keys + "[log]\nlevel = 'warning'\n")
            await until(lambda: service.config.log.level == "warning")
            assert service.config.keys and service.fleet.node("node0").health.standing.value == "up"
        finally:
            await service.stop()


async def test_another_key_for_a_node_counts_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_ONE", "one")
    monkeypatch.setenv("KEY_TWO", "two\n")
    async with engines() as [engine], router({"url": engine.url, "api_key_env": "KEY_ONE"}) as r:
        await r.ask()
        assert await reloaded(r, [{"url": engine.url, "name": "node0", "api_key_env": "KEY_TWO"}]) is None
        await r.ask()
        assert [seen.get(b"authorization") for seen in engine.seen] == [[b"Bearer one"], [b"Bearer two"]]


async def test_nodes_added_by_hand_stay_over_a_reload() -> None:
    async with engines(2) as [configured, by_hand], router(configured) as r:
        await r.admin("POST", "/admin/nodes", f'{{"url":"{by_hand.url}","name":"hand"}}'.encode())
        await reloaded(r, [configured], routing={"policy": "random"})
        assert {node.name for node in r.service.fleet} == {"node0", "hand"}


async def test_keys_can_be_changed_without_a_restart() -> None:
    import hashlib

    async with engines() as [engine], router(engine) as r:
        assert (await r.ask()).status == 200
        await reloaded(r, [engine], keys=[{"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t"}])
        assert (await r.ask()).status == 401
        assert (await r.ask(post(headers=["Authorization: Bearer k"]))).status == 200


async def test_a_reload_says_what_counts_only_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.admin("POST", "/admin/reload")
        assert found.json == {"status": "reloaded", "needs_restart": []}
        tables = {"scaling": {"enabled": True}, "routing": {"policy": "random"}, "prompts": {"threads": 7}}
        assert await reloaded(r, [engine], listen={"port": 0, "backlog": 77}, **tables) is None
        assert r.service.router.policy.name == "random"
        found = await r.admin("POST", "/admin/reload")
        assert found.json["needs_restart"] == ["listen.backlog", "scaling.enabled", "prompts.threads"]
        assert "only after a restart: listen.backlog, scaling.enabled, prompts.threads" in caplog.text
        assert await reloaded(r, [engine]) is None
        assert r.service.needs_restart() == [], "as it was at the start"


async def test_a_bad_configuration_keeps_the_old_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine) as r:

        def bad() -> Config:
            raise ConfigError("w.toml: unknown key x")

        before = r.service.config
        r.service._read_config = bad
        assert r.service.reload() == "w.toml: unknown key x"
        assert r.service.config is before and "the old one stays: w.toml: unknown key x" in caplog.text
        assert (await r.ask()).status == 200
        found = await r.admin("POST", "/admin/reload")
        assert found.status == 400 and "unknown key x" in found.error["message"]


async def test_a_ca_file_that_cannot_be_read_keeps_the_old_configuration() -> None:
    async with engines() as [engine], router(engine) as r:
        before = r.service.config
        said = await reloaded(r, [engine], upstream={"ca_file": "/nowhere/ca.pem"})
        assert said and "ca_file" in said and r.service.config is before


async def test_a_ca_file_that_cannot_be_read_is_said_at_the_start() -> None:
    config = from_table(quick_table([], upstream={"ca_file": "/nowhere/ca.pem"}))
    with pytest.raises(ConfigError, match="ca_file"):
        Service(lambda: config)


async def test_a_changed_file_is_taken_and_a_bad_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one))
        async with serve("--config", path) as command:
            await command.ready()
            replace(path, toml(one) + "nonsense = 1\n")
            await until(lambda: command.said("the old one stays"))
            assert (await command.ask()).status == 200 and len(one.seen) == 1
            replace(path, toml(two))
            await until(lambda: command.said("the configuration was reloaded"))
            await command.ready()
            assert (await command.ask()).status == 200 and len(two.seen) == 1
            os.unlink(path)
            await until(lambda: command.said("cannot be read"))
            assert (await command.ask()).status == 200
            command.signal(signal.SIGTERM)
            assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_sighup_reloads_at_once(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines() as [engine]:
        path.write_text(toml(engine))
        async with serve("--config", path) as command:
            await command.ready()
            peer = await command.connect()
            engine.behave = stream(100, 0.02)
            peer.write(post())
            await until(lambda: engine.seen)
            replace(path, toml(engine) + '\n[routing]\npolicy = "random"\n')
            command.signal(signal.SIGHUP)
            await until(lambda: command.said("the configuration was reloaded"), patience_s=5)
            replace(path, "[broken")
            command.signal(signal.SIGHUP)
            await until(lambda: command.said("is not valid TOML"), patience_s=5)
            assert (await peer.answer()).complete, "the running request was not dropped"
            peer.close()


async def test_the_file_is_watched_on_after_a_node_that_makes_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one))
        async with serve("--config", path) as command:
            await command.ready()
            replace(path, toml(one) + '\n[[nodes]]\nurl = "http://127.0.0.1:99999"\n')
            await asyncio.sleep(2.5)
            replace(path, toml(two))
            await until(lambda: command.said("the configuration was reloaded"), patience_s=5)


def replace(path: Path, text: str) -> None:
    """As an editor does: a new file under the old name."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


# Ending.


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones() -> None:
    async with engines() as [engine], serve(*FLAGS, "--node", engine.url) as command:
        await command.ready()
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(event(0)), gate, chunk(event(1)), DONE)
        running, idle = await command.connect(), await command.connect()
        running.write(post(headers=["Connection: close"]))
        idle.write(get("/health"))
        await idle.answer()
        await until(lambda: engine.seen)
        command.signal(signal.SIGTERM)
        assert await idle.is_closed(), "an idle connection goes"
        await until(lambda: refuses(command.port))
        assert command.process.returncode is None
        gate.set()
        found = await running.answer()
        assert found.complete and found.chunks[1] == event(1)
        assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_the_end_does_not_wait_for_a_connection_that_has_its_answer() -> None:
    async with engines() as [engine], serve(*FLAGS, "--node", engine.url) as command:
        await command.ready()
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(event(0)), gate, DONE)
        running = await command.connect()
        running.write(post())
        await running.head()
        command.signal(signal.SIGTERM)
        await until(lambda: refuses(command.port))
        gate.set()
        await asyncio.wait_for(command.process.wait(), 5)


async def test_ready_is_503_on_a_kept_connection_while_requests_are_still_taken(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines() as [engine]:
        path.write_text(toml(engine) + "\n[shutdown]\ndelay_s = 2.0\n")
        async with serve("--config", path) as command:
            await command.ready()
            peer = await command.connect()
            peer.write(get("/ready"))
            assert (await peer.answer()).status == 200
            command.signal(signal.SIGTERM)
            await until(lambda: command.said("stopping"))
            peer.write(get("/ready"))
            found = await peer.answer()
            assert found.status == 503 and b"stopping" in found.body
            assert (await command.ask(get("/ready"), command.admin_port)).status == 503
            peer.write(post())
            assert (await peer.answer()).status == 200
            assert (await command.ask()).status == 200
            assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_what_does_not_finish_in_time_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines() as [engine]:
        path.write_text(toml(engine) + "\n[shutdown]\ndeadline_s = 0.5\n")
        async with serve("--config", path) as command:
            await command.ready()
            engine.behave = hanging
            peer = await command.connect()
            peer.write(post())
            await until(lambda: engine.seen)
            started_s = time.monotonic()
            command.signal(signal.SIGTERM)
            assert await asyncio.wait_for(command.process.wait(), 20) == 0
            assert time.monotonic() - started_s < 10
            assert command.said("cut 1 requests")
            with pytest.raises(Gone):
                await peer.answer()


async def test_a_second_signal_ends_it_at_once() -> None:
    async with engines() as [engine], serve(*FLAGS, "--node", engine.url) as command:
        await command.ready()
        engine.behave = hanging
        peer = await command.connect()
        peer.write(post())
        await until(lambda: engine.seen)
        command.signal(signal.SIGTERM)
        await until(lambda: refuses(command.port))
        command.signal(signal.SIGINT)
        assert await asyncio.wait_for(command.process.wait(), 10) == 0


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# Starting.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--node", "nonsense"), "is not like http://host:port"),
        (("--config", "/nowhere/w.toml"), "/nowhere/w.toml: cannot be read"),
        (("--node", "http://a:1", "--node", "http://a:1"), "two nodes are named"),
        (("--host", "203.0.113.7"), "can't listen on 203.0.113.7"),
    ],
)
async def test_what_is_wrong_at_the_start_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    async with serve(*FLAGS, *arguments) as command:
        assert await asyncio.wait_for(command.process.wait(), 20) == 2
        await asyncio.sleep(0.05)
        assert command.said(words) and not command.said("Traceback")


async def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serve("--port", str(port), "--admin-port", "0") as command:
            assert await asyncio.wait_for(command.process.wait(), 20) == 2
            await asyncio.sleep(0.05)
            assert command.said(f"can't listen on 127.0.0.1:{port}")


async def test_without_keys_beyond_loopback_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    async with router(listen={"host": "0.0.0.0"}):
        assert "no keys are configured" in caplog.text
    caplog.clear()
    async with router():
        assert "no keys are configured" not in caplog.text


async def test_flags_stand_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one, port=1))
        async with serve("--config", path, *FLAGS, "--policy", "round_robin", "--node", two.url) as command:
            await command.ready()
            assert command.port > 1 and command.said("2 nodes, policy round_robin")


# Listeners.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import ssl

    import trustme

    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "cert.pem", append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return {"listen": {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}, "trusting": trusting}


async def test_a_tls_listener_serves_streams_errors_and_kept_connections(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        engine.behave = stream(5, 0.005)
        peer = await r.connect(ssl=certificate["trusting"])
        for _ in range(3):
            peer.write(post())
            assert (await peer.answer()).complete
        peer.write(post(b"{"))
        assert (await peer.answer()).status == 400
        peer.write(b"GET / HTTP/9.9\r\n\r\n")
        assert (await peer.answer()).status == 505


async def test_a_client_that_leaves_a_tls_listener_frees_the_node(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"]) as r:
        engine.behave = hanging
        peer = await r.connect(ssl=certificate["trusting"])
        peer.write(post())
        await until(lambda: engine.seen)
        left_s = time.monotonic()
        peer.leave()
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        assert engine.seen[0].left_s - left_s < 0.5


async def test_a_tls_client_that_is_still_sending_can_read_its_413(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"], limits={"body_bytes": 1000}) as r:
        peer = await r.connect(ssl=certificate["trusting"])
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 5000000\r\n\r\n")
        for _ in range(5):
            await peer.send(b"x" * 1_000_000)
        assert (await peer.answer()).status == 413


async def test_plain_http_on_a_tls_listener_is_no_use_and_does_no_harm(certificate: dict[str, Any]) -> None:
    async with engines() as [engine], router(engine, listen=certificate["listen"], checked=False) as r:
        peer = await r.connect()
        peer.write(get("/health"))
        assert b"200 OK" not in await peer.rest()
        good = await r.connect(ssl=certificate["trusting"])
        good.write(get("/health"))
        assert (await good.answer()).status == 200


async def test_certificates_that_are_no_use_are_said(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nonsense")
    for name in ("x.pem", "none.pem"):
        listen = {"tls_cert": str(tmp_path / name), "tls_key": str(tmp_path / name)}
        with pytest.raises(ConfigError, match=r"listen\.tls_cert and listen\.tls_key can't be used"):
            async with router(listen=listen):
                pass


async def test_an_ipv6_listener_serves_and_names_its_client() -> None:
    async with engines() as [engine], router(engine, listen={"host": "::1"}) as r:
        peer = await r.connect(host="::1")
        peer.write(post())
        assert (await peer.answer()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"::1"]


async def test_two_colons_listen_on_both_families() -> None:
    async with engines() as [engine], router(engine, listen={"host": "::"}) as r:
        for host in ("::1", "127.0.0.1"):
            peer = await r.connect(host=host)
            peer.write(post())
            assert (await peer.answer()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == [b"::1"]


async def test_an_ipv6_node_is_reached() -> None:
    engine = Engine()
    server = await asyncio.start_server(engine._connected, "::1", 0, limit=1 << 20)
    port = server.sockets[0].getsockname()[1]
    try:
        async with router({"url": f"http://[::1]:{port}"}) as r:
            assert (await r.ask()).status == 200
            assert engine.seen[0].get(b"host") == [b"[::1]:%d" % port]
    finally:
        server.close()
        await engine.close()


async def test_a_unix_socket_serves_without_an_address(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    async with engines() as [engine], router(engine, listen={"unix": path}) as r:
        peer = Peer(*await asyncio.open_unix_connection(path))
        r.peers.append(peer)
        peer.write(post())
        assert (await peer.answer()).status == 200
        assert engine.seen[0].get(b"x-forwarded-for") == []


async def test_a_dead_unix_socket_is_taken_over_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with engines() as [engine], router(engine, listen={"unix": path}):
        with pytest.raises(ConfigError, match="another process does"):
            async with router(listen={"unix": path}):
                pass
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        async with router(listen={"unix": str(tmp_path / "file")}):
            pass
    assert (tmp_path / "file").read_text() == "precious"
