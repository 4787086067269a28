"""Nodes that were added, drained, removed or given another role at run time, alike in all processes: a register of
the last change of each node, which every process holds whole.

A change gets the next version after all those that its process knows. Of two changes of one node the higher
version counts, then the sender with the higher name, so all processes end with the same register, in whatever
order messages arrive. Each message carries a digest of its sender's register; a process that sees another digest
publishes its whole register. So a lost message, a partition or a new process needs nothing else. For the time
when all processes have ended, the register is also stored in Redis, and what operators did in a file or a
ConfigMap (app/node_state.py).

A role of the register lasts until the node's configured role changes: the process that sees it clears the role.
For a node that the configuration lists, the configuration wins, except over a drain by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from warmroute.config import ConfigError, NodeConfig, canonical_address, parse_section
from warmroute.config.file import same_engine
from warmroute.config.nodes import Role
from warmroute.core.cluster.messages import MAX_CHANGES, MAX_NODE_BYTES, NodeChange
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node
from warmroute.core.rejections import NameTaken, UnknownNode
from warmroute.event_log import EventLog

log = EventLog("warmroute.cluster")

REPEAT_S: Final = 0.5
"""Shortest time between two publications of the whole register."""


class NodeOperations(Protocol):
    """Adds nodes to the service, drains and removes them."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def drain_node(self, name: str, draining: bool, by_hand: bool = False) -> Node: ...
    def set_role(self, name: str, role: Role) -> Node: ...


class Applied(NamedTuple):
    """A change that this process has applied."""

    version: int
    sender: str
    number: int
    """Of the fleet's node then; 0 if it had none."""
    configured_role: str


