"""Start, reload and shutdown of the service: no running request is dropped, and an invalid file changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import DONE, HANG, SSE_HEAD, chunk, hanging, huge, script, sse_event, stream
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import quick_table, router
from support.scripted_engine import ScriptedEngine, engines
from support.serve_process import serve

from warmroute.app.service import Service
from warmroute.config import Config, ConfigError, from_table, load

pytestmark = pytest.mark.usefixtures("experiment")

FLAGS = ("--port", "0", "--admin-port", "0")


def toml(engine: ScriptedEngine, more: str = "", port: int = 0) -> str:
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


# Reload.


async def reload_with(r: Any, nodes: list[Any], **tables: Any) -> str | None:
    changed: Config = from_table(quick_table(nodes, **tables), experiment=True)
    r.service.config_reload.read_config = lambda: changed
    problem: str | None = r.service.reload()
    return problem


async def test_a_running_request_survives_a_reload() -> None:
    async with engines(2) as [old, new], router(old) as r:
        gate = asyncio.Event()
        old.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, chunk(sse_event(1)), DONE)
        peer = await r.connect()
        peer.write(post())
        await until(lambda: old.seen)
        node = r.node(0)
        assert await reload_with(
            r, [{"url": new.url, "name": "fresh"}], upstream={"max_attempts": 1, "idle_timeout_s": 1.0},
            routing={"policy": "least_loaded"}, limits={"body_bytes": 100}, health={"consecutive_failures": 9},
        ) is None  # fmt: skip
        assert node.inflight == 1
        await until(lambda: r.service.fleet.can_serve)
        assert (await r.request()).status == 200 and len(new.seen) == 1 and len(old.seen) == 1
        assert (await r.request(post(chat("x" * 200)))).status == 413, "the new limits apply"
        gate.set()
        found = await peer.response()
        assert found.complete and found.chunks[:2] == [sse_event(0), sse_event(1)]
        assert node.inflight == 0
        await until(lambda: old.connections == 0)


async def test_an_unchanged_node_stays_up_after_a_reload() -> None:
    async with engines(2) as [unchanged, added], router(unchanged) as r:
        before = r.node(0)
        await reload_with(r, [unchanged, added])
        assert r.node(0) is before and before.health.state.value == "up"
        assert (await r.request()).status == 200
        await until(lambda: r.node(1).health.state.value == "up")


async def test_reloading_the_same_configuration_succeeds() -> None:
    async with engines() as [engine], router(engine) as r:
        assert await reload_with(r, [engine]) is None
        assert r.service.reload() is None


async def test_a_node_with_changed_settings_continues_to_serve() -> None:
    async with engines() as [engine], router(engine) as r:
        node = r.node(0)
        assert (
            await reload_with(r, [{"url": engine.url, "name": "node0", "island": "aws/eu", "models": ["other"]}])
            is None
        )
        assert r.node(0) is node and node.island == "aws/eu"
        assert (await r.request(post(chat(model="other")))).status == 200, "without a new health check"
        assert (await r.request()).status == 404


async def test_a_half_written_file_is_not_loaded(tmp_path: Path) -> None:
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
            path.write_text(listen + node + keys + "[shutdown]\ndelay_s = 0.01\n")
            await until(lambda: service.config.shutdown.delay_s == 0.01)
            assert service.config.keys and service.fleet.node("node0").health.state.value == "up"
        finally:
            await service.stop()


async def test_a_reload_changes_the_api_key_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_ONE", "one")
    monkeypatch.setenv("KEY_TWO", "two\n")
    async with engines() as [engine], router({"url": engine.url, "api_key_env": "KEY_ONE"}) as r:
        await r.request()
        assert await reload_with(r, [{"url": engine.url, "name": "node0", "api_key_env": "KEY_TWO"}]) is None
        await r.request()
        assert [seen.get(b"authorization") for seen in engine.seen] == [[b"Bearer one"], [b"Bearer two"]]


async def test_nodes_added_by_the_admin_api_survive_a_reload() -> None:
    async with engines(2) as [configured, added], router(configured) as r:
        await r.admin("POST", "/admin/nodes", f'{{"url":"{added.url}","name":"added"}}'.encode())
        await reload_with(r, [configured], routing={"policy": "random"})
        assert {node.name for node in r.service.fleet} == {"node0", "added"}


async def test_a_reload_changes_the_api_keys() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request()).status == 200
        await reload_with(r, [engine], keys=[{"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t"}])
        assert (await r.request()).status == 401
        assert (await r.request(post(headers=["Authorization: Bearer k"]))).status == 200


async def test_a_reload_names_the_keys_that_need_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.admin("POST", "/admin/reload")
        assert found.json == {"status": "reloaded", "changed": [], "needs_restart": []}
        tables = {"scaling": {"enabled": True}, "routing": {"policy": "random"}, "index": {"memory_bytes": 1 << 25}}
        assert await reload_with(r, [engine], listen={"port": 0, "unix_socket": "/tmp/w.sock"}, **tables) is None
        assert r.service.router.policy.name == "random"
        changed = r.service.config_reload.changed
        for change in ("listen.unix_socket changed", "scaling.enabled false -> true"):
            assert f"{change}, from the next restart on" in changed
        assert "routing.policy round_robin -> random" in changed, "this applies at once"
        found = await r.admin("POST", "/admin/reload")
        assert found.json["needs_restart"] == ["listen.unix_socket", "scaling.enabled", "index.memory_bytes"]
        assert "restart_required keys=listen.unix_socket,scaling.enabled,index.memory_bytes" in caplog.text
        assert await reload_with(r, [engine]) is None
        assert r.service.config_reload.needs_restart() == [], "as it was at the start"


async def test_an_invalid_configuration_is_logged_and_the_previous_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine) as r:

        def bad() -> Config:
            raise ConfigError("w.toml: unknown key x")

        before = r.service.config
        r.service.config_reload.read_config = bad
        assert r.service.reload() == "w.toml: unknown key x"
        assert r.service.config is before and 'config_rejected reason="w.toml: unknown key x"' in caplog.text
        assert (await r.request()).status == 200
        found = await r.admin("POST", "/admin/reload")
        assert found.status == 400 and "unknown key x" in found.error["message"]


async def test_an_unreadable_ca_file_is_rejected_on_reload() -> None:
    async with engines() as [engine], router(engine) as r:
        before = r.service.config
        error = await reload_with(r, [engine], upstream={"ca_file": "/nowhere/ca.pem"})
        assert error and "ca_file" in error and r.service.config is before


async def test_an_unreadable_ca_file_is_rejected_at_the_start() -> None:
    config = from_table(quick_table([], upstream={"ca_file": "/nowhere/ca.pem"}), experiment=True)
    with pytest.raises(ConfigError, match="ca_file"):
        Service(lambda: config)


async def test_a_changed_file_is_reloaded_and_an_invalid_one_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one))
        async with serve("--config", path) as command:
            await command.ready()
            replace(path, toml(one) + "nonsense = 1\n")
            await until(lambda: command.logged("config_rejected"))
            assert (await command.request()).status == 200 and len(one.seen) == 1
            replace(path, toml(two))
            await until(lambda: command.logged("config_reloaded"))
            await command.ready()
            assert (await command.request()).status == 200 and len(two.seen) == 1
            os.unlink(path)
            await until(lambda: command.logged("cannot read the file"))
            assert (await command.request()).status == 200
            command.signal(signal.SIGTERM)
            assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_sighup_reloads_the_configuration(tmp_path: Path) -> None:
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
            await until(lambda: command.logged("config_reloaded"), patience_s=5)
            assert command.logged("reload_requested reason=SIGHUP")
            command.signal(signal.SIGHUP)
            await until(lambda: command.logged("config_unchanged"), patience_s=5)
            replace(path, "[broken")
            command.signal(signal.SIGHUP)
            await until(lambda: command.logged("invalid TOML"), patience_s=5)
            assert (await peer.response()).complete, "the running request was not dropped"
            peer.close()


async def test_a_reload_says_what_changed_without_secrets(tmp_path: Path) -> None:
    def key(secret: str) -> str:
        return f'\n[[keys]]\ntenant = "team-a"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'

    async def request(secret: str) -> int:
        return (await command.request(post(headers=[f"Authorization: Bearer {secret}"]))).status

    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one) + key("first"))
        async with serve("--config", path) as command:
            await command.ready()
            assert await request("first") == 200
            more = f'[[nodes]]\nurl = "{two.url}"\nname = "gpu-b"\n[limits]\nbody_bytes = 99999\n'
            replace(path, toml(one, more) + key("second"))
            command.signal(signal.SIGHUP)
            await until(lambda: command.logged("config_reloaded"), patience_s=5)
            [line] = [line for line in command.lines if "config_reloaded" in line]
            assert 'changed="limits.body_bytes 33554432 -> 99999; nodes +gpu-b; keys team-a: rotated"' in line
            assert not [word for word in ("sha256", *key("second").split('"')[3:4]) if command.logged(word)]
            assert await request("second") == 200 and await request("first") == 401
            replace(path, toml(one) + key("third").replace("sha256 = ", "sha265 = "))
            command.signal(signal.SIGHUP)
            await until(lambda: command.logged("config_rejected"), patience_s=5)
            [line] = [line for line in command.lines if "config_rejected" in line]
            assert "unknown key keys.sha265; did you mean keys.sha256?" in line
            assert not command.logged(hashlib.sha256(b"third").hexdigest())
            assert await request("second") == 200


async def test_the_file_is_watched_after_an_invalid_node(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one))
        async with serve("--config", path) as command:
            await command.ready()
            replace(path, toml(one) + '\n[[nodes]]\nurl = "http://127.0.0.1:99999"\n')
            await asyncio.sleep(2.5)
            replace(path, toml(two))
            await until(lambda: command.logged("config_reloaded"), patience_s=5)


def replace(path: Path, text: str) -> None:
    """Replace the file by a new one, as editors do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


