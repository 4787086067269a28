"""The whole configuration file: reads and checks it, and says what a reload changes and what needs a restart."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, get_origin

import msgspec

from warmroute.config.alerts import Alerts, alert_problems
from warmroute.config.clients import (
    UNIX_PROXY,
    Admin,
    KeyConfig,
    Limits,
    Listen,
    Log,
    Picker,
    Shutdown,
    Startup,
    State,
    canonical_address,
    is_loopback,
    picker_problems,
    same_port,
)
from warmroute.config.cluster import Cluster, cluster_problems
from warmroute.config.nodes import (
    DiscoveryConfig,
    Health,
    Hedging,
    IslandAffinity,
    IslandConfig,
    KvStoreConfig,
    NodeConfig,
    OutlierDetection,
    Polling,
    Upstream,
    discovery_problems,
    island_problems,
    kv_store_problems,
    node_name,
)
from warmroute.config.prompts import ModelConfig, PromptDoctor, Prompts
from warmroute.config.records import Capture, Journal, Tracing, tracing_problems
from warmroute.config.routing import Admission, Index, Pricing, RouteConfig, Routing, route_problems
from warmroute.config.scaling import ProvisionerConfig, Scaling, provisioner_problems, scaling_problems
from warmroute.config.section import (
    NOT_IN_FILE,
    ConfigError,
    Section,
    choices_of,
    convert_section,
    find_problems,
    keys_of,
    section_of,
    without_removed_keys,
)

# Values of the configuration that contradict each other. Each problem is a sentence that names the keys.


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
        used.append(("scaling.keda_port", scaling.keda_host or listen.host, scaling.keda_port))
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


# The whole configuration file: its tables, how the router reads it, and the checks across tables.


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
    warnings: Annotated[tuple[str, ...], NOT_IN_FILE] = ()
    """One for each removed key that the file still has."""

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


EXPERIMENT: Final = "WARMROUTE_EXPERIMENT"
"""Environment variable that benchmarks and tests set to 1 for a command: its file may also set what is not a key."""


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError, which names the file and each key with a problem."""
    table = read_table(path)
    try:
        return from_table(table, experiment=os.environ.get(EXPERIMENT) == "1")
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
    """Build and check a Config. A key that was removed gives a warning. An experiment may also set values that are not
    in the file. Raises ConfigError."""
    warnings: list[str] = []
    if not experiment:
        table, warnings = without_removed_keys(Config, table)
    found = list(find_problems(Config, table, experiment=experiment))
    config = convert_section(Config, _without(table, [path for path, _problem in found]))
    # a value that was left out must not cause a problem of its own
    broken = [re.compile(rf"(?<![\w.]){re.escape(path)}(?![\w.])") for path, _problem in found]
    more = [one for one in contradictions(config) if not any(path.search(one) for path in broken)]
    if found or more:
        raise ConfigError(*(problem for _path, problem in found), *more)
    return msgspec.structs.replace(config, warnings=tuple(warnings))


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
    "state", "provisioners", "scaling.enabled", "scaling.lock_file", "scaling.keda_port", "index.memory_bytes",
    "alerts", "tracing.enabled", "tracing.endpoint",
    "picker.host", "picker.port", "picker.tls_cert", "picker.tls_key", "picker.tls_client_ca",
)  # fmt: skip
"""Tables and keys that a running router does not reload."""


BASIC_KEYS: Final = (
    "listen.host", "listen.port", "listen.tls_cert", "listen.tls_key", "admin.host", "admin.port", "admin.token_sha256",
    "keys.tenant", "keys.sha256", "nodes.url", "nodes.island", "nodes.gpu", "nodes.api_key_env", "discovery.kind",
    "discovery.file", "models.name", "models.tokenizer", "prompts.download_tokenizers", "state.directory", "log.level",
    "log.format", "limits.body_bytes", "upstream.first_byte_timeout_s", "shutdown.delay_s", "shutdown.deadline_s",
)  # fmt: skip
"""What operators set: the reference begins with these keys, and `warmroute init` writes them. The others are for larger
or unusual fleets."""


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


