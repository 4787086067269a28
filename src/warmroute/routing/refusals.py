"""Why a request gets no node: there is none for it, or it is not admitted though one could serve it. The latter has a
reason for metrics, and says when to come again."""

from __future__ import annotations

from math import ceil
from typing import Final

MOST_RETRY_AFTER_S: Final = 60.0


class Undecided(Exception):
    """No node can be named."""


class UnknownModel(Undecided):
    """No node serves this model, and every node has said what it serves."""


class MissingModel(Undecided):
    """The request names no model, and more than one is served."""


class NobodyCanServe(Undecided):
    """Nodes serve this model, or may, but none of them can take a request now."""


class NotAdmitted(Undecided):
    """A node could take it, but not now."""

    reason = ""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = max(1, ceil(min(MOST_RETRY_AFTER_S, retry_after_s)))


class Shed(NotAdmitted):
    """Too many requests wait already."""

    reason = "queue_full"


class Displaced(Shed):
    """It waited, and made room for one of a higher priority."""

    reason = "displaced"


class QueuesFull(Shed):
    """Every node has too long a queue of its own."""

    reason = "queue_threshold"


class WouldWait(NotAdmitted):
    """It does not want to wait, and would have to."""

    reason = "would_wait"


class WaitedTooLong(NotAdmitted):
    """No node had room for it in time."""

    reason = "waited_too_long"


class TooLate(NotAdmitted):
    """It can't be answered before its deadline."""

    def __init__(self, first_token: bool, expected_ms: float, left_ms: float) -> None:
        """`first_token`: that is what would be late, else the whole answer."""
        super().__init__((expected_ms - left_ms) / 1000.0)
        self.reason = "deadline_ttft" if first_token else "deadline_total"
        self.first_token = first_token
        self.expected_ms = expected_ms
        self.left_ms = max(0.0, left_ms)


class RateLimited(NotAdmitted):
    """Its tenant has used up what a minute allows."""

    def __init__(self, what: str, needed: float, limit: int, wait_s: float, told: tuple[tuple[str, str], ...]) -> None:
        """`what`: requests or tokens; `told`: header fields that say what is left."""
        self.retry_after_s = max(1, ceil(wait_s))
        self.reason = f"{what}_per_min"
        self.what = what
        self.needed = max(1, round(needed))
        self.limit = limit
        self.told = told
