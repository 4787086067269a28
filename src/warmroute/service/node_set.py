"""Adds nodes to the running service, removes them, and logs changes of their health."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warmroute.config import ConfigError, Health, NodeConfig
from warmroute.config.node_settings import Role
from warmroute.event_log import EventLog
from warmroute.fleet.health import CHECKS_TIME_OUT, HealthState
from warmroute.fleet.node import Node

if TYPE_CHECKING:
    from warmroute.service.service import Service

log = EventLog("warmroute.service")


class NodeSet:
    def __init__(self, service: Service) -> None:
        self._service = service

    def add_node(self, config: NodeConfig) -> Node:
        """Raises ConfigError or NameTaken."""
        if config.api_key_env and config.api_key_env not in self._service.config_reload.api_key_envs():
            raise ConfigError("api_key_env must be a variable that a configured node, source or provisioner uses")
        node = self._service.fleet.add(config)
        self._service.watcher.watch(node)
        log.info("node_added", node=node.name, url=node.url)
        self._service.shared_nodes.joined(node)
        return node

    def remove_node(self, name: str) -> Node:
        """Remove a node. Requests without a response move to other nodes, the others finish. Raises UnknownNode."""
        node = self._service.fleet.remove(name)
        self._forget(node)
        log.info(
            "node_removed", "Requests without a response moved to other nodes; the others finish.", node=node.name,
            requests_in_flight=node.inflight,
        )  # fmt: skip
        return node

    def drain_node(self, name: str, draining: bool, by_hand: bool = False) -> Node:
        """Send a node no new requests, or send it requests again. Only an operator ends a drain `by_hand`. Raises
        UnknownNode."""
        node = self._service.fleet.drain(name, draining, by_hand)
        if node.draining and not draining:
            log.info("node_stays_drained", "An operator drained it, and has not ended that.", node=node.name)
        elif draining:
            log.info(
                "node_draining", "It gets no new requests; running ones finish.", node=node.name,
                requests_in_flight=node.inflight,
            )  # fmt: skip
        else:
            log.info("node_undrained", "It gets requests again.", node=node.name)
        return node

    def set_role(self, name: str, role: Role) -> Node:
        """Give a node another role. Its requests continue. Raises UnknownNode."""
        before = self._service.fleet.node(name).role
        node = self._service.fleet.set_role(name, role)
        if before != role:
            log.info("node_role_changed", "Its requests continue.", node=node.name, role=role, previous=before)
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: Health) -> tuple[int, int]:
        """Apply the configured nodes. Return how many were added and removed."""
        added, removed = self._service.fleet.reconfigure(nodes, health)
        for node in removed:
            self._forget(node)
        for node in added:
            self._service.watcher.watch(node)
            self._service.shared_nodes.joined(node)
        self._service.shared_nodes.drop_configured()
        return len(added), len(removed)

    def _forget(self, node: Node) -> None:
        service = self._service
        service.proxy.dispatcher.leave(node, "the node was removed")
        service.watcher.unwatch(node)
        service.cache_view.remove_node(node.name)
        service.tokenizer_registry.remove_node(node.name)
        service.remote_tokenizer.reset(node)
        service.pools.remove(node)


def log_health_change(node: Node, before: HealthState) -> None:
    state = node.health.state
    fields: dict[str, object] = {"node": node.name, "previous": before.value, "reason": node.health.reason}
    if state is HealthState.EJECTED:
        duration_s = node.health.ejection_s
        log.warning("node_ejected", "The router sends it no requests for a while.", duration_s=duration_s, **fields)
    elif before is HealthState.EJECTED and state is HealthState.UP:
        log.info("node_returned", **fields)
    elif state is not HealthState.DOWN:
        log.info(f"node_{state.value}", **fields)
    elif node.draining:  # a node that still loads, or is about to be removed
        log.info("node_down", "The node is draining.", **fields)
    else:
        log.warning("node_down", _until_when(node, before), **fields)


def _until_when(node: Node, before: HealthState) -> str:
    """Return the sentence for a node that goes down: it says when the node gets requests again."""
    health = node.health
    if health.confirmed or health.reason == CHECKS_TIME_OUT:
        return "The router sends it no requests until a health check passes."
    failures = health.config.consecutive_failures
    if before is HealthState.HALF_OPEN:
        cause = "The trial request failed."
    else:
        cause = "A request failed." if failures == 1 else f"{failures:,} requests in a row failed."
    return (
        f"{cause} The router sends it no requests until its breaker is over and a health check passes; then one trial "
        "request."
    )
