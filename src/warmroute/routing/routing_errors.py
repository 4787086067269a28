"""Errors of a request that gets no node: no node can serve it, or admission rejects it although one could.

The latter carry a `reason` for metrics and a time after which the client may retry.
"""

from __future__ import annotations

from math import ceil
from typing import Final

MAX_RETRY_AFTER_S: Final = 60.0


class RoutingError(Exception):
    """The request gets no node."""


class UnknownModel(RoutingError):
    """No node serves this model, and every node has reported its models."""


class MissingModel(RoutingError):
    """The request names no model, and the fleet serves several."""


class NoNodeAvailable(RoutingError):
    """Nodes serve this model, or may do so, but none of them is available now."""


class NoNodeInSubset(RoutingError):
    """Nodes serve this model, but the request's subset contains none of them."""


class ContextTooLong(RoutingError):
    """The prompt is longer than the context window of every node that serves its model."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        """`max_model_len`: the longest window of these nodes."""
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class AllNodesFailed(RoutingError):
    """Every node that was tried failed before the client received anything."""

    def __init__(self, tried: int, retry_after_s: int | None) -> None:
        """`retry_after_s` is None where no node said that it is busy."""
        self.tried = tried
        self.retry_after_s = retry_after_s


class FailedOnEveryNode(AllNodesFailed):
    """Nodes that serve other requests answered this one with 5xx: the request itself is at fault."""

    def __init__(self, tried: int) -> None:
        super().__init__(tried, None)


class AllNodesUnavailable(RoutingError):
    """Every node that was tried answered 503, and not all of them said when to come back."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s


class NotAdmitted(RoutingError):
    """A node could serve the request, but admission rejects it."""

    reason = ""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = max(1, ceil(min(MAX_RETRY_AFTER_S, retry_after_s)))


class QueueFull(NotAdmitted):
    """Too many requests are in the admission queue."""

    reason = "queue_full"


class Displaced(QueueFull):
    """The request was removed from the queue in favour of one with a higher priority, or of one of a tenant that has
    fewer requests in it."""

    reason = "displaced"


class NodeQueuesFull(QueueFull):
    """The engine queue of every node is over the threshold."""

    reason = "queue_threshold"


class NodesFull(QueueFull):
    """Every node has its `max_inflight` requests, and the request may not wait at the router."""

    reason = "max_inflight"


class AllNodesBusy(NotAdmitted):
    """Every node that was tried answered that it is busy: 429, or 503 with Retry-After."""

    reason = "nodes_busy"

    def __init__(self, retry_after_s: int) -> None:
        """`retry_after_s`: the shortest that a node said."""
        self.retry_after_s = retry_after_s


class WouldQueue(NotAdmitted):
    """The request would have to queue, and its client asked not to."""

    reason = "would_queue"


class QueueTimeout(NotAdmitted):
    """No node had room for the request within the maximum queueing time."""

    reason = "queue_timeout"


class HeldTooLong(NotAdmitted):
    """No node had room for a low-priority request within Envoy's timeout."""

    reason = "envoy_timeout"


class DeadlineUnreachable(NotAdmitted):
    """The router expects to miss the request's deadline on every node."""

    def __init__(self, first_token: bool, expected_ms: float, left_ms: float) -> None:
        """`first_token`: the TTFT deadline is missed, else that of the whole response."""
        super().__init__((expected_ms - left_ms) / 1000.0)
        self.reason = "deadline_ttft" if first_token else "deadline_total"
        self.first_token = first_token
        self.expected_ms = expected_ms
        self.left_ms = max(0.0, left_ms)


class DeadlinePassed(RoutingError):
    """A node has the request, and its deadline has passed."""

    def __init__(self, first_token: bool, after_ms: float) -> None:
        """`first_token`: it is that of the first token, else that of the whole response. `after_ms`: how long the
        request had been given."""
        self.first_token = first_token
        self.after_ms = after_ms


class RateLimited(NotAdmitted):
    """The tenant has used up its limit per minute."""

    def __init__(
        self,
        what: str,
        needed: float,
        limit: int,
        wait_s: float,
        headers: tuple[tuple[str, str], ...],
        fraction: float = 1.0,
    ) -> None:
        """`what`: requests or tokens; `headers`: x-ratelimit header fields for the client; `fraction`: of the limit,
        that this process may use while it cannot hear from the others."""
        self.retry_after_s = max(1, ceil(wait_s))
        self.reason = f"{what}_per_min"
        self.what = what
        self.needed = max(1, round(needed))
        self.limit = limit
        self.fraction = fraction
        self.headers = headers
