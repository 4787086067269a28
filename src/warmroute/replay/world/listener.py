"""What a policy may hear beside what the fleet's books say: where requests went, how they came out, KV events."""

from __future__ import annotations

from typing import Protocol

from warmroute.fake_engine.core.events import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.world.simulated_request import SimulatedRequest


class Listener(Protocol):
    """Subclass it and override what you care for."""

    wants_kv_events: bool = False
    poll_interval_s: float | None = None
    """How often it looks at nodes' metrics, where it has its own mind."""

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        """A node is in the fleet, with what its cache_config_info would say."""
        return

    def node_left(self, node: Node) -> None:
        """A node was taken out of the fleet."""
        return

    def polled(self, node: Node, incarnation: float, now_s: float) -> None:
        """The node answered a poll; what it says of itself is taken after this."""
        return

    def sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """A request was sent to a node: once for each node that is tried."""
        return

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        """Its first token reached the router, with what the engine says of its cache."""
        return

    def ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        """However it ended there. Follows each `sent`, once."""
        return

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        """A batch of KV events, late as they come. A gap in `sequence` is a loss; it starts at 0 for an incarnation."""
        return
