"""A request whose body is scanned in a thread. It is served like any other once that is done."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmroute.edge import errors
from warmroute.edge.body_scanner import ScannedBody
from warmroute.edge.errors import HttpError
from warmroute.edge.http1 import RequestHead

if TYPE_CHECKING:
    from warmroute.edge.client_connection import ClientConnection
    from warmroute.edge.proxy import Proxy


@dataclass(slots=True, eq=False)
class LargeBodyExchange:
    """Implements listener.Exchange until the scan is done."""

    _proxy: Proxy
    _client: ClientConnection
    _head: RequestHead
    _path: bytes
    _body: bytes
    scanning: Future[ScannedBody] = field(init=False)

    def scanned(self, done: Future[ScannedBody]) -> None:
        client, proxy = self._client, self._proxy
        body, self._body = self._body, b""
        del self.scanning  # it refers to this exchange
        if done.cancelled() or not client.is_serving(self):
            return
        try:
            exchange = proxy.begin(client, self._head, self._path, body, done.result())
        except HttpError as error:
            client.send_error(error)
        except Exception as error:
            self.internal_error(error)
        else:
            client.replace_exchange(self, exchange)

    def client_left(self) -> None:
        self.scanning.cancel()
        self._body = b""
        self._proxy.counters.disconnects += 1

    def cut_off(self) -> None:
        self.scanning.cancel()
        self._body = b""
        self._client.send_error(errors.router_stopping())

    def pause_response(self) -> None:
        """There is no response yet."""

    def resume_response(self) -> None:
        pass

    def internal_error(self, error: Exception) -> None:
        self._client.send_error(self._proxy.internal_error(error, self._head.request_id))
