"""What would keep a configuration from being served on this machine: files, environment variables, provisioners.

`warmroute serve` and `warmroute check-config` run the same checks and report everything at once. The values themselves
are checked when the configuration is read (config/contradictions.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from warmroute.cluster.redis.connect import check_cluster
from warmroute.config import Config, ConfigError, ModelConfig
from warmroute.discovery.discovery_service import create_source
from warmroute.edge.connection_pool import node_tls
from warmroute.edge.listening_sockets import server_tls
from warmroute.prompt.tokenizer_loader import check_tokenizer_path, load_error_reason, read_template
from warmroute.scaling.provisioners import create_provisioner
from warmroute.service.node_state import create_store
from warmroute.telemetry.alert_webhook import is_header_value
from warmroute.telemetry.tracing.create import import_opentelemetry


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
    return StartupReport(problems, [*warnings, *_commands_without_port(config), *_unused_names(config)])


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
