"""Asks the admin APIs of workers, which listen on Unix sockets that only their parent can reach.

A worker that hangs is left out: the parent answers with what the others say, and names it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from warmroute.edge.errors import HttpError
from warmroute.http_client import request

TIMEOUT_S: Final = 10.0
"""For a worker whose event loop runs, but whose answer takes long."""
CHECK_S: Final = 0.05
"""How often the parent looks whether a worker that it waits for still runs."""
ALL_SILENT_S: Final = 0.9
LIMIT_BYTES: Final = 256 << 20


class ServingWorker(Protocol):
    """A worker, as the parent knows it."""

    number: int
    admin_socket: str

    @property
    def answers(self) -> bool:
        """Whether its event loop runs: the parent has just heard of it."""


class Reply(NamedTuple):
    worker: int
    socket: str
    status: int
    body: bytes


class Replies(NamedTuple):
    found: list[Reply]
    missing: list[int]
    """Workers that did not answer."""

    def body_of(self, reply: Reply) -> bytes:
        """Return one worker's answer, to which the workers are added that did not answer."""
        return self.encode(msgspec.json.decode(reply.body)) if self.missing else reply.body

    def encode(self, answer: dict[str, Any]) -> bytes:
        """Encode an answer, with the workers that did not take part in it."""
        return msgspec.json.encode(answer | {"workers_not_answering": self.missing} if self.missing else answer)


def no_worker(missing: Sequence[int] = ()) -> HttpError:
    hang = f" These do not answer: {', '.join(map(str, missing))}." if missing else ""
    return HttpError(
        503, f"No worker serves at the moment.{hang}", code="no_worker", kind="server_error", retry_after_s=1
    )


def wait_until_s(workers: Iterable[ServingWorker]) -> float:
    """Return until when to wait for workers that hang: as long as any other one answers, not at all. If none does, they
    may only be held up, on a machine without free CPU time."""
    return 0.0 if any(worker.answers for worker in workers) else time.monotonic() + ALL_SILENT_S


async def ask(worker: ServingWorker, method: str, target: str, body: bytes = b"", until_s: float = 0.0) -> Reply | None:
    """Return the worker's reply; None if it has just ended, or hangs. `until_s`: wait for it so long in any case."""
    call = asyncio.ensure_future(
        request(
            method, f"http://localhost{target}", body, timeout_s=TIMEOUT_S, limit_bytes=LIMIT_BYTES,
            unix_socket=worker.admin_socket,
        )
    )  # fmt: skip
    try:
        while worker.answers or time.monotonic() < until_s:
            if (await asyncio.wait((call,), timeout=CHECK_S))[0]:
                return Reply(worker.number, worker.admin_socket, *call.result())
    except (OSError, TimeoutError):
        pass
    finally:
        call.cancel()
    return None


async def ask_all(workers: Iterable[ServingWorker], method: str, target: str, body: bytes = b"") -> Replies:
    """Ask all workers at the same time."""
    asked = list(workers)
    until_s = wait_until_s(asked)
    replies = await asyncio.gather(*(ask(worker, method, target, body, until_s) for worker in asked))
    missing = [worker.number for worker, reply in zip(asked, replies, strict=True) if reply is None]
    return Replies([reply for reply in replies if reply is not None], missing)
