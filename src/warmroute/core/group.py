"""The nodes of one model, and by role the candidates of a request. They are sorted anew when a node has changed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from warmroute.core.adapters import GroupAdapter
from warmroute.core.context_windows import ContextWindows
from warmroute.core.demand import LongPrompts, ServiceRate
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.speeds import DecodeSpeed, TransferSpeeds

# A group: the nodes that serve one model, sorted by how the router may use them.
#
# A request finds its candidates without a search: the fleet tells a group when a member comes, leaves or changes. After
# a change of a member's health, the group sorts its members when somebody next asks the fleet for it. So a node with
# hundreds of LoRA adapters changes its health at the cost of a mark in each of its groups, and only those with requests
# sort anew.


class Candidates:
    """The nodes that a policy chooses from, with their seeds for rendezvous hashing."""

    __slots__ = ("__weakref__", "_subsets", "by_name", "nodes", "seeds", "shared_by")

    def __init__(self, nodes: Iterable[Node], shared_by: int = 0) -> None:
        """`shared_by`: how many nodes share the model's traffic, where these are only some of them."""
        self.nodes = tuple(nodes)
        self.shared_by = shared_by or len(self.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.seeds = array("Q", [node.seed for node in self.nodes])
        self._subsets: dict[object, Candidates] | None = None

    def __len__(self) -> int:
        return len(self.nodes)

    def subset(self, key: object, keeps: Callable[[Node], bool]) -> Candidates:
        """Return the nodes for which `keeps` is true. Computed once for each key, so keys have to be few."""
        subsets = self._subsets
        if subsets is None:
            subsets = self._subsets = {}
        found = subsets.get(key)
        if found is None:
            found = subsets[key] = Candidates([node for node in self.nodes if keeps(node)], self.shared_by)
        return found


_NO_CANDIDATES: Final = Candidates(())


@dataclass(slots=True, eq=False)
class Group:
    model: str
    adapter: GroupAdapter | None = None
    """Set if the model is a LoRA adapter."""
    decode_speed: DecodeSpeed = field(default_factory=DecodeSpeed)
    inflight: int = 0
    """Requests of this process and its peers on the group's nodes, for any model."""
    waiting: int = 0
    """Requests in the admission queues of this process and its peers for this group."""
    peer_waiting: int = 0
    """Those of them that wait in the queues of peers."""
    service: ServiceRate = field(default_factory=ServiceRate)
    """How fast the others, those of this process, get nodes."""
    members: tuple[Node, ...] = ()
    """In the order in which the fleet got them."""
    spans_islands: bool = False
    """Whether the members are on more than one island."""
    windows: ContextWindows | None = None
    """Set while the members differ in their context window."""
    _serving: tuple[Node, ...] = ()
    """Those that serve requests when they are up."""
    # By health. Fleet.group() sorts a group before it returns it; who keeps a group calls sort_if_changed() first.
    is_sorted: bool = False
    up: Candidates = _NO_CANDIDATES
    last_resort: Candidates = _NO_CANDIDATES
    """Suspected, half-open and ejected nodes: used while none is up."""
    half_open: tuple[Node, ...] = ()
    """Nodes that get one trial request at a time until one succeeds."""
    # Prefill and decode nodes (core/pairs.py).
    has_roles: bool = False
    """Whether a member has the role `prefill` or `decode`."""
    prefill_nodes: Candidates = _NO_CANDIDATES
    """Nodes that are up and can prefill for another node."""
    half_open_prefill: tuple[Node, ...] = ()
    transfer_speeds: TransferSpeeds = field(default_factory=TransferSpeeds)
    long_prompts: LongPrompts = field(default_factory=LongPrompts)
    slow_start_until_s: float = 0.0
    """Until then at least one node gets less than its normal share of the traffic."""
    _slow_start_s: float = 0.0

    # Members.

    def add(self, node: Node) -> None:
        if node not in self.members:
            self.members = tuple(sorted((*self.members, node), key=attrgetter("number")))

    def remove(self, node: Node) -> None:
        self.members = tuple(other for other in self.members if other is not node)

    def members_changed(self, slow_start_s: float) -> None:
        """A member came, left, or changed its island, role, context window or draining."""
        self.spans_islands = len({node.island for node in self.members}) > 1
        self.has_roles = any(node.role != "mixed" for node in self.members)
        serving = [node for node in self.members if not node.draining and node.role != "prefill"]
        self._serving = tuple(serving)
        self.windows = ContextWindows.of(self.model, serving, self.windows)
        self.health_changed(slow_start_s)

    @property
    def serving(self) -> int:
        """Number of nodes that serve requests when they are up."""
        return len(self._serving)

    # Their health.

    def health_changed(self, slow_start_s: float) -> None:
        self.is_sorted = False
        self._slow_start_s = slow_start_s

    def sort_if_changed(self) -> Group:
        """Sort the members if the health of one has changed since. Return the group."""
        if not self.is_sorted:
            self._sort()
        return self

    def _sort(self) -> None:
        self.is_sorted = True  # first: another thread may report a change meanwhile
        serving = self._serving
        if self.has_roles:
            serving = self._sort_prefill_nodes(serving)
        up = [node for node in serving if node.health.state is HealthState.UP]
        self.up = Candidates(up)
        self.half_open = tuple(node for node in serving if node.health.state is HealthState.HALF_OPEN)
        self.last_resort = Candidates(node for node in serving if node.health.usable_as_last_resort)
        self.slow_start_until_s = max((node.health.up_since_s + self._slow_start_s for node in up), default=0.0)

    def _sort_prefill_nodes(self, serving: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes that can serve a request. A decode node that cannot prefill needs a prefill node. Where no
        other node is up, prefill nodes serve whole requests."""
        nodes = [node for node in self.members if not node.draining and node.prefills_for_others]
        self.prefill_nodes = Candidates(node for node in nodes if node.health.state is HealthState.UP)
        self.half_open_prefill = tuple(
            node for node in nodes if node.role == "prefill" and node.health.state is HealthState.HALF_OPEN
        )
        engines = {node.engine for node in (*self.prefill_nodes.nodes, *self.half_open_prefill)}
        usable = [
            node for node in serving if not node.awaits_detection and (not node.needs_partner or node.engine in engines)
        ]
        if not any(node.health.state is HealthState.UP for node in usable):
            usable += [node for node in self.prefill_nodes.nodes if node.role == "prefill" and node.can_serve_alone]
        return tuple(usable)

    def on_islands(self, *islands: str) -> Candidates:
        """Return the nodes on these islands that are up."""
        return self.sort_if_changed().up.subset(islands, lambda node: node.island in islands)


# Restricts a request to some nodes: Envoy may tell the picker which endpoints are eligible.


def within_subset(candidates: Candidates, names: frozenset[str]) -> Candidates:
    """Return the candidates with these names."""
    return Candidates([node for node in candidates.nodes if node.name in names], candidates.shared_by)


def is_outside_subset(members: Iterable[Node], names: frozenset[str]) -> bool:
    """Return whether none of these nodes has such a name."""
    return not any(node.name in names for node in members)


# Prefill nodes that serve whole requests while they have nothing else to do. No I/O.
#
# A role is a preference with a price. On an idle prefill node, a long prompt needs no transfer, and a short one does
# not wait for the batch of a decode node. But the node prefills for no other one until the answer ends, since that
# would stop the answer (Node.whole_answers, admission.py). The price of a node alone gets one more term:
#
#     blocking = P(more long prompts come during the answer than other prefill nodes are idle)                    [ms]
#              · wait of the first one of them / (1 − busy^nodes)
#              + answer · prompts in the queue / nodes
#
#     wait     until half of the answer is over, or a prefill on one of the other nodes ends
#     busy     share of their time that long prompts and this answer keep the prefill nodes busy
#
# On busy prefill nodes one delay makes others; with several nodes only if all of them are busy. The arrivals of long
# prompts (core/demand.py) are those of this process, and so are the answers that block a node: with several
# processes, prefill nodes serve no whole requests.

ANSWER_LEFT: Final = 0.5
"""The share of an answer that is left on average when a prompt comes."""
MAX_BUSY: Final = 0.99
MAX_OTHERS: Final = 8
"""More idle nodes than this make no difference."""
MAX_RATIO_TO_EXPECTED: Final = 2.0
"""An answer blocks its node for at most this many times as long as it is expected to take."""


def idle_nodes(nodes: Sequence[Node], island: str) -> int:
    """Return how many prefill nodes of an island have no request and could serve whole ones."""
    return sum([not node.load and is_prefill_node(node, island) for node in nodes])


def is_prefill_node(node: Node, island: str) -> bool:
    return node.role == "prefill" and node.island == island and node.can_serve_alone


def blocking_ms(group: Group, answer_ms: float, others: int, now_s: float) -> float:
    """Return what it costs long prompts that a prefill node decodes an answer, if `others` more are idle."""
    per_ms, busy_nodes = group.long_prompts.recent(now_s)
    if per_ms <= 0.0 or answer_ms <= 0.0:
        return 0.0
    nodes = len(group.prefill_nodes)
    expected = per_ms * answer_ms
    chance = enough = math.exp(-expected)
    for count in range(1, min(others, MAX_OTHERS) + 1):
        chance *= expected / count
        enough += chance
    wait_ms = ANSWER_LEFT / (1.0 / answer_ms + (nodes - 1) * per_ms / busy_nodes)
    busy = min(MAX_BUSY, (busy_nodes + expected) / nodes)
    return max(0.0, 1.0 - enough) * wait_ms / (1.0 - busy**nodes) + answer_ms * group.waiting / nodes
