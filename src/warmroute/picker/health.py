"""grpc.health.v1: whether the picker is alive, and whether Envoy should ask it.

    "liveness"                                          the process answers
    "", "readiness", "envoy.service.ext_proc.v3…"       it has read its nodes once, and it does not stop

A picker without a node that could serve is ready all the same: it answers 503 itself, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc

from warmroute.picker.messages import SERVICE

WATCH_S: Final = 0.5
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"
_READINESS: Final = ("", "readiness", SERVICE)


def _service_of(request: bytes) -> str:
    """Return the field `service` (1) of a HealthCheckRequest."""
    if len(request) < 2 or request[0] != 0x0A or request[1] > 127:
        return ""
    return request[2 : 2 + request[1]].decode("utf-8", "replace")


class Health:
    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    def handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    def _status(self, service: str) -> bytes:
        if service == "liveness":
            return _SERVING
        if service in _READINESS:
            return _SERVING if self._is_ready() else _NOT_SERVING
        return _SERVICE_UNKNOWN

    async def _check(self, request: bytes, context: Any) -> bytes:
        status = self._status(_service_of(request))
        if status is _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return status

    async def _watch(self, request: bytes, context: Any) -> None:
        """Send the status, at once and at each change."""
        service, sent = _service_of(request), b""
        while True:
            status = self._status(service)
            if status != sent:
                sent = status
                await context.write(status)
            await asyncio.sleep(WATCH_S)
