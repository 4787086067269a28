"""Start, reload, drain and stop of the picker; TLS; no cost for those who do not run it."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from support.picker import RunningPicker, chat_body, picker
from support.polling import until
from support.scripted_engine import engines
from support.serve_process import serve

from warmroute.config import ConfigError, from_table
from warmroute.edge.envoy import ext_proc

pytestmark = pytest.mark.usefixtures("experiment")

CONTENT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'


def _imports(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def _mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_nothing_imports_grpc_until_the_picker_runs() -> None:
    code = (
        "import sys, warmroute.app.main as m; m.create_parser(); import warmroute.app.service;"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('grpc', 'google') or 'warmroute.edge.envoy' in n))"
    )
    assert _imports(code) == "[]"


async def test_a_proxy_that_serves_has_loaded_neither_grpc_nor_protobuf() -> None:
    async with engines(1) as nodes, serve("--port", "0", "--admin-port", "0", "--node", nodes[0].url) as process:
        await process.ready()
        assert (await process.request()).status == 200
        loaded = _mapped_files(process.process.pid)
        assert "warmroute/_kernel" in loaded and "grpc" not in loaded and "google" not in loaded


def test_the_picker_and_tracing_work_in_one_process() -> None:
    code = (
        "import warmroute.edge.envoy.server, opentelemetry.exporter.otlp.proto.http.trace_exporter as t;"
        "from opentelemetry.proto.trace.v1.trace_pb2 import Span; print(Span(name='x').name)"
    )
    assert _imports(code) == "x"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['hpack'] = None; sys.argv = ['warmroute', 'picker', '--port', '0'];"
        "import warmroute.app.main as m; sys.exit(m.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "its extra 'picker'" in done.stderr


def test_contradictions_are_named() -> None:
    for table, problem in (
        ({"tls_cert": "a"}, "picker.tls_cert and picker.tls_key must be set together"),
        ({"tls_client_ca": "a"}, "client certificates need picker.tls_cert"),
        ({"message_timeout_s": 2.0, "max_message_timeout_s": 1.0}, "is shorter than picker.message_timeout_s"),
    ):
        with pytest.raises(ConfigError, match=problem):
            from_table({"picker": table})


# Stop.


async def test_a_stopping_picker_lets_its_requests_finish_and_accepts_no_more() -> None:
    async with engines(1) as nodes, picker(*nodes, shutdown={"deadline_s": 10.0}) as p:
        running = p.stream()
        await running.send_request(chat_body())
        await running.decision()
        stopping = asyncio.ensure_future(p.service.stop())
        listening = p.server._server
        assert listening is not None
        await until(lambda: p.service.proxy.own_endpoints.stopping and not listening.is_serving())
        late = RunningPicker(p.service)
        with pytest.raises(grpc.aio.AioRpcError):
            await late.ask()
        await running.respond(CONTENT)
        assert p.service.counters.responses == {200: 1}
        await running.finish()
        await asyncio.wait_for(stopping, 5.0)


async def test_at_the_deadline_decided_requests_go_on_without_the_picker_and_others_get_503() -> None:
    async with engines(1) as nodes, picker(*nodes, shutdown={"deadline_s": 0.1}) as p:
        decided, waiting = p.stream(), p.stream("duplex")
        await decided.send_request(chat_body())
        await decided.decision()
        body = chat_body()
        await waiting.call.write(_head(waiting.mode))
        http = ext_proc.MESSAGES["HttpBody"](body=body[:10])
        await waiting.call.write(ext_proc.ProcessingRequest(request_body=http))
        await until(lambda: len(p.server.connections) == 2 and p.server.buffered_bytes == 10)
        await p.service.stop()
        answer = await waiting.decision()
        assert (answer.status, answer.error["code"]) == (503, "router_stopping")
        assert await decided.read() is grpc.aio.EOF  # without an error: Envoy continues by itself
        assert await decided.call.code() is grpc.StatusCode.OK
        assert p.inflight() == [0]


async def test_unfinished_bodies_of_one_tenant_leave_room_for_the_others() -> None:
    keys = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in ("a", "b", "c")]
    async with engines(1) as nodes, picker(*nodes, keys=keys, limits={"buffered_bytes": 8000}) as p:

        async def begin(tenant: str, size: int) -> Any:
            stream = p.stream("duplex")
            before = p.server.buffered_bytes
            await stream.call.write(_head(stream.mode, tenant))
            http = ext_proc.MESSAGES["HttpBody"](body=b"x" * size)
            await stream.call.write(ext_proc.ProcessingRequest(request_body=http))
            await until(lambda: p.server.buffered_bytes != before)
            return stream

        first, second = await begin("a", 2500), await begin("a", 1400)
        third = p.stream("duplex")
        await third.call.write(_head(third.mode, "a"))
        http = ext_proc.MESSAGES["HttpBody"](body=b"x" * 1000)
        await third.call.write(ext_proc.ProcessingRequest(request_body=http))
        answer = await third.decision()
        assert (answer.status, answer.error["code"]) == (503, "tenant_buffer_full")
        other = await begin("b", 2300)
        answer = await first.decision()
        assert (answer.status, answer.error["code"]) == (503, "tenant_buffer_full"), "the largest one gives way"
        assert p.server.buffered_bytes == 1400 + 2300
        for stream in (second, other):
            stream.call.cancel()


def _head(mode: int, key: str = "") -> Any:
    message = ext_proc.ProcessingRequest()
    fields = [(":method", b"POST"), (":path", b"/v1/completions")]
    if key:
        fields.append(("authorization", b"Bearer " + key.encode()))
    for name, value in fields:
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    message.protocol_config.request_body_mode = mode
    return message


# TLS.


def _files(folder: Path, name: str, *blobs: trustme.Blob) -> str:
    path = folder / name
    path.write_bytes(b"".join(blob.bytes() for blob in blobs))
    return str(path)


async def _asked(p: RunningPicker, ca: trustme.CA, client: trustme.LeafCert | None = None) -> list[str]:
    credentials = grpc.ssl_channel_credentials(
        ca.cert_pem.bytes(),
        client.private_key_pem.bytes() if client is not None else None,
        client.cert_chain_pems[0].bytes() if client is not None else None,
    )
    async with grpc.aio.secure_channel(f"127.0.0.1:{p.service.port}", credentials) as channel:
        envoy = p.stream(channel=channel)
        await envoy.send_request(chat_body())
        endpoints = (await envoy.decision()).endpoints
        envoy.call.cancel()
        await p.until_idle()
        return endpoints


async def test_tls_mutual_tls_and_a_renewed_certificate(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    server = ca.issue_cert("127.0.0.1")
    files = {
        "tls_cert": _files(tmp_path, "cert.pem", *server.cert_chain_pems),
        "tls_key": _files(tmp_path, "key.pem", server.private_key_pem),
        "tls_client_ca": _files(tmp_path, "ca.pem", ca.cert_pem),
    }
    client = ca.issue_cert("envoy.test")
    async with engines(1) as nodes, picker(*nodes, picker={"port": 0, **files}) as p:
        assert await _asked(p, ca, client)
        for stranger in (None, other.issue_cert("envoy.test")):
            with pytest.raises(grpc.aio.AioRpcError):
                await _asked(p, ca, stranger)
        renewed = other.issue_cert("127.0.0.1")
        _files(tmp_path, "key.pem", renewed.private_key_pem)
        _files(tmp_path, "cert.pem", *renewed.cert_chain_pems)
        assert await _asked(p, other, client)


# The command.


async def test_the_command_serves_reloads_on_sighup_and_drains_on_sigterm(tmp_path: Path) -> None:
    async with engines(2) as nodes:
        config = tmp_path / "warmroute.toml"

        def write(count: int) -> None:
            listed = "\n".join(f'[[nodes]]\nurl = "{node.url}"' for node in nodes[:count])
            config.write_text(f"[picker]\nport = 0\n[admin]\nport = 0\n[health]\ninterval_s = 0.05\n{listed}\n")

        write(1)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "warmroute", "picker", "--config", str(config),
            stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        lines: list[str] = []

        async def read() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                lines.append(line.decode())  # noqa: PERF401 the test reads them meanwhile

        reading = asyncio.ensure_future(read())
        try:
            await until(lambda: any("startup_complete" in line for line in lines), "it has started", 20)
            address = next(line for line in lines if "service_started" in line).partition("grpc://")[2].split()[0]

            async def endpoints() -> int:
                process_call = channel.stream_stream(f"/{ext_proc.SERVICE}/Process")()
                head = _head(ext_proc.FULL_DUPLEX_STREAMED)
                head.request_headers.headers.headers[1].raw_value = b"/v1/chat/completions"
                await process_call.write(head.SerializeToString())
                http = ext_proc.MESSAGES["HttpBody"](body=chat_body(), end_of_stream=True)
                await process_call.write(ext_proc.ProcessingRequest(request_body=http).SerializeToString())
                answer = ext_proc.ProcessingResponse.FromString(await process_call.read())
                process_call.cancel()
                return len(answer.dynamic_metadata["envoy.lb"][ext_proc.DESTINATION].split(","))

            async with grpc.aio.insecure_channel(address) as channel:
                assert await endpoints() == 1
                write(2)
                process.send_signal(signal.SIGHUP)
                await until(lambda: sum("node_up" in line for line in lines) == 2, "the second node is up")
                await asyncio.sleep(0.05)
                assert await endpoints() == 2
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 20.0) == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading
        assert not any("ERROR" in line or "Traceback" in line for line in lines), lines


@pytest.mark.parametrize("role", ["mixed", "prefill"])
async def test_prefill_nodes_lead_to_one_warning_at_the_start(role: str, caplog: pytest.LogCaptureFixture) -> None:
    async with engines(2) as nodes:
        listed: list[dict[str, Any]] = [
            {"name": "first", "url": nodes[0].url, "role": role},
            {"name": "second", "url": nodes[1].url},
        ]
        async with picker(*listed) as p:
            await p.ask()
    logged = [record.getMessage() for record in caplog.records if "picker_without_pairs" in record.getMessage()]
    assert len(logged) == (role == "prefill")
    assert all("first" in line and "second" not in line for line in logged)
