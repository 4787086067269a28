"""What is checked before a start, and what waits until nodes are known."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from warmroute import build, build_advice
from warmroute.app.alert_webhook import is_header_value
from warmroute.app.node_state import create_store
from warmroute.app.redis import check_cluster
from warmroute.app.tracing import import_opentelemetry
from warmroute.config import Config, ConfigError, ModelConfig, is_loopback
from warmroute.edge.connection_pool import node_tls
from warmroute.edge.sockets import server_tls
from warmroute.engines.discovery.sync import create_source
from warmroute.event_log import EventLog
from warmroute.prompt.registry import check_tokenizer_path, load_error_reason, read_template
from warmroute.scaling.provisioners import create_provisioner

if TYPE_CHECKING:
    from warmroute.app.service import Service


# The start of the router: /ready answers 503 and requests wait until the router knows its nodes.
#
# Right after the start no node is checked, and the caches of nodes are unknown until their KV events are replayed. The
# first requests would get 503 or go to the wrong node. `Startup.max_wait_s` bounds the wait.

log = EventLog("warmroute.service")
CHECK_S: Final = 0.02


def log_started(config: Config, address: str, admin_port: int, nodes: int) -> None:
    """Log where the router listens, and what its configuration lacks."""
    admin = f"http://{url_host(config.admin.host)}:{admin_port}" if config.admin.enabled else "off"
    log.info(
        "service_started", build_advice(),
        address=address, admin=admin, nodes=nodes, policy=config.routing.policy, build=build(),
    )  # fmt: skip
    warn_without_keys(config, address)
    if not config.nodes and not config.provisioners and not config.discovery:
        log.warning(
            "no_nodes", "Add [[nodes]] or [[discovery]] to the configuration, use --node URL, or POST /admin/nodes."
        )


def warn_without_keys(config: Config, address: str) -> None:
    """`address`: where the router listens. It can differ from the configuration: systemd may have opened the socket."""
    host = urlsplit(address).hostname
    if not config.keys and host is not None and not is_loopback(host):
        log.warning(
            "no_api_keys", "Everybody who reaches this address can use the fleet. Add [[keys]].", address=address
        )


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def hold_until_started(service: Service) -> None:
    """Hold requests back, and release them once the router knows its nodes or the time is over."""
    started_s, max_wait_s = time.monotonic(), service.config.startup.max_wait_s
    missing: list[str] = []
    try:
        while missing := unknown_nodes(service):
            if time.monotonic() - started_s >= max_wait_s:
                break
            await asyncio.sleep(CHECK_S)
    finally:
        service.proxy.own_endpoints.starting = service.tables.starting = False
        service.proxy.release_requests()
    duration_ms = round((time.monotonic() - started_s) * 1000.0, 1)
    if missing:
        log.warning(
            "startup_timed_out",
            "The router serves requests although it does not know these nodes yet.",
            nodes=",".join(missing[:8]),
            duration_ms=duration_ms,
        )
    else:
        log.info("startup_complete", nodes=len(service.fleet), duration_ms=duration_ms)


def unknown_nodes(service: Service) -> list[str]:
    """Return the names of sources that have not listed their nodes yet, and of nodes whose health or earlier KV events
    are not known, or whose tokenizer is being loaded."""
    unknown = service.discovery.pending or [node.name for node in service.fleet if not service.watcher.is_settled(node)]
    if not unknown and service.member is not None and service.member.starts:
        unknown = ["snapshot of a peer"]
    if not unknown and service.tokenizer_registry.is_loading:
        unknown = [node.name for node in service.fleet]
    return unknown


# What would keep a configuration from being served on this machine: files, environment variables, provisioners.
#
# `warmroute serve` and `warmroute check-config` run the same checks and report everything at once. The values
# themselves are checked when the configuration is read (config/file.py).


@dataclass(frozen=True, slots=True)
class StartupReport:
    problems: list[str]
    """The router refuses to start."""
    warnings: list[str]
    """Probable mistakes."""


def check_startup(config: Config) -> StartupReport:
    """Takes up to seconds, if provisioners have to be created."""
    problems: list[str] = []
    problems += _errors_of(lambda: server_tls(config.listen.tls_cert, config.listen.tls_key))
    problems += _errors_of(lambda: node_tls(config.upstream))
    problems += _directory_problems(config)
    if config.state.config_map:
        problems += _errors_of(lambda: create_store(config.state))
    if config.cluster.url:
        problems += _errors_of(lambda: check_cluster(config.cluster))
    if config.tracing.enabled:
        problems += _errors_of(import_opentelemetry)
    for model in config.models:
        problems += _model_problems(model)
    for source in config.discovery:
        problems += _errors_of(lambda source=source: create_source(source))  # type: ignore[misc]
    warnings: list[str] = []
    for problem in (*_provisioner_problems(config), *_unset_variables(config)):
        fatal = config.scaling.enabled or problem.startswith(("nodes.", "discovery.", "tracing.", "alerts."))
        (problems if fatal else warnings).append(problem)
    if not config.scaling.enabled:
        warnings = [f"{one} (the provisioner is unused while scaling.enabled is false)" for one in warnings]
    warnings += _state_warnings(config)
    warnings = [*config.warnings, *warnings, *_commands_without_port(config), *_unused_names(config)]
    return StartupReport(problems, warnings)


def _errors_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return list(error.problems)
    return []


def _directory_problems(config: Config) -> Iterator[str]:
    for key, path in (
        ("journal.file", config.journal.file),
        ("listen.unix_socket", config.listen.unix_socket),
        ("capture.directory", config.capture.directory),
    ):
        folder = Path(path).parent
        if path and not folder.is_dir():
            yield f"{key}: the directory {folder} does not exist"
        elif path and not os.access(folder, os.W_OK | os.X_OK):
            yield f"{key}: this user cannot write to the directory {folder}"


def _state_warnings(config: Config) -> Iterator[str]:
    """The router starts without its state, rather than not at all."""
    if not config.state.directory:
        return
    folder = Path(config.state.directory).expanduser()
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield f"state.directory: this user cannot write to {folder}: a restart would lose operators' changes"
    elif not folder.exists() and not os.access(folder.parent, os.W_OK | os.X_OK):
        yield f"state.directory: this user cannot create {folder}: a restart would lose operators' changes"


def _model_problems(model: ModelConfig) -> Iterator[str]:
    try:
        if model.tokenizer:
            check_tokenizer_path(model.tokenizer)
    except (OSError, ValueError) as error:
        yield f"models: cannot load the tokenizer of {model.name!r}: {load_error_reason(error)}"
    try:
        if model.chat_template:
            read_template(model.chat_template)
    except (OSError, ValueError) as error:
        yield f"models: cannot load the chat template of {model.name!r}: {load_error_reason(error)}"


def _provisioner_problems(config: Config) -> Iterator[str]:
    for one in config.provisioners:
        yield from _errors_of(lambda one=one: create_provisioner(one))  # type: ignore[misc]


def _unset_variables(config: Config) -> Iterator[str]:
    for node in config.nodes:
        if node.api_key_env and not os.environ.get(node.api_key_env):
            yield _unset("nodes.api_key_env", node.api_key_env, f"the API key of {node.url}")
    for source in config.discovery:
        if source.api_key_env and not os.environ.get(source.api_key_env):
            yield _unset("discovery.api_key_env", source.api_key_env, f"the API key of {source.label}")
    headers_env = config.tracing.headers_env
    if config.tracing.enabled and headers_env and not os.environ.get(headers_env):
        yield _unset("tracing.headers_env", headers_env, "the headers for the collector")
    secret_env = config.alerts.webhook_secret_env
    if secret_env and not os.environ.get(secret_env):
        yield _unset("alerts.webhook_secret_env", secret_env, "the secret for the webhook of alerts")
    elif secret_env and not is_header_value(os.environ[secret_env]):
        yield f"alerts.webhook_secret_env: the value of {secret_env} is no value of a header: it has control characters"
    for one in config.provisioners:
        if one.api_key_env and not os.environ.get(one.api_key_env):
            yield _unset("provisioners.api_key_env", one.api_key_env, f"the API key of {one.label}")


def _commands_without_port(config: Config) -> Iterator[str]:
    for one in config.provisioners:
        if one.kind == "process" and one.command and not any("{port}" in word for word in one.command):
            yield f"provisioners.command ({one.label}) has no {{port}}: all its engines would listen on the same port"


def _unused_names(config: Config) -> Iterator[str]:
    islands = _islands_of_nodes(config)
    if islands is not None:
        known = ", ".join(sorted(islands)) or "none"
        names = [("scaling.islands", one.island) for one in config.scaling.islands]
        names += [("islands", one.name) for one in config.islands]
        for key, name in names:
            if name not in islands:
                yield f"{key}: no node or provisioner is on island {name!r}; known islands: {known}"
    tenants = {key.tenant for key in config.keys}
    for route in config.routes:
        if route.tenant and "*" not in route.tenant and route.tenant not in tenants:
            known = ", ".join(sorted(tenants)) or "none"
            yield f"routes: no key has the tenant {route.tenant!r} of route {route.name!r}; known tenants: {known}"


def _islands_of_nodes(config: Config) -> set[str] | None:
    """Return all islands that nodes can be on; None if only a provisioner, a source or the admin API knows them."""
    found = {node.island for node in config.nodes} | {source.island for source in config.discovery}
    if "" in found:
        return None
    for one in config.provisioners:
        if one.island:
            found.add(one.island)
        elif one.kind == "process":
            found.add("local")
        elif one.kind == "ec2":
            found.update(f"aws/{region}" for region in one.regions)
        else:
            return None
    return found or None


def _unset(key: str, variable: str, content: str) -> str:
    return f"{key}: the environment variable {variable}, which has {content}, is not set"
