"""Why a request got no node, in words for its client."""

from __future__ import annotations

from typing import Final

from warmroute.edge import errors
from warmroute.edge.errors import Refusal
from warmroute.prompt.ask import Ask
from warmroute.routing.admission import Shed, WaitedTooLong
from warmroute.routing.router import MissingModel, NobodyCanServe, Undecided, UnknownModel

RETRY_AFTER_S: Final = 1


def in_words(undecided: Undecided, ask: Ask) -> Refusal:
    match undecided:
        case UnknownModel():
            return errors.unknown_model(ask.model)
        case MissingModel():
            return errors.missing_model()
        case NobodyCanServe():
            return errors.nobody_can_serve(ask.model, RETRY_AFTER_S)
        case Shed():
            return errors.too_many_waiting(undecided.retry_after_s)
        case WaitedTooLong():
            return errors.waited_too_long(RETRY_AFTER_S)
    raise undecided
