"""grpc.health.v1: whether the picker is alive, and whether Envoy should ask it.

    "liveness"                                          the process answers
    "", "readiness", "envoy.service.ext_proc.v3…"       it has read its nodes once, and it does not stop

A picker without a node that could serve is ready all the same: it answers 503 itself, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from warmroute.picker.grpc_call import NOT_FOUND, Call
from warmroute.picker.messages import SERVICE

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
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


class HealthCall:
    """One Check, or one Watch, which sends the status at once and at each change."""

    def __init__(self, call: Call, is_ready: Callable[[], bool], watches: bool) -> None:
        self._call = call
        self._is_ready = is_ready
        self._watches = watches
        self._service = ""
        self._sent = b""
        self._timer: asyncio.TimerHandle | None = None

    def _status(self) -> bytes:
        if self._service == "liveness":
            return _SERVING
        if self._service in _READINESS:
            return _SERVING if self._is_ready() else _NOT_SERVING
        return _SERVICE_UNKNOWN

    def received(self, message: bytes) -> None:
        self._service = _service_of(message)
        if self._watches:
            self.cancelled()
            self._tell()
            return
        status = self._status()
        if status is _SERVICE_UNKNOWN:
            self._call.end(NOT_FOUND, "unknown service")
        else:
            self._call.write(status)
            self._call.end()

    def _tell(self) -> None:
        status = self._status()
        if status != self._sent:
            self._sent = status
            self._call.write(status)
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._tell)

    def too_large(self) -> None:
        self._call.reset()

    def client_finished(self) -> None:
        if self._timer is None:  # it asked nothing
            self._call.end()

    def cancelled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
