"""The whole file: its tables, how it is read, and what must fit together in it."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_origin

import msgspec

from warmroute.config.islands import Crossing, IslandConfig, check_islands
from warmroute.config.journal import Journal
from warmroute.config.nodes import Health, Metrics, NodeConfig, Upstream, node_name
from warmroute.config.prompts import ModelConfig, Prompts
from warmroute.config.provisioners import ProvisionerConfig, check_provisioners
from warmroute.config.routes import RouteConfig
from warmroute.config.routing import Admission, Index, Pricing, Routing
from warmroute.config.scaling import Scaling, check_scaling
from warmroute.config.section import ConfigError, Section, made_of, section_of
from warmroute.config.serving import Admin, KeyConfig, Limits, Listen, Log, Shutdown


class Config(Section, frozen=True):
    """The file."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    limits: Limits = Limits()
    upstream: Upstream = Upstream()
    health: Health = Health()
    metrics: Metrics = Metrics()
    index: Index = Index()
    routing: Routing = Routing()
    admission: Admission = Admission()
    price: Pricing = Pricing()
    crossing: Crossing = Crossing()
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
    def uses_events(self) -> bool:
        """Whether some policy wants to know what nodes tell of their caches."""
        return self.routing.uses_events or any(route.routing(self.routing).uses_events for route in self.routes)

    def sharing(self) -> dict[str, str]:
        """For each tenant, whom it shares knowledge of caches with; nothing where all share with all."""
        groups = {key.tenant: f"shared {key.shares}" if key.shares else f"only {key.tenant}" for key in self.keys}
        return groups if len(set(groups.values())) > 1 else {}


def load(path: Path) -> Config:
    """Reads a file; raises ConfigError with a sentence that names the file and the key."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    try:
        return from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_table(table: Mapping[str, Any]) -> Config:
    """Makes a Config of a parsed table, checked as a whole."""
    config = made_of(Config, table)
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError where values do not fit together."""
    listen = config.listen
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise ConfigError("listen.tls_cert and listen.tls_key go together: give both or neither")
    for what, port in (("listen.port", listen.port), ("admin.port", config.admin.port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{what}: {port} is no port; it must be 0 to 65535")
    if config.admin.enabled and not config.admin.token_sha256 and not is_loopback(config.admin.host):
        raise ConfigError(
            f"admin.host is {config.admin.host!r}, which others can reach: set admin.token_sha256 "
            "(`warmroute hash-key` makes it), or keep the admin listener on 127.0.0.1"
        )
    check_islands(config.islands)
    check_scaling(config.scaling)
    check_provisioners(config.provisioners)
    names: dict[str, str] = {}
    for node in config.nodes:
        name = node_name(node)
        if name in names:
            raise ConfigError(f"two nodes are named {name!r} ({names[name]} and {node.url}): give each its own name")
        names[name] = node.url
    models: set[str] = set()
    for model in config.models:
        if model.name in models:
            raise ConfigError(f"models: the model {model.name!r} stands there twice")
        models.add(model.name)
    hashes: set[str] = set()
    for key in config.keys:
        if key.sha256 in hashes:
            raise ConfigError(f"keys: the key of tenant {key.tenant!r} stands there twice")
        hashes.add(key.sha256)
    _check_limits(config.keys)
    names_of_routes: set[str] = set()
    for route in config.routes:
        if route.name in names_of_routes:
            raise ConfigError(f"routes: two routes are named {route.name!r}: give each its own name")
        names_of_routes.add(route.name)


def _check_limits(keys: tuple[KeyConfig, ...]) -> None:
    """A limit is its tenant's: keys of one tenant may leave it out, not contradict each other."""
    for name in ("requests_per_min", "tokens_per_min"):
        limits: dict[str, int] = {}
        for key in keys:
            limit = getattr(key, name)
            if limit and limits.setdefault(key.tenant, limit) != limit:
                raise ConfigError(
                    f"keys.{name}: two keys of tenant {key.tenant!r} say {limits[key.tenant]} and {limit}; the limit "
                    "is for all keys of a tenant together: say it once"
                )


NEED_RESTART: Final = (
    "listen", "admin", "provisioners", "scaling.enabled", "scaling.lock_file", "scaling.keda_host", "scaling.keda_port",
    "index.memory_bytes", "prompts.threads",
)  # fmt: skip
"""Tables and values that a running router does not take."""


def needing_restart(before: Config, after: Config) -> list[str]:
    """Which of those differ, by name."""
    found: list[str] = []
    for name in NEED_RESTART:
        table, _, value = name.partition(".")
        old, new = getattr(before, table), getattr(after, table)
        if isinstance(old, Section):
            names = (value,) if value else old.__struct_fields__
            found += [f"{table}.{one}" for one in names if getattr(old, one) != getattr(new, one)]
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


def tables() -> Iterator[tuple[str, type[Section], bool]]:
    """Each table of the file: name, section, whether it may stand there many times."""
    return _tables_in(Config, "")


def _tables_in(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section], bool]]:
    for field in msgspec.structs.fields(section):
        inner = section_of(field.type)
        if inner is not None:
            yield f"{prefix}{field.name}", inner, get_origin(field.type) is tuple
            yield from _tables_in(inner, f"{prefix}{field.name}.")
