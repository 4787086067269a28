"""Keeps the fleet equal to what the sources list. No I/O of its own.

    a target is listed and ready        its node joins the fleet
    not ready, or terminating           the node drains: no new requests, running ones finish
    ready again                         the node gets requests again, unless an operator drained it
    not listed any more                 the node drains, and leaves the fleet after its last request

- Targets with the same address are one node. It is ready if every source says so.
- A node with that address that is in the fleet already ([[nodes]], the admin API, the autoscaler) stays as it is.
- A discovered node that an operator or the autoscaler removes stays away until its source has stopped listing it.
- If a source lists nothing any more, its nodes stay, except those that drained before: a source that fails often
  answers with nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from msgspec.structs import replace

from warmroute.config import ConfigError, NodeConfig, canonical_address, node_name
from warmroute.discovery.target import MAX_TARGETS, Address, Target
from warmroute.discovery.turn import Turn
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet, NameTaken, UnknownNode
from warmroute.fleet.node import Node

log = EventLog("warmroute.discovery")


class NodeRegistry(Protocol):
    """Adds nodes to the service, drains and removes them."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def drain_node(self, name: str, draining: bool) -> Node: ...


class _Discovered:
    """A node that discovery added."""

    __slots__ = ("drained", "node", "removed", "source", "target")

    def __init__(self, node: Node, target: NodeConfig, source: str) -> None:
        self.node = node
        self.target = target
        """As the source lists it."""
        self.source = source
        self.drained = False
        """Whether discovery drained it, and not an operator."""
        self.removed = False
        """Somebody else removed it."""


class DiscoveredNodes:
    def __init__(self, fleet: Fleet, registry: NodeRegistry) -> None:
        self._fleet = fleet
        self._registry = registry
        self._listed: dict[str, dict[Address, Target]] = {}
        """By source."""
        self._discovered: dict[Address, _Discovered] = {}
        self._addresses: dict[Node, Address] = {}
        self._refused: set[Address] = set()
        self.leaving = False
        """Whether nodes wait for their last requests."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """By source and kind of change."""

    def listed(self, source: str) -> list[Target]:
        return list(self._listed.get(source, {}).values())

    def node_at(self, address: Address) -> str:
        """Return the name of the node that discovery added at this address; empty if there is none."""
        found = self._discovered.get(address)
        return found.node.name if found is not None and not found.removed else ""

    def update(self, source: str, targets: list[Target]) -> tuple[bool, int]:
        """Take over what a source lists. Return whether it lists nothing although it did before, and how many targets
        were ignored because there are too many: those that the router knows stay."""
        before = self._listed.get(source, {})
        wanted: dict[Address, Target] = {}
        for target in targets:
            same = wanted.get(target.address)
            wanted[target.address] = target if same is None else same._replace(ready=same.ready and target.ready)
        if not wanted and any(target.ready for target in before.values()):
            self._listed[source] = {address: target for address, target in before.items() if target.ready}
            return True, 0
        ignored = max(0, len(wanted) - MAX_TARGETS)
        if ignored:
            order = sorted(wanted.values(), key=lambda target: target.address not in before)
            wanted = {target.address: target for target in order[:MAX_TARGETS]}
        self._listed[source] = wanted
        return False, ignored

    def forget(self, source: str) -> None:
        """The configuration does not have this source any more: its nodes drain and leave."""
        self._listed.pop(source, None)

    async def apply(self) -> None:
        """Change the fleet."""
        wanted, sources = self._merged()
        others = self._addresses_of_others()
        turn = Turn()
        for address, target in wanted.items():
            self._apply(address, target, sources[address], address in others)
            await turn.share()
        for address in [one for one in self._discovered if one not in wanted]:
            self._leave(address)
            await turn.share()
        self.leaving = any(address not in wanted for address in self._discovered)
        self._refused &= wanted.keys()

    def _merged(self) -> tuple[dict[Address, Target], dict[Address, str]]:
        wanted: dict[Address, Target] = {}
        sources: dict[Address, str] = {}
        for source, targets in self._listed.items():
            for address, target in targets.items():
                first = wanted.get(address)
                if first is None:
                    wanted[address], sources[address] = target, source
                elif not target.ready:
                    wanted[address] = first._replace(ready=False)
        return wanted, sources

    def _addresses_of_others(self) -> set[Address]:
        """Return the addresses of nodes that discovery did not add."""
        known = self._addresses
        self._addresses = {node: known.get(node) or canonical_address(node.url) for node in self._fleet}
        ours = {one.node for one in self._discovered.values()}
        return {address for node, address in self._addresses.items() if node not in ours}

    def _apply(self, address: Address, target: Target, source: str, taken: bool) -> None:
        known = self._discovered.get(address)
        if known is not None and not self._is_in_fleet(known):
            if taken:
                del self._discovered[address]
            known.removed = True
            return
        if known is not None and (taken or not _is_same_engine(known.target, target.node)):
            self._remove(address, known)
            known = None
        if known is None:
            if not taken and target.ready:
                self._add(address, target, source)
            return
        if known.target != target.node:
            known.target = target.node
            self._fleet.update_config(known.node, replace(target.node, name=known.node.name))
        self._set_draining(known, not target.ready)

    def _add(self, address: Address, target: Target, source: str) -> None:
        for name in (target.node.name, f"{source}-{node_name(target.node)}"):
            try:
                node = self._registry.add_node(replace(target.node, name=name))
            except NameTaken:
                continue
            except ConfigError as error:
                reason = str(error)
                break
            self._discovered[address] = _Discovered(node, target.node, source)
            self.changes[source, "added"] += 1
            return
        else:
            reason = "other nodes have its name"
        if address not in self._refused:
            self._refused.add(address)
            log.warning(
                "discovered_node_refused", "The node cannot join the fleet.", node=node_name(target.node),
                source=source, reason=reason,
            )  # fmt: skip

    def _leave(self, address: Address) -> None:
        """No source lists it any more."""
        known = self._discovered[address]
        if not self._is_in_fleet(known):
            del self._discovered[address]
        elif known.node.inflight:
            self._set_draining(known, True)
        else:
            self._remove(address, known)

    def _remove(self, address: Address, known: _Discovered) -> None:
        del self._discovered[address]
        self._registry.remove_node(known.node.name)
        self.changes[known.source, "removed"] += 1

    def _set_draining(self, known: _Discovered, draining: bool) -> None:
        if draining and not known.node.draining:
            self._registry.drain_node(known.node.name, True)
            known.drained = True
            self.changes[known.source, "drained"] += 1
        elif not draining and known.drained:
            known.drained = False
            if known.node.draining:
                self._registry.drain_node(known.node.name, False)

    def _is_in_fleet(self, known: _Discovered) -> bool:
        try:
            return self._fleet.node(known.node.name) is known.node
        except UnknownNode:
            return False


def _is_same_engine(before: NodeConfig, now: NodeConfig) -> bool:
    """Of two targets with the same address. Another Pod may get the address of one that is gone."""
    return before.url == now.url and before.name == now.name
