"""The memory for request bodies is shared between tenants: no tenant can take the room of another."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from typing import Any

import pytest
from support.engine_scripts import hanging, http_response, script
from support.polling import until
from support.raw_client import RawConnection, Response, chat, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.edge.client_connection import BodyMemory
from warmroute.edge.errors import HttpError

MB = 1_000_000
LIMITS = {"buffered_bytes": 8 * MB, "body_bytes": 2 * MB}
BODY = chat("x" * (2 * MB - 1000))


def keys(*tenants: str) -> list[dict[str, Any]]:
    return [
        {"sha256": hashlib.sha256(tenant.encode()).hexdigest(), "tenant": tenant, "max_priority": "low"}
        for tenant in tenants
    ]


async def unfinished(r: RunningRouter, tenant: str, body: bytes = BODY) -> RawConnection:
    """Send all of a request but its last byte."""
    peer = await r.connect()
    before = r.service.listener.buffered_bytes
    peer.write(post(body, headers=[f"Authorization: Bearer {tenant}"] if tenant else [])[:-1])
    size = len(body) - 1
    await until(lambda: r.service.listener.buffered_bytes >= before + size or peer.reader._buffer)  # type: ignore[attr-defined]
    return peer


async def ask(r: RunningRouter, tenant: str, body: bytes = BODY) -> Response:
    return await r.request(post(body, headers=[f"Authorization: Bearer {tenant}"]))


async def test_unfinished_bodies_of_one_tenant_leave_room_for_the_others() -> None:
    async with engines() as [engine], router(engine, limits=LIMITS, keys=keys("a", "b", "c")) as r:
        held = [await unfinished(r, "a") for _ in range(4)]
        assert r.service.listener.buffered_bytes <= LIMITS["buffered_bytes"] // 2
        for tenant in ("b", "c", "b"):
            assert (await ask(r, tenant)).status == 200
        rejected = [await peer.response() for peer in held[2:]]
        for response in rejected:
            assert response.status == 503 and response.error["code"] == "tenant_buffer_full"
            assert response.get("retry-after") == "1"
        held[0].write(BODY[-1:])
        assert (await held[0].response()).status == 200, "a body within the share goes on"


async def test_the_tenant_with_the_most_gives_way_when_memory_is_short() -> None:
    async with engines() as [engine], router(engine, limits=LIMITS, keys=keys("a", "b", "c")) as r:
        small = await unfinished(r, "a", chat("x" * MB))
        large = await unfinished(r, "a")
        other = await unfinished(r, "b", chat("x" * (MB + MB // 2)))
        assert (await ask(r, "c")).status == 200
        response = await large.response()
        assert response.status == 503 and response.error["code"] == "tenant_buffer_full"
        assert "had not arrived completely" in response.error["message"]
        assert await large.is_closed()
        for peer in (small, other):
            peer.write(b'"}]}'[-1:])
            assert (await peer.response()).status == 200


async def test_complete_bodies_stay_and_the_next_tenant_still_has_room() -> None:
    async with engines() as [engine], router(engine, limits=LIMITS, keys=keys("a", "b")) as r:
        engine.behave = hanging
        running = []
        for _ in range(2):
            running.append(await r.connect())
            running[-1].write(post(BODY, headers=["Authorization: Bearer a"]))
        await until(lambda: len(engine.seen) == 2)
        assert (await ask(r, "a")).error["code"] == "tenant_buffer_full"
        engine.behave = script(http_response())
        assert (await ask(r, "b", chat("x" * MB))).status == 200
        second = await unfinished(r, "b")
        assert (await ask(r, "b", chat("x" * MB))).error["code"] == "request_buffer_full", "a has more, and keeps it"
        second.disconnect()
        for peer in running:
            peer.disconnect()


@pytest.mark.parametrize("configured", [[], ["a"]], ids=["no keys", "one tenant"])
async def test_a_single_tenant_may_take_all_of_the_memory(configured: list[str]) -> None:
    async with engines() as [engine], router(engine, limits=LIMITS, keys=keys(*configured)) as r:
        held = [await unfinished(r, "a") for _ in range(4)]
        assert r.service.listener.buffered_bytes > 7 * MB
        refused = await ask(r, "a", chat("x" * MB))
        assert refused.status == 503 and refused.error["code"] == "request_buffer_full"
        for peer in held:
            peer.write(BODY[-1:])
            assert (await peer.response()).status == 200


async def test_requests_that_wait_behind_others_count_for_their_tenant() -> None:
    limits = {**LIMITS, "buffered_bytes": MB}
    async with engines() as [engine], router(engine, limits=limits, keys=keys("a", "b")) as r:
        engine.behave = hanging
        pipelining = []
        for _ in range(4):
            peer = await r.connect()
            peer.write(post(headers=["Authorization: Bearer a"]) + b"x" * 400_000)
            pipelining.append(peer)
        await until(lambda: len(engine.seen) == 4)
        await asyncio.sleep(0.1)
        assert r.service.listener.buffered_bytes <= MB // 2
        engine.behave = script(http_response())
        assert (await ask(r, "b", chat("x" * 100_000))).status == 200
        for peer in pipelining:
            peer.disconnect()


async def test_bodies_without_a_key_take_their_own_share_only() -> None:
    """/health needs no key, and a request for it may have a body."""
    async with engines() as [engine], router(engine, limits=LIMITS, keys=keys("a", "b")) as r:
        for _ in range(4):
            peer = await r.connect()
            peer.write(get("/health", f"Content-Length: {2 * MB}") + b"x" * (2 * MB - 1))
        await until(lambda: r.service.listener.buffered_bytes > 3 * MB)
        for tenant in ("a", "b"):
            assert (await ask(r, tenant)).status == 200


class Receiver:
    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self.memory, self.tenant, self.held, self.gone = memory, tenant, 0, False

    def receive(self, size: int, limit: int) -> bool:
        try:
            self.memory.reserve(self.tenant, size, limit)
        except HttpError:
            self.give_way()
            return False
        self.held += size
        self.memory.arrives(self.tenant, self, self.held)
        return True

    def give_way(self) -> None:
        self.gone = True
        self.memory.arrived(self.tenant, self)
        self.memory.release(self.tenant, self.held)
        self.held = 0


@pytest.mark.parametrize("tenants", [2, 3, 5])
def test_tenants_that_take_what_they_can_get_end_with_equal_shares(tenants: int) -> None:
    memory, limit = BodyMemory(), 6_000_000
    receivers: list[Receiver] = []
    for turn in range(6000):
        tenant = str(turn % tenants if turn > 1000 else 0)  # the first one has a head start
        growing = [one for one in receivers if one.tenant == tenant and not one.gone and one.held < 50_000]
        if not growing:
            growing = [Receiver(memory, tenant)]
            receivers += growing
        growing[0].receive(10_000, limit)
        assert memory.total_bytes == sum(one.held for one in receivers) <= limit
    shares = [memory.by_tenant[str(number)] / limit for number in range(tenants)]
    assert all(abs(share - 1 / (tenants + 1)) < 0.03 for share in shares), shares
    for one in receivers:
        if not one.gone:
            one.give_way()
    assert memory.total_bytes == 0 and not memory.by_tenant and not memory._incomplete


async def test_pipelined_bytes_are_released_for_the_tenant_that_they_were_counted_for() -> None:
    """The rest of a pipelined request of another tenant arrives in the moment in which the response ends."""
    async with engines() as [engine], router(engine, keys=keys("a", "b")) as r:
        second = post(chat(), headers=["Authorization: Bearer b"])
        seen = 0
        with socket.create_connection(("127.0.0.1", r.port)) as client:
            client.setblocking(False)

            async def behave(_engine: Any, _received: Any, writer: asyncio.StreamWriter) -> None:
                nonlocal seen
                seen += 1
                if seen == 2:
                    await asyncio.Event().wait()
                await until(lambda: r.service.listener.buffered_bytes > 0)
                client.send(second[:40])  # it waits for the first response, counted for a
                await asyncio.sleep(0.1)
                os.write(writer.get_extra_info("socket").fileno(), http_response())
                client.send(second[40:])  # with the response, in one batch of events

            engine.behave = behave
            client.send(post(chat(), headers=["Authorization: Bearer a"]))
            await until(lambda: seen == 2)
        await until(lambda: not r.inflight() and not r.service.listener.connections)
        bodies = r.service.listener.bodies
        assert bodies.total_bytes == 0 and not bodies.by_tenant
