"""The picker's answer to a request: endpoints in order, as header and as metadata, in each of Envoy's body modes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import grpc
import pytest
from support.picker import chat_body, headers_message, picker
from support.scripted_engine import engines

KEY = "secret"
KEYS = [{"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "t", "max_priority": "high"}]
BIG: dict[str, Any] = {"limits": {"body_bytes": 12 << 20}}


@pytest.mark.parametrize("mode", ["buffered", "duplex", "streamed"])
async def test_a_request_gets_its_endpoints_in_every_body_mode(mode: str) -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        body = chat_body("x" * 150_000)
        envoy = p.stream(mode)
        await envoy.send_request(body, pieces=1 if mode == "buffered" else 3)
        answer = await envoy.decision()
        assert sorted(answer.endpoints) == sorted(f"127.0.0.1:{node.port}" for node in nodes)
        assert answer.metadata == ",".join(answer.endpoints)
        if mode == "duplex":
            assert await envoy.body_back() == body
        elif mode == "streamed":
            for _ in range(3):
                assert (await envoy.read()).HasField("request_body")
        assert sum(p.inflight()) == 1
        await envoy.respond(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
        assert sum(p.inflight()) == 0
        await envoy.finish()
        assert p.service.counters.responses == {200: 1}


async def test_an_envoy_that_names_no_mode_is_taken_for_full_duplex() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream("duplex")
        await envoy.send_request(chat_body(), protocol=False)
        assert (await envoy.decision()).endpoints
        assert await envoy.body_back() == chat_body()
        envoy.call.cancel()


@pytest.mark.parametrize("mode", ["duplex", "streamed"])
async def test_trailers_end_a_body(mode: str) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream(mode)
        await envoy.send_request(chat_body(), trailers=True)
        assert (await envoy.decision()).endpoints
        if mode == "duplex":
            assert await envoy.body_back() == chat_body()
        else:
            assert (await envoy.read()).HasField("request_body")
            assert (await envoy.read()).HasField("request_trailers")
        envoy.call.cancel()


async def test_a_body_beyond_four_megabytes_is_routed_and_one_beyond_the_limit_is_413() -> None:
    async with engines(1) as nodes, picker(*nodes, **BIG) as p:
        for mode in ("buffered", "duplex", "streamed"):
            assert (await p.ask(chat_body("x" * (10 << 20)), mode)).endpoints
        too_large = chat_body("x" * (13 << 20))
        for mode in ("buffered", "duplex"):
            answer = await p.ask(too_large, mode)
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        envoy = p.stream("duplex")  # its length is known only when it has come
        message = headers_message("request_headers", {":method": "POST", ":path": "/v1/completions"}, end=False)
        message.protocol_config.request_body_mode = envoy.mode
        await envoy.call.write(message)
        http = type(message).DESCRIPTOR.fields_by_name["request_body"].message_type._concrete_class(body=too_large)
        await envoy.call.write(type(message)(request_body=http))
        assert (await envoy.decision()).status == 413


async def test_a_prompt_returns_to_the_node_that_has_its_prefix() -> None:
    async with engines(3) as nodes, picker(*nodes, routing={"policy": "price"}) as p:
        text = "a long conversation " * 400
        chosen = []
        for turn in range(6):
            envoy = p.stream("duplex" if turn % 2 else "buffered")
            await envoy.send_request(chat_body(text, max_tokens=turn + 1))
            answer = await envoy.decision()
            if turn % 2:
                await envoy.body_back()
            await envoy.respond(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
            await envoy.finish()
            chosen.append(answer.endpoints[0])
        assert len(set(chosen)) == 1


# Errors.


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{nope", 400, "malformed_json"),
        (b"", 400, "malformed_json"),
        (b'{"model":"m"}', 400, "missing_messages"),
        (chat_body()[:-1], 400, "malformed_json"),
        (chat_body().replace(b'"m"', b'"other"'), 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_bad_request_gets_an_error_in_openais_form(mode: str, body: bytes, status: int, code: str) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream(mode)
        await envoy.send_request(body, x_request_id="abc-1")
        answer = await envoy.decision()
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.response_headers["content-type"] == "application/json"
        assert answer.response_headers["x-request-id"] == "abc-1"
        assert await envoy.read() is grpc.aio.EOF
        assert p.service.counters.errors[status, code] == 1


async def test_other_paths_and_methods_are_rejected_and_the_model_list_is_answered() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        for path, method, status in (
            ("/v1/chat/completions", "GET", 405), ("/metrics", "GET", 404), ("/v1/load_lora_adapter", "POST", 404),
            ("/v1/models", "GET", 200), ("/health", "GET", 200), ("/v1/models/none", "GET", 404),
        ):  # fmt: skip
            envoy = p.stream()
            await envoy.send_request(None, path=path, method=method)
            answer = await envoy.decision()
            assert answer.status == status, path
        envoy = p.stream()
        await envoy.send_request(None, path="/v1/models", method="GET")
        listed = json.loads((await envoy.decision()).body)
        assert [one["id"] for one in listed["data"]] == ["m"]


@pytest.mark.parametrize("responses", ["streamed", "none"])
async def test_a_second_head_in_one_stream_is_rejected_and_ends_the_first_request(responses: str) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream("none", responses)
        for _ in range(2):
            message = headers_message(
                "request_headers",
                {":method": "POST", ":path": "/v1/chat/completions", "x-gateway-model-name": "m"},
                end=False,
            )
            message.protocol_config.response_body_mode = envoy.response_mode
            await envoy.call.write(message)
        assert (await envoy.decision()).endpoints
        answer = await envoy.decision()
        assert (answer.status, answer.error["code"]) == (400, "bad_request")
        assert await envoy.read() is grpc.aio.EOF
        await p.until_idle()
        assert not p.service.counters.responses[200] and p.service.counters.disconnects == 1


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_second_head_before_the_end_of_the_body_is_rejected(mode: str) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream(mode)
        message = headers_message("request_headers", {":method": "POST", ":path": "/v1/completions"}, end=False)
        message.protocol_config.request_body_mode = envoy.mode
        await envoy.call.write(message)
        if mode == "buffered":
            assert (await envoy.read()).HasField("request_headers")
        await envoy.call.write(message)
        assert (await envoy.decision()).status == 400
        assert await envoy.read() is grpc.aio.EOF


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_large_body_that_is_rejected_logs_no_internal_error(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy = p.stream(mode)
        await envoy.send_request(chat_body("x" * 400_000).replace(b'"m"', b'"other"'))
        answer = await envoy.decision()
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert await envoy.read() is grpc.aio.EOF
        await p.until_idle()
        assert not p.service.counters.disconnects
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_headers_with_line_breaks_or_given_twice_are_rejected() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        bad: list[dict[str, Any]] = [
            {"x_evil": "a\r\nauthorization: Bearer b"}, {"x_evil": "a\nb"}, {"content_encoding": "gzip"},
        ]  # fmt: skip
        for headers in bad:
            envoy = p.stream("duplex")
            await envoy.send_request(chat_body(), **headers)
            assert (await envoy.decision()).status in (400, 415)


# Keys.


async def test_a_key_of_the_router_is_checked_and_not_sent_to_nodes() -> None:
    async with engines(1) as nodes, picker(*nodes, keys=KEYS) as p:
        assert (await p.ask()).status == 401
        answer = await p.ask(authorization=f"Bearer {KEY}")
        assert sorted(answer.removed) == ["authorization", "x-api-key"]


async def test_a_node_gets_its_own_key_and_fallbacks_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_KEY", "for-the-node")
    async with engines(3) as nodes:
        listed: list[dict[str, Any]] = [{"url": node.url} for node in nodes]
        for one in listed[:2]:
            one["api_key_env"] = "NODE_KEY"
        async with picker(*listed, keys=KEYS) as p:
            seen = set()
            for _ in range(3):
                answer = await p.ask(authorization=f"Bearer {KEY}")
                has_key = answer.endpoints[0] != f"127.0.0.1:{nodes[2].port}"
                assert len(answer.endpoints) == (2 if has_key else 1)
                assert answer.headers.get("authorization") == ("Bearer for-the-node" if has_key else None)
                assert ("authorization" in answer.removed) == (not has_key)
                seen.add(has_key)
            assert seen == {True, False}


async def test_a_client_cannot_name_a_rank_or_an_endpoint() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        answer = await p.ask(x_data_parallel_rank="1", x_gateway_destination_endpoint="10.0.0.1:1")
        assert "x-data-parallel-rank" in answer.removed
        assert answer.endpoints == [f"127.0.0.1:{nodes[0].port}"]


# Nodes and endpoints.


async def test_names_of_nodes_are_resolved() -> None:
    async with engines(1) as nodes, picker({"url": f"http://localhost:{nodes[0].port}"}) as p:
        assert (await p.ask()).endpoints == [f"127.0.0.1:{nodes[0].port}"]


async def test_a_node_whose_name_cannot_be_resolved_is_passed_over() -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        p.node = p.service.fleet.node("node0")  # type: ignore[attr-defined]
        p.server.endpoints._by_number.clear()
        p.server.endpoints._endpoint = lambda node: "" if node.name == "node0" else f"127.0.0.1:{node.port}"  # type: ignore[method-assign]
        for _ in range(4):
            assert (await p.ask()).endpoints == [f"127.0.0.1:{nodes[1].port}"]


@pytest.mark.parametrize("policy", ["price", "round_robin"])
async def test_a_prefill_node_is_an_endpoint_only_where_no_other_is_left(policy: str) -> None:
    async with engines(3) as nodes:
        listed: list[dict[str, Any]] = [{"url": node.url} for node in nodes]
        listed[0]["role"] = "prefill"
        async with picker(*listed, routing={"policy": policy}) as p:
            others = sorted(f"127.0.0.1:{node.port}" for node in nodes[1:])
            for _ in range(6):
                assert sorted((await p.ask()).endpoints) == others
            p.service.fleet.drain("node1")
            p.service.fleet.drain("node2")
            assert (await p.ask()).endpoints == [f"127.0.0.1:{nodes[0].port}"]


async def test_a_decode_node_that_cannot_prefill_is_no_fallback() -> None:
    async with engines(3) as nodes:
        roles = ("mixed", "prefill", "decode")
        listed = [{"url": node.url, "engine": "sglang", "role": role} for node, role in zip(nodes, roles, strict=True)]
        async with picker(*listed) as p:
            for _ in range(6):
                assert (await p.ask()).endpoints == [f"127.0.0.1:{nodes[0].port}"]


async def test_as_many_endpoints_as_configured_are_named() -> None:
    async with engines(3) as nodes:
        for most in (1, 2):
            async with picker(*nodes, picker={"port": 0, "max_endpoints": most}) as p:
                assert len((await p.ask()).endpoints) == most


async def test_without_bodies_the_picker_routes_by_the_models_header() -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        envoy = p.stream("none")
        message = headers_message(
            "request_headers",
            {":method": "POST", ":path": "/v1/chat/completions", "x-gateway-model-name": "m"},
            end=False,
        )
        message.protocol_config.request_body_mode = 0
        await envoy.call.write(message)
        assert len((await envoy.decision()).endpoints) == 2
        unknown = p.stream("none")
        message.request_headers.headers.headers[2].raw_value = b"other"
        await unknown.call.write(message)
        assert (await unknown.decision()).status == 404
        envoy.call.cancel()


async def test_many_requests_at_once() -> None:
    async with engines(2) as nodes, picker(*nodes, routing={"policy": "price"}) as p:

        async def one(number: int) -> None:
            envoy = p.stream("duplex" if number % 2 else "buffered")
            await envoy.send_request(chat_body("x" * (number * 100)))
            await envoy.decision()
            if number % 3 == 0:
                envoy.call.cancel()
                return
            if number % 2:
                await envoy.body_back()
            await envoy.respond(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n', end=number % 5 != 0)
            await envoy.finish()

        await asyncio.gather(*map(one, range(100)))
