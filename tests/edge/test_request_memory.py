"""The memory of a request is freed when its response ends: the garbage collector has nothing to do."""

from __future__ import annotations

import gc

import pytest
from support.engine_scripts import DONE, SSE_HEAD, chunk, http_response, script
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.core.decision import Decision
from warmroute.core.routing_context import Query
from warmroute.edge.exchange import Exchange
from warmroute.edge.tries import NodeTry

OF_A_REQUEST = (Exchange, NodeTry, Query, Decision)
USAGE = b'"usage": {"prompt_tokens": 900, "completion_tokens": 1}'
WHOLE = (http_response(b'{"choices": [], %b}' % USAGE),)
STREAM = (SSE_HEAD, chunk(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'), DONE)


@pytest.mark.parametrize("response", [WHOLE, STREAM])
async def test_a_request_leaves_no_garbage(response: tuple[bytes, ...]) -> None:
    async with engines() as [engine], router(engine, routing={"policy": "price"}) as r:
        engine.behave = script(*response)
        gc.collect()
        gc.disable()
        try:
            for number in range(5):
                assert (await r.request(post(chat(f"{number} " + "word " * 400)))).status == 200
            left = [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, OF_A_REQUEST)]
        finally:
            gc.enable()
        assert left == []
