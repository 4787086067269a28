"""The start of the router: /ready answers 503 and requests wait until the router knows its nodes.

Right after the start no node is checked, and the caches of nodes are unknown until their KV events are replayed. The
first requests would get 503 or go to the wrong node. `startup.max_wait_s` bounds the wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from warmroute.build_info import build, build_advice
from warmroute.config import Config, is_loopback
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.service.service import Service

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
        service.proxy.own_endpoints.starting = False
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
