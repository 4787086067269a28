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
        self.reconfigure(config)

    def reconfigure(self, config: UpstreamConfig) -> None:
        """Raises ConfigError, with nothing changed, where the authorities can't be read."""
        try:
            self._tls = ssl.create_default_context(cafile=config.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"upstream.ca_file can't be used: {error}") from None
        self._config = config
        for node in list(self._pools):
            self.remove(node)

    def of(self, node: Node) -> NodePool:
        pool = self._pools.get(node)
        if pool is None:
            api_key = os.environ.get(node.api_key_env, "") if node.api_key_env else ""
            pool = NodePool(node.scheme, node.host, node.port, self._config, self._deadlines, self._tls, api_key)
            self._pools[node] = pool
        return pool

    def remove(self, node: Node) -> None:
        pool = self._pools.pop(node, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for node in list(self._pools):
            self.remove(node)
