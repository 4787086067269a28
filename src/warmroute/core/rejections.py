"""Why a request gets no node: the reason, and the status, code, sentence and Retry-After that its client gets.

`NotAdmitted` rounds a Retry-After up to whole seconds, from 1 to MAX_RETRY_AFTER_S. core/queue.py computes the number
for a full queue; edge/errors.py writes the header.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from warmroute.core.messages import INTERNAL_ERROR, RETRY, Reject, RoutingRequest, unknown_model

# Errors of a request that gets no node: no node can serve it, or admission rejects it although one could.
#
# The latter carry a `reason` for metrics and a time after which the client may retry.

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


class OutOfResources(RoutingError):
    """The router itself lacks files, ports or memory to connect to any node."""


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


# Turns the reason why routing gives a request no node into the error that its client gets.

RETRY_AFTER_S: Final = 1
"""Sent where routing gives no estimate."""
_NO_RETRY: Final = (("X-Should-Retry", "false"),)
"""The clients of OpenAI and Anthropic retry a 502 otherwise."""
_NOT_ADMITTED: Final[dict[type[NotAdmitted], tuple[str, str]]] = {
    QueueFull: (
        "overloaded",
        f"The router's queue is full: too many requests already wait for a node. {RETRY}",
    ),
    Displaced: (
        "overloaded",
        "The queue is full. A request with a higher priority, or of a client with fewer waiting requests, took this "
        f"request's place. {RETRY}",
    ),
    NodeQueuesFull: ("overloaded", f"Every node already has a long queue. {RETRY}"),
    NodesFull: ("overloaded", f"Every node has as many requests as it may have at a time. {RETRY}"),
    AllNodesBusy: ("overloaded", f"Every node is busy. {RETRY}"),
    HeldTooLong: ("overloaded", f"No node has room for a low-priority request now. {RETRY}"),
    WouldQueue: (
        "would_queue",
        "No node has room for the request now, and its header `X-Queue: no` forbids queueing. "
        "Retry after the time in the `Retry-After` header, or send `X-Queue: yes`.",
    ),
}
"""Code and message of the errors with status 429 that need no further values."""
_DEADLINES: Final = {True: ("first token", "X-Deadline-Ttft-Ms"), False: ("whole response", "X-Deadline-Ms")}
"""What is due, and in which header; by whether it is the first token."""


def rejection(why: RoutingError, id: int, request: RoutingRequest) -> Reject:
    """Return the error that the client of a call gets. `id`: the call's number."""
    match why:
        case UnknownModel():
            return Reject(id, 404, "model_not_found", unknown_model(request.model), param="model")
        case MissingModel():
            message = (
                "The request has no `model`, and the router serves several models. "
                "Set `model` to one of the names that GET /v1/models lists."
            )
            return Reject(id, 400, "missing_model", message, param="model")
        case ContextTooLong():
            message = (
                f"The maximum context length of this model is {why.max_model_len:,} tokens, but the prompt has "
                f"{why.prompt_tokens:,} tokens. Send a shorter prompt."
            )
            return Reject(id, 400, "context_length_exceeded", message)
        case NoNodeAvailable():
            what = f"the model `{request.model[:200]}`" if request.model else "this request"
            return _unavailable(id, 503, "no_node_available", f"No node can serve {what} now. {RETRY}", RETRY_AFTER_S)
        case NoNodeInSubset():
            what = f"the model `{request.model[:200]}`" if request.model else "this request"
            message = (
                "The subset of endpoints that the gateway allows (metadata `envoy.lb.subset_hint`) contains no node "
                f"that can serve {what}. A retry does not help: correct the hint, or the router's nodes."
            )
            return _unavailable(id, 503, "no_node_in_subset", message, None)
        case QueueTimeout():
            message = f"The request waited in the router's queue, and no node could take it in time. {RETRY}"
            return _unavailable(id, 503, "queue_timeout", message, why.retry_after_s)
        case OutOfResources():
            message = f"The router lacks open files, ports or memory to connect to a node. {RETRY}"
            return _unavailable(id, 503, "router_out_of_resources", message, RETRY_AFTER_S)
        case AllNodesUnavailable():
            message = f"Every node says that it cannot serve requests now. {RETRY}"
            return _unavailable(id, 503, "no_node_available", message, why.retry_after_s)
        case FailedOnEveryNode():
            message = (
                f"The router tried {why.tried} nodes. At least two of them failed at this request while they served "
                "others, so the router tried no further node. A retry is unlikely to help: change the request, or "
                "tell the operator."
            )
            return Reject(id, 502, "failed_on_every_node", message, "server_error", headers=_NO_RETRY)
        case AllNodesFailed():
            nodes = "node" if why.tried == 1 else "nodes"
            message = f"The router tried {why.tried} {nodes}, and none of them completed the request. Retry later."
            return _unavailable(id, 502, "upstream_failed", message, why.retry_after_s)
        case DeadlineUnreachable():
            return _too_many(id, why, "deadline_unreachable", _deadline_message(why))
        case DeadlinePassed():
            what, header = _DEADLINES[why.first_token]
            message = (
                f"The deadline has passed: the {what} was due {why.after_ms:,.0f} ms after the request's arrival, and "
                f"the router has ended the request. Allow more time with the `{header}` header."
            )
            return Reject(id, 504, "deadline_exceeded", message, "server_error", headers=_NO_RETRY)
        case RateLimited():
            needs = f", and this request needs about {why.needed:,}" if why.what == "tokens" and why.needed > 1 else ""
            message = f"The rate limit of {why.limit:,} {why.what} per minute is reached{needs}."
            if why.fraction < 1.0:
                message += f" This router uses {why.fraction:.0%} of it while it cannot reach the other routers."
            message += f" Retry in {why.retry_after_s:,} s."
            return _too_many(id, why, "rate_limit_exceeded", message, why.headers)
        case NotAdmitted():
            return _too_many(id, why, *_NOT_ADMITTED[type(why)])
    raise why


def internal_error(id: int) -> Reject:
    """The router itself failed at a call."""
    return Reject(id, 500, "internal_error", INTERNAL_ERROR, "server_error")


def _too_many(id: int, why: NotAdmitted, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()) -> Reject:
    return Reject(id, 429, code, message, "rate_limit_error", None, why.retry_after_s, headers)


def _unavailable(id: int, status: int, code: str, message: str, retry_after_s: int | None) -> Reject:
    return Reject(id, status, code, message, "server_error", None, retry_after_s)


def _deadline_message(why: DeadlineUnreachable) -> str:
    what, header = _DEADLINES[why.first_token]
    if why.expected_ms > why.left_ms:
        reason = f"is due in {why.left_ms:,.0f} ms, but the router expects it after {why.expected_ms:,.0f} ms"
    else:
        reason = "is due, but no node has had room for the request yet"
    return (
        f"The deadline cannot be met: the {what} {reason}. Retry later, or allow more time with the `{header}` header."
    )


# Errors of the fleet's methods.


class UnknownNode(KeyError):
    """No node has this name."""


class NameTaken(ValueError):
    """Another node has this name."""
