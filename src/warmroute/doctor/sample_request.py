"""A small request to a node: does the engine report cached tokens, and does it publish KV events?

It has one output token, and a prompt that no request had before and that fills a few KV blocks, so that the engine has
something to publish. vLLM before 0.10 reports cached tokens only if there are any; so without a report the same request
is sent once more.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from warmroute.doctor.node_facts import NodeFacts, printable
from warmroute.doctor.node_http import Answer, NodeHttp
from warmroute.engines.kv_endpoints import KvEndpoint
from warmroute.fleet.reported_values import decode_json

CONNECT_S: Final = 2.0
SUBSCRIBE_S: Final = 0.5
"""Time for a subscription to reach the engine. Events before that are lost."""
EVENT_S: Final = 3.0
REQUEST_S: Final = 120.0
_MAX_MESSAGE_BYTES: Final = 64 << 20
_DEFAULT_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class SampleResult:
    error: str = ""
    """Why the request failed; empty if it succeeded."""
    reports_cached_tokens: bool = False
    has_event: bool = False


async def unreachable_endpoints(endpoints: list[KvEndpoint]) -> list[str]:
    """Return the endpoints of events and replays that accept no connection."""
    names = [name for one in endpoints for name in (one.endpoint, one.replay) if name]
    return [name for name in names if not await _accepts(name)]


async def _accepts(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(CONNECT_S):
            _reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


async def send_sample(facts: NodeFacts, http: NodeHttp, endpoints: list[KvEndpoint]) -> SampleResult:
    """Send the request, and wait for a KV event if there are endpoints."""
    context = zmq.asyncio.Context()
    try:
        listening = asyncio.ensure_future(_first_event(context, endpoints))
        if endpoints:
            await asyncio.sleep(SUBSCRIBE_S)
        answer = await _complete(facts, http)
        if not answer.ok:
            listening.cancel()
            return SampleResult(error=answer.error or f"it answers {answer.status}: {_message(answer)}")
        has_event = False
        if endpoints:
            await asyncio.wait([listening], timeout=EVENT_S)
            has_event = listening.done()
        listening.cancel()
        return SampleResult("", _reports(answer), has_event)
    finally:
        context.destroy(linger=0)


async def _first_event(context: zmq.asyncio.Context, endpoints: list[KvEndpoint]) -> None:
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        for one in endpoints:
            socket.connect(one.endpoint)
        await socket.recv_multipart()
    finally:
        socket.close(linger=0)


async def _complete(facts: NodeFacts, http: NodeHttp) -> Answer:
    words = 2 * (facts.block_size or _DEFAULT_BLOCK) + 16
    window = facts.bases[0].get("max_model_len")
    if isinstance(window, int):
        words = min(words, window // 8)
    text = f"{os.urandom(8).hex()} " + "one two three four five six seven eight " * (words // 8 + 1)
    common = {"model": facts.bases[0]["id"], "max_tokens": 1, "temperature": 0}
    forms = [
        ("/v1/completions", {**common, "prompt": text}),
        ("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}),
    ]
    answer = Answer()
    for path, body in forms:
        answer = await http.post(path, json.dumps(body).encode(), REQUEST_S)
        if answer.ok and not _reports(answer):
            answer = await http.post(path, json.dumps(body).encode(), REQUEST_S)
        if answer.ok or answer.error or answer.status in (401, 403, 429) or answer.status >= 500:
            break
    return answer


def _reports(answer: Answer) -> bool:
    try:
        usage = decode_json(answer.body)["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return isinstance(details.get("cached_tokens"), int)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _message(answer: Answer) -> str:
    try:
        body = decode_json(answer.body)
        found = body.get("error", body)
        return printable(found.get("message", found) if isinstance(found, dict) else found, 200)
    except (ValueError, AttributeError):
        return "no JSON"
