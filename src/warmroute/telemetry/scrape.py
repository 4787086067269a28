"""Serves the metrics page: renders it in a thread, once for all who ask at the same time, and compresses it.

The event loop only starts the thread and sends the result. A page of 64 nodes, 16 models and 100 tenants has megabytes:
Prometheus accepts it compressed, so that sending it takes a hundredth of the time.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from typing import Final

from warmroute.telemetry.exposition import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE

_GZIP: Final = 16 + zlib.MAX_WBITS
_LEVEL: Final = 1
"""Higher levels take several times as long, for a page that is a third smaller."""

_REFUSED: Final = re.compile(rb"q\s*=\s*0(\.0*)?")

Headers = tuple[tuple[str, str], ...]


class Scrapes:
    def __init__(self, render: Callable[[bool], list[bytes]]) -> None:
        """`render`: returns the page in pieces; True: in the format of OpenMetrics."""
        self._render = render
        self._running: dict[tuple[bool, bool], asyncio.Future[list[bytes]]] = {}

    async def page(self, accept: bytes, accept_encoding: bytes) -> tuple[list[bytes], str, Headers]:
        """Return the page in pieces, its content type and further headers, for these headers of the request."""
        openmetrics = b"application/openmetrics-text" in accept.lower()
        compressed = accepts_gzip(accept_encoding)
        key = (openmetrics, compressed)
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = self._running[key] = loop.run_in_executor(None, self._render_page, openmetrics, compressed)
            running.add_done_callback(lambda _: self._running.pop(key))
        page = await asyncio.shield(running)  # a client that disconnects must not cancel the page of the others
        headers: Headers = (("Vary", "Accept, Accept-Encoding"),)
        if compressed:
            headers = (("Content-Encoding", "gzip"), *headers)
        return page, OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE, headers

    def _render_page(self, openmetrics: bool, compressed: bool) -> list[bytes]:
        page = self._render(openmetrics)
        if not compressed:
            return page
        gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        return [b"".join([*[gzip.compress(piece) for piece in page], gzip.flush()])]


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return whether this `Accept-Encoding` names gzip, and does not refuse it with a quality of 0."""
    for item in accept_encoding.lower().split(b","):
        name, *parameters = [part.strip() for part in item.split(b";")]
        if name == b"gzip":
            return not any(_REFUSED.fullmatch(one) for one in parameters)
    return False