# What a reload changes, in a few words for the log: keys, names, and values that cannot be secret.
#
# Texts of the file may be passwords or hashes of keys, so only numbers, switches and values of a fixed set are shown.
# Of other keys the log has the name.

MAX_CHANGES: Final = 20
"""Changes that are named one by one, so that a line of the log stays readable. The others are counted."""
MAX_CHARACTERS: Final = 120
"""Length of one change: names of nodes, tenants and routes can be long."""


def describe_changes(before: Config, after: Config, waiting: Sequence[str] = ()) -> list[str]:
    """Return one phrase for each change, such as `limits.connections 20000 -> 100` or `nodes +gpu-c`. `waiting`: keys
    whose change takes effect after a restart."""
    found = [one if len(one) <= MAX_CHARACTERS else f"{one[: MAX_CHARACTERS - 1]}…" for one in _of_table(before, after)]
    found = [f"{one}, from the next restart on" if _is_of(one, waiting) else one for one in found]
    if len(found) <= MAX_CHANGES:
        return found
    return [*found[:MAX_CHANGES], f"{len(found) - MAX_CHANGES} more"]


def _of_table(before: Section, after: Section, prefix: str = "") -> Iterator[str]:
    """Yield the changes of a table's keys. `prefix` begins the path of each key."""
    for name, kind in keys_of(type(after)).items():
        old, new, path = getattr(before, name), getattr(after, name), prefix + name
        if old == new:
            continue
        if isinstance(old, Section) and isinstance(new, Section):
            yield from _of_table(old, new, f"{path}.")
        elif section_of(kind) is KeyConfig:
            yield from _of_api_keys(old, new)
        elif section_of(kind) is not None:
            yield from _of_list(path, old, new)
        elif _is_no_secret(kind, old) and _is_no_secret(kind, new):
            yield f"{path} {_shown(old)} -> {_shown(new)}"
        else:
            yield f"{path} changed"


def _is_of(change: str, keys: Sequence[str]) -> bool:
    path = change.partition(" ")[0]
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _of_list(path: str, before: Sequence[Section], after: Sequence[Section]) -> Iterator[str]:
    """Yield the changes of a repeatable table."""
    old, new = ({_label(number, one): one for number, one in enumerate(items)} for items in (before, after))
    yield from (f"{path} +{name}" for name in new if name not in old)
    yield from (f"{path} -{name}" for name in old if name not in new)
    stay = [name for name in new if name in old]
    for name in stay:
        yield from _of_table(old[name], new[name], f"{path} {name}: ")
    if stay != [name for name in old if name in new]:  # of routes, the first that matches applies
        yield f"{path} in another order"


def _of_api_keys(before: Sequence[KeyConfig], after: Sequence[KeyConfig]) -> Iterator[str]:
    """Yield the changes of API keys, which are known by their tenant."""
    for tenant in sorted({key.tenant for key in (*before, *after)}):
        old, new = ({key.sha256: key for key in keys if key.tenant == tenant} for keys in (before, after))
        added, removed = (
            [key for one, key in these.items() if one not in others] for these, others in ((new, old), (old, new))
        )
        if not old or not new:
            yield f"keys {'-' if old else '+'}{tenant}"
            continue
        if len(added) == len(removed) != 0:
            yield f"keys {tenant}: rotated" + (f" ({len(added)} keys)" if len(added) > 1 else "")
        elif added or removed:
            yield f"keys {tenant}: {len(added)} added, {len(removed)} removed"
        pairs = [(old[one], key) for one, key in new.items() if one in old]
        if len(added) == len(removed) == 1:
            pairs.append((removed[0], msgspec.structs.replace(added[0], sha256=removed[0].sha256)))
        for pair in pairs:
            yield from _of_table(*pair, f"keys {tenant}: ")


def _label(number: int, item: Section) -> str:
    """Return how the log names an item of a repeatable table."""
    if isinstance(item, NodeConfig):
        return node_name(item)
    names = (getattr(item, name, "") for name in ("label", "name", "island", "role"))
    return next((str(name) for name in names if name), f"{number + 1}")


def _is_no_secret(kind: Any, value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or value in choices_of(kind)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
