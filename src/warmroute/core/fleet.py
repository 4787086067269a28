"""The fleet: its nodes, the models each of them serves, and their health. Takes events and a clock; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from warmroute.config import Health, NodeConfig, OutlierDetection, node_name
from warmroute.config.nodes import Role
from warmroute.core.adapters import FleetAdapters, GroupAdapter
from warmroute.core.context_windows import windows_by_model
from warmroute.core.group import Group
from warmroute.core.health import HealthState, Outliers
from warmroute.core.islands import IslandRegistry
from warmroute.core.messages import AT_FAULT, PASSED, Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import NameTaken, UnknownNode
from warmroute.core.speeds import SpeedReview

MAX_PAST_MODELS: Final = 1024

OnHealthChange = Callable[[Node, HealthState], None]
"""Called after each change of a node's health state, with the state before it."""


class Fleet:
    def __init__(
        self,
        health: Health,
        on_change: OnHealthChange = lambda _node, _before: None,
        outlier_detection: OutlierDetection | None = None,
        first_number: int = 0,
    ) -> None:
        """`first_number`: the numbers of its nodes begin behind it."""
        self._health = health
        self._first_number = first_number
        self.outlier_detection = Outliers(outlier_detection or OutlierDetection())
        self._observers = [on_change]
        self._config_observers: list[Callable[[Node], None]] = []
        self._speed_review = SpeedReview()
        self.islands = IslandRegistry()
        self.adapters = FleetAdapters()
        self._nodes: dict[str, Node] = {}
        self._numbered: dict[int, Node] = {}
        self.changed: dict[Node, None] = {}
        """Nodes whose waiting calls may have to leave, or that can take such calls, until the Brain has looked."""
        self.version = 0
        """Incremented when something changes that an edge has to know."""
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

    def numbered(self, number: int) -> Node | None:
        return self._numbered.get(number)

    def add(self, config: NodeConfig) -> Node:
        name = node_name(config)
        if name in self._nodes:
            raise NameTaken(name)
        node = self._nodes[name] = Node(config, self._health, self.adapters)
        self._added += 1
        node.number = self._first_number + self._added
        self._numbered[node.number] = node
        self.version += 1
        self.islands.add(node)
        self._regroup(node)
        return node

    def remove(self, name: str) -> Node:
        """Remove a node at once. Its running requests keep their tickets until they finish, or leave it."""
        node = self.node(name)
        node.draining = True
        del self._nodes[name]
        del self._numbered[node.number]
        self.version += 1
        self.changed[node] = None
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
        self.version += 1
        if not node.draining:
            self.changed[node] = None
        for group in node.groups:
            self._members_changed(group)
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Give a node another role, until its configuration has another one than now. Its requests continue."""
        node = self.node(name)
        node.role = role
        self.version += 1
        self.changed[node] = None
        for group in node.groups:
            self._members_changed(group)
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: Health) -> tuple[list[Node], list[Node]]:
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
        self.version += 1
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
    def by_model(self) -> dict[str, Group]:
        """The groups themselves, not a copy. One whose nodes changed health is sorted when `group` returns it."""
        return self._groups

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
        self.version += 1
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
            self.changed[node] = None
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
        self.version += 1
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
        if outcome in PASSED:
            if health.request_passed(now_s):
                self._apply_health(node, (HealthState.HALF_OPEN, False), now_s)
        elif outcome in AT_FAULT:
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
        self.version += 1
        if node.health.state is HealthState.UP:
            self.outlier_detection.came_up(node, now_s)
        for group in node.groups:
            group.health_changed(self._health.slow_start_s)
        self.changed[node] = None
        if node.health.state is not before[0]:
            for on_change in self._observers:
                on_change(node, before[0])


def _how_served(node: Node, model: str) -> tuple[int | None, bool]:
    return node.context_window(model), model in node.adapter_names
