"""Connections to Redis or Valkey, alone or found through Sentinels."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from warmroute.config import Cluster, ConfigError, missing_extra, parse_redis_url

Client = Any
"""A redis.asyncio.Redis. Its types differ between versions."""
TIMEOUT_S: Final = 1.0
"""For a connection, and for each reply."""


def import_redis() -> None:
    """Raises ConfigError if redis-py is not installed."""
    try:
        import redis.asyncio  # noqa: F401
    except ImportError as error:
        raise missing_extra("cluster.url", error, "redis") from None


def read_password(config: Cluster) -> str:
    """Return the password of the server; empty without one. Raises ConfigError."""
    if config.password_env:
        password = os.environ.get(config.password_env, "")
        if not password:
            name = config.password_env
            raise ConfigError(f"cluster.password_env: the environment variable {name} (the password) is not set")
        return password
    if config.password_file:
        try:
            return Path(config.password_file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"cluster.password_file: cannot read {config.password_file}: {reason}") from None
    return parse_redis_url(config.url).password


def check_cluster(config: Cluster) -> None:
    """Raises ConfigError if this machine lacks what the configuration needs."""
    import_redis()
    read_password(config)
    if config.sentinel_password_env and not os.environ.get(config.sentinel_password_env):
        name = config.sentinel_password_env
        raise ConfigError(f"cluster.sentinel_password_env: the environment variable {name} is not set")
    if config.ca_file:
        try:
            ssl.create_default_context(cafile=config.ca_file)
        except OSError as error:  # also ssl.SSLError
            raise ConfigError(f"cluster.ca_file: cannot read {config.ca_file}: {error.strerror or error}") from None


def create_client(config: Cluster) -> Client:
    """Return a client without connections yet. It retries nothing: its users do. Raises ConfigError."""
    from redis.asyncio import Redis
    from redis.asyncio import sentinel as sentinels
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    create_sentinel: Any = sentinels.Sentinel

    address = parse_redis_url(config.url)
    options: dict[str, Any] = {
        "db": address.database, "username": address.username or None, "password": read_password(config) or None,
        "socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0), "retry_on_error": [], "protocol": 2,
    }  # fmt: skip
    if address.tls:
        options |= {"ssl": True, "ssl_ca_certs": config.ca_file or None, "ssl_check_hostname": True}
    if not address.service:
        host, port = address.hosts[0]
        return Redis(host=host, port=port, **options)
    sentinel_options = {key: value for key, value in options.items() if key not in ("db", "username", "password")}
    if config.sentinel_password_env:
        sentinel_options["password"] = os.environ.get(config.sentinel_password_env)
    sentinel = create_sentinel(list(address.hosts), sentinel_kwargs=sentinel_options, **options)
    return sentinel.master_for(address.service)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: redis-py may take a cancellation for the end of one of its own timeouts."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=0.05)


def describe_error(error: Exception) -> str:
    """Return why a command failed. redis-py puts a pipeline's command, with values, before the server's words."""
    text = str(error).split("\n")[0].rpartition("caused error: ")[2].strip("()',\" ")[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
