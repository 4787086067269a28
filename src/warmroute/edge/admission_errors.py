"""Turns the reason why routing rejected a request into the error that its client gets."""

from __future__ import annotations

from typing import Final

from warmroute.edge import errors
from warmroute.edge.errors import HttpError
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.routing_errors import (
    AllNodesFailed,
    DeadlineUnreachable,
    Displaced,
    MissingModel,
    NodeQueuesFull,
    NoNodeAvailable,
    QueueFull,
    QueueTimeout,
    RateLimited,
    RoutingError,
    UnknownModel,
    WouldQueue,
)

RETRY_AFTER_S: Final = 1
"""Sent where routing gives no estimate."""


def to_error(why: RoutingError, request: RoutingRequest) -> HttpError:
    match why:
        case UnknownModel():
            return errors.model_not_found(request.model)
        case MissingModel():
            return errors.missing_model()
        case NoNodeAvailable():
            return errors.no_node_available(request.model, RETRY_AFTER_S)
        case AllNodesFailed():
            return errors.all_nodes_failed(why.tried, why.retry_after_s)
        case Displaced():
            return errors.displaced(why.retry_after_s)
        case NodeQueuesFull():
            return errors.node_queues_full(why.retry_after_s)
        case QueueFull():
            return errors.queue_full(why.retry_after_s)
        case WouldQueue():
            return errors.would_queue(why.retry_after_s)
        case DeadlineUnreachable():
            return errors.deadline_unreachable(why.first_token, why.expected_ms, why.left_ms, why.retry_after_s)
        case RateLimited():
            return errors.rate_limited(why.what, why.limit, why.needed, why.retry_after_s, why.headers)
        case QueueTimeout():
            return errors.queue_timeout(RETRY_AFTER_S)
    raise why
