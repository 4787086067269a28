"""Request ids that the router makes are unique and cannot be guessed from others."""

from __future__ import annotations

import re

from support.raw_client import get, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.edge.arrival import random_ids


def test_ids_are_random() -> None:
    ids = [one for _ in range(8) for one in random_ids()]
    assert len(set(ids)) == len(ids) > 2000
    assert all(re.fullmatch(rb"wr-[0-9a-f]{32}", one) for one in ids)
    # A counter, or a prefix that all ids of a process share, would leave most digits as they were.
    for position in range(3, 35):
        assert len({one[position] for one in ids}) == 16


async def test_requests_and_errors_get_ids_that_do_not_follow_from_each_other() -> None:
    async with engines() as [engine], router(engine) as r:
        responses = [await r.request() for _ in range(3)] + [await r.request(get("/nothing"))]
        ids = [response.get("x-request-id") or "" for response in responses]
        assert all(re.fullmatch("wr-[0-9a-f]{32}", one) for one in ids)
        assert len({one[3:11] for one in ids}) == 4
        assert [seen.get(b"x-request-id") for seen in engine.seen] == [[one.encode()] for one in ids[:3]]


async def test_the_id_of_a_client_is_kept() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(headers=["X-Request-Id: mine-7"]))).get("x-request-id") == "mine-7"
