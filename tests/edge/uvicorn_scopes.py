"""What uvicorn's two HTTP implementations make of the bytes of a request, without sockets."""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class _Transport:
    """A connection that writes nowhere."""

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def __getattr__(self, _name: str) -> Any:
        return lambda *_given, **_named: None


class _Loop:
    """An event loop that runs nothing."""

    def create_task(self, coroutine: Any, **_named: Any) -> _Transport:
        coroutine.close()
        return _Transport()

    def __getattr__(self, _name: str) -> Any:
        return lambda *_given, **_named: _Transport()


async def _app(_scope: Any, _receive: Any, _send: Any) -> None: ...


_config = uvicorn.Config(_app, lifespan="off", log_config=None, proxy_headers=False)
_config.load()


def scopes(request: bytes) -> dict[str, dict[str, Any] | None]:
    """Return the ASGI scope of a request by implementation; None where that refuses it."""
    found: dict[str, dict[str, Any] | None] = {}
    for kind in (HttpToolsProtocol, H11Protocol):
        protocol = kind(_config, ServerState(), {}, _Loop())
        protocol.connection_made(_Transport())
        protocol.data_received(request)
        cycle = protocol.cycle
        found[kind.__name__] = None if cycle is None else cycle.scope
    return found
