"""Collects what this process publishes: its own part of each node's figures, the prompts that it routed, the homes
of conversations, and how many requests wait in its queue.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from warmroute._kernel import pack_load_rows
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.messages import (
    FULL_S,
    MAX_HOMES,
    MAX_NODES,
    MAX_ROUTED,
    MAX_ROUTED_BYTES,
    MAX_TENANTS,
    VERSION,
    Home,
    RoutedPrompt,
    Update,
)
from warmroute.core.cluster.shared_demand import SharedDemand
from warmroute.core.cluster.shared_nodes import SharedNodes
from warmroute.core.cluster.shared_speeds import SharedSpeeds
from warmroute.core.cluster.turns import Head
from warmroute.core.fleet import Fleet
from warmroute.core.islands import ConversationAffinity
from warmroute.core.queue import AdmissionQueue
from warmroute.core.rate_limits import RateLimits

_UNTAKEN: Final = (0.0, 0.0, 0.0, 0.0)


class Publisher:
    def __init__(
        self,
        sender: str,
        fleet: Fleet,
        cache_view: CacheView,
        affinity: ConversationAffinity,
        queue: AdmissionQueue,
        speeds: SharedSpeeds,
        limits: RateLimits | None,
    ) -> None:
        self.sender = sender
        self._fleet = fleet
        self._cache_view = cache_view
        self._affinity = affinity
        self._queue = queue
        self._speeds = speeds
        self._limits = limits
        self._taken: dict[str, tuple[float, float, float, float]] = {}
        self._routed = cache_view.routed_log = []
        self._homes = affinity.log = []
        self.sequence = 0
        self._heads: dict[str, Head] = {}
        self._waiting: dict[str, int] = {}
        self._full_s = -1e9
        self._asks = ""
        for node in fleet:
            node.published_changes, node.published_work = 0, 0.0
        self._changes_digest = 0
        self.unpublished = 0
        """Routed prompts and homes that were too many for a message."""

    def next_update(
        self, now_s: float, nodes: SharedNodes | None = None, demand: SharedDemand | None = None, asks: str = ""
    ) -> Update | None:
        """Return what has changed since the last call; None if nothing has, and the next full update is not due."""
        full = now_s - self._full_s >= FULL_S
        nodes_with_news, rows = pack_load_rows(self._fleet.by_name, self._cache_view.by_name, full, MAX_NODES)
        first_token_nodes, first_tokens = self._speeds.take_own()
        waiting = {group.model: own for group in self._fleet.groups if (own := group.waiting - group.peer_waiting) > 0}
        taken = self._newly_taken(full, now_s) if self._limits else {}
        heads, firsts = self._queue.first_waiting(now_s) if self._queue.tenants else ({}, {})
        queue_changed = waiting != self._waiting or heads.keys() != self._heads.keys()
        news = queue_changed or rows or first_tokens or taken or self._routed or self._homes
        changes, digest = (nodes.take_unpublished(), nodes.digest) if nodes is not None else ((), 0)
        if not (full or news or changes or asks != self._asks or digest != self._changes_digest):
            return None
        self._asks, self._changes_digest = asks, digest
        if full:
            self._full_s = now_s
        self._heads, self._waiting = heads, waiting
        self.sequence += 1
        return Update(
            VERSION, self.sender, self.sequence, now_s, full, nodes_with_news, rows, waiting, heads, firsts,
            taken, first_token_nodes, first_tokens, self._take_routed(), self._take_homes(), changes, digest,
            demand.own() if demand is not None and full else None, asks,
        )  # fmt: skip

    def last_update(self, now_s: float) -> Update:
        """Return the message with which this process leaves the cluster."""
        self.sequence += 1
        return Update(VERSION, self.sender, self.sequence, now_s, True, leaving=True)

    def _newly_taken(self, full: bool, now_s: float) -> dict[str, tuple[float, float, float, float]]:
        """Return the totals of the tenants for which they changed; of all tenants in a full update."""
        assert self._limits is not None
        now, before = self._limits.taken(now_s), self._taken
        self._taken = now
        if full:
            return dict(islice(now.items(), MAX_TENANTS))
        return {tenant: taken for tenant, taken in now.items() if before.get(tenant, _UNTAKEN)[:2] != taken[:2]}

    def _take_routed(self) -> tuple[RoutedPrompt, ...]:
        routed, left, at = self._routed, MAX_ROUTED_BYTES, 0
        for _, chain, _, _ in routed:
            left -= len(chain)
            if left < 0 or at >= MAX_ROUTED:
                break
            at += 1
        self.unpublished += len(routed) - at
        taken = tuple(routed[:at])
        routed.clear()
        return taken

    def _take_homes(self) -> tuple[Home, ...]:
        homes = self._homes
        self.unpublished += max(0, len(homes) - MAX_HOMES)
        taken = tuple(homes[:MAX_HOMES])
        homes.clear()
        return taken

    def close(self) -> None:
        self._cache_view.routed_log = self._affinity.log = None
