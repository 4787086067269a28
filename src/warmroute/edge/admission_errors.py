"""Why a request got no node, in words for its client."""

from __future__ import annotations

from typing import Final

from warmroute.edge import errors
from warmroute.edge.errors import Refusal
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.refusals import (
    Displaced,
    MissingModel,
    NobodyCanServe,
    QueuesFull,
    RateLimited,
    Shed,
    TooLate,
    Undecided,
    UnknownModel,
    WaitedTooLong,
    WouldWait,
)

RETRY_AFTER_S: Final = 1


def in_words(undecided: Undecided, request: RoutingRequest) -> Refusal:
    match undecided:
        case UnknownModel():
            return errors.unknown_model(request.model)
        case MissingModel():
            return errors.missing_model()
        case NobodyCanServe():
            return errors.nobody_can_serve(request.model, RETRY_AFTER_S)
        case Displaced(retry_after_s=retry_after_s):
            return errors.displaced(retry_after_s)
        case QueuesFull(retry_after_s=retry_after_s):
            return errors.queues_full(retry_after_s)
        case Shed(retry_after_s=retry_after_s):
            return errors.too_many_waiting(retry_after_s)
        case WouldWait(retry_after_s=retry_after_s):
            return errors.would_wait(retry_after_s)
        case TooLate() as late:
            return errors.deadline_unreachable(late.first_token, late.expected_ms, late.left_ms, late.retry_after_s)
        case RateLimited() as limited:
            return errors.rate_limited(limited.what, limited.limit, limited.needed, limited.retry_after_s, limited.told)
        case WaitedTooLong():
            return errors.waited_too_long(RETRY_AFTER_S)
    raise undecided
