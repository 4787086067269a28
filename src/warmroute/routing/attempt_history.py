"""What is kept of a traced request's attempts. Other requests forget an attempt when its ticket closes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from warmroute.fleet.node import Outcome
from warmroute.fleet.ticket import Ticket


class ClosedTicket(NamedTuple):
    ticket: Ticket
    outcome: Outcome
    closed_s: float
    reason: str
    """Why the attempt failed; empty if it did not."""


@dataclass(slots=True, eq=False)
class AttemptHistory:
    queue_length: int = 0
    """Requests that waited in the admission queue when this one came."""
    queued: bool = False
    """Whether it had to wait, too."""
    closed: list[ClosedTicket] = field(default_factory=list)