# Shutdown.


async def test_on_sigterm_running_streams_finish_and_new_connections_are_refused() -> None:
    async with engines() as [engine], serve(*FLAGS, "--node", engine.url) as command:
        await command.ready()
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, chunk(sse_event(1)), DONE)
        running, idle = await command.connect(), await command.connect()
        running.write(post(headers=["Connection: close"]))
        idle.write(get("/health"))
        await idle.response()
        await until(lambda: engine.seen)
        command.signal(signal.SIGTERM)
        assert await idle.is_closed(), "idle connections are closed"
        await until(lambda: refuses(command.port))
        assert command.process.returncode is None
        gate.set()
        found = await running.response()
        assert found.complete and found.chunks[1] == sse_event(1)
        assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_shutdown_does_not_wait_for_idle_keep_alive_connections() -> None:
    async with engines() as [engine], serve(*FLAGS, "--node", engine.url) as command:
        await command.ready()
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, DONE)
        running = await command.connect()
        running.write(post())
        await running.head()
        command.signal(signal.SIGTERM)
        await until(lambda: refuses(command.port))
        gate.set()
        await asyncio.wait_for(command.process.wait(), 5)


async def test_during_the_shutdown_delay_ready_is_503_and_requests_are_served(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines() as [engine]:
        path.write_text(toml(engine) + "\n[shutdown]\ndelay_s = 2.0\n")
        async with serve("--config", path) as command:
            await command.ready()
            peer = await command.connect()
            peer.write(get("/ready"))
            assert (await peer.response()).status == 200
            command.signal(signal.SIGTERM)
            await until(lambda: command.logged("service_stopping"))
            peer.write(get("/ready"))
            found = await peer.response()
            assert found.status == 503 and b"stopping" in found.body
            assert (await command.request(get("/ready"), command.admin_port)).status == 503
            peer.write(post())
            assert (await peer.response()).status == 200
            assert (await command.request()).status == 200
            assert await asyncio.wait_for(command.process.wait(), 20) == 0


async def test_a_second_signal_ends_the_stop_although_a_client_does_not_read() -> None:
    async with engines() as [engine], router(engine, shutdown={"deadline_s": 100.0}) as r:
        engine.behave = huge(1 << 30)
        with socket.create_connection(("127.0.0.1", r.port)) as client:
            client.sendall(post())
            await until(lambda: engine.seen and r.inflight() == 1)
            stopping = asyncio.create_task(r.service.stop())
            await asyncio.sleep(0.1)
            assert not stopping.done()
            r.service.stop_now()
            await asyncio.wait_for(stopping, 20)


async def test_requests_are_cut_off_at_the_shutdown_deadline(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines() as [engine]:
        path.write_text(toml(engine) + "\n[shutdown]\ndeadline_s = 0.5\n")
        async with serve("--config", path) as command:
            await command.ready()
            silent, streaming, messages = [await command.connect() for _ in range(3)]
            engine.behave = hanging
            silent.write(post())
            await until(lambda: len(engine.seen) == 1)
            engine.behave = script(SSE_HEAD, chunk(sse_event(0)) + b"20\r\ndata: half an ev", HANG)
            streaming.write(post(chat(stream=True)))
            messages.write(post(chat(stream=True), "/v1/messages"))
            await until(lambda: len(engine.seen) == 3)
            assert (await streaming.head()).status == (await messages.head()).status == 200
            started_s = time.monotonic()
            command.signal(signal.SIGTERM)
            assert await asyncio.wait_for(command.process.wait(), 20) == 0
            assert time.monotonic() - started_s < 10
            assert command.logged("requests_cut_off requests=3 deadline_s=0.5")
            rejected = await silent.response()
            assert rejected.status == 503 and rejected.error["code"] == "router_stopping"
            body = await streaming.rest()
            assert b"event: error\ndata: " in body and b'"code":"router_stopping"' in body
            assert not body.endswith(b"0\r\n\r\n"), "nobody takes it for complete"
            body = await messages.rest()
            assert b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"' in body


async def test_a_second_signal_stops_the_router_at_once() -> None:
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


# Start.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--node", "nonsense"), "does not look like http://host:port"),
        (("--config", "/nowhere/w.toml"), "/nowhere/w.toml: cannot read the file"),
        (("--node", "http://a:1", "--node", "http://a:1"), "two nodes have the name"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7"),
    ],
)
async def test_a_start_error_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    async with serve(*FLAGS, *arguments) as command:
        assert await asyncio.wait_for(command.process.wait(), 20) == 2
        await asyncio.sleep(0.05)
        assert command.logged(words) and not command.logged("Traceback")


async def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        async with serve("--port", str(port), "--admin-port", "0") as command:
            assert await asyncio.wait_for(command.process.wait(), 20) == 2
            await asyncio.sleep(0.05)
            assert command.logged(f"cannot listen on 127.0.0.1:{port}")


async def test_a_public_listener_without_api_keys_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with router(listen={"host": "0.0.0.0"}):
        assert "no_api_keys" in caplog.text
    caplog.clear()
    async with router():
        assert "no_api_keys" not in caplog.text


async def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    async with engines(2) as [one, two]:
        path.write_text(toml(one, port=1))
        async with serve("--config", path, *FLAGS, "--policy", "round_robin", "--node", two.url) as command:
            await command.ready()
            assert command.port > 1 and command.logged("nodes=2 policy=round_robin")


async def test_sigterm_ends_the_process_while_a_chat_template_loops(tmp_path: Path) -> None:
    path, template = tmp_path / "w.toml", tmp_path / "endless.jinja"
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    template.write_text(f"{{% if messages | length > 40 %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}")
    folder = Path(__file__).parent / "prompt" / "small-model"
    async with engines() as [engine]:
        model = f'[[models]]\nname = "m"\ntokenizer = "{folder}"\nchat_template = "{template}"\n'
        path.write_text(toml(engine, model))
        async with serve("--config", path) as command:
            await command.ready()
            messages = [{"role": "user", "content": "a message that is long enough to be looked up " * 9}] * 50
            peer = await command.connect()
            peer.write(post(json.dumps({"model": "m", "messages": messages}).encode()))
            await asyncio.sleep(0.1)
            command.signal(signal.SIGTERM)
            assert (await peer.response()).status == 200, "the prompt is matched by its text"
            assert await asyncio.wait_for(command.process.wait(), 10) == 0
