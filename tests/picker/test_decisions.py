"""The picker's answer to a request: endpoints in order, as header and as metadata, in each of Envoy's body modes."""

from __future__ import annotations

import pytest
from support.picker import chat_body, picker
from support.scripted_engine import engines


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
