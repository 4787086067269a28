"""Nodes that were added, drained, removed or given another role at run time, alike in all processes: a register of the
last change of each node, which every process holds whole.

A change gets the next version after all those that its process knows. Of two changes of one node the higher version
counts, then the sender with the higher name, so all processes end with the same register, in whatever order messages
arrive. Each message carries a digest of its sender's register; a process that sees another digest publishes its whole
register. So a lost message, a partition or a new process needs nothing else. The register is also stored in Redis, for
the time when all processes have ended.

A role of the register lasts until the node's configured role changes: the process that sees it clears the role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from warmroute.cluster.messages import MAX_CHANGES, MAX_NODE_BYTES, NodeChange
from warmroute.config import ConfigError, NodeConfig, parse_section
from warmroute.config.node_settings import Role
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet, NameTaken, UnknownNode
from warmroute.fleet.node import Node

log = EventLog("warmroute.cluster")

REPEAT_S: Final = 0.5
"""Shortest time between two publications of the whole register."""


class NodeOperations(Protocol):
    """Adds nodes to the service, drains and removes them."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def drain_node(self, name: str, draining: bool) -> Node: ...
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

    def __init__(self, fleet: Fleet, operations: NodeOperations) -> None:
        self._fleet = fleet
        self._operations = operations
        self._sender = ""
        self._on_change: Callable[[NodeChange], object] | None = None
        self._changes: dict[str, NodeChange] = {}
        self._version = 0
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
        """Raises ConfigError or NameTaken."""
        node = self._operations.add_node(config)
        self._record(node, msgspec.json.encode(config))
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
        """Raises UnknownNode."""
        node = self._operations.drain_node(name, draining)
        self._record_state(node)
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Raises UnknownNode."""
        node = self._operations.set_role(name, role)
        self._record_state(node)
        return node

    def drain(self, name: str, draining: bool = True) -> Node:
        """Drain like `drain_node`, for the autoscaler, which logs it otherwise. Raises UnknownNode."""
        node = self._fleet.drain(name, draining)
        self._record_state(node)
        return node

    def _record_state(self, node: Node) -> None:
        known = self._changes.get(node.name)
        self._record(node, known.config if known is not None and not known.removed else b"")

    def _record(self, node: Node, config: bytes = b"", removed: bool = False) -> None:
        if self._on_change is None:
            return
        if len(config) > MAX_NODE_BYTES:
            log.warning("node_change_failed", "Other routers do not get it.", node=node.name, reason="it is too long")
            return
        draining = node.draining and not removed
        role: Role | Literal[""] = node.role if node.role != node.config.role and not removed else ""
        self._publish(NodeChange(node.name, self._version + 1, self._sender, config, removed, draining, role))

    def _publish(self, change: NodeChange) -> None:
        self._keep(change)
        self._applied[change.name] = self._applied_now(change)
        self._unpublished[change.name] = change
        if self._on_change is not None:
            self._on_change(change)

    # Changes of others.

    def merge(self, changes: Iterable[NodeChange]) -> None:
        """Take over the changes that are later than those known here."""
        for change in changes:
            known = self._changes.get(change.name)
            if known is None or (change.version, change.sender) > (known.version, known.sender):
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
            oldest = min(self._changes.values(), key=lambda one: (not one.removed, one.version))
            self._forget(oldest)
        known = self._changes.get(change.name)
        if known is not None:
            self.digest ^= _digest(known)
        self._changes[change.name] = change
        self.digest ^= _digest(change)
        self._version = max(self._version, change.version)

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
