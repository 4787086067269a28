"""A group: the nodes that serve one model, sorted by what may be asked of them. Rebuilt when a node's standing
changes, so that a request finds its candidates without looking at the fleet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from warmroute.fleet.adapters import Adapter
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.health import Standing
from warmroute.fleet.islands import several
from warmroute.fleet.node import Node


class Candidates:
    """Nodes that a policy ranks, with their rendezvous seeds beside them."""

    __slots__ = ("__weakref__", "by_name", "nodes", "of", "seeds")

    def __init__(self, nodes: Iterable[Node], of: int = 0) -> None:
        """`of`: how many they were chosen of, where they are those of an island."""
        self.nodes = tuple(nodes)
        self.of = of or len(self.nodes)
        """Nodes among whom the model's requests are spread."""
        self.by_name = {node.name: node for node in self.nodes}
        self.seeds = array("Q", [node.seed for node in self.nodes])

    def __len__(self) -> int:
        return len(self.nodes)


class Group:
    __slots__ = (
        "_on",
        "adapter",
        "at_need",
        "inflight",
        "members",
        "model",
        "pace",
        "ramping_until_s",
        "several",
        "trials",
        "up",
        "waiting",
    )

    def __init__(self, model: str) -> None:
        self.model = model
        self.adapter: Adapter | None = None
        """Where the model is a LoRA adapter: what loading it costs."""
        self.pace = DecodeSpeed()
        self.inflight = 0
        """Our requests on nodes of this group, whatever model they asked for."""
        self.waiting = 0
        """Requests that wait at the router for one of its nodes."""
        self.members: tuple[Node, ...] = ()
        self.up = Candidates(())
        self.at_need = Candidates(())
        """Suspected nodes: used where none is up."""
        self.trials: tuple[Node, ...] = ()
        """Nodes on trial: each takes one request at a time until one succeeds."""
        self.ramping_until_s = 0.0
        """Until then at least one node takes less than its full share."""
        self.several = False
        """Whether its nodes stand on more than one island, up or not."""
        self._on: dict[tuple[str, ...], Candidates] = {}

    def rebuild(self, members: Iterable[Node], slow_start_s: float) -> None:
        self.members = tuple(members)
        self.several = several(self.members)
        self._on = {}
        serving = [node for node in self.members if not node.draining and node.role == "mixed"]
        if not serving:
            serving = [node for node in self.members if not node.draining and node.role == "decode"]
        up = [node for node in serving if node.health.standing is Standing.UP]
        self.up = Candidates(up)
        self.trials = tuple(node for node in serving if node.health.standing is Standing.HALF_OPEN)
        self.at_need = Candidates(node for node in serving if node.health.usable_at_need)
        self.ramping_until_s = max((node.health.up_since_s + slow_start_s for node in up), default=0.0)

    def on(self, *islands: str) -> Candidates:
        """Of those that are up, the ones on these islands. Made when first asked for."""
        found = self._on.get(islands)
        if found is None:
            up = self.up.nodes
            found = self._on[islands] = Candidates([node for node in up if node.island in islands], len(up))
        return found
