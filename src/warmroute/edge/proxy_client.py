"""What the proxy needs of a client, and of what does the I/O of its request: a connection, or a stream from Envoy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from warmroute.core.calls import AttemptDriver, Attempts
from warmroute.edge.arrival import Rights
from warmroute.edge.client_connection import Exchange
from warmroute.edge.errors import Headers, HttpError
from warmroute.edge.trace_context import RequestTrace
from warmroute.prompt.prompt import Prompt

if TYPE_CHECKING:
    from warmroute.prompt.reader import PendingPrompt


class RequestExchange(Exchange, AttemptDriver, Protocol):
    attempts: Attempts
    trace: RequestTrace | None
    node_fields: bytes
    """Header lines for a node; empty: the client's as they are."""
    pending_prompt: PendingPrompt | None
    """Set while the prompt is being read in a thread or by a node."""

    def prompt_read(self, prompt: Prompt | None) -> None: ...

    def send_error(self, error: HttpError) -> None:
        """End a request that has no node with an error."""

    def has_last_event(self) -> bool:
        """Return whether the client has all events of its response, though the response has not ended."""

    def response_complete(self) -> None:
        """The client has left after the last event."""

    def release(self) -> None:
        """Give up what the request holds."""

    def forget(self) -> None:
        """Drop the body of a request that has ended."""


class ProxyClient(Protocol):
    @property
    def rights(self) -> Rights:
        """What the current request may do."""

    @property
    def body_started_s(self) -> float: ...

    def reply(self, status: int, body: bytes, headers: Headers = (), content_type: str = ...) -> None:
        """Send a response of the router itself."""

    def send_error(self, error: HttpError, request_id: bytes = b"") -> None: ...

    def is_serving(self, exchange: Any) -> bool:
        """Return whether this exchange answers the current request."""

    def replace_exchange(self, exchange: Any, other: Any) -> None:
        """Another exchange answers the current request from now on."""
