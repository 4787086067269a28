"""Reads what routing needs of a request's body: on the event loop if the body is small, otherwise in a thread.

The scan of a large body releases the interpreter lock, so the event loop serves other requests meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from warmroute._kernel import MAX_LOOP_BYTES, BadBody, Outline
from warmroute.edge import errors
from warmroute.edge.content_type import form_boundary
from warmroute.prompt.body_fields import read_json
from warmroute.prompt.multipart import BadForm, form_fields
from warmroute.prompt.request_body import generation_options

_JSON: Final = b"application/json"
"""The type of nearly all bodies."""
_THREADS: Final = 2


class ScannedBody:
    model: str
    """Empty where the body names none."""
    system: bytes | None
    """First characters of the system prompt."""
    user: bytes | None
    """First characters of the first user message."""
    session: bytes
    """The conversation's name; empty where the body has none."""
    outline: Outline | None
    """The positions of the fields of a JSON body."""
    max_output_tokens: int | None
    priority: int
    """As vLLM reads it: a lower number is served first."""
    streams: bool
    engine_field: str | None
    """The name of a field that only the router may set (ENGINE_FIELDS)."""

    def __init__(
        self,
        model: str,
        system: bytes | None = None,
        user: bytes | None = None,
        session: bytes = b"",
        outline: Outline | None = None,
        max_output_tokens: int | None = None,
        priority: int = 0,
        streams: bool = True,
        engine_field: str | None = None,
    ) -> None:
        self.model = model
        self.system = system
        self.user = user
        self.session = session
        self.outline = outline
        self.max_output_tokens = max_output_tokens
        self.priority = priority
        self.streams = streams
        self.engine_field = engine_field


def scan(path: bytes, content_type: bytes, body: bytes) -> ScannedBody:
    """Raises HttpError for a body that is malformed, or that the engine might read in another way."""
    boundary = None if content_type == _JSON else form_boundary(content_type)
    if boundary is not None:
        try:
            model, engine_field = form_fields(boundary, body)
            return ScannedBody(model, engine_field=engine_field)
        except BadForm as bad:
            raise errors.malformed_form(str(bad)) from None
    try:
        model, system, user, session, outline = read_json(body)
        max_output_tokens, priority, streams = generation_options(path, outline)
        return ScannedBody(
            model, system, user, session, outline, max_output_tokens, priority, streams, outline.engine_field
        )
    except BadBody as bad:
        problem, field = bad.args
        raise errors.invalid_field(field, problem) if field else errors.malformed_json(problem) from None


class BodyScanner:
    """Scans large bodies in threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "warmroute-body")

    def scan_in_thread(
        self, path: bytes, content_type: bytes, body: bytes, then: Callable[[Future[ScannedBody]], None]
    ) -> Future[ScannedBody]:
        """Return the scan, which can be cancelled until it starts. `then` is called on the event loop."""
        loop = asyncio.get_running_loop()

        def hand_to_loop(done: Future[ScannedBody]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(then, done)

        scanning = self._threads.submit(scan, path, content_type, body)
        scanning.add_done_callback(hand_to_loop)
        return scanning

    async def scan(self, path: bytes, content_type: bytes, body: bytes) -> ScannedBody:
        """Scan a body of any size. Raises HttpError."""
        if len(body) <= MAX_LOOP_BYTES:
            return scan(path, content_type, body)
        return await asyncio.wrap_future(self._threads.submit(scan, path, content_type, body))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
