"""The files of the live page: built from ui/ by `make page`, and served with headers that allow nothing else.

They contain no data of the router, so they need no token.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from warmroute.edge.async_handler import Request, Responder
from warmroute.edge.errors import HttpError
from warmroute.edge.local_replies import Headers

FOLDER: Final = Path(__file__).with_name("page")
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/app.css": ("app.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS: Final = tuple(path.encode() for path in _FILES)
SECURITY_HEADERS: Final[Headers] = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
)


class _File(NamedTuple):
    content_type: str
    plain: bytes
    compressed: bytes


class PageFiles:
    """Reads each file once, when it is first asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read = cache(self._read_file)

    def reply(self, request: Request, responder: Responder) -> None:
        """Raises HttpError for an unknown path."""
        if request.path not in _FILES:
            raise HttpError(404, "The live page has no such file.", code="not_found")
        file = self._read(request.path)
        headers: Headers = (*SECURITY_HEADERS, ("Cache-Control", "no-cache"), ("Vary", "Accept-Encoding"))
        if b"gzip" in request.head.get(b"accept-encoding"):
            responder.reply(200, file.compressed, file.content_type, (*headers, ("Content-Encoding", "gzip")))
        else:
            responder.reply(200, file.plain, file.content_type, headers)

    def _read_file(self, path: str) -> _File:
        name, content_type = _FILES[path]
        plain = (self._folder / name).read_bytes()
        return _File(content_type, plain, gzip.compress(plain, mtime=0))
