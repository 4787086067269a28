"""A new configuration or certificate while the router runs, and the files that are watched for it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from warmroute.app import log as logs
from warmroute.app.alerts import Alert
from warmroute.app.metrics.page import Reloads
from warmroute.app.process import reconfigure_exit
from warmroute.config import Config, ConfigError, describe_changes, keys_needing_restart
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.sockets import server_tls
from warmroute.event_log import EventLog, where_it_failed

if TYPE_CHECKING:
    from warmroute.app.service import Service


# Reloads the configuration of the running service: on SIGHUP, on POST /admin/reload, and when the file changes.

log = EventLog("warmroute.service")

MAX_REASON: Final = 2_000
"""Characters of the log's reason why a configuration was rejected. A file can have many problems."""


class ConfigReload:
    def __init__(self, service: Service, read_config: Callable[[], Config]) -> None:
        self._service = service
        self.read_config = read_config
        self.started_with = self.current = read_config()
        self.reloads = Reloads()
        self.changed: list[str] = []
        """What the last reload has changed."""
        self._last: dict[str, Any] | None = None
        """The last reload, for the live page."""
        self._kept = "configuration"
        """What keeps its previous version if the last reload failed."""

    def reload(self, reason: str = "admin API") -> str | None:
        """Apply a changed configuration and changed certificates. Running requests continue. Return the error if they
        are invalid: then the previous ones stay. `reason`: who asked for it."""
        log.info("reload_requested", reason=reason)
        systemd = self._service.systemd
        systemd.reloading()
        problem = self._record(reason, lambda: self._reload_config() or self._reload_certificates())
        systemd.ready(f"The configuration was rejected: {problem}" if problem else f"{len(self._service.fleet)} nodes")
        return problem

    def certificates_changed(self) -> None:
        self.changed = []
        self._record("certificates changed", self._reload_certificates)

    def _record(self, reason: str, reload: Callable[[], str | None]) -> str | None:
        try:
            problem = reload()
        except Exception as error:
            self._ended(reason, f"internal error: {where_it_failed(error)}")
            raise
        self._ended(reason, problem)
        return problem

    def _ended(self, reason: str, problem: str | None) -> None:
        self.reloads.record(problem is None)
        last, now_s = self._last, round(time.time(), 1)
        if last is not None and last["error"] is None and problem is None and not self.changed:
            self._last = {**last, "checked": now_s}  # a file's change and a signal often come together
            return
        self._last = {
            "time": now_s,
            "checked": now_s,
            "reason": reason,
            "error": None if problem is None else shortened(problem),
            "changed": list(self.changed),
        }

    def _reload_certificates(self) -> str | None:
        self._kept = "certificates"
        return self._service.certificates.reload()

    def _reload_config(self) -> str | None:
        service, before = self._service, self.current
        self._kept = "configuration"
        self.changed = []
        try:
            config = self.read_config()
            if config.upstream != before.upstream:
                service.pools.reconfigure(config.upstream)
        except ConfigError as error:
            log_rejected(error)
            return str(error)
        for warning in config.warnings:
            if warning not in before.warnings:
                log.warning("config_warning", warning)
        self.current = config
        if msgspec.structs.replace(config, warnings=before.warnings) == before:
            log.info("config_unchanged")
            return None
        keys = self.needs_restart()
        if keys:
            log.warning("restart_required", "These changes take effect after a restart.", keys=",".join(keys))
        added, removed = self._apply(config, before)
        self.changed = describe_changes(before, config, keys)
        log.info("config_reloaded", nodes_added=added, nodes_removed=removed, changed="; ".join(self.changed))
        return None

    def _apply(self, config: Config, before: Config) -> tuple[int, int]:
        service = self._service
        service.clients.limits = service.admin_listener.limits = config.limits
        service.listener.unread.limit = service.admin_listener.unread.limit = config.limits.unread_bytes
        routes_changed = config.routes != before.routes
        if config.routing != before.routing or config.price != before.price or routes_changed:
            service.router.reconfigure(config.routing, config.price, config.routes)
        if config.admission != before.admission or routes_changed:
            service.admission.reconfigure(config.admission, config.routes)
        if config.index != before.index:
            service.cache_view.reconfigure(config.index)
        if config.kv_stores != before.kv_stores:
            service.cache_view.set_stores({one.name: one.capacity_tokens for one in config.kv_stores})
        if config.prompts != before.prompts or config.models != before.models:
            service.prompt_reader.reconfigure(config.prompts)
            service.tokenizer_registry.reconfigure(config.prompts, config.models)
        if config.log != before.log:
            logs.set_up(config.log, service.seat.name if service.seat is not None else None)
        if config.shutdown != before.shutdown:
            reconfigure_exit(config.shutdown)
        service.last_decisions.reconfigure(config.journal)
        service.capture.reconfigure(config.capture)
        if config.islands != before.islands or config.island_affinity != before.island_affinity:
            service.fleet.islands.reconfigure(config.islands, config.island_affinity)
        if config.scaling.enabled and service.scaling is not None:
            service.scaling.reconfigure(config)
        service.fleet.outlier_detection.config = config.outlier_detection
        service.rate_limits.reconfigure(config.keys, time.monotonic())
        service.brain.reconfigure(config.upstream.max_attempts, config.hedging)
        service.proxy.reconfigure(config)
        service.ended_calls.reconfigure(config)
        service.watcher.reconfigure(config)
        changed = service.nodes.reconfigure(config.nodes, config.health)
        service.watcher.attach_stores()
        service.discovery.reconfigure(config.discovery)
        service.pools.drop_changed_keys(service.fleet)
        if service.edges is not None:
            service.edges.settings_changed()
        return changed

    def needs_restart(self) -> list[str]:
        """Return the changed keys that take effect only after a restart."""
        return keys_needing_restart(self.started_with, self.current)

    def describe(self) -> dict[str, list[str]]:
        """Return what the last reload has changed, and which of all changes take effect only after a restart."""
        return {"changed": self.changed, "needs_restart": self.needs_restart()}

    def describe_last(self) -> dict[str, Any] | None:
        """Return when and why a reload last changed something or failed, what it has changed or which error it met,
        when the configuration was last found unchanged since then (`checked`), and which of all changes take effect
        only after a restart; None before the first reload."""
        return None if self._last is None else {**self._last, "needs_restart": self.needs_restart()}

    def alerts(self, _now_s: float) -> Iterator[Alert]:
        if self._last is not None and (error := self._last["error"]):
            yield Alert(
                id="config_rejected", severity="warning", title=f"The last reload of the {self._kept} failed",
                cause=error, what_to_do=f"Correct it and reload. The router keeps the previous {self._kept}.",
            )  # fmt: skip

    def api_key_envs(self) -> set[str]:
        """Return the environment variables with API keys. Provisioners do not change until a restart."""
        provisioners = (*self.current.provisioners, *self.started_with.provisioners)
        found = {node.api_key_env for node in self.current.nodes} | {one.api_key_env for one in provisioners}
        return found | {source.api_key_env for source in self.current.discovery}

    def file_changed(self, path: Path) -> None:
        try:
            self.reload(f"{path} changed")
        except Exception:
            log.exception("config_reload_failed", file=path)


