"""Settings of the client side: listeners, keys of clients, limits, Envoy, shutdown."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from warmroute.config.routing import PriorityName
from warmroute.config.section import REMOVED, Bytes, Count, Port, Seconds, Section

# Settings of the client side: listeners, limits, API keys, logs, shutdown.

UNIX_PROXY: Final = "unix"
"""In `listen.trusted_proxies`: whoever connects to the router's unix socket."""


class Listen(Section, frozen=True):
    """The listener for clients."""

    host: Annotated[str, Meta(description="Address to listen on. `::` listens on IPv6 and IPv4.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port. 0 picks a free port and logs it.")] = 8080
    unix_socket: Annotated[str, Meta(description="Path of a Unix socket to listen on instead of TCP.")] = ""
    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain. Together with `tls_key` it enables HTTPS.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the private key of the certificate.")] = ""
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            max_length=64,
            description="Addresses or networks (CIDR) of the proxies in front of the router, and `unix` for those that "
            "use its unix socket. Log and alerts then name the client that their `X-Forwarded-For` names. The router "
            "believes this header from no other sender.",
        ),
    ] = ()


class Admin(Section, frozen=True):
    """The listener for metrics and the admin API."""

    host: Annotated[
        str, Meta(description="Address to listen on. Any address except loopback requires `token_sha256`.")
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port. 0 picks a free port and logs it.")] = 8081
    enabled: Annotated[bool, Meta(description="Start the admin listener.")] = True
    token_sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="SHA-256 hash of the token that admin requests must send, except /health and /ready. "
            "`warmroute hash-key` prints it.",
        ),
    ] = ""


class Limits(Section, frozen=True):
    """Limits on client connections and requests."""

    header_bytes: Annotated[Bytes, REMOVED] = 32_768
    """Maximum size of a request head. Above: 431. As large as those of common proxies in front."""
    body_bytes: Annotated[Bytes, Meta(description="Maximum size of a request body. Above: 413.")] = 33_554_432
    buffered_bytes: Annotated[
        Bytes,
        Meta(
            description="Maximum memory for all request bodies together. Above: 503 for further requests. With keys of "
            "several tenants, each may take at most half of what the others leave."
        ),
    ] = 2_147_483_648
    unread_bytes: Annotated[Bytes, REMOVED] = 1_073_741_824
    """Maximum memory for what clients have not read of their responses. Above: the router disconnects the slowest
    clients."""
    connections: Annotated[
        Count,
        Meta(
            description="Maximum number of client connections. When it is reached, a new connection takes the place of "
            "the oldest one without a request, and gets 503 if there is none; the others are closed after their next "
            "response."
        ),
    ] = 20_000
    first_request_timeout_s: Annotated[Seconds, REMOVED] = 10.0
    """Time after which the router closes a new connection that has sent nothing: such connections cost an attacker
    nothing."""
    header_timeout_s: Annotated[Seconds, REMOVED] = 10.0
    """Time for a request head to arrive, from its first byte. Above: 408."""
    body_timeout_s: Annotated[Seconds, REMOVED] = 60.0
    """Time for a request body to arrive, after the head. Above: 408. The largest body takes it at 4.5 Mbit/s."""
    idle_timeout_s: Annotated[Seconds, REMOVED] = 75.0
    """Time after which the router closes a keep-alive connection without requests: longer than the 60 s of common load
    balancers, which would otherwise send a request on a connection that closes."""
    stall_timeout_s: Annotated[Seconds, REMOVED] = 120.0
    """Time after which the router disconnects a client that reads no response data."""


