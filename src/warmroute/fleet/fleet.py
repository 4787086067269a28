"""The fleet: which nodes there are, what each serves, and who may be asked now. Takes events and a clock; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig, node_name
from warmroute.fleet.adapters import Adapter, Adapters
from warmroute.fleet.group import Group
from warmroute.fleet.health import Standing
from warmroute.fleet.islands import Islands
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket

StandingChanged = Callable[[Node, Standing], None]
"""Told of each change, with the standing before it."""


class UnknownNode(KeyError):
    """No node has this name."""


class NameTaken(ValueError):
    """Another node has this name."""


class Fleet:
    def __init__(self, health: HealthConfig, on_change: StandingChanged = lambda _node, _before: None) -> None:
        self._health = health
        self._on_change = on_change
        self.islands = Islands()
        self.adapters = Adapters(0.0)
        self._nodes: dict[str, Node] = {}
        self._groups: dict[str, Group] = {}
        self.served: set[str] = set()
        """Names of all models that nodes have served, also of those that are gone."""
        self._configured: set[str] = set()
        """Names of the nodes that the configuration brought; others were added at run time and stay."""

    # Who there is.

    def __iter__(self) -> Iterator[Node]:
        """Those that there are now. Others may come and go meanwhile: the metrics page is read in a thread."""
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, name: str) -> Node:
        try:
            return self._nodes[name]
        except KeyError:
            raise UnknownNode(name) from None

    def add(self, config: NodeConfig) -> Node:
        name = node_name(config)
        if name in self._nodes:
            raise NameTaken(name)
        node = self._nodes[name] = Node(config, self._health, self.adapters)
        self.islands.joined(node)
        self._regroup(node)
        return node

    def remove(self, name: str) -> Node:
        """Takes a node out of the fleet at once. Its running requests keep their tickets and finish."""
        node = self.node(name)
        node.draining = True
        del self._nodes[name]
        for group in node.groups:
            self._rebuild(group)
        node.groups = ()
        self.islands.left(node)
        return node

    def drain(self, name: str, draining: bool = True) -> Node:
        """No new request goes to a draining node; running ones finish."""
        node = self.node(name)
        node.draining = draining
        for group in node.groups:
            self._rebuild(group)
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: HealthConfig) -> tuple[list[Node], list[Node]]:
        """Makes the fleet that of a new configuration; returns the nodes added and removed."""
        self._health = health
        wanted = {node_name(config): config for config in nodes}
        removed = []
        for name in (self._configured | wanted.keys()) & self._nodes.keys():
            node, config = self._nodes[name], wanted.get(name)
            if config is None or config.url != node.config.url:
                removed.append(self.remove(name))
            elif config != node.config:
                self.redescribe(node, config)
        added = [self.add(config) for name, config in wanted.items() if name not in self._nodes]
        self._configured = set(wanted)
        for node in self:
            node.health.reconfigure(health)
        return added, removed

    def redescribe(self, node: Node, config: NodeConfig) -> None:
        """The same endpoint, of which other things are said."""
        node.redescribe(config)
        self.islands.joined(node)
        self._regroup(node)

    # Who serves what.

    def group(self, model: str) -> Group | None:
        return self._groups.get(model)

    @property
    def groups(self) -> Iterable[Group]:
        return self._groups.values()

    @property
    def models(self) -> list[str]:
        return list(self._groups)

    @property
    def only_group(self) -> Group | None:
        """The group of the only model there is."""
        return next(iter(self._groups.values())) if len(self._groups) == 1 else None

    @property
    def fully_known(self) -> bool:
        """Whether every node has said which models it serves."""
        return all(node.models is not None for node in self)

    @property
    def can_serve(self) -> bool:
        return any(len(group.up) or len(group.at_need) for group in self._groups.values())

    def saw_models(self, node: Node, models: Sequence[str], cards: Sequence[dict[str, object]]) -> None:
        """Takes what the node's /v1/models says."""
        node.model_cards = tuple(cards)
        found = node.config.models or tuple(models)
        adapters = frozenset(str(card["id"]) for card in cards if card.get("parent"))
        if found != node.models or adapters != node.adapter_names:
            node.models, node.adapter_names = found, adapters
            self._regroup(node)

    def _regroup(self, node: Node) -> None:
        before = node.groups
        names = dict.fromkeys(node.models or ())
        self.served.update(names)
        node.groups = tuple(self._groups.setdefault(name, Group(name)) for name in names)
        for group in {*before, *node.groups}:
            self._rebuild(group)
        if not node.speed.answers:  # until it has shown its own, it is taken to be as quick as its peers
            peers = {other for group in node.groups for other in group.members if other.speed.answers}
            if peers:
                node.speed.guess(median([peer.speed.ms_per_token for peer in peers]))

    def _rebuild(self, group: Group) -> None:
        members = [node for node in self if group in node.groups]
        group.rebuild(members, self._health.slow_start_s)
        is_adapter = any(group.model in node.adapter_names for node in members)
        if is_adapter != (group.adapter is not None):
            group.adapter = Adapter(group.model, self.adapters) if is_adapter else None
        if not members:
            self._groups.pop(group.model, None)

    # What is heard of them.

    def check_passed(self, node: Node, now_s: float) -> None:
        before = node.health.view
        node.health.check_passed(now_s)
        self._settle(node, before)

    def check_slow(self, node: Node, now_s: float, heard_s: float = -1e9) -> None:
        before = node.health.view
        node.health.check_slow(now_s, heard_s)
        self._settle(node, before)

    def check_refused(self, node: Node, now_s: float, reason: str) -> None:
        before = node.health.view
        node.health.check_refused(now_s, reason)
        self._settle(node, before)

    def close_ticket(self, ticket: Ticket, outcome: Outcome, now_s: float, reason: str = "") -> None:
        """Settles a request's books, and lets its outcome speak for the node's health."""
        ticket.close(outcome, now_s)
        node = ticket.node
        health = node.health
        if outcome is Outcome.OK or outcome is Outcome.REJECTED:
            if health.request_passed(now_s):
                self._settle(node, (Standing.HALF_OPEN, False))
        elif outcome is Outcome.FAILED or outcome is Outcome.BROKEN:
            before = health.view
            health.request_failed(now_s, reason)
            self._settle(node, before)

    def _settle(self, node: Node, before: tuple[Standing, bool]) -> None:
        if node.health.view == before:
            return
        for group in node.groups:
            self._rebuild(group)
        if node.health.standing is not before[0]:
            self._on_change(node, before[0])
