"""The whole configuration file: its tables, how the router reads it, and the checks across tables."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_origin

from warmroute.config.island_settings import IslandAffinity, IslandConfig, check_islands
from warmroute.config.journal_settings import Journal
from warmroute.config.node_settings import NodeConfig, node_name
from warmroute.config.prompt_settings import ModelConfig, Prompts
from warmroute.config.provisioner_settings import ProvisionerConfig, check_provisioners
from warmroute.config.route_settings import RouteConfig
from warmroute.config.routing_settings import Admission, Index, Pricing, Routing
from warmroute.config.scaling_settings import Scaling, check_scaling
from warmroute.config.section import ConfigError, Section, convert_section, keys_of, parse_section, section_of
from warmroute.config.serving_settings import Admin, KeyConfig, Limits, Listen, Log, Shutdown
from warmroute.config.upstream_settings import Health, Polling, Upstream


class Config(Section, frozen=True):
    """The configuration file."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    limits: Limits = Limits()
    upstream: Upstream = Upstream()
    health: Health = Health()
    polling: Polling = Polling()
    index: Index = Index()
    routing: Routing = Routing()
    admission: Admission = Admission()
    price: Pricing = Pricing()
    island_affinity: IslandAffinity = IslandAffinity()
    prompts: Prompts = Prompts()
    journal: Journal = Journal()
    log: Log = Log()
    scaling: Scaling = Scaling()
    shutdown: Shutdown = Shutdown()
    nodes: tuple[NodeConfig, ...] = ()
    islands: tuple[IslandConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()
    routes: tuple[RouteConfig, ...] = ()
    provisioners: tuple[ProvisionerConfig, ...] = ()

    @property
    def uses_kv_events(self) -> bool:
        """Whether any policy needs the nodes' KV events."""
        return self.routing.uses_kv_events or any(route.routing(self.routing).uses_kv_events for route in self.routes)

    def cache_groups(self) -> dict[str, str]:
        """Return the cache group of each tenant; empty if all tenants share one."""
        groups = {
            key.tenant: f"shared {key.cache_group}" if key.cache_group else f"only {key.tenant}" for key in self.keys
        }
        return groups if len(set(groups.values())) > 1 else {}


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError, which names the file and the key."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: invalid TOML: {error}") from None
    try:
        return from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_table(table: Mapping[str, Any], *, experiment: bool = False) -> Config:
    """Build and check a Config. An experiment may also set values that are not in the file. Raises ConfigError."""
    config = convert_section(Config, table) if experiment else parse_section(Config, table)
    check(config)
    return config


def check(config: Config) -> None:
    """Raise ConfigError if values contradict each other."""
    listen, admin = config.listen, config.admin
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise ConfigError("listen.tls_cert and listen.tls_key must be set together")
    for key, port in (("listen.port", listen.port), ("admin.port", admin.port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{key}: {port} is not a port; expected 0 to 65535")
    if admin.enabled and not admin.token_sha256 and not is_loopback(admin.host):
        raise ConfigError(
            f"admin.host {admin.host!r} is reachable from other machines: set admin.token_sha256 "
            "(`warmroute hash-key` prints it), or use 127.0.0.1"
        )
    check_islands(config.islands)
    check_scaling(config.scaling)
    check_provisioners(config.provisioners)
    urls: dict[str, str] = {}
    for node in config.nodes:
        name = node_name(node)
        if name in urls:
            raise ConfigError(f"two nodes have the name {name!r} ({urls[name]} and {node.url}); give each its own name")
        urls[name] = node.url
    _reject_duplicates("models: model", (model.name for model in config.models))
    _reject_duplicates("routes: route", (route.name for route in config.routes))
    _check_keys(config.keys)


def _reject_duplicates(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {name!r} is defined twice")
        seen.add(name)


def _check_keys(keys: tuple[KeyConfig, ...]) -> None:
    """Rate limits apply to tenants: keys of one tenant may omit them, but must not set different ones."""
    hashes: set[str] = set()
    for key in keys:
        if key.sha256 in hashes:
            raise ConfigError(f"keys: a key of tenant {key.tenant!r} is defined twice")
        hashes.add(key.sha256)
    for name in ("requests_per_min", "tokens_per_min"):
        limits: dict[str, int] = {}
        for key in keys:
            limit = getattr(key, name)
            if limit and limits.setdefault(key.tenant, limit) != limit:
                raise ConfigError(
                    f"keys.{name}: two keys of tenant {key.tenant!r} set different limits ({limits[key.tenant]} and "
                    f"{limit}); the limit applies to all keys of a tenant together: set it once"
                )


RESTART_KEYS: Final = (
    "listen", "admin", "provisioners", "scaling.enabled", "scaling.lock_file", "scaling.keda_host", "scaling.keda_port",
    "index.memory_bytes", "prompts.threads",
)  # fmt: skip
"""Tables and keys that a running router does not reload."""


def keys_needing_restart(before: Config, after: Config) -> list[str]:
    """Return the changed keys that take effect only after a restart."""
    found: list[str] = []
    for name in RESTART_KEYS:
        table, _, key = name.partition(".")
        old, new = getattr(before, table), getattr(after, table)
        if isinstance(old, Section):
            keys = (key,) if key else old.__struct_fields__
            found += [f"{table}.{one}" for one in keys if getattr(old, one) != getattr(new, one)]
        elif old != new:
            found.append(table)
    return found


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tables(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section], bool]]:
    """Yield each table of the file: its name, its Section, and whether it is repeatable."""
    for name, kind in keys_of(section).items():
        inner = section_of(kind)
        if inner is not None:
            yield f"{prefix}{name}", inner, get_origin(kind) is tuple
            yield from tables(inner, f"{prefix}{name}.")