class Log(Section, frozen=True):
    """Logs, which go to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Minimum level.")] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="`text`: one line per event. `json`: one JSON object per line.")
    ] = "text"
    requests: Annotated[
        bool, Meta(description="Log one line per request, without its content. For debugging: it slows the router.")
    ] = False


class State(Section, frozen=True):
    """Where the router keeps what operators did through the admin API, for its next start: drains, roles and nodes that
    they added. Without it, a restart loses them."""

    directory: Annotated[
        str,
        Meta(
            description="Directory for the file `node-changes.json`. The router creates it. Each router needs its own "
            "one, except replicas that share their state (`[cluster]`)."
        ),
    ] = ""
    config_map: Annotated[
        str,
        Meta(
            max_length=253,
            pattern="^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
            description="Name of a ConfigMap in the Pod's namespace, to use instead of a directory on Kubernetes. It "
            "must exist, and the Pod's service account must be allowed to `get` and `patch` it.",
        ),
    ] = ""


class Startup(Section, frozen=True):
    """What happens at the start."""

    max_wait_s: Annotated[float, Meta(ge=0), REMOVED] = 10.0
    """Maximum time for which /ready answers 503 and requests wait, until every node was checked, its earlier KV events
    were replayed, and its tokenizer is loaded. Requests with a deadline or with `X-Queue: no` do not wait. A node that
    does not answer holds up a start no longer than this."""


class Shutdown(Section, frozen=True):
    """What happens on SIGTERM."""

    delay_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Time in which /ready answers 503 while the router still accepts requests, so that load "
            "balancers in front can notice.",
        ),
    ] = 0.0
    deadline_s: Annotated[
        float, Meta(ge=0, description="Time for running requests to finish before the router cuts them off.")
    ] = 30.0


class KeyConfig(Section, frozen=True):
    """An API key of a client. Without any key, the router accepts requests from everybody."""

    sha256: Annotated[
        str, Meta(pattern="^[0-9a-f]{64}$", description="SHA-256 hash of the key. `warmroute hash-key` prints it.")
    ]
    tenant: Annotated[str, Meta(min_length=1, description="Tenant that the key belongs to.")]
    max_priority: Annotated[
        PriorityName,
        Meta(
            description="Highest priority of requests with this key. The router lowers a higher `X-Priority` to it. "
            "Only `high` allows a negative `priority` in the body, which the engine reads."
        ),
    ] = "normal"
    requests_per_min: Annotated[
        int, Meta(ge=0, description="Requests per minute, for all keys of the tenant together. 0: no limit.")
    ] = 0
    tokens_per_min: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompt and output tokens per minute, for all keys of the tenant together. 0: no limit.",
        ),
    ] = 0
    cache_group: Annotated[
        str,
        Meta(description="Tenants with the same cache group share cached prefixes. Empty: no sharing."),
    ] = ""


# Settings of `warmroute picker`, which chooses endpoints for Envoy.

MAX_ENDPOINTS = 16


class Picker(Section, frozen=True):
    """The listener for Envoy, only used by `warmroute picker` (docs/guides/envoy.md)."""

    host: Annotated[str, Meta(description="Address to listen on. `::` listens on IPv6 and IPv4.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="TCP port for gRPC. 0 picks a free port and logs it.")] = 9002
    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain. Together with `tls_key` it enables TLS.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the private key of the certificate.")] = ""
    tls_client_ca: Annotated[
        str, Meta(description="PEM file with the authorities of client certificates. With it, Envoy must present one.")
    ] = ""
    message_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="`message_timeout` of Envoy's filter. A request waits for a node at most this long, less a "
            "tenth, unless Envoy sends bodies as FULL_DUPLEX_STREAMED, which has no such timeout.",
        ),
    ] = 0.2
    max_message_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="`max_message_timeout` of Envoy's filter. If a request has to wait, the picker asks Envoy for "
            "this much time instead of `message_timeout_s`. 0: Envoy's filter does not set it.",
        ),
    ] = 0.0
    max_endpoints: Annotated[int, Meta(ge=1, le=MAX_ENDPOINTS), REMOVED] = 4
    """Endpoints that the picker names for a request: the chosen node and three fallbacks, in order. Envoy rarely
    retries more often."""


def picker_problems(picker: Picker) -> Iterator[str]:
    """Find values that contradict each other."""
    if bool(picker.tls_cert) != bool(picker.tls_key):
        yield "picker.tls_cert and picker.tls_key must be set together"
    if picker.tls_client_ca and not picker.tls_cert:
        yield "picker.tls_client_ca: client certificates need picker.tls_cert and picker.tls_key"
    if 0 < picker.max_message_timeout_s < picker.message_timeout_s:
        yield "picker.max_message_timeout_s is shorter than picker.message_timeout_s; Envoy allows only a longer one"


# Addresses in the configuration: which mean this machine, and which are equal.

_ALL_ADDRESSES: Final = ("", "0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_port(host: str, port: int, other_host: str, other_port: int) -> bool:
    """Return whether two listeners would need the same port of the same address. Port 0 is any free port."""
    if not port or port != other_port:
        return False
    first, second = _canonical_host(host), _canonical_host(other_host)
    return first == second or first in _ALL_ADDRESSES or second in _ALL_ADDRESSES


def canonical_address(url: str) -> tuple[str, int]:
    """Return host and port of a valid URL; equal for different spellings of the same address."""
    parts = urlsplit(url)
    return _canonical_host(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)


def _canonical_host(host: str) -> str:
    host = host.lower().rstrip(".")
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
