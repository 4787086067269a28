"""A request whose body is scanned in a thread. It is served like any other once that is done."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmroute._kernel import RequestHead
from warmroute.edge import errors
from warmroute.edge.arrival import ScannedBody
from warmroute.edge.errors import HttpError
from warmroute.edge.trace_context import RequestTrace

if TYPE_CHECKING:
    from warmroute.edge.proxy import Proxy
    from warmroute.edge.proxy_client import ProxyClient


@dataclass(slots=True, eq=False)
class LargeBodyExchange:
    """Implements listener.Exchange until the scan is done."""

    _proxy: Proxy
    _client: ProxyClient
    _head: RequestHead
    _path: bytes
    _body: bytes
    _trace: RequestTrace | bytes | None
    scanning: Future[ScannedBody] = field(init=False)

    def scanned(self, done: Future[ScannedBody]) -> None:
        client, proxy = self._client, self._proxy
        body, self._body = self._body, b""
        del self.scanning  # it refers to this exchange
        if done.cancelled() or not client.is_serving(self):
            return
        try:
            exchange = proxy.begin(client, self._head, self._path, body, done.result(), self._trace)
        except HttpError as error:
            self._end_trace(error)
            client.send_error(error)
        except Exception as error:
            self.internal_error(error)
        else:
            client.replace_exchange(self, exchange)

    def client_left(self) -> None:
        self.scanning.cancel()
        self._body = b""
        self._proxy.counters.disconnects += 1
        if isinstance(self._trace, RequestTrace):
            self._trace.end(self._proxy.now(), client_left=True)

    def cut_off(self) -> None:
        self.scanning.cancel()
        self._body = b""
        error = errors.router_stopping()
        self._end_trace(error)
        self._client.send_error(error)

    def _end_trace(self, error: Exception) -> None:
        if isinstance(self._trace, RequestTrace):
            end_with(self._trace, error, self._proxy.now())

    def pause_response(self) -> None:
        """There is no response yet."""

    def resume_response(self) -> None:
        pass

    def internal_error(self, error: Exception) -> None:
        self._end_trace(error)
        self._client.send_error(self._proxy.internal_error(error, self._head.request_id))


def end_with(trace: RequestTrace, error: Exception, now_s: float) -> None:
    """End the trace of a request that the router answers with an error before it asks for a node."""
    known = error if isinstance(error, HttpError) else errors.internal_error()
    trace.end(now_s, known.status, known.code)
