"""A reload while a request's body arrives: the request keeps the rights that were checked when its head arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.picker import Answer, RunningPicker, chat_body, picker
from support.raw_client import RawConnection, Response, chat, post
from support.running_router import RunningRouter, quick_table, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.config import from_table
from warmroute.config.routing import LOW
from warmroute.edge.arrival import hash_key

LONG = "abcdefgh" * 400
LARGE = "x" * 400_000
"""Makes a body that is scanned in a thread."""
PRICE = {"policy": "price", "seed": 7}


def key(name: str, tenant: str = "a", **more: Any) -> dict[str, Any]:
    return {"sha256": hash_key(name), "tenant": tenant, **more}


def reload_with(r: RunningRouter | RunningPicker, engine: ScriptedEngine, **tables: Any) -> None:
    changed = from_table(quick_table([engine], **tables), experiment=True)
    r.service.config_reload.read_config = lambda: changed
    assert r.service.reload() is None


async def head_sent(r: RunningRouter, body: bytes, *headers: str) -> RawConnection:
    """Send a request's head, and return when the router waits for its body."""
    peer = await r.connect()
    request = post(body, headers=["Expect: 100-continue", *headers])
    peer.write(request[: -len(body)])
    assert (await peer.head()).status == 100
    return peer


async def across(r: RunningRouter, body: bytes, headers: list[str], reload: Callable[[], None]) -> Response:
    """Send a request whose body arrives after a reload."""
    peer = await head_sent(r, body, *headers)
    reload()
    peer.write(body)
    return await peer.response()


async def last_decision(r: RunningRouter) -> dict[str, Any]:
    found: dict[str, Any] = (await r.admin("GET", "/admin/decisions")).json["decisions"][0]
    return found


@pytest.mark.parametrize("text", ["hi", LARGE], ids=["small", "in a thread"])
@pytest.mark.parametrize(
    "after", [[], [key("another", "b")], [key("low", max_priority="high")]], ids=["none", "revoked", "raised"]
)
async def test_a_low_key_stays_low(after: list[dict[str, Any]], text: str) -> None:
    keys = [key("low", max_priority="low"), key("high", max_priority="high")]
    async with engines() as [engine], router(engine, keys=keys) as r:
        headers = ["Authorization: Bearer low", "X-Priority: high"]
        reply = await across(r, chat(text), headers, lambda: reload_with(r, engine, keys=after))
        assert reply.status == 200
        decision = await last_decision(r)
        assert (decision["priority"], decision["tenant"]) == ("low", "a")


async def test_a_revoked_key_allows_no_negative_priority() -> None:
    keys = [key("low", max_priority="low"), key("high", max_priority="high")]
    async with engines() as [engine], router(engine, keys=keys) as r:
        reply = await across(
            r,
            chat(priority=-1),
            ["Authorization: Bearer low"],
            lambda: reload_with(r, engine, keys=[key("another", "b")]),
        )
        assert (reply.status, reply.error["code"]) == (403, "priority_not_allowed")
        assert not engine.seen


async def test_a_request_of_a_revoked_key_counts_in_the_limits_of_its_tenant() -> None:
    async with engines() as [engine], router(engine, keys=[key("one", requests_per_min=1)]) as r:
        assert (await r.request(post(headers=["Authorization: Bearer one"]))).status == 200
        reply = await across(
            r, chat(), ["Authorization: Bearer one"], lambda: reload_with(r, engine, keys=[key("two", "b")])
        )
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")


async def test_changed_limits_of_the_same_tenant_apply() -> None:
    async with engines() as [engine], router(engine, keys=[key("one", requests_per_min=1)]) as r:
        changed = [key("one", requests_per_min=60)]
        assert (await r.request(post(headers=["Authorization: Bearer one"]))).status == 200
        reload_with(r, engine, keys=[key("one", requests_per_min=2)])
        reply = await across(r, chat(), ["Authorization: Bearer one"], lambda: reload_with(r, engine, keys=changed))
        assert reply.status == 429, "the tenant's bucket was empty, and still is"


async def test_a_key_for_the_router_is_not_sent_to_a_node_that_gets_clients_keys_since_a_reload() -> None:
    async with engines() as [engine], router(engine, keys=[key("one")]) as r:
        reply = await across(r, chat(), ["Authorization: Bearer one"], lambda: reload_with(r, engine))
        assert reply.status == 200
        assert b"Bearer" not in engine.seen[-1].head


async def test_a_revoked_tenant_gets_no_hits_of_others() -> None:
    keys = [key("one", "a"), key("two", "b"), key("three", "c")]
    async with engines() as [engine], router(engine, keys=keys, routing=PRICE) as r:
        for _ in range(2):
            assert (await r.request(post(chat(LONG), headers=["Authorization: Bearer one"]))).status == 200
        assert (await last_decision(r))["candidates"][0]["cached_tokens"] > 0
        headers = ["Authorization: Bearer two"]
        reply = await across(r, chat(LONG), headers, lambda: reload_with(r, engine, keys=keys[:1], routing=PRICE))
        assert reply.status == 200
        decision = await last_decision(r)
        assert (decision["tenant"], decision["candidates"][0]["cached_tokens"]) == ("b", 0)


async def test_the_routes_of_the_head_apply() -> None:
    before = [{"name": "batch", "tenant": "a", "priority": "low"}]
    after = [{"name": "fast", "tenant": "a", "priority": "high"}]
    keys = [key("one", max_priority="high")]
    async with engines() as [engine], router(engine, keys=keys, routes=before) as r:
        reply = await across(
            r, chat(), ["Authorization: Bearer one"], lambda: reload_with(r, engine, keys=keys, routes=after)
        )
        assert reply.status == 200
        decision = await last_decision(r)
        assert (decision["priority"], decision["route"]) == ("low", "batch")
        await r.request(post(headers=["Authorization: Bearer one"]))
        assert (await last_decision(r))["route"] == "fast"


async def test_the_next_request_of_the_connection_has_the_rights_of_its_own_head() -> None:
    keys = [key("low", max_priority="low")]
    async with engines() as [engine], router(engine, keys=keys) as r:
        peer = await head_sent(r, chat(), "Authorization: Bearer low", "X-Priority: high")
        reload_with(r, engine, keys=[key("low", max_priority="high")])
        peer.write(chat() + post(headers=["Authorization: Bearer low", "X-Priority: high"]))
        assert [(await peer.response()).status for _ in range(2)] == [200, 200]
        decisions = (await r.admin("GET", "/admin/decisions")).json["decisions"]
        assert [one["priority"] for one in decisions] == ["high", "low"]


async def test_a_request_through_envoy_keeps_its_rights() -> None:
    keys = [key("low", max_priority="low", requests_per_min=1), key("high", "b", max_priority="high")]
    async with engines() as [engine], picker(engine, keys=keys) as p:

        async def ask() -> Answer:
            envoy = p.stream("buffered")
            await envoy.send_request(
                chat_body(), between=lambda: reload_with(p, engine, keys=after),
                authorization="Bearer low", x_priority="high",
            )  # fmt: skip
            answer = await envoy.decision()
            envoy.call.cancel()
            await p.until_idle()
            return answer

        after = keys
        assert (await ask()).status == 0
        after = []
        assert (await ask()).status == 429
        reload_with(p, engine, keys=[key("low", "c", max_priority="low"), keys[1]])
        answer = await ask()
        assert "authorization" in answer.removed, "a key for the router is not for nodes"
        [call] = p.service.last_decisions.latest(1)
        assert (call.request.tenant, call.request.priority) == ("c", LOW)
