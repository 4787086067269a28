"""One other process of the cluster: what it published last, as it counts in this process's fleet.

A node's figures (`inflight`, `pending_work`, …) are sums over all processes, so prices, admission and policies need not
know of peers:

    figure = own + sum over peers of what each published last

A peer publishes gauges and running totals, not changes: the next message makes up for a lost one. The kernel replaces
what a peer published before by what it published now (_kernel/peer_load.c), and keeps the sum over peers in
`node.peer_inflight` and the like, so that a process can publish its own part.
"""

from __future__ import annotations

from math import inf
from typing import Final

from warmroute._kernel import PeerRow, apply_load_rows
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.messages import Update
from warmroute.core.cluster.turns import Head
from warmroute.core.fleet import Fleet
from warmroute.core.group import Group
from warmroute.core.node import Node
from warmroute.core.rate_limits import RateLimits

MIN_ANSWERS: Final = 8
"""Answers that a peer must have learned a node's speed from. The speed is used until this process has measured it."""
CLOCK_DRIFT: Final = 1e-4
"""How fast the clocks of two machines may drift apart."""

Taken = dict[str, tuple[float, float, float, float]]
"""By tenant: see `Update.taken`."""


class Peer:
    def __init__(self, sender: str, fleet: Fleet, cache_view: CacheView, limits: RateLimits | None) -> None:
        self.sender = sender
        self._fleet = fleet
        self._cache_view = cache_view
        self._limits = limits
        self._taken: dict[str, tuple[float, float]] = {}
        self.sequence = -1
        self.heard_s = 0.0
        self.lost = 0
        """Messages that did not arrive, or not in order."""
        self.heads: dict[str, Head] = {}
        """Its first waiting request, by node."""
        self.firsts: dict[str, Head] = {}
        """Its first waiting request that would go to any node with room, by model."""
        self.changes_digest = 0
        """A hash of all changes of nodes that it knows."""
        self.left = False
        """Whether it has said that it ends."""
        self._from_start = False
        """Whether this process has heard the peer's first message: then its totals count from 0."""
        self.clock_offset_s = inf
        """What has to be added to a time of the peer's clock to get this process's."""
        self._rows: dict[str, PeerRow] = {}
        """By node."""
        self._waiting: dict[str, tuple[Group, int]] = {}

    @property
    def may_know(self) -> bool:
        """Whether it started before this process."""
        return not self._from_start

    def is_old(self, update: Update) -> bool:
        """Return whether a later message of the peer has arrived before this one."""
        return update.sequence <= self.sequence

    def apply(self, update: Update, now_s: float) -> list[Node]:
        """Count what the peer published. Return the nodes that have less work than before."""
        if self.sequence >= 0:
            self.lost += update.sequence - self.sequence - 1
        else:
            self._from_start = update.sequence == 1
        self._follow_clock(update.sent_s, now_s)
        self.sequence, self.heard_s = update.sequence, now_s
        freed: list[Node] = []
        rows = self._rows
        if update.nodes:
            freed = apply_load_rows(
                rows, self._fleet.by_name, self._cache_view.by_name, update.nodes, update.rows, now_s,
                self._from_start, MIN_ANSWERS, update.sent_s,
            )  # fmt: skip
        if update.full:
            for name in rows.keys() - set(update.nodes):
                if rows[name].inflight:
                    freed.append(self._node(rows[name]))
                    rows[name].clear()
                if self._fleet.find(name) is None:
                    del rows[name]
        self._apply_waiting(update.waiting)
        self.heads, self.firsts = update.heads, update.firsts
        self.changes_digest = update.changes_digest
        if self._limits is not None:
            self._apply_taken(update.taken, self._limits, now_s)
        return freed

    def _apply_taken(self, taken: Taken, limits: RateLimits, now_s: float) -> None:
        for tenant, (requests, tokens, requests_left, tokens_left) in taken.items():
            before = self._taken.get(tenant, (0.0, 0.0) if self._from_start else None)
            self._taken[tenant] = (requests, tokens)
            if before is None:
                limits.peer_has_left(tenant, requests_left, tokens_left, now_s)
            else:
                limits.peer_took(tenant, requests - before[0], tokens - before[1])

    def _follow_clock(self, sent_s: float, now_s: float) -> None:
        """The smallest difference between sending and arrival is that of the clocks, and of the fastest message."""
        drift_s = CLOCK_DRIFT * (now_s - self.heard_s)
        self.clock_offset_s = min(now_s - sent_s, self.clock_offset_s + drift_s)

    @staticmethod
    def _node(row: PeerRow) -> Node:
        assert isinstance(row.node, Node)
        return row.node

    def _apply_waiting(self, waiting: dict[str, int]) -> None:
        for model in self._waiting.keys() - waiting.keys():
            self._count_waiting(model, 0)
        for model, requests in waiting.items():
            self._count_waiting(model, requests)

    def _count_waiting(self, model: str, requests: int) -> None:
        group, before = self._waiting.pop(model, (None, 0))
        if group is not None:
            group.waiting -= before
            group.peer_waiting -= before
        found = self._fleet.group(model)
        if found is not None and requests:
            found.waiting += requests
            found.peer_waiting += requests
            self._waiting[model] = (found, requests)

    def forget(self) -> list[Node]:
        """Count nothing of the peer any more: it is silent or gone. Return the nodes that had its requests."""
        rows = self._rows.values()
        freed = [self._node(row) for row in rows if row.inflight]
        for row in rows:
            row.clear()
        self._rows.clear()
        self.heads, self.firsts = {}, {}
        self._apply_waiting({})
        return freed
