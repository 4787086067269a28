"""Reloads certificates while the router runs: those of its listener, and the authorities that it trusts for nodes.

A new certificate counts for new connections. Connections that are open keep theirs.
"""

from __future__ import annotations

import ssl
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from warmroute.config import ConfigError
from warmroute.edge.listening_sockets import server_tls
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.service.service import Service

log = EventLog("warmroute.service")


class Certificates:
    def __init__(self, service: Service) -> None:
        self._service = service
        listen = service.config.listen  # its keys change only with a restart
        self._cert, self._key = listen.tls_cert, listen.tls_key
        self.listener_tls: ssl.SSLContext | None = None
        self._digests: dict[Path, bytes] = {}
        """Of the files that are in use: a reload names those that have changed."""

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
