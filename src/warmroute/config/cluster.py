"""Settings of several replicas of the router that share their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec import Meta

from warmroute.config.section import Section

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_SCHEMES: Final = {
    "redis": (False, False), "rediss": (True, False), "valkey": (False, False), "valkeys": (True, False),
    "redis+sentinel": (False, True), "rediss+sentinel": (True, True),
}  # fmt: skip
"""Scheme → whether it uses TLS, and whether it names Sentinels."""


class Cluster(Section, frozen=True):
    """Replicas of the router that share their state through Redis or Valkey. They need
    the extra `redis`: `pip install '.[redis]'`."""

    url: Annotated[
        str,
        Meta(
            description="Server: `redis://user@host:6379/0`, with TLS `rediss://…`; through Sentinels "
            "`redis+sentinel://host:26379,host:26379/SERVICE/0`, with TLS `rediss+sentinel://…`. All replicas of a "
            "fleet have the same. Empty: this router shares nothing with others."
        ),
    ] = ""
    prefix: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z0-9._-]{1,64}$",
            description="Begins the names of all keys and channels. Fleets that share a server need different ones.",
        ),
    ] = "warmroute"
    password_env: Annotated[str, Meta(description="Environment variable with the server's password.")] = ""
    password_file: Annotated[
        str, Meta(description="File with the server's password. The router reads it for each connection.")
    ] = ""
    sentinel_password_env: Annotated[
        str, Meta(description="Environment variable with the Sentinels' own password.")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(description="PEM file with the certificate authority of the server. Empty: those of the system."),
    ] = ""
    lease_s: Annotated[
        float,
        Meta(
            ge=1,
            le=300,
            description="Length of the lease of the replica that scales the fleet. If it ends, another one scales at "
            "most this much later.",
        ),
    ] = 5.0


class RedisAddress(NamedTuple):
    """What a URL of a Redis server or of its Sentinels contains."""

    hosts: tuple[tuple[str, int], ...]
    database: int
    tls: bool
    service: str
    """The name of the server among the Sentinels; empty without Sentinels."""
    username: str
    password: str

    @property
    def label(self) -> str:
        """The address for logs, without the password."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts}/{self.service}" if self.service else f"{hosts}/{self.database}"


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ValueError, whose message does not contain the URL: it may contain a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"begin it with {', '.join(f'{name}://' for name in _SCHEMES)}")
    tls, uses_sentinels = _SCHEMES[scheme]
    place, _, path = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    username, _, password = login.partition(":")
    parts = path.split("/") if path else []
    service = unquote(parts.pop(0)) if uses_sentinels and parts else ""
    if uses_sentinels and not service:
        raise ValueError("name the service after the Sentinels: redis+sentinel://host:26379/SERVICE")
    if any("?" in part or "#" in part for part in parts) or len(parts) > 1:
        raise ValueError("write host, port and number of the database: redis://host:6379/0")
    database = parts[0] if parts and parts[0] else "0"
    if not (database.isascii() and database.isdigit()) or int(database) > 1_000_000:
        raise ValueError("the database is not a number")
    found = tuple(_host(one, SENTINEL_PORT if uses_sentinels else REDIS_PORT) for one in hosts.split(","))
    if len(found) > 1 and not uses_sentinels:
        raise ValueError("name one host, or Sentinels with redis+sentinel://")
    return RedisAddress(found, int(database), tls, service, unquote(username), unquote(password))


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port == 0 or not host.isprintable() or " " in host:
        raise ValueError("a host is missing or invalid")
    return host, port or default_port


def cluster_problems(cluster: Cluster) -> Iterator[str]:
    if not cluster.url:
        return
    try:
        address = parse_redis_url(cluster.url)
    except ValueError as error:
        yield f"cluster.url: {error}"
        return
    if cluster.password_env and cluster.password_file:
        yield "cluster.password_env and cluster.password_file are both set: keep one of them"
    if address.password and (cluster.password_env or cluster.password_file):
        yield "cluster.url has a password, and so has cluster.password_env or cluster.password_file: keep one of them"
    if cluster.ca_file and not address.tls:
        yield "cluster.ca_file needs TLS: write rediss:// in cluster.url"
    if cluster.sentinel_password_env and not address.service:
        yield "cluster.sentinel_password_env needs Sentinels: write redis+sentinel:// in cluster.url"
