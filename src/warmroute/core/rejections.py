"""Turns the reason why routing gives a request no node into the error that its client gets."""

from __future__ import annotations

from typing import Final

from warmroute.edge.errors import RETRY, HttpError, model_not_found
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing import routing_errors as reasons

RETRY_AFTER_S: Final = 1
"""Sent where routing gives no estimate."""
_NO_RETRY: Final = (("X-Should-Retry", "false"),)
"""The clients of OpenAI and Anthropic retry a 502 otherwise."""
_NOT_ADMITTED: Final[dict[type[reasons.NotAdmitted], tuple[str, str]]] = {
    reasons.QueueFull: (
        "overloaded",
        f"The router's queue is full: too many requests already wait for a node. {RETRY}",
    ),
    reasons.Displaced: (
        "overloaded",
        "The queue is full. A request with a higher priority, or of a client with fewer waiting requests, took this "
        f"request's place. {RETRY}",
    ),
    reasons.NodeQueuesFull: ("overloaded", f"Every node already has a long queue. {RETRY}"),
    reasons.NodesFull: ("overloaded", f"Every node has as many requests as it may have at a time. {RETRY}"),
    reasons.AllNodesBusy: ("overloaded", f"Every node is busy. {RETRY}"),
    reasons.HeldTooLong: ("overloaded", f"No node has room for a low-priority request now. {RETRY}"),
    reasons.WouldQueue: (
        "would_queue",
        "No node has room for the request now, and its header `X-Queue: no` forbids queueing. "
        "Retry after the time in the `Retry-After` header, or send `X-Queue: yes`.",
    ),
}
"""Code and message of the errors with status 429 that need no further values."""
_DEADLINES: Final = {True: ("first token", "X-Deadline-Ttft-Ms"), False: ("whole response", "X-Deadline-Ms")}
"""What is due, and in which header; by whether it is the first token."""


def to_error(why: reasons.RoutingError, request: RoutingRequest) -> HttpError:
    match why:
        case reasons.UnknownModel():
            return model_not_found(request.model)
        case reasons.MissingModel():
            message = (
                "The request has no `model`, and the router serves several models. "
                "Set `model` to one of the names that GET /v1/models lists."
            )
            return HttpError(400, message, code="missing_model", param="model")
        case reasons.ContextTooLong():
            message = (
                f"The maximum context length of this model is {why.max_model_len:,} tokens, but the prompt has "
                f"{why.prompt_tokens:,} tokens. Send a shorter prompt."
            )
            return HttpError(400, message, code="context_length_exceeded")
        case reasons.NoNodeAvailable():
            what = f"the model `{request.model[:200]}`" if request.model else "this request"
            return _unavailable(503, "no_node_available", f"No node can serve {what} now. {RETRY}", RETRY_AFTER_S)
        case reasons.NoNodeInSubset():
            what = f"the model `{request.model[:200]}`" if request.model else "this request"
            message = (
                "The subset of endpoints that the gateway allows (metadata `envoy.lb.subset_hint`) contains no node "
                f"that can serve {what}. A retry does not help: correct the hint, or the router's nodes."
            )
            return _unavailable(503, "no_node_in_subset", message, None)
        case reasons.QueueTimeout():
            message = f"The request waited in the router's queue, and no node could take it in time. {RETRY}"
            return _unavailable(503, "queue_timeout", message, why.retry_after_s)
        case reasons.AllNodesUnavailable():
            message = f"Every node says that it cannot serve requests now. {RETRY}"
            return _unavailable(503, "no_node_available", message, why.retry_after_s)
        case reasons.FailedOnEveryNode():
            message = (
                f"The router tried {why.tried} nodes. At least two of them failed at this request while they served "
                "others, so the router tried no further node. A retry is unlikely to help: change the request, or "
                "tell the operator."
            )
            return HttpError(502, message, code="failed_on_every_node", kind="server_error", headers=_NO_RETRY)
        case reasons.AllNodesFailed():
            nodes = "node" if why.tried == 1 else "nodes"
            message = f"The router tried {why.tried} {nodes}, and none of them completed the request. Retry later."
            return _unavailable(502, "upstream_failed", message, why.retry_after_s)
        case reasons.DeadlineUnreachable():
            return _too_many(why, "deadline_unreachable", _deadline_message(why))
        case reasons.DeadlinePassed():
            what, header = _DEADLINES[why.first_token]
            message = (
                f"The deadline has passed: the {what} was due {why.after_ms:,.0f} ms after the request's arrival, and "
                f"the router has ended the request. Allow more time with the `{header}` header."
            )
            return HttpError(504, message, code="deadline_exceeded", kind="server_error", headers=_NO_RETRY)
        case reasons.RateLimited():
            needs = f", and this request needs about {why.needed:,}" if why.what == "tokens" and why.needed > 1 else ""
            message = f"The rate limit of {why.limit:,} {why.what} per minute is reached{needs}."
            if why.fraction < 1.0:
                message += f" This router uses {why.fraction:.0%} of it while it cannot reach the other routers."
            return _too_many(why, "rate_limit_exceeded", f"{message} Retry in {why.retry_after_s:,} s.", why.headers)
        case reasons.NotAdmitted():
            return _too_many(why, *_NOT_ADMITTED[type(why)])
    raise why


def _too_many(
    why: reasons.NotAdmitted, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()
) -> HttpError:
    return HttpError(
        429, message, code=code, kind="rate_limit_error", retry_after_s=why.retry_after_s, headers=headers
    )  # fmt: skip


def _unavailable(status: int, code: str, message: str, retry_after_s: int | None) -> HttpError:
    return HttpError(status, message, code=code, kind="server_error", retry_after_s=retry_after_s)


def _deadline_message(why: reasons.DeadlineUnreachable) -> str:
    what, header = _DEADLINES[why.first_token]
    if why.expected_ms > why.left_ms:
        reason = f"is due in {why.left_ms:,.0f} ms, but the router expects it after {why.expected_ms:,.0f} ms"
    else:
        reason = "is due, but no node has had room for the request yet"
    return (
        f"The deadline cannot be met: the {what} {reason}. Retry later, or allow more time with the `{header}` header."
    )
