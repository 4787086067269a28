"""A real vLLM sends events of a response before its first token: the router waits for the content."""

from __future__ import annotations

import asyncio
import json

import pytest
from real_asking import MODEL, post, routed, run
from real_engine import RealEngine
from support import raw_client
from support.polling import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PAUSED_S = 0.5
TEXT = "where is the first token of this response? " * 12
BODIES = {
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}


@pytest.mark.parametrize("path", list(BODIES))
def test_the_prefill_lasts_until_the_first_content(real_engines: list[RealEngine], path: str) -> None:
    """The engine is paused while the request waits for its prefill. Only /v1/responses sends events meanwhile."""
    engine = real_engines[0]

    async def work() -> None:
        async with routed("price", engine.url) as r:
            [node] = r.service.fleet
            await post(engine, "/reset_prefix_cache")
            await post(engine, "/pause?mode=keep&clear_cache=false")
            try:
                peer = await r.connect()
                body = json.dumps({"model": MODEL, "stream": True, **BODIES[path]}).encode()
                peer.write(raw_client.post(body, path))
                if path == "/v1/responses":
                    assert b"response.created" in await peer.reader.readuntil(b"response.in_progress")
                await until(lambda: node.inflight == 1, "the request is sent to the engine", 30)
                await asyncio.sleep(PAUSED_S)
                assert node.inflight == 1 and node.pending_work > 0 and node.speed.answers == 0
            finally:
                await post(engine, "/resume")
            await until(lambda: node.inflight == 0, "the response ends", 30)
            assert node.speed.answers == 1 and sum(node.ttft_counts) == 1
            assert node.ttft_sum_ms > 1000 * PAUSED_S
            peer.close()

    run(work)