class SharedNodes:
    """The operations of the admin API and of the autoscaler: each applies here, and then in all other processes."""

    def __init__(self, fleet: Fleet, operations: NodeOperations, version: int = 0) -> None:
        """`version`: above those of processes before, also if their register is not known yet."""
        self._fleet = fleet
        self._operations = operations
        self._sender = ""
        self._on_change: Callable[[NodeChange], object] | None = None
        self.keep: Callable[[NodeChange], object] | None = None
        """Keeps each change, also of other processes, for the next start."""
        self._changes: dict[str, NodeChange] = {}
        self._version = version
        self.digest = 0
        self._unpublished: dict[str, NodeChange] = {}
        self._repeated_s = -1e9
        self._applied: dict[str, Applied] = {}
        """By node: the change that was applied, and the fleet's node then."""

    def join(self, sender: str, on_change: Callable[[NodeChange], object]) -> None:
        """Share changes from now on. `on_change` is called with each change of this process, which has to be published
        and stored."""
        self._sender, self._on_change = sender, on_change

    @property
    def changes(self) -> list[NodeChange]:
        return list(self._changes.values())

    # Changes of this process.

    def add_node(self, config: NodeConfig) -> Node:
        """Add a node of the autoscaler. Raises ConfigError or NameTaken."""
        node = self._operations.add_node(config)
        self._record(node, msgspec.json.encode(config))
        return node

    def add_by_hand(self, config: NodeConfig) -> Node:
        """Add a node of an operator. Raises ConfigError or NameTaken."""
        node = self._operations.add_node(config)
        self._record(node, msgspec.json.encode(config), added_by_hand=True)
        return node

    def update_node(self, name: str, config: NodeConfig) -> Node:
        """Change the configuration of a node with the same address. A role that was set at run time stays. Raises
        UnknownNode."""
        node = self._fleet.node(name)
        role = node.role if node.role != node.config.role else config.role
        self._fleet.update_config(node, config)
        if node.role != role:
            self._fleet.set_role(name, role)
        self._record(node, msgspec.json.encode(config))
        return node

    def remove_node(self, name: str) -> Node:
        """Raises UnknownNode."""
        node = self._operations.remove_node(name)
        self._record(node, removed=True)
        return node

    def drain_node(self, name: str, draining: bool) -> Node:
        """Drain by hand, or end it. Raises UnknownNode."""
        node = self._operations.drain_node(name, draining, by_hand=True)
        self._record_state(node)
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Give a node another role, for the autoscaler. Raises UnknownNode."""
        node = self._operations.set_role(name, role)
        self._record_state(node, role_by_hand=False)
        return node

    def set_role_by_hand(self, name: str, role: Role) -> Node:
        """Raises UnknownNode."""
        node = self._operations.set_role(name, role)
        self._record_state(node, role_by_hand=True)
        return node

    def drain(self, name: str, draining: bool = True) -> Node:
        """Drain for the autoscaler, which logs it otherwise. It does not end a drain by hand. Raises UnknownNode."""
        node = self._fleet.drain(name, draining)
        self._record_state(node)
        return node

    def _record_state(self, node: Node, role_by_hand: bool | None = None) -> None:
        """`role_by_hand`: who has just changed the role; None if nobody has."""
        known = self._changes.get(node.name)
        if known is None or known.removed:
            self._record(node, role_by_hand=bool(role_by_hand))
        else:
            role_by_hand = known.role_by_hand if role_by_hand is None else role_by_hand
            self._record(node, known.config, added_by_hand=known.added_by_hand, role_by_hand=role_by_hand)

    def _record(
        self,
        node: Node,
        config: bytes = b"",
        removed: bool = False,
        added_by_hand: bool = False,
        role_by_hand: bool = False,
    ) -> None:
        if len(config) > MAX_NODE_BYTES:
            log.warning("node_change_failed", "Other routers do not get it.", node=node.name, reason="it is too long")
            return
        draining = node.draining and not removed
        role: Role | Literal[""] = node.role if node.role != node.config.role and not removed else ""
        by_hand = node.drained_by_hand and not removed
        self._publish(
            NodeChange(
                node.name,
                self._version + 1,
                self._sender,
                config,
                removed,
                draining,
                role,
                by_hand,
                added_by_hand,
                bool(role) and role_by_hand,
            )
        )

    def _publish(self, change: NodeChange) -> None:
        self._keep(change)
        self._applied[change.name] = self._applied_now(change)
        if self._on_change is not None:
            self._unpublished[change.name] = change
            self._on_change(change)

    # The configuration, sources, and the start.

    def restore(self, changes: Iterable[NodeChange]) -> None:
        """Take over what operators did before this process started. The nodes of the configuration are in the fleet."""
        for change in changes:
            if change.is_later_than(self._changes.get(change.name)):
                self._keep(change)
        self.drop_configured()
        names = {canonical_address(node.url): node.name for node in self._fleet}
        for node in self._fleet:
            self.joined(node)
        for change in self.changes:
            if change.added_by_hand and self._fleet.find(change.name) is None:
                self._add_restored(change, names)
            self._applied[change.name] = self._applied_now(change)

    def _add_restored(self, change: NodeChange, names: dict[tuple[str, int], str]) -> None:
        """`names`: of the nodes that the configuration lists, by address."""
        try:
            config = parse_section(NodeConfig, msgspec.json.decode(change.config))
            if first := names.get(canonical_address(config.url)):
                self._forget_added(change)
                raise ConfigError(same_engine(first, change.name, config.url))
            self._operations.add_node(config)
        except (ConfigError, NameTaken, msgspec.DecodeError) as error:
            log.warning("node_change_failed", "An operator added it before.", node=change.name, reason=error)

    def joined(self, node: Node) -> None:
        """A node of the configuration or of a source has joined the fleet: drain it if an operator drained a node of
        this name, and give it the role that an operator gave it, unless the configuration names one."""
        change = self._changes.get(node.name)
        if change is None or change.removed:
            return
        if change.drained_by_hand and not node.drained_by_hand:
            self._operations.drain_node(node.name, True, by_hand=True)
        if change.role and change.role != node.role and not self.configured_role(node):
            self._operations.set_role(node.name, change.role)

    def configured_role(self, node: Node) -> str:
        """Return the role that the configuration names for a node that it lists; empty if it names none."""
        return node.config.role if self._fleet.is_configured(node.name) and node.config.role != "mixed" else ""

    def drop_configured(self) -> None:
        """Forget how an operator added nodes that the configuration lists now. Drains and roles stay."""
        for change in self.changes:
            if change.added_by_hand and self._fleet.is_configured(change.name):
                self._forget_added(change)

    def _forget_added(self, change: NodeChange) -> None:
        version = self._version + 1
        self._publish(
            msgspec.structs.replace(change, version=version, sender=self._sender, config=b"", added_by_hand=False)
        )

    # Changes of others.

    def merge(self, changes: Iterable[NodeChange]) -> None:
        """Take over the changes that are later than those known here."""
        for change in changes:
            known = self._changes.get(change.name)
            if change.is_later_than(known):
                self._keep(change)
                self._apply(change, known.config if known is not None else b"")

    def merge_stored(self, values: Iterable[bytes]) -> list[NodeChange]:
        """Take over the register that Redis has. Return the changes that it lacks."""
        stored: dict[str, NodeChange] = {}
        for value in values:
            try:
                change = decode_change(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            stored[change.name] = change
        self.merge(stored.values())
        return [change for name, change in self._changes.items() if stored.get(name) != change]

    def compare(self, digest: int, now_s: float) -> None:
        """A process has a register with this digest. Publish this one if it is another."""
        if digest != self.digest and self._changes and now_s - self._repeated_s >= REPEAT_S:
            self._repeated_s = now_s
            self._unpublished.update(self._changes)

    def take_unpublished(self) -> tuple[NodeChange, ...]:
        found = tuple(self._unpublished.values())[:MAX_CHANGES]
        if found:
            self._unpublished.clear()
        return found

    @property
    def has_unpublished(self) -> bool:
        return bool(self._unpublished)

    def apply_again(self) -> None:
        """Apply changes of nodes that the configuration or a source has added meanwhile, or added again."""
        for change in self.changes:
            before, now = self._applied.get(change.name), self._applied_now(change)
            if before == now:
                continue
            was_configured = before.configured_role if before is not None else ""
            if change.role and was_configured and now.configured_role not in ("", was_configured):
                version = self._version + 1  # the configured role has replaced that of the change
                change = msgspec.structs.replace(change, version=version, sender=self._sender, role="")
                self._publish(change)
                if before is not None and before.number == now.number:
                    continue
            self._apply(change)

    def _keep(self, change: NodeChange) -> None:
        if change.name not in self._changes and len(self._changes) >= MAX_CHANGES:
            oldest = min(self._changes.values(), key=lambda one: (not one.removed, one.by_hand, one.version))
            self._forget(oldest)
        known = self._changes.get(change.name)
        if known is not None:
            self.digest ^= _digest(known)
        self._changes[change.name] = change
        self.digest ^= _digest(change)
        self._version = max(self._version, change.version)
        if self.keep is not None:
            self.keep(change)

    def _forget(self, change: NodeChange) -> None:
        del self._changes[change.name]
        self._applied.pop(change.name, None)
        self.digest ^= _digest(change)

    def _apply(self, change: NodeChange, config_before: bytes = b"") -> None:
        """`config_before`: that of the change which this one follows. A node that has it gets the new one."""
        operations, name = self._operations, change.name
        try:
            number = self._number(name)
            if change.removed:
                if number:
                    operations.remove_node(name)
            elif not number and change.config:
                config = parse_section(NodeConfig, msgspec.json.decode(change.config))
                operations.add_node(config)
            elif change.config != config_before and change.config and config_before:
                before, config = (
                    parse_section(NodeConfig, msgspec.json.decode(one)) for one in (config_before, change.config)
                )
                node = self._fleet.node(name)
                if node.config == before and config.url == before.url:
                    self._fleet.update_config(node, config)
            if not change.removed and self._number(name):
                node = self._fleet.node(name)
                if node.drained_by_hand != change.drained_by_hand:
                    operations.drain_node(name, change.drained_by_hand, by_hand=True)
                if node.draining != change.draining:
                    operations.drain_node(name, change.draining)
                role = change.role or node.config.role
                if node.role != role:
                    operations.set_role(name, role)
        except (ConfigError, NameTaken, UnknownNode, msgspec.DecodeError) as error:
            log.warning("node_change_failed", "Another router changed it.", node=name, reason=error)
        self._applied[name] = self._applied_now(change)

    def _applied_now(self, change: NodeChange) -> Applied:
        node = self._fleet.find(change.name)
        number, role = (node.number, node.config.role) if node is not None else (0, "")
        return Applied(change.version, change.sender, number, role)

    def _number(self, name: str) -> int:
        """Return the number of the fleet's node, which is another one after each time it is added; 0 if it is gone."""
        try:
            return self._fleet.node(name).number
        except UnknownNode:
            return 0


_decoder = msgspec.msgpack.Decoder(NodeChange)


def decode_change(value: bytes) -> NodeChange:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(value)


def encode_change(change: NodeChange) -> bytes:
    return msgspec.msgpack.encode(change)


def _digest(change: NodeChange) -> int:
    return int.from_bytes(blake2b(encode_change(change), digest_size=7).digest())
