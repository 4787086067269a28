"""The picker's TLS: its certificate, and whether Envoy must present one."""

from __future__ import annotations

import ssl
from typing import Any

from warmroute.config import ConfigError, Picker
from warmroute.event_log import EventLog

log = EventLog("warmroute.picker")


class FreshContext(ssl.SSLContext):
    """Reads the files anew for each connection, so that a new certificate or authority counts at once."""

    _config: Picker
    _current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        try:
            self._current = _read(self._config)
        except ConfigError as error:
            log.error("certificates_rejected", "The picker keeps the previous certificates.", reason=error)
        return self._current.wrap_bio(*args, **options)


def server_tls(config: Picker) -> ssl.SSLContext | None:
    """Return None if no certificate is configured. Raises ConfigError if the files are unusable."""
    if not config.tls_cert:
        return None
    fresh = FreshContext(ssl.PROTOCOL_TLS_SERVER)
    fresh._config, fresh._current = config, _read(config)
    return fresh


def _read(config: Picker) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"picker.tls_cert, tls_key, tls_client_ca: cannot load the files: {error}") from None
    context.set_alpn_protocols(["h2"])
    return context
