"""The headers that the picker adds to responses: those of the proxy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gated_engine import PRICE
from support.picker import RunningPicker, chat_body, headers_message, picker
from support.scripted_engine import engines

from warmroute.app.journal import describe
from warmroute.core.messages import Outcome
from warmroute.edge.arrival import hash_key
from warmroute.edge.envoy import ext_proc

TEXT = "some words of a prompt " * 200
ID = "my-own-id"
FROM_NODE = {":status": "200", "x-envoy-upstream-service-time": "1"}


async def _mutation(
    p: RunningPicker, fallback: int = 0, fields: dict[str, str] | None = None, mode: str = "streamed", **headers: Any
) -> tuple[dict[str, str], list[str]]:
    """Send a request, which an endpoint answers with these fields. Return what the picker sets, and what it removes."""
    envoy = p.stream("buffered", mode)
    await envoy.send_request(chat_body(TEXT), **headers)
    endpoints = (await envoy.decision()).endpoints
    message = headers_message("response_headers", fields or FROM_NODE, end=True)
    message.metadata_context.filter_metadata["envoy.lb"][ext_proc.SERVED] = endpoints[fallback]
    await envoy.call.write(message)
    mutation = (await envoy.read()).response_headers.response.header_mutation
    await envoy.finish()
    assert all(one.append_action == ext_proc.OVERWRITE_IF_EXISTS_OR_ADD for one in mutation.set_headers)
    found = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
    return found, list(mutation.remove_headers)


@pytest.mark.parametrize("mode", ["none", "streamed", "duplex"])
async def test_every_response_has_the_id_of_its_request(mode: str) -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:
        assert await _mutation(p, mode=mode, x_request_id=ID) == ({"x-request-id": ID}, [])
        found, _removed = await _mutation(p, mode=mode)
        [call] = p.service.last_decisions.latest(1)
        assert found == {"x-request-id": describe(call, 0.0)["request_id"]}


async def test_the_headers_name_the_node_that_served_and_the_hit() -> None:
    async with engines(2) as nodes, picker(*nodes, routing=PRICE, journal={"response_headers": "always"}) as p:
        for fallback in (0, 1):
            served = {node.name: node.outcomes[Outcome.OK] for node in p.service.fleet}
            found, _removed = await _mutation(p, fallback, x_request_id=ID)
            node = p.service.fleet.node(found.pop("x-warmroute-node"))
            assert node.outcomes[Outcome.OK] == served[node.name] + 1
            if not fallback:  # the router did not expect anything of a fallback's cache
                assert re.fullmatch(r"\d+/[1-9]\d*", found.pop("x-warmroute-hit"))
            assert found == {"x-request-id": ID}


async def test_on_request_only_those_who_ask_learn_the_node() -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE, journal={"response_headers": "on_request"}) as p:
        assert list((await _mutation(p))[0]) == ["x-request-id"]
        found, _removed = await _mutation(p, x_warmroute_explain="1")
        assert list(found) == ["x-request-id", "x-warmroute-node", "x-warmroute-hit"]


async def test_an_answer_of_envoy_names_no_node() -> None:
    always: dict[str, Any] = {"journal": {"response_headers": "always"}, "health": {"consecutive_failures": 100}}
    async with engines(1) as nodes, picker(*nodes, routing=PRICE, **always) as p:
        assert await _mutation(p, fields={":status": "503"}, x_request_id=ID) == ({"x-request-id": ID}, [])


async def test_the_limits_of_the_tenant_replace_those_of_the_node() -> None:
    keys = [{"tenant": "a", "sha256": hash_key("secret"), "requests_per_min": 50}]
    async with engines(1) as nodes, picker(*nodes, keys=keys) as p:
        fields = {**FROM_NODE, "x-ratelimit-limit-tokens": "7"}
        found, removed = await _mutation(p, fields=fields, authorization="Bearer secret")
        assert (found["x-ratelimit-limit-requests"], found["x-ratelimit-remaining-requests"]) == ("50", "49")
        assert removed == ["x-ratelimit-limit-tokens"]


async def test_errors_have_the_id_of_their_request() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        for body, status in ((b"{", 400), (chat_body(model="other"), 404)):
            answer = await p.ask(body, x_request_id=ID)
            assert (answer.status, answer.response_headers["x-request-id"]) == (status, ID)
            assert (await p.ask(body)).response_headers["x-request-id"]


@pytest.mark.parametrize("size", [1, 100, 127, 128, 200, 20_000])
def test_the_bytes_are_those_of_protobuf(size: int) -> None:
    value, remove = b"v" * size, ["x-ratelimit-limit-tokens", "n" * size]
    option = ext_proc.HeaderValueOption(
        header=ext_proc.HeaderValue(key="x-request-id", raw_value=value), append_action=2
    )
    mutation = ext_proc.HeaderMutation(set_headers=[option, option], remove_headers=remove)
    common = ext_proc.CommonResponse(header_mutation=mutation)
    expected = ext_proc.Response(response_headers=ext_proc.HeadersResponse(response=common)).SerializeToString()
    assert ext_proc.response_headers([(b"X-Request-Id", value)] * 2, remove) == expected
