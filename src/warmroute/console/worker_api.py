"""Asks the admin APIs of workers, which listen on Unix sockets that only their parent can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

from warmroute.edge.errors import HttpError
from warmroute.http_client import request

TIMEOUT_S: Final = 10.0
LIMIT_BYTES: Final = 256 << 20


class Reply(NamedTuple):
    worker: int
    socket: str
    status: int
    body: bytes


def no_worker() -> HttpError:
    return HttpError(503, "No worker serves at the moment.", code="no_worker", kind="server_error", retry_after_s=1)


async def ask(worker: int, socket: str, method: str, target: str, body: bytes = b"") -> Reply | None:
    """Return the worker's reply; None if it does not answer: it may have just ended."""
    url = f"http://localhost{target}"
    try:
        status, reply = await request(
            method, url, body, timeout_s=TIMEOUT_S, limit_bytes=LIMIT_BYTES, unix_socket=socket
        )  # fmt: skip
    except (OSError, TimeoutError):
        return None
    return Reply(worker, socket, status, reply)


async def ask_all(workers: Iterable[tuple[int, str]], method: str, target: str, body: bytes = b"") -> list[Reply]:
    """Ask all workers at the same time. Return the replies of those that answered."""
    replies = await asyncio.gather(*(ask(*worker, method, target, body) for worker in workers))
    return [reply for reply in replies if reply is not None]
