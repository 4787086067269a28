"""A client that leaves after the last event of its response has all of it: the request counts as complete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.engine_scripts import HANG, SSE_HEAD, chunk, script
from support.polling import until
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.core.messages import Outcome
from warmroute.edge.node_connection import NodeConnection
from warmroute.edge.response import has_last_event

TOKEN = b'data: {"choices":[{"delta":{"content":"[DONE]"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@pytest.mark.parametrize(
    ("pieces", "complete"),
    [
        ([TOKEN, DONE], True),
        ([TOKEN, b"data: [DO", b"NE]\n\n"], True),
        ([b"data:[DONE]"], True),
        ([TOKEN + DONE, b"\r\n0\r\n"], True),
        ([chunk(TOKEN), chunk(DONE)], True),
        ([TOKEN, STOP], True),
        ([TOKEN, COMPLETED.replace(b"\n", b"\r\n")], True),
        ([TOKEN], False),
        ([DONE, TOKEN], False),
        ([TOKEN, STOP[:30]], False),
        ([b'data: {"text":"data: [DONE]"}\n\n'], False),
        ([b'data: {"text":"\\ndata: [DONE]'], False),
        ([], False),
    ],
)
def test_the_last_event_is_recognized(pieces: list[bytes], complete: bool) -> None:
    assert has_last_event(b"".join(pieces)) is complete


@pytest.mark.parametrize(("events", "complete"), [((TOKEN, USAGE, DONE), True), ((TOKEN, USAGE), False)])
async def test_a_client_that_leaves_after_the_last_event_has_its_response(
    events: tuple[bytes, ...], complete: bool
) -> None:
    async with engines(1) as [node], router(node) as r:
        node.behave = script(SSE_HEAD, *map(chunk, events), HANG)
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        await asyncio.wait_for(peer.reader.readuntil(events[-1]), 10.0)
        peer.disconnect()
        outcome = Outcome.OK if complete else Outcome.CANCELLED
        await until(lambda: r.node(0).outcomes[outcome] == 1)
        assert r.service.counters.disconnects == (0 if complete else 1)
        assert r.service.counters.responses == ({200: 1} if complete else {})
        [call] = r.service.last_decisions.latest(1)
        assert call.usage == ((9, None, 3) if complete else None)


@pytest.mark.interpreted
@pytest.mark.parametrize("tls", [False, True])
async def test_the_kernel_passes_the_chunks_of_a_plain_stream_on(
    tls: bool, certificate: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sees the beginning and the end of a stream. It sees every chunk if the client speaks TLS."""
    seen: list[bytes] = []
    """Pieces with a chunk."""
    receive = NodeConnection.data_received

    def counted(self: NodeConnection, data: bytes) -> None:
        if TOKEN in data:
            seen.append(data)
        receive(self, data)

    monkeypatch.setattr(NodeConnection, "data_received", counted)
    listen = certificate["listen"] if tls else {}
    tokens: list[bytes | float] = [chunk(TOKEN), 0.02] * 20
    async with engines() as [engine], router(engine, listen=listen) as r:
        engine.behave = script(SSE_HEAD, *tokens, chunk(DONE) + b"0\r\n\r\n")
        peer = await r.connect(**({"ssl": certificate["trusting"]} if tls else {}))
        peer.write(post())
        response = await peer.response()
        assert response.complete and response.body.count(b"data: ") == 21
    assert len(seen) >= 3 if tls else len(seen) <= 2  # a slow machine reads several chunks at once
