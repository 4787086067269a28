"""The connection pools of all nodes, made when first needed."""

from __future__ import annotations

import os
import ssl

from warmroute.config import ConfigError
from warmroute.config import Upstream as UpstreamConfig
from warmroute.edge.deadlines import Deadlines
from warmroute.edge.upstream import NodePool
from warmroute.fleet.node import Node


class Pools:
    def __init__(self, config: UpstreamConfig, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._pools: dict[Node, NodePool] = {}
        self._config = config
        self._tls = node_tls(config)

    def reconfigure(self, config: UpstreamConfig) -> None:
        """Raises ConfigError, with nothing changed, where the authorities can't be read."""
        self._tls = node_tls(config)
        for node, pool in list(self._pools.items()):
            if config.ca_file != self._config.ca_file:
                self.remove(node)
            else:
                pool.config = config
        self._config = config

    def of(self, node: Node) -> NodePool:
        pool = self._pools.get(node)
        if pool is None:
            pool = NodePool(node.scheme, node.host, node.port, self._config, self._deadlines, self._tls, _api_key(node))
            self._pools[node] = pool
        return pool

    def take_new_keys(self) -> None:
        """Lets go of pools whose node is to get another key than before."""
        for node, pool in list(self._pools.items()):
            if pool.api_key != _api_key(node):
                self.remove(node)

    def remove(self, node: Node) -> None:
        pool = self._pools.pop(node, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for node in list(self._pools):
            self.remove(node)


def node_tls(config: UpstreamConfig) -> ssl.SSLContext:
    """Raises ConfigError where the authorities can't be read."""
    try:
        return ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"upstream.ca_file can't be used: {error}") from None


def _api_key(node: Node) -> str:
    return os.environ.get(node.api_key_env, "").strip() if node.api_key_env else ""
