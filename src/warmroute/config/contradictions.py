"""Values of the configuration that contradict each other. Each problem is a sentence that names the keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from warmroute.config.addresses import canonical_address, is_loopback, same_port
from warmroute.config.alert_settings import alert_problems
from warmroute.config.cluster_settings import cluster_problems
from warmroute.config.discovery_settings import discovery_problems
from warmroute.config.island_settings import island_problems
from warmroute.config.kv_store_settings import kv_store_problems
from warmroute.config.node_settings import NodeConfig, node_name
from warmroute.config.picker_settings import picker_problems
from warmroute.config.provisioner_settings import provisioner_problems
from warmroute.config.route_settings import route_problems
from warmroute.config.scaling_settings import scaling_problems
from warmroute.config.section import ConfigError
from warmroute.config.serving_settings import UNIX_PROXY, KeyConfig
from warmroute.config.tracing_settings import tracing_problems

if TYPE_CHECKING:
    from warmroute.config.config import Config


def contradictions(config: Config) -> Iterator[str]:
    yield from _listener_problems(config)
    yield from island_problems(config.islands)
    roles = [one.role for one in config.nodes] + [one.role for one in config.provisioners]
    yield from scaling_problems(config.scaling, {*roles, *(one.role for one in config.discovery)})
    yield from provisioner_problems(config.provisioners)
    yield from _node_problems(config.nodes)
    yield from kv_store_problems(config.kv_stores, config.nodes)
    yield from discovery_problems(config.discovery)
    yield from _duplicates("models: model", (model.name for model in config.models))
    yield from _duplicates("routes: route", (route.name for route in config.routes))
    yield from route_problems(config.routes)
    yield from _key_problems(config.keys)
    if config.capture.block_size & (config.capture.block_size - 1):
        yield f"capture.block_size: {config.capture.block_size} is not a power of two, as the engines' block sizes are"
    yield from tracing_problems(config.tracing)
    yield from alert_problems(config.alerts)
    yield from cluster_problems(config.cluster)
    yield from picker_problems(config.picker)
    yield from _state_problems(config)
    if config.cluster.url and config.scaling.lock_file:
        yield "scaling.lock_file and cluster.url are both set: replicas elect the one that scales; remove the lock file"


def _state_problems(config: Config) -> Iterator[str]:
    if config.state.directory and config.state.config_map:
        yield "state.directory and state.config_map are both set: the router keeps operators' changes in one of them"


def _listener_problems(config: Config) -> Iterator[str]:
    listen, admin, scaling = config.listen, config.admin, config.scaling
    if bool(listen.tls_cert) != bool(listen.tls_key):
        yield "listen.tls_cert and listen.tls_key must be set together"
    for proxy in listen.trusted_proxies:
        if proxy == UNIX_PROXY:
            continue
        try:
            network = ipaddress.ip_network(proxy)
        except ValueError as error:
            yield f"listen.trusted_proxies: {error}; expected an address or a network, such as 10.0.0.0/8"
            continue
        if not network.prefixlen:
            yield f"listen.trusted_proxies: {proxy} trusts everybody, so every client could name any address"
    used: list[tuple[str, str, int]] = []
    if not listen.unix_socket:
        used.append(("listen.port", listen.host, listen.port))
    if admin.enabled:
        used.append(("admin.port", admin.host, admin.port))
    if scaling.enabled:
        used.append(("scaling.keda_port", scaling.keda_host, scaling.keda_port))
    for number, (key, host, port) in enumerate(used):
        if not 0 <= port <= 65535:
            yield f"{key}: {port} is not a port; expected 0 to 65535"
        for other_key, other_host, other_port in used[:number]:
            if same_port(host, port, other_host, other_port):
                yield f"{other_key} and {key} are both {port}: give each listener its own port"
    if admin.enabled and not admin.token_sha256 and not is_loopback(admin.host):
        yield (
            f"admin.host {admin.host!r} is reachable from other machines: set admin.token_sha256 "
            "(`warmroute hash-key` prints it), or use 127.0.0.1"
        )


def _node_problems(nodes: Iterable[NodeConfig]) -> Iterator[str]:
    urls: dict[str, str] = {}
    names: dict[tuple[str, int], str] = {}
    for node in nodes:
        try:
            name = node_name(node)
        except ConfigError as error:
            yield from error.problems
            continue
        if name in urls:
            yield f"two nodes have the name {name!r} ({urls[name]} and {node.url}); give each its own name"
            continue
        urls[name] = node.url
        first = names.setdefault(canonical_address(node.url), name)
        if first != name:
            yield f"nodes: {same_engine(first, name, node.url)}. Remove one of them"


def same_engine(first: str, second: str, url: str) -> str:
    """Return what is wrong with two nodes that have one address."""
    return f"{first!r} and {second!r} are the same engine ({url}): its load would count twice"


def _duplicates(what: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} {name!r} is defined twice"
        seen.add(name)


def _key_problems(keys: tuple[KeyConfig, ...]) -> Iterator[str]:
    """Rate limits apply to tenants: keys of one tenant may omit them, but must not set different ones."""
    hashes: set[str] = set()
    for key in keys:
        if key.sha256 in hashes:
            yield f"keys: a key of tenant {key.tenant!r} is defined twice"
        hashes.add(key.sha256)
    for name in ("requests_per_min", "tokens_per_min"):
        limits: dict[str, int] = {}
        for key in keys:
            limit = getattr(key, name)
            if limit and limits.setdefault(key.tenant, limit) != limit:
                yield (
                    f"keys.{name}: two keys of tenant {key.tenant!r} set different limits ({limits[key.tenant]} and "
                    f"{limit}); the limit applies to all keys of a tenant together: set it once"
                )
