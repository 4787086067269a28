"""The whole configuration file: its tables, how the router reads it, and the checks across tables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, get_origin

from warmroute.config.alert_settings import Alerts
from warmroute.config.capture_settings import Capture
from warmroute.config.cluster_settings import Cluster
from warmroute.config.contradictions import contradictions
from warmroute.config.discovery_settings import DiscoveryConfig
from warmroute.config.island_settings import IslandAffinity, IslandConfig
from warmroute.config.journal_settings import Journal
from warmroute.config.kv_store_settings import KvStoreConfig
from warmroute.config.node_settings import NodeConfig
from warmroute.config.picker_settings import Picker
from warmroute.config.prompt_settings import ModelConfig, PromptDoctor, Prompts
from warmroute.config.provisioner_settings import ProvisionerConfig
from warmroute.config.route_settings import RouteConfig
from warmroute.config.routing_settings import Admission, Index, Pricing, Routing
from warmroute.config.scaling_settings import Scaling
from warmroute.config.section import ConfigError, Section, convert_section, find_problems, keys_of, section_of
from warmroute.config.serving_settings import Admin, KeyConfig, Limits, Listen, Log, Shutdown, Startup, State
from warmroute.config.tracing_settings import Tracing
from warmroute.config.upstream_settings import Health, Hedging, OutlierDetection, Polling, Upstream


class Config(Section, frozen=True):
    """The configuration file."""

    listen: Listen = Listen()
    picker: Picker = Picker()
    admin: Admin = Admin()
    limits: Limits = Limits()
    upstream: Upstream = Upstream()
    health: Health = Health()
    outlier_detection: OutlierDetection = OutlierDetection()
    hedging: Hedging = Hedging()
    polling: Polling = Polling()
    index: Index = Index()
    routing: Routing = Routing()
    admission: Admission = Admission()
    price: Pricing = Pricing()
    island_affinity: IslandAffinity = IslandAffinity()
    prompts: Prompts = Prompts()
    prompt_doctor: PromptDoctor = PromptDoctor()
    journal: Journal = Journal()
    capture: Capture = Capture()
    log: Log = Log()
    tracing: Tracing = Tracing()
    alerts: Alerts = Alerts()
    scaling: Scaling = Scaling()
    cluster: Cluster = Cluster()
    state: State = State()
    startup: Startup = Startup()
    shutdown: Shutdown = Shutdown()
    nodes: tuple[NodeConfig, ...] = ()
    discovery: tuple[DiscoveryConfig, ...] = ()
    islands: tuple[IslandConfig, ...] = ()
    kv_stores: tuple[KvStoreConfig, ...] = ()
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
    """Read a configuration file. Raises ConfigError, which names the file and each key with a problem."""
    table = read_table(path)
    try:
        return from_table(table)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from None


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, which names the file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: invalid TOML: {error}") from None


def from_table(table: Mapping[str, Any], *, experiment: bool = False) -> Config:
    """Build and check a Config. An experiment may also set values that are not in the file. Raises ConfigError."""
    if experiment:
        config = convert_section(Config, table)
        check(config)
        return config
    found = list(find_problems(Config, table))
    config = convert_section(Config, _without(table, [path for path, _problem in found]))
    # a value that was left out must not cause a problem of its own
    broken = [re.compile(rf"(?<![\w.]){re.escape(path)}(?![\w.])") for path, _problem in found]
    more = [one for one in contradictions(config) if not any(path.search(one) for path in broken)]
    if found or more:
        raise ConfigError(*(problem for _path, problem in found), *more)
    return config


def _without(table: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return the table without the values at these paths. An item of a list is left out as a whole."""
    top = {path.partition(".")[0] for path in paths}
    left: dict[str, Any] = {}
    for key, value in table.items():
        below = [path.partition(".")[2] for path in paths if path.partition(".")[0] == key]
        if isinstance(value, list):
            left[key] = [item for number, item in enumerate(value) if f"{key}[{number}]" not in top]
        elif all(below) and isinstance(value, dict):
            left[key] = _without(value, below)
        if key in top and not all(below):
            left.pop(key, None)
        elif not isinstance(value, (list, dict)):
            left[key] = value
    return left


def check(config: Config) -> None:
    """Raise ConfigError if values contradict each other."""
    problems = list(contradictions(config))
    if problems:
        raise ConfigError(*problems)


RESTART_KEYS: Final = (
    "listen.host", "listen.port", "listen.unix_socket", "listen.tls_cert", "listen.tls_key", "admin", "cluster",
    "state", "provisioners", "scaling.enabled", "scaling.lock_file", "scaling.keda_host", "scaling.keda_port",
    "scaling.replay.enabled", "index.memory_bytes", "prompts.threads", "startup",
    "alerts", "tracing.enabled", "tracing.endpoint", "tracing.headers_env", "tracing.service_name",
    "picker.host", "picker.port", "picker.tls_cert", "picker.tls_key", "picker.tls_client_ca",
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
            found += [f"{table}.{one}" for one in keys if attrgetter(one)(old) != attrgetter(one)(new)]
        elif old != new:
            found.append(table)
    return found


def tables(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section], bool]]:
    """Yield each table of the file: its name, its Section, and whether it is repeatable."""
    for name, kind in keys_of(section).items():
        inner = section_of(kind)
        if inner is not None:
            yield f"{prefix}{name}", inner, get_origin(kind) is tuple
            yield from tables(inner, f"{prefix}{name}.")
