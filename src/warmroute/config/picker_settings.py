"""Settings of `warmroute picker`, which chooses endpoints for Envoy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from warmroute.config.section import Port, Section

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
    max_endpoints: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_ENDPOINTS,
            description="Endpoints that the picker names for a request: the chosen node and its fallbacks, in order.",
        ),
    ] = 4


def picker_problems(picker: Picker) -> Iterator[str]:
    """Find values that contradict each other."""
    if bool(picker.tls_cert) != bool(picker.tls_key):
        yield "picker.tls_cert and picker.tls_key must be set together"
    if picker.tls_client_ca and not picker.tls_cert:
        yield "picker.tls_client_ca: client certificates need picker.tls_cert and picker.tls_key"
    if 0 < picker.max_message_timeout_s < picker.message_timeout_s:
        yield "picker.max_message_timeout_s is shorter than picker.message_timeout_s; Envoy allows only a longer one"