def log_rejected(error: ConfigError) -> None:
    log.error("config_rejected", "The router keeps the previous configuration.", reason=shortened(str(error)))


def shortened(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"


# Reloads certificates while the router runs: those of its listener, and the authorities that it trusts for nodes.
#
# A new certificate counts for new connections. Connections that are open keep theirs.


class HasCertificates(Protocol):
    """The router's process, or an edge."""

    pools: ConnectionPools

    @property
    def config(self) -> Config: ...


class Certificates:
    def __init__(self, service: HasCertificates) -> None:
        self._service = service
        listen = service.config.listen  # its keys change only with a restart
        self._cert, self._key = listen.tls_cert, listen.tls_key
        self.listener_tls: ssl.SSLContext | None = None
        self._digests: dict[Path, bytes] = {}
        """Digests of the files that are in use. A reload names the files that have changed."""

    def load(self) -> ssl.SSLContext | None:
        """Return the listener's TLS context; None without TLS. Raises ConfigError."""
        self.listener_tls = server_tls(self._cert, self._key)
        self._digests = self._read_digests()
        return self.listener_tls

    @property
    def files(self) -> list[Path]:
        ca_file = self._service.config.upstream.ca_file
        return [Path(name) for name in (self._cert, self._key, ca_file) if name]

    def reload(self) -> str | None:
        """Read all files again. Return the error if one is unusable: then all previous ones stay."""
        try:
            server_tls(self._cert, self._key)  # first, since a bad pair would break the context that is in use
            self._service.pools.reload_authorities()
            if self.listener_tls is not None:
                self.listener_tls.load_cert_chain(self._cert, self._key)
            digests = self._read_digests()
        except (ConfigError, OSError, ssl.SSLError) as error:
            log.error("certificates_rejected", "The router keeps the previous certificates.", reason=error)
            return str(error)
        changed = [str(file) for file, digest in digests.items() if self._digests.get(file) != digest]
        self._digests = digests
        if changed:
            log.info("certificates_reloaded", files=",".join(changed))
        return None

    def _read_digests(self) -> dict[Path, bytes]:
        """Raises OSError."""
        return {file: blake2b(file.read_bytes()).digest() for file in self.files}


# Notices when files change: the configuration, certificates.

FILE_CHECK_S: Final = 0.5

Version = tuple[tuple[int, int, int] | None, ...]


async def watch_files(files: Callable[[], Sequence[Path]], changed: Callable[[], object]) -> None:
    """Call `changed` when a file has changed and all then stayed the same for FILE_CHECK_S: they may be half written
    before."""
    known = previous = _version(files())
    while True:
        await asyncio.sleep(FILE_CHECK_S)
        version = _version(files())
        settled, previous = version == previous, version
        if version != known and settled:
            known = version
            changed()


def _version(files: Sequence[Path]) -> Version:
    return tuple(map(_file_version, files))


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
