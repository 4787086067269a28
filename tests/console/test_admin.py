"""The admin API and the metrics page."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine_scripts import DONE, SSE_HEAD, chunk, failing, hanging, normal, script, sse_event
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import router
from support.scripted_engine import engines

TOKEN = {"token_sha256": hashlib.sha256(b"open sesame").hexdigest()}


async def test_the_api_lists_nodes() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.request()
        [node] = (await r.admin("GET", "/admin/nodes")).json["nodes"]
        assert node == (await r.admin("GET", "/admin/nodes/node0")).json
        assert node["name"] == "node0" and node["url"] == engine.url and node["models"] == ["m"]
        assert node["state"] == "up" and node["requests_in_flight"] == 0 and node["outcomes"]["ok"] == 1


async def test_a_node_can_be_added_and_removed() -> None:
    async with engines(1, "new") as [engine], router() as r:
        assert (await r.request()).status == 503
        added = await r.admin("POST", "/admin/nodes", json.dumps({"url": engine.url, "name": "a/b c"}).encode())
        assert added.status == 201 and added.json["state"] == "unknown"
        await until(lambda: r.service.fleet.can_serve)
        assert (await r.request(post(chat(model="new")))).status == 200
        gone = await r.admin("DELETE", "/admin/nodes/a%2Fb%20c")
        assert gone.status == 200
        assert (await r.request(post(chat(model="new")))).status == 503
        await until(lambda: engine.connections == 0)


async def test_a_removed_node_finishes_its_running_requests() -> None:
    async with engines(2) as [going, staying], router(going, staying) as r:
        gate = asyncio.Event()
        going.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, DONE)
        peer = await r.connect()
        peer.write(post())
        await until(lambda: going.seen)
        node = r.node(0)
        assert (await r.admin("DELETE", "/admin/nodes/node0")).json["requests_in_flight"] == 1
        for _ in range(3):
            assert (await r.request()).status == 200
        assert len(going.seen) == 1 and len(staying.seen) == 3
        gate.set()
        assert (await peer.response()).complete
        assert node.inflight == 0
        await until(lambda: going.connections == 0)


async def test_a_draining_node_gets_no_requests_until_it_is_undrained() -> None:
    async with engines(2) as [drained, other], router(drained, other) as r:
        gate = asyncio.Event()
        drained.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, DONE)
        peer = await r.connect()
        peer.write(post())
        await until(lambda: drained.seen)
        node = (await r.admin("POST", "/admin/nodes/node0/drain")).json
        assert node["state"] == "draining" and node["reason"] == "an operator drained it: it gets no new requests"
        for _ in range(4):
            assert (await r.request()).status == 200
        assert len(drained.seen) == 1
        gate.set()
        assert (await peer.response()).complete
        drained.behave = normal()
        assert (await r.admin("POST", "/admin/nodes/node0/undrain")).json["state"] == "up"
        for _ in range(4):
            assert (await r.request()).status == 200
        assert len(drained.seen) == 3


async def test_a_node_gets_another_role_at_run_time() -> None:
    async with engines(2) as [first, second], router(first, second) as r:
        for name in ("node0", "node1"):
            node = r.service.fleet.node(name)
            node.engine, node.kv_connector = "vllm", True
        assert (await r.admin("POST", "/admin/nodes/node0/role", b'{"role": "prefill"}')).json["role"] == "prefill"
        assert [(await r.request()).status for _ in range(3)] == [200] * 3
        assert not first.seen and len(second.seen) == 3, "a prefill node serves no whole request"
        assert (await r.admin("POST", "/admin/nodes/node0/role", b'{"role": "mixed"}')).json["role"] == "mixed"
        assert (await r.admin("POST", "/admin/nodes/node0/role", b'{"role": "oven"}')).status == 400
        r.service.fleet.node("node1").engine = "sglang"
        refused = await r.admin("POST", "/admin/nodes/node1/role", b'{"role": "decode"}')
        assert refused.status == 409 and refused.json["error"]["code"] == "role_fixed"
        assert (await r.admin("POST", "/admin/nodes/nobody/role", b'{"role": "decode"}')).status == 404
        assert (await r.admin("GET", "/admin/nodes/node0/role")).status == 405


async def test_a_router_whose_nodes_all_drain_is_not_ready() -> None:
    async with engines() as [engine], router(engine) as r:
        await r.admin("POST", "/admin/nodes/node0/drain")
        assert (await r.request(get("/ready"))).status == 503
        assert (await r.admin("GET", "/ready")).status == 503
        assert (await r.request()).status == 503


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "expected a table, got a list"),
        (b'{"url": 7}', "url: expected text, got a whole number"),
        (b'{"url": "http://a:1", "isle": "b"}', "unknown key isle; did you mean island?"),
        (b"{}", "missing required field `url`"),
    ],
)
async def test_the_error_for_an_invalid_node_says_what_is_wrong(body: bytes, message: str) -> None:
    async with engines() as [engine], router(engine) as r:
        error = (await r.admin("POST", "/admin/nodes", body)).json["error"]["message"]
        assert error.endswith(message), error


async def test_drains_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "warmroute.service")
    async with engines() as [engine], router(engine) as r:
        engine.behave = hanging
        client = await r.connect()
        client.write(post())
        await until(lambda: engine.seen)
        for action in ("drain", "undrain"):
            assert (await r.admin("POST", f"/admin/nodes/node0/{action}")).status == 200
        client.disconnect()
    drains = [record.getMessage() for record in caplog.records if "drain" in record.getMessage().split()[0]]
    assert drains == [
        "node_draining node=node0 requests_in_flight=1: It gets no new requests; running ones finish.",
        "node_undrained node=node0: It gets requests again.",
    ]


async def test_a_configured_context_window_is_reported() -> None:
    async with engines() as [engine], router({"url": engine.url, "max_model_len": 4096}) as r:
        [node] = (await r.admin("GET", "/admin/nodes")).json["nodes"]
        [model] = (await r.admin("GET", "/admin/models")).json["models"]
    assert node["max_model_len"] == 4096 and model["context_windows"] == [4096]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST."])
async def test_an_engine_is_not_added_under_a_second_name(host: str) -> None:
    async with engines() as [engine], router(engine) as r:
        body = json.dumps({"url": f"http://{host}:{engine.port}", "name": "other"}).encode()
        refused = await r.admin("POST", "/admin/nodes", body)
        assert refused.status == 409 and refused.error["code"] == "same_engine"
        assert "'node0' and 'other' are the same engine" in refused.error["message"]
        assert len(r.service.fleet) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/admin/nodes/none", b"", 404, "unknown_node"),
        ("DELETE", "/admin/nodes/none", b"", 404, "unknown_node"),
        ("POST", "/admin/nodes/none/drain", b"", 404, "unknown_node"),
        ("POST", "/admin/nodes", b"", 400, "bad_node"),
        ("POST", "/admin/nodes", b"[]", 400, "bad_node"),
        ("POST", "/admin/nodes", b'{"url":"x"}', 400, "bad_node"),
        ("POST", "/admin/nodes", b'{"url":"http://a:1","colour":"red"}', 400, "bad_node"),
        ("POST", "/admin/nodes", b'{"url":"http://a:1","name":"node0"}', 409, "name_taken"),
        ("PUT", "/admin/nodes", b"", 405, "method_not_allowed"),
        ("POST", "/admin/nodes/node0", b"", 405, "method_not_allowed"),
        ("GET", "/other", b"", 404, "not_found"),
        ("GET", "/admin", b"", 404, "not_found"),
        ("POST", "/v1/chat/completions", b"{}", 404, "not_found"),
    ],
)
async def test_errors_have_a_status_and_a_code(method: str, path: str, body: bytes, status: int, code: str) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.admin(method, path, body)
        assert found.status == status and found.error["code"] == code


async def test_a_node_with_an_impossible_port_is_400() -> None:
    async with router() as r:
        found = await r.admin("POST", "/admin/nodes", b'{"url":"http://127.0.0.1:99999"}')
        assert found.status == 400


async def test_a_configured_token_is_required_except_for_health_and_ready() -> None:
    async with engines() as [engine], router(engine, admin=TOKEN) as r:
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/admin/nodes"),
            ("DELETE", "/admin/nodes/node0"),
            ("GET", "/none"),
        ):
            for header in (
                "X: y",
                "Authorization: Bearer wrong",
                "Authorization: Basic open sesame",
                "Authorization: Bearer",
            ):
                found = await r.admin(method, path, b"", header)
                assert found.status == 401 and found.error["code"] == "invalid_token"
        assert (await r.admin("GET", "/health")).status == 200
        assert (await r.admin("GET", "/ready")).status == 200
        assert (await r.admin("GET", "/admin/nodes", b"", "Authorization: Bearer open sesame")).status == 200
        assert len(r.service.fleet) == 1


@pytest.mark.parametrize("headers", [("Origin: http://evil.example",), ("Origin: null",)])
async def test_without_a_token_web_pages_are_rejected(headers: tuple[str, ...]) -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.admin("POST", "/admin/nodes", b'{"url":"http://127.0.0.1:1"}', *headers)
        assert found.status == 403 and len(r.service.fleet) == 1


async def test_without_a_token_the_host_must_be_loopback() -> None:
    async with engines() as [engine], router(engine) as r:
        for host, status in (
            ("evil.example:8081", 403),
            ("localhost:8081", 200),
            ("[::1]:8081", 200),
            ("127.0.0.1", 200),
        ):
            peer = await r.connect(r.service.admin_port)
            peer.write(f"GET /admin/nodes HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await peer.response()).status == status, host


async def test_a_host_name_that_looks_like_a_loopback_address_is_rejected() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect(r.service.admin_port)
        peer.write(b"GET /admin/nodes HTTP/1.1\r\nHost: 127.evil.example:8081\r\n\r\n")
        assert (await peer.response()).status == 403


async def test_the_client_listener_does_not_serve_the_admin_api() -> None:
    async with engines() as [engine], router(engine) as r:
        for path in ("/metrics", "/admin/nodes"):
            assert (await r.request(get(path))).status == 404


async def test_the_admin_listener_can_be_disabled() -> None:
    async with engines() as [engine], router(engine, admin={"enabled": False}) as r:
        assert r.service.admin_port == 0
        assert (await r.request()).status == 200


# Metrics.


async def test_the_metrics_page_is_valid_and_counts_requests() -> None:
    async with engines(2) as [good, bad], router(good, bad, health={"consecutive_failures": 100}) as r:
        bad.behave = failing(500)
        for _ in range(6):
            await r.request()
        await r.request(post(b"{"))
        await r.request(post(chat(model='no"such\\model\n')))
        good.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.02, "close")
        await r.request()
        await r.request()
        page = await r.admin("GET", "/metrics")
        assert page.get("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        text = page.body.decode()
        found = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["warmroute_responses_total", ("status", "200")] == 6
        assert found["warmroute_errors_total", ("code", "malformed_json"), ("status", "400")] == 1
        assert found["warmroute_errors_total", ("code", "model_not_found"), ("status", "404")] == 1
        assert found["warmroute_responses_interrupted_total",] == 2
        assert found["warmroute_retries_total",] >= 3
        assert found["warmroute_node_requests_total", ("node", "node1"), ("outcome", "failed")] >= 3
        assert found["warmroute_node_state", ("node", "node0"), ("state", "up")] == 1
        assert found["warmroute_node_requests_in_flight", ("node", "node0")] == 0
        assert found["warmroute_node_time_to_first_token_seconds_count", ("node", "node0")] == 8
        assert found["warmroute_client_connections_accepted_total",] >= 10
        assert "such" not in text, "labels contain nothing that a client sent"


async def test_clients_cannot_add_labels() -> None:
    async with engines() as [engine], router(engine) as r:
        before = len((await r.admin("GET", "/metrics")).body.splitlines())
        for number in range(30):
            await r.request(post(chat(model=f"model-{number}")))
            await r.request(post(path=f"/nowhere/{number}"))
        after = len((await r.admin("GET", "/metrics")).body.splitlines())
        assert after - before <= 4


async def test_special_characters_in_a_node_name_are_escaped() -> None:
    async with engines() as [engine], router({"url": engine.url, "name": 'a"b\\c d é'}) as r:
        text = (await r.admin("GET", "/metrics")).body.decode()
        names = {
            sample.labels.get("node") for family in text_string_to_metric_families(text) for sample in family.samples
        }
        assert 'a"b\\c d é' in names


async def test_concurrent_scrapes_succeed() -> None:
    async with engines() as [engine], router(engine) as r:
        pages = await asyncio.gather(*(r.admin("GET", "/metrics") for _ in range(20)))
        assert {page.status for page in pages} == {200}


async def test_an_added_node_cannot_use_arbitrary_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_ROUTER", "s3cr3t")
    async with engines() as [engine], router(engine) as r:
        body = json.dumps({"url": "http://127.0.0.1:9", "name": "x", "api_key_env": "SECRET_OF_THE_ROUTER"}).encode()
        assert (await r.admin("POST", "/admin/nodes", body)).status == 400
