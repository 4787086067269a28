"""The health of one node: a state machine with a circuit breaker. It takes events and a clock, and does no I/O.

    state       event                                               next state
    ---------   -------------------------------------------------   ----------
    UNKNOWN     a check passes                                      UP
    any         connection refused, or a check answers 5xx          DOWN, confirmed
    UP          `consecutive_failures` requests in a row fail       DOWN, suspected (the circuit breaker opens)
    UP          `consecutive_timeouts` checks in a row time out,    DOWN, suspected
                and the node answers nothing else meanwhile
    DOWN        confirmed, and a check passes                       UP, with slow start
    DOWN        suspected before it was ever UP, a check passes     UP, with slow start
    DOWN        suspected, the breaker's time is over,              HALF_OPEN
                and a check passes
    HALF_OPEN   the trial request succeeds                          UP, with slow start
    HALF_OPEN   the trial request fails                             DOWN, for twice as long
    UP          it answers far worse than its peers                 EJECTED (outlier_detection.py)
    EJECTED     the ejection is over, and a check passes            UP, with slow start

A busy node is not a dead one: while no node is UP, the router still uses suspected and ejected nodes
(`usable_as_last_resort`), and a check that times out does not count while the node answers requests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from warmroute.config import Health as HealthConfig

CHECKS_TIME_OUT: Final = "health checks time out"
"""Why a node is down whose health checks time out."""


class HealthState(enum.Enum):
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    HALF_OPEN = "half_open"
    EJECTED = "ejected"


@dataclass(slots=True, eq=False)
class Health:
    config: HealthConfig
    state: HealthState = HealthState.UNKNOWN
    confirmed: bool = False
    """DOWN because the connection was refused or the node said so, not on suspicion."""
    reason: str = "not yet checked"
    failure: str = ""
    """Why it went DOWN the last time."""
    breaker_open_until_s: float = 0.0
    ejected_until_s: float = 0.0
    ejection_s: float = 0.0
    """How long its last ejection takes."""
    up_since_s: float = -1e9
    half_open_s: float = -1e9
    last_response_s: float = -1e9
    """When the node last answered anything."""
    last_passed_s: float = -1e9
    """When a request last passed."""
    _consecutive_failures: int = 0
    _consecutive_timeouts: int = 0
    _first_timeout_s: float = 0.0
    _failed_check_s: float = -1e9
    _next_open_s: float = 0.0
    """How long the breaker stays open the next time."""
    _ever_up: bool = False

    def __post_init__(self) -> None:
        self._next_open_s = self.config.breaker_open_s

    @property
    def awaits_first_check(self) -> bool:
        """Whether no check has ended yet: none passed, failed or timed out."""
        return self.state is HealthState.UNKNOWN and not self._consecutive_timeouts

    def check_passed(self, now_s: float) -> None:
        if now_s < self._failed_check_s:
            return  # an older result than the one known
        self.last_response_s = now_s
        self._consecutive_timeouts = 0
        if self.state is HealthState.UNKNOWN:
            self.state, self.reason, self._ever_up = HealthState.UP, "health check passed", True
        elif self.state is HealthState.DOWN and (self.confirmed or not self._ever_up):
            self._recover(now_s, "health check passed")
        elif self.state is HealthState.DOWN and now_s >= self.breaker_open_until_s:
            self.state, self.reason = HealthState.HALF_OPEN, "health check passed; waiting for a trial request"
            self.half_open_s = now_s
        elif self.state is HealthState.EJECTED and now_s >= self.ejected_until_s:
            self._recover(now_s, "the ejection is over")

    def eject(self, now_s: float, ejection_s: float, reason: str) -> None:
        self.state, self.confirmed, self.reason = HealthState.EJECTED, False, reason
        self.ejection_s, self.ejected_until_s = ejection_s, now_s + ejection_s

    def check_timed_out(self, now_s: float, last_response_s: float = -1e9) -> None:
        """`last_response_s`: when the node last sent a byte of any running response."""
        self.last_response_s = max(self.last_response_s, last_response_s)
        if not self._consecutive_timeouts:
            self._first_timeout_s = now_s - self.config.timeout_s
        if self.last_response_s > self._first_timeout_s:
            self._consecutive_timeouts = 0
            return  # it answers other requests: busy, not dead
        self._consecutive_timeouts += 1
        if self._consecutive_timeouts >= self.config.consecutive_timeouts and self.state is not HealthState.DOWN:
            self._mark_down(now_s, confirmed=False, reason=CHECKS_TIME_OUT)
        elif self.state is HealthState.UNKNOWN:
            self.reason = CHECKS_TIME_OUT

    def check_failed(self, now_s: float, reason: str) -> None:
        """The connection was refused, or the node says that it cannot serve."""
        self._failed_check_s = now_s
        if self.confirmed_down:
            self.reason = self.failure = reason
            return
        self._mark_down(now_s, confirmed=True, reason=reason)

    def request_passed(self, now_s: float) -> bool:
        """Return whether the request was a successful trial: the node is UP again."""
        self.last_response_s = self.last_passed_s = now_s
        self._consecutive_failures = 0
        if self.state is not HealthState.HALF_OPEN:
            return False
        self._recover(now_s, "trial request succeeded")
        return True

    def request_failed(self, now_s: float, reason: str) -> None:
        self._consecutive_failures += 1
        if self.state is HealthState.HALF_OPEN or (
            self.state is HealthState.UP and self._consecutive_failures >= self.config.consecutive_failures
        ):
            self._mark_down(now_s, confirmed=False, reason=reason)

    def _recover(self, now_s: float, reason: str) -> None:
        self.state, self.confirmed, self.reason = HealthState.UP, False, reason
        self.up_since_s = now_s
        self._ever_up = True
        self._consecutive_failures = 0
        self._next_open_s = self.config.breaker_open_s

    def _mark_down(self, now_s: float, *, confirmed: bool, reason: str) -> None:
        self.state, self.confirmed, self.reason, self.failure = HealthState.DOWN, confirmed, reason, reason
        self.breaker_open_until_s = now_s + self._next_open_s
        self._next_open_s = min(self._next_open_s * 2, self.config.breaker_open_max_s)
        self._consecutive_failures = 0
        self._consecutive_timeouts = 0

    @property
    def eligibility(self) -> tuple[HealthState, bool]:
        """State and `confirmed`: what decides whether the router may choose the node."""
        return self.state, self.confirmed

    @property
    def check_has_timed_out(self) -> bool:
        """Whether the last health check timed out, and the node has answered nothing since."""
        return self._consecutive_timeouts > 0

    @property
    def confirmed_down(self) -> bool:
        return self.state is HealthState.DOWN and self.confirmed

    @property
    def usable_as_last_resort(self) -> bool:
        """Whether to try the node while no node is UP."""
        return self.state in (HealthState.HALF_OPEN, HealthState.EJECTED) or (
            self.state is HealthState.DOWN and not self.confirmed
        )

    def traffic_share(self, now_s: float) -> float:
        """Return the share of its normal traffic that an UP node gets: below 1 during slow start."""
        slow_start_s = self.config.slow_start_s
        age_s = now_s - self.up_since_s
        return 1.0 if age_s >= slow_start_s else max(0.1, age_s / slow_start_s)
