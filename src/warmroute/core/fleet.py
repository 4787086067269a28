"""All nodes, and by model and role the candidates of a request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final

from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig, node_name
from warmroute.config import OutlierDetection as OutlierConfig
from warmroute.config.nodes import Role
from warmroute.core.adapters import FleetAdapters, GroupAdapter
from warmroute.core.context_windows import ContextWindows, windows_by_model
from warmroute.core.demand import LongPrompts, ServiceRate
from warmroute.core.health import HealthState, OutlierDetection
from warmroute.core.islands import IslandRegistry
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import NameTaken, UnknownNode
from warmroute.core.speeds import DecodeSpeed, SpeedReview, TransferSpeeds

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


# The fleet: its nodes, the models each of them serves, and their health. Takes events and a clock; no I/O.

MAX_PAST_MODELS: Final = 1024

OnHealthChange = Callable[[Node, HealthState], None]
"""Called after each change of a node's health state, with the state before it."""

_PASSED: Final = (Outcome.OK, Outcome.REJECTED)
_FAILED: Final = (Outcome.FAILED, Outcome.BROKEN)


class Fleet:
    def __init__(
        self,
        health: HealthConfig,
        on_change: OnHealthChange = lambda _node, _before: None,
        outlier_detection: OutlierConfig | None = None,
    ) -> None:
        self._health = health
        self.outlier_detection = OutlierDetection(outlier_detection or OutlierConfig())
        self._observers = [on_change]
        self._config_observers: list[Callable[[Node], None]] = []
        self._speed_review = SpeedReview()
        self.islands = IslandRegistry()
        self.adapters = FleetAdapters()
        self._nodes: dict[str, Node] = {}
        self._added = 0
        self._groups: dict[str, Group] = {}
        self.models_ever_served: dict[str, None] = {}
        """Models that nodes have served, including nodes that are gone, the latest ones last. Of those that no node
        serves any more, the oldest are forgotten beyond MAX_PAST_MODELS."""
        self.has_roles = False
        """Whether a node has, or had, the role `prefill` or `decode`."""
        self.pairs_only_with_vllm = False
        """Whether all nodes that can be one of a pair run vLLM."""
        self._configured: set[str] = set()
        """Names of the nodes from the configuration. Nodes added at run time survive a reload."""

    # Nodes.

    def __iter__(self) -> Iterator[Node]:
        """Iterate over a copy: a thread renders the metrics page."""
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def membership(self) -> tuple[int, int]:
        """Changes whenever a node joins or leaves."""
        return self._added, len(self._nodes)

    def node(self, name: str) -> Node:
        try:
            return self._nodes[name]
        except KeyError:
            raise UnknownNode(name) from None

    @property
    def by_name(self) -> dict[str, Node]:
        """The nodes themselves, not a copy: for the kernel."""
        return self._nodes

    def find(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def add(self, config: NodeConfig) -> Node:
        name = node_name(config)
        if name in self._nodes:
            raise NameTaken(name)
        node = self._nodes[name] = Node(config, self._health, self.adapters)
        self._added += 1
        node.number = self._added
        self.islands.add(node)
        self._regroup(node)
        return node

    def remove(self, name: str) -> Node:
        """Remove a node at once. Its running requests keep their tickets until they finish, or leave it (routing's
        Dispatcher.leave)."""
        node = self.node(name)
        node.draining = True
        del self._nodes[name]
        node.speed.first_tokens = None  # another node may get its name
        before, node.groups = node.groups, ()
        for group in before:
            group.inflight -= node.peer_inflight
            group.remove(node)
            self._members_changed(group)
        self.islands.remove(node)
        return node

    def drain(self, name: str, draining: bool = True, by_hand: bool = False) -> Node:
        """Send no new requests to a node, or send it requests again. Running ones finish. Only an operator ends a drain
        `by_hand`: discovery and the autoscaler do not."""
        node = self.node(name)
        if by_hand:
            node.drained_by_hand = draining
        node.draining = draining or node.drained_by_hand
        for group in node.groups:
            self._members_changed(group)
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Give a node another role, until its configuration has another one than now. Its requests continue."""
        node = self.node(name)
        node.role = role
        for group in node.groups:
            self._members_changed(group)
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: HealthConfig) -> tuple[list[Node], list[Node]]:
        """Apply a new configuration. Return the nodes added and removed."""
        self._health = health
        wanted = {node_name(config): config for config in nodes}
        removed = []
        for name in (self._configured | wanted.keys()) & self._nodes.keys():
            node, config = self._nodes[name], wanted.get(name)
            if config is None or config.url != node.config.url:
                removed.append(self.remove(name))
            elif config != node.config:
                self.update_config(node, config)
        added = [self.add(config) for name, config in wanted.items() if name not in self._nodes]
        self._configured = set(wanted)
        for node in self:
            node.health.config = health
        return added, removed

    def update_config(self, node: Node, config: NodeConfig) -> None:
        """Apply a changed configuration of the same endpoint."""
        node.update_config(config)
        self.islands.add(node)
        self._regroup(node)
        for on_change in self._config_observers:
            on_change(node)

    def is_configured(self, name: str) -> bool:
        """Whether the configuration lists this node."""
        return name in self._configured

    def observe_config(self, on_change: Callable[[Node], None]) -> None:
        """Call `on_change` after each change of a node's configuration: by a reload, a source or the autoscaler."""
        self._config_observers.append(on_change)

    # Models.

    def group(self, model: str) -> Group | None:
        group = self._groups.get(model)
        return group if group is None or group.is_sorted else group.sort_if_changed()

    @property
    def groups(self) -> Iterable[Group]:
        """All groups. A group whose nodes changed health is sorted when `group` returns it, not here."""
        return self._groups.values()

    @property
    def models(self) -> list[str]:
        return list(self._groups)

    @property
    def only_group(self) -> Group | None:
        """The group of the only model that the fleet serves."""
        return next(iter(self._groups.values())).sort_if_changed() if len(self._groups) == 1 else None

    @property
    def all_models_known(self) -> bool:
        return all(node.models is not None for node in self)

    def awaits_first_check(self, model: str) -> bool:
        """Whether a node whose first check has not ended may serve this model. Empty: any model."""
        return any(
            node.health.awaits_first_check
            and not node.draining
            and (not model or node.models is None or model in node.models)
            for node in self
        )

    @property
    def can_serve(self) -> bool:
        groups = (group.sort_if_changed() for group in self._groups.values())
        return any(group.up.nodes or group.last_resort.nodes for group in groups)

    def transfers_changed(self, node: Node) -> None:
        """The router learned which engine a node runs, or whether it can transfer KV cache."""
        for group in node.groups:
            if group.has_roles:
                self._members_changed(group)

    def update_models(self, node: Node, models: Sequence[str], cards: Sequence[dict[str, object]]) -> None:
        """Take over what the node's /v1/models reports."""
        node.model_cards = tuple(cards)
        found = node.config.models or tuple(models)
        adapters = frozenset(str(card["id"]) for card in cards if card.get("parent"))
        windows = windows_by_model(cards)
        if found != node.models or adapters != node.adapter_names or windows != node.context_windows:
            before = {name: _how_served(node, name) for name in node.models or ()}
            node.models, node.adapter_names, node.context_windows = found, adapters, windows
            self._regroup(node, {name for name in found if before.get(name) != _how_served(node, name)})

    def _regroup(self, node: Node, changed: Container[str] | None = None) -> None:
        """Put the node into the groups of its models. `changed`: those that it serves in another way than before, if
        not all of them."""
        before = node.groups
        names = dict.fromkeys(node.models or ())
        self._remember_models(names)
        node.groups = tuple(self._groups.get(name) or self._groups.setdefault(name, Group(name)) for name in names)
        if peer_inflight := node.peer_inflight:
            for group in before:
                group.inflight -= peer_inflight
            for group in node.groups:
                group.inflight += peer_inflight
        for group in before:
            if group.model not in names:
                group.remove(node)
                self._members_changed(group)
        for group in node.groups:
            if changed is None or group.model in changed:
                group.add(node)
                self._members_changed(group)
        self._speed_review.assume_peers(node)

    def _remember_models(self, names: dict[str, None]) -> None:
        ever = self.models_ever_served
        for name in names:
            ever.pop(name, None)
            ever[name] = None
        surplus = len(ever) - len(self._groups) - MAX_PAST_MODELS
        if surplus > 0:
            past = (name for name in ever if name not in self._groups and name not in names)
            for name in list(islice(past, surplus)):
                del ever[name]

    def _members_changed(self, group: Group) -> None:
        members, had_roles = group.members, group.has_roles
        group.members_changed(self._health.slow_start_s)
        self.has_roles = self.has_roles or group.has_roles
        if group.has_roles or had_roles:
            self.pairs_only_with_vllm = all(node.engine == "vllm" for node in self if node.transfers_kv)
        is_adapter = any(group.model in node.adapter_names for node in members)
        if is_adapter != (group.adapter is not None):
            group.adapter = GroupAdapter(group.model, self.adapters) if is_adapter else None
        if not members:
            self._groups.pop(group.model, None)

    # Health.

    def observe_health(self, on_change: OnHealthChange) -> None:
        self._observers.append(on_change)

    def check_passed(self, node: Node, now_s: float) -> None:
        before = node.health.eligibility
        node.health.check_passed(now_s)
        self._speed_review.review(node, now_s)
        if before[0] is HealthState.UP and node.health.state is HealthState.UP:
            self._eject_outlier(node, now_s)
        self._apply_health(node, before, now_s)

    def _eject_outlier(self, node: Node, now_s: float) -> None:
        outlier = self.outlier_detection.find(node, now_s)
        if outlier is not None:
            node.health.eject(now_s, self.outlier_detection.ejection_s(node, outlier, now_s), outlier.reason)

    def check_timed_out(self, node: Node, now_s: float, last_response_s: float = -1e9) -> None:
        before = node.health.eligibility
        node.health.check_timed_out(now_s, last_response_s)
        self._apply_health(node, before, now_s)

    def check_failed(self, node: Node, now_s: float, reason: str) -> None:
        before = node.health.eligibility
        node.health.check_failed(now_s, reason)
        self._apply_health(node, before, now_s)

    def close_ticket(
        self, ticket: Ticket, outcome: Outcome, now_s: float, reason: str = "", *, judged: bool = True
    ) -> None:
        """Close the ticket, and count its outcome for the node's health. `judged`: whether it is known that the node is
        at fault, if it failed; else `count_failure` may follow."""
        ticket.close(outcome, now_s)
        node = ticket.node
        health = node.health
        if not judged:
            node.excused_failures += 1
            return
        if outcome in _PASSED:
            if health.request_passed(now_s):
                self._apply_health(node, (HealthState.HALF_OPEN, False), now_s)
        elif outcome in _FAILED:
            before = health.eligibility
            health.request_failed(now_s, reason)
            self._apply_health(node, before, now_s)

    def count_failure(self, node: Node, failed_s: float, now_s: float, reason: str) -> None:
        """A node was at fault at `failed_s`, as is known only now."""
        node.excused_failures -= 1
        health = node.health
        if failed_s >= max(health.last_passed_s, health.up_since_s):  # else it would have been forgiven since
            before = health.eligibility
            health.request_failed(now_s, reason)
            self._apply_health(node, before, now_s)

    def _apply_health(self, node: Node, before: tuple[HealthState, bool], now_s: float) -> None:
        if node.health.eligibility == before:
            return
        if node.health.state is HealthState.UP:
            self.outlier_detection.came_up(node, now_s)
        for group in node.groups:
            group.health_changed(self._health.slow_start_s)
        if node.health.state is not before[0]:
            for on_change in self._observers:
                on_change(node, before[0])


def _how_served(node: Node, model: str) -> tuple[int | None, bool]:
    return node.context_window(model), model in node.adapter_names


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
PATIENCE: Final = 2.0
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
