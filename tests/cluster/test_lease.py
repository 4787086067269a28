"""The lease of the autoscaler on a real server: never two leaders that can act, and a successor within one lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from support.polling import until
from support.redis_server import RedisServer, needs_redis, redis_server

from warmroute.app.redis import Lease, boot_time_s, end_tasks
from warmroute.config import Cluster

pytestmark = needs_redis


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.command("FLUSHALL")
    return shared_server


@asynccontextmanager
async def leases(server: RedisServer, *names: str) -> AsyncIterator[list[Lease]]:
    found = [Lease(Cluster(url=server.url, lease_s=1.0), name) for name in names]
    for lease in found:
        lease.start()
    try:
        await until(lambda: any(lease.is_leader() for lease in found), "one leads")
        yield found
    finally:
        for lease in found:
            await lease.close()


async def kill(lease: Lease) -> None:
    """End it without a release, as a crash does."""
    assert lease._task is not None
    await end_tasks([lease._task])


async def test_one_leads_and_a_released_lease_is_taken_at_once(server: RedisServer) -> None:
    async with leases(server, "a", "b", "c") as found:
        (leader,) = [lease for lease in found if lease.is_leader()]
        assert await leader.commit(b"state 1")
        others = [lease for lease in found if lease is not leader]
        assert not any([await lease.commit(b"wrong") for lease in others])
        first_token = leader.token
        await leader.close()
        await until(lambda: sum(lease.is_leader() for lease in others) == 1)
        (successor,) = [lease for lease in others if lease.is_leader()]
        assert successor.state == b"state 1" and successor.token > first_token
        assert not leader.is_leader() and not await leader.commit(b"late")


async def test_a_leader_that_was_suspended_is_refused_although_it_believes_to_lead(server: RedisServer) -> None:
    async with leases(server, "a") as [a], leases_after(server, "b") as b:
        await kill(a)
        stopped_s = time.monotonic()
        a._now = lambda: boot_time_s() - 3600.0  # its clock stood still
        a._ends_s = a._now() + 3600.0
        a._client = b._client
        await until(b.is_leader, "another one leads")
        assert time.monotonic() - stopped_s < 4.0  # one lease of 1 s, on a busy machine
        assert a.is_leader()
        assert not await a.commit(b"late"), "the server knows a newer token"
        assert await b.commit(b"state 2") and not a.is_leader()


@asynccontextmanager
async def leases_after(server: RedisServer, name: str) -> AsyncIterator[Lease]:
    """A candidate that starts after another one leads."""
    lease = Lease(Cluster(url=server.url, lease_s=1.0), name)
    lease.start()
    try:
        await until(lambda: lease._free_s > 0.0, "it knows of the leader")
        yield lease
    finally:
        await lease.close()


async def test_a_flushed_server_never_has_two_leaders(server: RedisServer) -> None:
    async with leases(server, "a") as [a], leases_after(server, "b") as b:
        for _ in range(3):
            before = a.token
            server.command("FLUSHALL")
            while a.token == before:
                assert not (a.is_leader() and b.is_leader())
                await asyncio.sleep(0.002)
            assert a.is_leader()
            assert await a.commit(b"state") and not await b.commit(b"state")


async def test_a_server_that_takes_no_writes_has_no_leader(server: RedisServer) -> None:
    async with leases(server, "a") as [a]:
        server.command("CONFIG", "SET", "maxmemory", "1")
        try:
            assert not await a.commit(b"state" * 100)
            await until(lambda: not a.is_leader(), "its lease ends")
        finally:
            server.command("CONFIG", "SET", "maxmemory", "0")
        await until(a.is_leader, "it leads again")
