"""The head of a response, as far as Envoy shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from warmroute.edge.retry_after import seconds_of
from warmroute.fleet.node import Node
from warmroute.picker.messages import served_endpoint


class ObservedHead(NamedTuple):
    status: int
    """0 if it cannot be read."""
    served: Node | None
    """The node that answers; None if it is unknown."""
    by_envoy: bool
    """No node answers, but Envoy itself."""
    retry_after_s: int | None
    encoded: bool
    """Whether the body has a content coding, such as gzip."""
    is_event_stream: bool
    """Whether its tokens can be seen one by one."""


def read_response_head(message: Any, node_at: Callable[[str], Node | None]) -> ObservedHead:
    """`node_at`: returns the node at an endpoint."""
    status, content_type, retry_after = 0, b"", b""
    encoded = from_node = False
    for field in message.response_headers.headers.headers:
        name = field.key
        if name == ":status":
            value = field.raw_value or field.value.encode()
            status = int(value) if value.isdigit() and len(value) == 3 else 0
        elif name == "content-type":
            content_type = field.raw_value
        elif name == "retry-after":
            retry_after = field.raw_value
        elif name == "content-encoding":
            encoded = True
        elif name == "x-envoy-upstream-service-time":  # Envoy's own answers do not have it
            from_node = True
    served = served_endpoint(message)
    return ObservedHead(
        status,
        node_at(served) if served else None,
        not from_node and (status >= 500 or status == 429),
        seconds_of(retry_after) if status in (429, 503) else None,
        encoded,
        not encoded and content_type[:17].lower() == b"text/event-stream",
    )


def rate_limits(message: Any) -> list[str]:
    """Return the names of the node's headers about its rate limits."""
    fields = message.response_headers.headers.headers
    return [field.key for field in fields if field.key.startswith("x-ratelimit-")]
