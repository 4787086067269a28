"""What uvicorn's two HTTP implementations make of the bytes of a request, without sockets."""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class _Nothing:
    """A connection that writes nowhere, and an event loop that runs nothing."""

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def create_task(self, coroutine: Any, **_named: Any) -> _Nothing:
        coroutine.close()
        return self

    def __getattr__(self, _name: str) -> Any:
        return lambda *_given, **_named: self


async def _app(_scope: Any, _receive: Any, _send: Any) -> None: ...


_config = uvicorn.Config(_app, lifespan="off", log_config=None, proxy_headers=False)
_config.load()


def scopes(request: bytes) -> dict[str, dict[str, Any] | None]:
    """Return the ASGI scope of a request by implementation; None where that refuses it."""
    found: dict[str, dict[str, Any] | None] = {}
    nothing: Any = _Nothing()
    for kind in (HttpToolsProtocol, H11Protocol):
        protocol: Any = kind(_config, ServerState(), {}, nothing)
        protocol.connection_made(nothing)
        protocol.data_received(request)
        found[kind.__name__] = None if protocol.cycle is None else protocol.cycle.scope
    return found
