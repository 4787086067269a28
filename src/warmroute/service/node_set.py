"""Adds nodes to the running service, removes them, and logs changes of their health."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warmroute.config import ConfigError, Health, NodeConfig
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.engines.node_watcher import NodeWatcher
from warmroute.engines.remote_tokenizer import RemoteTokenizer
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.prompt.tokenizer_registry import TokenizerRegistry

log = EventLog("warmroute.service")


class NodeSet:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        watcher: NodeWatcher,
        tokenizer_registry: TokenizerRegistry,
        remote_tokenizer: RemoteTokenizer,
        pools: ConnectionPools,
        api_key_envs: Callable[[], set[str]],
    ) -> None:
        """`api_key_envs`: the environment variables that added nodes may use."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._watcher = watcher
        self._tokenizer_registry = tokenizer_registry
        self._remote_tokenizer = remote_tokenizer
        self._pools = pools
        self._api_key_envs = api_key_envs

    def add_node(self, config: NodeConfig) -> Node:
        """Raises ConfigError or NameTaken."""
        if config.api_key_env and config.api_key_env not in self._api_key_envs():
            raise ConfigError("api_key_env must be a variable that a configured node or provisioner uses")
        node = self._fleet.add(config)
        self._watcher.watch(node)
        log.info("node_added", node=node.name, url=node.url)
        return node

    def remove_node(self, name: str) -> Node:
        """Remove a node. Its running requests finish. Raises UnknownNode."""
        node = self._fleet.remove(name)
        self._forget(node)
        log.info("node_removed", "Its running requests finish.", node=node.name, requests_in_flight=node.inflight)
        return node

    def reconfigure(self, nodes: Sequence[NodeConfig], health: Health) -> tuple[int, int]:
        """Apply the configured nodes. Return how many were added and removed."""
        added, removed = self._fleet.reconfigure(nodes, health)
        for node in removed:
            self._forget(node)
        for node in added:
            self._watcher.watch(node)
        return len(added), len(removed)

    def _forget(self, node: Node) -> None:
        self._watcher.unwatch(node)
        self._cache_view.remove_node(node.name)
        self._tokenizer_registry.remove_node(node.name)
        self._remote_tokenizer.reset(node)
        self._pools.remove(node)


def log_health_change(node: Node, before: HealthState) -> None:
    state, reason = node.health.state, node.health.reason
    fields = {"node": node.name, "previous": before.value, "reason": reason}
    if state is not HealthState.DOWN:
        log.info(f"node_{state.value}", **fields)
    elif node.draining:  # a node that still loads, or is about to be removed
        log.info("node_down", "The node is draining.", **fields)
    else:
        log.warning("node_down", "The router sends it no requests until a health check passes.", **fields)
