"""The error budget: how much of what two objectives allow to fail in 30 days is spent, for alert rules and panels.

    availability   of all requests, the share that is neither answered with an error of the router (5xx, or 429 because
                   of its load), nor breaks off after its first byte. Limits that an operator set for a tenant, and
                   what clients ask for (deadlines, no queue), are not counted
    TTFT           of the streamed responses of a model and route, the share whose first token comes in time

Budget = 1 - objective. Spent = lost share of the last 30 days / budget. Burn rate = lost share of a shorter window /
budget: with 1, the budget lasts 30 days.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from warmroute.app import metrics

PERIOD: Final = "30d"
NOT_COUNTED: Final = "deadline_unreachable|rate_limit_exceeded|would_queue"
"""Codes of errors with status 429 that do not mean that the fleet is overloaded."""


class Objective(NamedTuple):
    name: str
    share: float
    """Of the requests, that has to be good."""
    by: str
    """Labels for which the budget is counted separately."""
    bound: str = ""
    """Of the TTFT histogram; empty: availability."""

    @property
    def budget(self) -> float:
        return 1.0 - self.share

    def lost(self, window: str, where: str = "") -> str:
        """Return the number of bad requests in a window. `where`: label matchers."""
        if self.bound:
            in_time = _increase(f"{metrics.TTFT.name}_bucket", window, f'le="{self.bound}"', where)
            return f"({self._all(window, where)} - sum by ({self.by}) ({in_time}))"
        return f"sum by ({self.by}) ({self._failed(window, where)})"

    def lost_share(self, window: str, where: str = "") -> str:
        """Return the share of the bad requests in a window."""
        return f"{self.lost(window, where)} / {self._all(window, where)}"

    def burn_rate(self, window: str, where: str = "") -> str:
        return f"{self.lost_share(window, where)} / {self.budget:.6g}"

    def _all(self, window: str, where: str) -> str:
        if self.bound:
            return f"sum by ({self.by}) ({_increase(f'{metrics.TTFT.name}_count', window, where)})"
        responses = _increase(metrics.RESPONSES.name, window, where)
        return f"sum by ({self.by}) ({self._failed(window, where)} or {responses})"

    @staticmethod
    def _failed(window: str, where: str) -> str:
        """Return two counters with different labels, of which the first may have no sample."""
        errors = _increase(metrics.ERRORS.name, window, f'status=~"5..|429",code!~"{NOT_COUNTED}"', where)
        return f"{errors} or {_increase(metrics.RESPONSES_INTERRUPTED.name, window, where)}"


def _increase(name: str, window: str, *matchers: str) -> str:
    braces = ",".join(filter(None, matchers))
    return f"increase({name}{{{braces}}}[{window}])" if braces else f"increase({name}[{window}])"


def objectives(availability: float, ttft_share: float, ttft_s: float) -> tuple[Objective, Objective]:
    return (
        Objective("availability", availability, "job"),
        Objective("TTFT", ttft_share, "job, model, route", str(float(ttft_s))),
    )
