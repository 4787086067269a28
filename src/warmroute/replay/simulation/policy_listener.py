"""What a simulated policy learns besides the fleet's own accounting: where requests went, how they ended, KV events."""

from __future__ import annotations

from typing import Protocol

from warmroute.engines.node_updates import KvEvents
from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.simulation.simulated_request import SimulatedRequest


class PolicyListener(Protocol):
    """Subclass it and override the methods you need."""

    wants_kv_events: bool = False
    poll_interval_s: float | None = None
    """Its own interval between two polls of a node; None for that of the conditions."""

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        """A node joined the fleet, with a cache of this size."""
        return

    def node_left(self, node: Node) -> None:
        """A node left the fleet."""
        return

    def node_kv_events(self, node: Node) -> KvEvents | None:
        """Return the node's KV events if the router's CacheView follows them."""
        return None

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """The router sent a request to a node: once for each node that it tries."""
        return

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        """The first token reached the router, with the cached tokens that the engine reports."""
        return

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """A request ended on a node, with or without success: once after each `request_sent`."""
        return

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        """A batch of KV events arrived. Numbers start at 0 for each incarnation; a gap in them is a loss."""
        return
