"""Tenants' rate limits over several processes (core/rate_limits.py has the rule).

- A process may take an equal part of what is left of a limit: its slice. It gets another one when it has heard from all
  its peers again, SLICE_S after the last one: then they know what it took, and it knows what they took.
- If this process is cut off from others, it uses its part of the limit: processes that it still hears, itself included,
  of all those that it last heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from warmroute.core.cluster.peer import Peer
from warmroute.core.rate_limits import RateLimits

SLICE_S: Final = 0.05
"""Shortest time of a slice. A message arrives within this time, or its sender's slice is the error of the limit."""

LEFT_S: Final = 2.0
"""A process that is silent for this time, while messages arrive, has ended. Before, this process may be the one that is
cut off and has not noticed it yet."""


class SharedLimits:
    def __init__(self, limits: RateLimits, peers: Mapping[str, Peer]) -> None:
        self._limits = limits
        self._peers = peers
        self.connected = True
        """Whether messages of all other processes can arrive."""
        self._known = 1
        """Processes when messages could last arrive, this one included."""
        self._fewer_since_s: float | None = None
        """Since when fewer processes are heard than are known, although messages seem to arrive."""
        self._fraction = 1.0
        self._processes = 1
        self._started_s = -inf

    @property
    def fraction(self) -> float:
        """The part of each limit that this process and those it hears may use."""
        return self._fraction

    def update(self, now_s: float) -> None:
        """Call it after each change of the peers, and regularly."""
        processes = len(self._peers) + 1
        if processes >= self._known:
            self._known, self._fewer_since_s = processes, None
        elif not self.connected:
            self._fewer_since_s = None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s
        elif now_s - self._fewer_since_s >= LEFT_S:
            self._known, self._fewer_since_s = processes, None
        fraction = min(1.0, processes / self._known)
        if fraction != self._fraction:
            self._fraction = fraction
            self._limits.set_fraction(fraction, now_s)
        if processes == 1:
            if self._processes > 1:
                self._start(1, now_s)
        elif processes != self._processes or all(
            peer.heard_s >= self._started_s + SLICE_S for peer in self._peers.values()
        ):
            self._start(processes, now_s)

    def _start(self, processes: int, now_s: float) -> None:
        self._processes, self._started_s = processes, now_s
        self._limits.start_slices(processes, now_s)
