"""One other process of the cluster: what it published last, as it counts in this process's fleet."""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from warmroute.cluster.messages import NodeRow, Update
from warmroute.fleet.fleet import Fleet, UnknownNode
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node
from warmroute.fleet.peer_load import PeerLoad, change_peer_load, record_peer_arrivals
from warmroute.index.cache_view import CacheView
from warmroute.routing.rate_limits import RateLimits

MIN_ANSWERS: Final = 8
"""Answers that a peer must have learned a node's speed from. The speed is used until this process has measured it."""
CLOCK_DRIFT: Final = 1e-4
"""How fast the clocks of two machines may drift apart."""

Taken = dict[str, tuple[float, float, float, float]]
"""By tenant: see `Update.taken`."""

_NOTHING: Final = PeerLoad()


class _Counted:
    """A row of the peer, as it is counted in a node."""

    def __init__(self, node: Node, load: PeerLoad, row: NodeRow) -> None:
        self.node = node
        self.load = load
        self.row = row


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
        self.heads: dict[str, tuple[int, float]] = {}
        """Priority and score of its first waiting request, by node."""
        self.changes_digest = 0
        """A hash of all changes of nodes that it knows."""
        self.left = False
        """Whether it has said that it ends."""
        self._from_start = False
        """Whether this process has heard the peer's first message: then its totals count from 0."""
        self._clock_offset_s = inf
        self._counted: dict[str, _Counted] = {}
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
        freed = [node for row in update.nodes if (node := self._apply_row(row, now_s)) is not None]
        if update.full:
            published = {row.node for row in update.nodes}
            for name in self._counted.keys() - published:
                counted = self._counted[name]
                if counted.load.inflight:
                    freed.append(counted.node)
                    self._count(counted, _NOTHING)
        self._apply_waiting(update.waiting)
        self.heads = update.heads
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

    def local_s(self, time_s: float) -> float:
        """Translate a time of the peer's clock."""
        return time_s + self._clock_offset_s

    def _follow_clock(self, sent_s: float, now_s: float) -> None:
        """The smallest difference between sending and arrival is that of the clocks, and of the fastest message."""
        drift_s = CLOCK_DRIFT * (now_s - self.heard_s)
        self._clock_offset_s = min(now_s - sent_s, self._clock_offset_s + drift_s)

    def _apply_row(self, row: NodeRow, now_s: float) -> Node | None:
        """Return the node if it has less work than before."""
        counted = self._counted.get(row.node)
        try:
            node = self._fleet.node(row.node)
        except UnknownNode:
            return None  # it was removed here, or is not added yet
        if counted is None or counted.node is not node:
            start = row
            if counted is None and self._from_start:  # else the totals may be old
                start = msgspec.structs.replace(row, kv_sum=0.0, opened=0, output_tokens=0)
            counted = self._counted[row.node] = _Counted(node, _NOTHING, start)
        before, load = counted.row, PeerLoad(row.inflight, row.pending_work, row.context_tokens, row.kv_new)
        has_less = load.inflight < counted.load.inflight or load.pending_work < counted.load.pending_work
        self._count(counted, load)
        counted.row = row
        node.kv_delta += row.kv_sum - before.kv_sum
        if row.opened > before.opened:
            record_peer_arrivals(node, row.opened - before.opened, now_s)
        if not node.speed.answers and row.answers >= MIN_ANSWERS and row.ms_per_token > 0.0:
            node.speed.guess(row.ms_per_token)
            node.speed.factor = row.speed_factor or 1.0
        cache = self._cache_view.cache(row.node)
        if cache is not None and row.output_tokens > before.output_tokens:
            cache.record_peer_output(row.output_tokens - before.output_tokens, now_s)
        return node if has_less else None

    def _count(self, counted: _Counted, load: PeerLoad) -> None:
        change_peer_load(counted.node, counted.load, load)
        counted.load = load

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
        freed = [counted.node for counted in self._counted.values() if counted.load.inflight]
        for counted in self._counted.values():
            self._count(counted, _NOTHING)
        self._counted.clear()
        self.heads = {}
        self._apply_waiting({})
        return freed
