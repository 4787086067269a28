"""What is believed of one node's health: a state machine that takes events and a clock, and does no I/O.

    standing    event                                              becomes
    --------    -----                                              -------
    UNKNOWN     a check passes                                     UP
    any         nobody listens, or the node says it is ill         OPEN, for certain
    UP          requests fail, `failures` in a row                 OPEN, suspected
    UP          checks time out, `slow_checks` in a row, while     OPEN, suspected
                nothing at all is heard from the node
    OPEN        for certain, and a check passes                    UP, growing to its full share over `slow_start_s`
    OPEN        suspected before it was ever UP, a check passes    UP, the same
    OPEN        suspected, its time has passed, a check passes     HALF_OPEN
    HALF_OPEN   the one request that is let through succeeds       UP, growing to its full share over `slow_start_s`
    HALF_OPEN   it fails                                           OPEN, for twice as long

Busy is not dead: a node that is only suspected is still used where there is no better one (`usable_at_need`), and a
slow check says nothing about a node that answers requests meanwhile.
"""

from __future__ import annotations

import enum

from warmroute.config import Health as HealthConfig


class Standing(enum.Enum):
    UNKNOWN = "unknown"
    UP = "up"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Health:
    __slots__ = (
        "_config",
        "_failures",
        "_open_for_s",
        "_refused_s",
        "_slow_checks",
        "_slow_since_s",
        "_was_up",
        "certain",
        "half_open_s",
        "heard_s",
        "open_until_s",
        "reason",
        "standing",
        "up_since_s",
    )

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._failures = 0
        self._slow_checks = 0
        self._slow_since_s = 0.0
        self._refused_s = -1e9
        self._open_for_s = config.open_s
        self._was_up = False
        self.standing = Standing.UNKNOWN
        self.certain = False
        """OPEN because nobody listens or the node said so, not on suspicion."""
        self.open_until_s = 0.0
        self.up_since_s = -1e9
        self.half_open_s = -1e9
        self.heard_s = -1e9
        """When the node last answered anything."""
        self.reason = "not yet checked"

    def reconfigure(self, config: HealthConfig) -> None:
        self._config = config

    def check_passed(self, now_s: float) -> None:
        if now_s < self._refused_s:
            return  # older news than what is known
        self.heard_s = now_s
        self._slow_checks = 0
        if self.standing is Standing.UNKNOWN:
            self.standing, self.reason, self._was_up = Standing.UP, "check passed", True
        elif self.standing is Standing.OPEN and (self.certain or not self._was_up):
            self._come_back(now_s, "check passed")
        elif self.standing is Standing.OPEN and now_s >= self.open_until_s:
            self.standing, self.reason = Standing.HALF_OPEN, "check passed; on trial"
            self.half_open_s = now_s

    def check_slow(self, now_s: float, heard_s: float = -1e9) -> None:
        """A check got no answer in time. `heard_s`: when the node last sent anything of a running answer."""
        self.heard_s = max(self.heard_s, heard_s)
        if not self._slow_checks:
            self._slow_since_s = now_s - self._config.timeout_s
        if self.heard_s > self._slow_since_s:
            self._slow_checks = 0
            return  # it answers other things: busy, not dead
        self._slow_checks += 1
        if self._slow_checks >= self._config.slow_checks and self.standing is not Standing.OPEN:
            self._open(now_s, certain=False, reason="health checks time out")
        elif self.standing is Standing.UNKNOWN:
            self.reason = "health checks time out"

    def check_refused(self, now_s: float, reason: str) -> None:
        """Nobody listens there, or the node says itself that it can't serve."""
        self._refused_s = now_s
        if self.standing is Standing.OPEN and self.certain:
            self.reason = reason
            return
        self._open(now_s, certain=True, reason=reason)

    def request_passed(self, now_s: float) -> bool:
        """Whether that ended its trial."""
        self.heard_s = now_s
        self._failures = 0
        if self.standing is not Standing.HALF_OPEN:
            return False
        self._come_back(now_s, "trial passed")
        return True

    def request_failed(self, now_s: float, reason: str) -> None:
        self._failures += 1
        if self.standing is Standing.HALF_OPEN or (
            self.standing is Standing.UP and self._failures >= self._config.failures
        ):
            self._open(now_s, certain=False, reason=reason)

    def _come_back(self, now_s: float, reason: str) -> None:
        self.standing, self.certain, self.reason = Standing.UP, False, reason
        self.up_since_s = now_s
        self._was_up = True
        self._failures = 0
        self._open_for_s = self._config.open_s

    def _open(self, now_s: float, *, certain: bool, reason: str) -> None:
        self.standing, self.certain, self.reason = Standing.OPEN, certain, reason
        self.open_until_s = now_s + self._open_for_s
        self._open_for_s = min(self._open_for_s * 2, self._config.open_limit_s)
        self._failures = 0
        self._slow_checks = 0

    @property
    def view(self) -> tuple[Standing, bool]:
        """What decides whether the node is a candidate."""
        return self.standing, self.certain

    @property
    def certain_open(self) -> bool:
        return self.standing is Standing.OPEN and self.certain

    @property
    def usable_at_need(self) -> bool:
        """Worth a try where no node is UP."""
        return self.standing is Standing.HALF_OPEN or (self.standing is Standing.OPEN and not self.certain)

    def share(self, now_s: float) -> float:
        """How much of its full share of the traffic an UP node takes: below 1 after it came back."""
        slow_start_s = self._config.slow_start_s
        age_s = now_s - self.up_since_s
        return 1.0 if age_s >= slow_start_s else max(0.1, age_s / slow_start_s)
