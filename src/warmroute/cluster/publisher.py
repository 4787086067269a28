"""Collects what this process publishes: its own part of each node's figures, the prompts that it routed, the homes of
conversations, and how many requests wait in its queue."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from warmroute.cluster.messages import (
    FULL_S,
    MAX_HOMES,
    MAX_NODES,
    MAX_ROUTED,
    MAX_ROUTED_BYTES,
    MAX_TENANTS,
    VERSION,
    Home,
    NodeRow,
    RoutedPrompt,
    Update,
)
from warmroute.cluster.shared_demand import SharedDemand
from warmroute.cluster.shared_nodes import SharedNodes
from warmroute.cluster.shared_speeds import SharedSpeeds
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.fleet.peer_load import own_load
from warmroute.index.cache_view import CacheView
from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.routing.conversation_affinity import ConversationAffinity
from warmroute.routing.rate_limits import RateLimits

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
        self._published: dict[str, tuple[Node, int]] = {}
        """By node: its `changes` when it was last published."""
        self._heads: dict[str, tuple[int, float]] = {}
        self.published_work: dict[str, float] = {}
        """By node: this process's pending work, as it was last published."""
        self._full_s = -1e9
        self._asks = ""
        self._changes_digest = 0
        self.unpublished = 0
        """Routed prompts and homes that were too many for a message."""

    def next_update(
        self, now_s: float, nodes: SharedNodes | None = None, demand: SharedDemand | None = None, asks: str = ""
    ) -> Update | None:
        """Return what has changed since the last call; None if nothing has, and the next full update is not due."""
        full = now_s - self._full_s >= FULL_S
        rows, prefills = tuple(self._rows(full)), tuple(self._speeds.take_own())
        waiting = {group.model: own for group in self._fleet.groups if (own := group.waiting - group.peer_waiting) > 0}
        taken = self._newly_taken(full, now_s) if self._limits else {}
        heads = self._queue.heads_by_node(now_s) if self._queue.tenants else {}
        news = rows or prefills or taken or self._routed or self._homes or heads.keys() != self._heads.keys()
        changes, digest = (nodes.take_unpublished(), nodes.digest) if nodes is not None else ((), 0)
        if not (full or news or changes or asks != self._asks or digest != self._changes_digest):
            return None
        self._asks, self._changes_digest = asks, digest
        if full:
            self._full_s = now_s
        self._heads = heads
        self.sequence += 1
        return Update(
            VERSION, self.sender, self.sequence, now_s, full, rows, waiting, heads, taken, prefills,
            tuple(self._take_routed()), tuple(self._take_homes()), changes, digest,
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

    def _rows(self, full: bool) -> Iterable[NodeRow]:
        published, count = self._published, 0
        for node in self._fleet:
            known = published.get(node.name)
            if known is None or known[0] is not node:
                if not node.changes:
                    continue
            elif known[1] == node.changes and not (full and node.own_inflight):
                continue
            published[node.name] = (node, node.changes)
            yield self._row(node)
            count += 1
            if count >= MAX_NODES:
                return

    def _row(self, node: Node) -> NodeRow:
        own, speed, cache = own_load(node), node.speed, self._cache_view.cache(node.name)
        self.published_work[node.name] = own.pending_work
        return NodeRow(
            node.name, own.inflight, own.pending_work, own.context_tokens, own.kv_new, node.kv_sum,
            own.inflight + sum(node.outcomes), cache.output_tokens if cache is not None else 0,
            speed.learned_ms_per_token, speed.factor, speed.answers,
        )  # fmt: skip

    def _take_routed(self) -> Iterable[RoutedPrompt]:
        left = MAX_ROUTED_BYTES
        for at, (name, chain, exact, cache_group) in enumerate(self._routed):
            left -= len(chain)
            if left < 0 or at >= MAX_ROUTED:
                self.unpublished += len(self._routed) - at
                break
            yield RoutedPrompt(name, chain, exact, cache_group)
        self._routed.clear()

    def _take_homes(self) -> Iterable[Home]:
        homes = self._homes
        self.unpublished += max(0, len(homes) - MAX_HOMES)
        yield from (Home(*home) for home in homes[:MAX_HOMES])
        homes.clear()

    def close(self) -> None:
        self._cache_view.routed_log = self._affinity.log = None
