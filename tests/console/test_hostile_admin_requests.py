"""No body, path, query or header makes the admin API fail: it succeeds, or answers with an error that says why not."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.raw_client import RawConnection, Response
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app.workers.combined_admin import CombinedAdmin
from warmroute.config import Limits
from warmroute.edge.async_handler import AsyncHandler
from warmroute.edge.client_connection import Listener
from warmroute.edge.timer_wheel import TimerWheel

BODIES = {
    "/admin/nodes": b'{"url": "http://[::1]:1", "name": "new", "max_model_len": 4096, "models": ["m"]}',
    "/admin/nodes/node0/role": b'{"role": "mixed"}',
    "/admin/nodes/node0/blocks": b'{"sequence": 0, "block_size": 1, "snapshot": true, '
    b'"removed": [1, {"hashes": ["a"]}], '
    b'"stored": [{"hashes": [1], "token_ids": [1], "lora": "l", "salt": "s", "tier": "cpu"}]}',
    "/admin/explain": b'{"path": "/v1/chat/completions", "headers": {"X-Session-Id": "7"}, "tenant": "", '
    b'"body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}}',
    "/admin/reload": b"",
    "/admin/nodes/node0/drain": b"",
    "/admin/nodes/node0/undrain": b"",
}
"""Each path that takes POST, with a body that it accepts."""
PATHS = (
    "/", "/page/x", "/metrics", "/health", "/ready", "/admin/capture", "/admin/nodes", "/admin/nodes/node0",
    "/admin/models", "/admin/islands", "/admin/scaling", "/admin/cluster", "/admin/prompts", "/admin/discovery",
    "/admin/decisions", "/admin/decisions/none",
)  # fmt: skip
FRAGMENTS = (
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\\ud800", b"\\u0000", b"\0", b'"', b"\\",
    b"{", b"]", b",", b":", b"null", b"-1", b"1e999", b"9" * 400, b"true", b"NaN", b'{"a":' * 60_000, b"[" * 60_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1 << 63, 1 << 64, 10**400, 1e308, float("nan"), True, "", "\ud800", "\0", "x" * 5000, "/v1/models",
    "m\udfff", [], {}, [None], [[]], {"": ""}, {"\ud800": "\ud800"}, ["\ud800"], [1 << 32], [-1], [0] * 1000,
)  # fmt: skip
QUERIES = ("?", "?limit=%ff", "?limit=" + "9" * 9, "?limit=%00", "?limit=-1", "?show_text=%ff", "?=&&;=" + "&a" * 500)
HEADERS = (
    (), ("Accept: \xff;q=\xff", "Accept-Encoding: \xff"), ("Accept: a;q=nan", "Accept-Encoding: gzip;q=1e999"),
    ("Origin: \xff",), ("Authorization: Bearer \xff",),
)  # fmt: skip


def deep(body: bytes) -> bytes:
    """Nest the body so deeply that a parser with a stack gives up, and close every bracket."""
    return b'{"body":' * 5000 + body + b"}" * 5000


def with_another_value(tree: Any, source: random.Random) -> Any:
    """Put a hostile value somewhere into a tree of JSON values."""
    if not isinstance(tree, dict | list) or not tree or source.random() < 0.2:
        return source.choice(VALUES)
    at = source.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    tree[at] = with_another_value(tree[at], source)
    return tree


def mutations(body: bytes, count: int, source: random.Random) -> list[bytes]:
    found = [deep(body), deep(b"1"), b'{"body": ' + deep(b"1") + b"}"]
    for number in range(count):
        changed = body
        if number % 2 and body:
            found.append(json.dumps(with_another_value(json.loads(body), source)).encode())
            continue
        for _ in range(source.randrange(1, 4)):
            at, fragment = source.randrange(len(changed) + 1), source.choice(FRAGMENTS)
            changed = changed[:at] + fragment + changed[at + source.randrange(3) :]
        found.append(changed)
    return found


async def send(port: int, method: str, path: str, body: bytes, *headers: str) -> Response:
    peer = RawConnection(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    peer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
    try:
        return await peer.response()
    finally:
        peer.disconnect()


class RunningWorker:
    """Implements worker_api.ServingWorker."""

    number = 0
    answers = True

    def __init__(self, socket: Path) -> None:
        self.admin_socket = str(socket)


class OneWorker:
    """Implements combined_admin.Workers."""

    restarts = 0

    def __init__(self, socket: Path) -> None:
        self.serving = [RunningWorker(socket)]

    async def reload(self, reason: str) -> tuple[int, bytes]:
        return 200, b"{}"


@asynccontextmanager
async def combined_admin(r: RunningRouter, folder: Path) -> AsyncIterator[int]:
    """The admin API of `serve --workers` in front of the router's own. Yields its port."""
    loop, socket = asyncio.get_running_loop(), folder / "admin"
    worker = await loop.create_unix_server(r.service.admin_listener.protocol, socket)
    combined = CombinedAdmin(OneWorker(socket), "")
    handler = AsyncHandler(combined.answer, combined.check_head)
    listener = Listener(handler, Limits(), TimerWheel(time.monotonic))
    server = await loop.create_server(listener.protocol, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        listener.abort_all()
        server.close()
        worker.close()


@pytest.mark.parametrize("with_workers", [False, True])
async def test_hostile_requests_get_no_internal_error(
    with_workers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(32)
    async with engines() as [engine], router(engine) as r, combined_admin(r, tmp_path) as combined_port:
        port = combined_port if with_workers else r.service.admin_port
        for path, body in BODIES.items():
            for sent in mutations(body, 80, source):
                reply = await send(port, "POST", path, sent)
                assert reply.status in (200, 201, 400, 404, 409, 413, 503), (path, sent[:200], reply.body)
        assert (await send(port, "GET", "/admin/nodes/node0", b"")).status == 200
        for path in PATHS:
            for more in (*QUERIES, "%ff", "%2f%00", "/%ed%a0%80"):
                for headers in HEADERS:
                    reply = await send(port, "GET", path + more, b"", *headers)
                    assert reply.status < 500 or reply.status == 503, (path + more, headers, reply.body)
    failed = [record.getMessage() for record in caplog.records if "handler_failed" in record.getMessage()]
    assert not failed and not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body])
@pytest.mark.parametrize(
    "body", [b'{"url": "\xff", "role": "\xff", "body": {"a": "\xff"}}', deep(b"1")], ids=["bytes", "deep"]
)
async def test_a_body_that_is_no_json_text_is_a_400(path: str, body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        reply = await r.admin("POST", path, body)
        assert reply.status == 400 and reply.error["message"]
