"""The rules of the Inference Extension's endpoint picker protocol (proposal 004), one test each."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from gated_engine import LONG, ONE_BY_ONE, PRICE
from support.picker import RunningPicker, chat_body, picker
from support.polling import until
from support.scripted_engine import engines

from warmroute.config.routing import HIGH, LOW, NORMAL

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


async def test_only_endpoints_of_the_subset_are_named() -> None:
    async with engines(4) as nodes, picker(*nodes) as p:
        allowed = [f"127.0.0.1:{node.port}" for node in nodes[1:3]]
        for policy_run in range(6):
            answer = await p.ask(subset=allowed if policy_run % 2 else ",".join(allowed))
            assert sorted(answer.endpoints) == sorted(allowed)
        answer = await p.ask(subset=[*allowed[:1], "10.9.9.9:1"])
        assert answer.endpoints == allowed[:1]


async def test_a_subset_may_be_a_list_of_lists_or_name_addresses_without_a_port() -> None:
    async with engines(2) as nodes:
        listed: list[dict[str, Any]] = [
            {"url": nodes[0].url},
            {"url": nodes[1].url},
            {"url": "http://127.0.0.2:8000", "models": ["m"]},
        ]
        async with picker(*listed, wait=False) as p:
            await until(lambda: sum(node.health.state.value == "up" for node in p.service.fleet) == 2)
            first, second = (f"127.0.0.1:{node.port}" for node in nodes)
            for subset in ([f"{first},{second}"], "127.0.0.1", ["10.0.0.1", "127.0.0.1"], [f" {second} , {first}"]):
                assert sorted((await p.ask(subset=subset)).endpoints) == sorted((first, second)), subset
            assert (await p.ask(subset=["127.0.0.1:1", "127.0.0.2"])).status == 503


async def test_a_subset_holds_for_every_policy() -> None:
    async with engines(3) as nodes:
        only = f"127.0.0.1:{nodes[2].port}"
        for policy in ("price", "least_loaded", "prefix_hash", "overlap"):
            async with picker(*nodes, routing={"policy": policy}) as p:
                for _ in range(3):
                    assert (await p.ask(chat_body("x" * 4000), subset=[only])).endpoints == [only]


@pytest.mark.parametrize("hint", [[], ["10.0.0.1:8000"], ["nonsense"], ""])
async def test_an_empty_or_ineligible_subset_is_503(hint: Any) -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        answer = await p.ask(subset=hint)
        assert (answer.status, answer.error["code"]) == (503, "no_node_in_subset")
        assert "`envoy.lb.subset_hint`" in answer.error["message"] and "`m`" in answer.error["message"]
        assert "retry-after" not in answer.response_headers  # the nodes are up: a retry does not help


async def test_a_subset_of_nodes_that_are_down_is_worth_a_retry() -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        await nodes[0].refuse()
        await until(lambda: p.service.fleet.node("node0").health.confirmed_down)
        answer = await p.ask(subset=[f"127.0.0.1:{nodes[0].port}"])
        assert (answer.status, answer.error["code"]) == (503, "no_node_available")
        assert answer.response_headers["retry-after"] == "1"


async def test_without_a_ready_endpoint_the_answer_is_503() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        await nodes[0].refuse()
        await until(lambda: p.service.fleet.node("node0").health.confirmed_down)
        answer = await p.ask()
        assert (answer.status, answer.error["code"]) == (503, "no_node_available")
        assert answer.response_headers["retry-after"] == "1"


async def test_header_and_metadata_name_the_same_endpoints() -> None:
    async with engines(3) as nodes, picker(*nodes) as p:
        for mode in ("buffered", "duplex", "streamed"):
            answer = await p.ask(mode=mode)
            assert answer.metadata == answer.headers["x-gateway-destination-endpoint"]
            assert len(answer.endpoints) == len(set(answer.endpoints)) == 3


# Priorities.


async def _queued(p: RunningPicker, **headers: Any) -> tuple[Any, int]:
    """Return the stream of a request that waits, and its priority."""
    envoy = p.stream("duplex")
    before = p.service.admission.queue.waiting
    await envoy.send_request(chat_body(LONG, stream=True), **headers)
    await until(lambda: p.service.admission.queue.waiting == before + 1)
    key, _queued = list(p.service.admission.queue.all_queued())[-1]
    return envoy, key[0]


FULL: dict[str, Any] = {"routing": PRICE, "admission": ONE_BY_ONE}


async def test_an_objective_gives_its_requests_their_priority() -> None:
    async with engines(1) as nodes, picker(*nodes, **FULL) as p:
        p.server.objectives = lambda: {"chat": "high", "batch": "low", "zero": "normal"}
        first = p.stream("duplex")
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        found = []
        for objective in ("chat", "batch", "zero", "unknown"):
            envoy, priority = await _queued(p, x_gateway_inference_objective=objective)
            found.append(priority)
            envoy.call.cancel()
            await until(lambda: not p.service.admission.queue.waiting)
        assert found == [HIGH, LOW, NORMAL, NORMAL]
        envoy, priority = await _queued(p, x_llm_d_inference_objective="batch")
        assert priority == LOW  # llm-d's name of the header
        envoy.call.cancel()
        await until(lambda: not p.service.admission.queue.waiting)
        envoy, priority = await _queued(p, x_gateway_inference_objective="batch", x_priority="high")
        assert priority == HIGH  # what the client asks for itself
        envoy.call.cancel()
        first.call.cancel()


async def test_a_sheddable_request_is_429_when_time_is_up_and_others_go_to_the_best_node() -> None:
    tables: dict[str, Any] = {**FULL, "picker": {"port": 0, "message_timeout_s": 0.3}}
    async with engines(1) as nodes, picker(*nodes, **tables) as p:
        p.server.objectives = lambda: {"batch": "low"}
        first = p.stream("buffered")
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        started_s = asyncio.get_running_loop().time()
        shed = await p.ask(chat_body(LONG, stream=True), x_gateway_inference_objective="batch")
        assert asyncio.get_running_loop().time() - started_s >= 0.25
        assert (shed.status, shed.error["code"], shed.response_headers["retry-after"]) == (429, "overloaded", "5")
        assert p.service.counters.rejected["envoy_timeout", LOW] == 1
        for priority in ("normal", "high"):
            sent = await p.ask(chat_body(LONG, stream=True), x_priority=priority)
            assert sent.endpoints == [f"127.0.0.1:{nodes[0].port}"]
        first.call.cancel()


# Health.


async def _check(p: RunningPicker, service: str) -> int:
    encoded = service.encode()
    request = b"\x0a" + bytes([len(encoded)]) + encoded if service else b""
    answer = await p.channel.unary_unary("/grpc.health.v1.Health/Check")(request)
    return int(answer[1])


async def test_the_health_service_answers_liveness_and_readiness() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        for service in ("", "liveness", "readiness", SERVICE):
            assert await _check(p, service) == 1
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await _check(p, "other")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        watch = p.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert (await watch.read())[1] == 1
        p.service.proxy.own_endpoints.stopping = True
        assert (await watch.read())[1] == 2
        assert await _check(p, "readiness") == await _check(p, SERVICE) == 2
        assert await _check(p, "liveness") == 1
        watch.cancel()
