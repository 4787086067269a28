"""A target: a node's configuration as a source lists it; long lists leave the event loop its turns."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, get_args, get_type_hints

from warmroute.config import DEFAULT_ENGINE_PORT, ConfigError, DiscoveryConfig, NodeConfig, canonical_address, node_name

# A target: an engine that a source lists, as a node's configuration, and whether it is ready for requests.
#
# The author of a source's labels names models, roles and prices, so the values are checked and bounded. A label
# never sets an API key or an endpoint of KV events.

MAX_TARGETS: Final = 2_000
"""Nodes of one source. The router ignores further ones."""
MAX_LABEL_LENGTH: Final = 200
"""Labels end up in logs, metrics and pages."""
MAX_MODELS: Final = 32
"""Models that one label may name."""

Address = tuple[str, int]
"""Host and port, equal for different spellings of the same address."""


class SourceError(Exception):
    """A source cannot be read. The router keeps the nodes that it knows."""


class Target(NamedTuple):
    address: Address
    node: NodeConfig
    ready: bool = True
    """False while an engine starts or terminates: it gets no new requests."""


class Targets(NamedTuple):
    found: list[Target]
    invalid: list[str]
    """A sentence for each target or label that was ignored."""
    priorities: Mapping[str, str] = {}
    """The priority of each InferenceObjective: `high`, `normal` or `low`."""


class Source(Protocol):
    """Where nodes are listed."""

    max_retry_s: float
    """Longest time between two attempts to read a source that fails."""

    async def run(self, report: Callable[[Targets], None]) -> None:
        """Report all targets, now and after each change. Raises SourceError or ConfigError."""


_CHOICES: Final = {key: get_args(get_type_hints(NodeConfig, include_extras=False)[key]) for key in ("engine", "role")}
LABELS: Final = ("model", "engine", "role", "gpu", "island", "usd_per_hour", "max_inflight")
"""Labels of a target that the router reads."""


def create_target(
    config: DiscoveryConfig,
    host: str,
    port: int,
    labels: Mapping[str, object],
    invalid: list[str],
    *,
    name: str = "",
    ready: bool = True,
    scheme: str = "",
) -> Target | None:
    """Return the target at this address; None if the address is unusable. Adds each problem to `invalid`."""
    url = f"{scheme or config.scheme}://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_ENGINE_PORT}"
    settings: dict[str, Any] = {
        "models": config.models, "engine": config.engine, "role": config.role, "gpu": config.gpu,
        "island": config.island or "local", "usd_per_hour": config.usd_per_hour,
        "max_inflight": config.max_inflight,
    }  # fmt: skip
    settings |= _read_labels({key: value for key, value in labels.items() if key in LABELS and value}, invalid)
    # The operator's word counts more than a label's: egress prices depend on the island.
    if config.island:
        settings["island"] = config.island
    node = NodeConfig(
        url=url, name=name, api_key_env=config.api_key_env, kv_events=config.kv_events, kv_replay=config.kv_replay,
        **settings,
    )  # fmt: skip
    try:
        node_name(node)
        return Target(canonical_address(url), node, ready)
    except (ConfigError, ValueError) as error:
        invalid.append(str(error)[:MAX_LABEL_LENGTH])
        return None


def _read_labels(labels: Mapping[str, object], invalid: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in labels.items():
        text = str(value)
        if not isinstance(value, (str, int, float)) or len(text) > MAX_LABEL_LENGTH or not text.isprintable():
            invalid.append(f"the label {key} is not text of at most {MAX_LABEL_LENGTH} printable characters")
        elif key == "model":
            settings["models"] = tuple(filter(None, (model.strip() for model in text.split(","))))[:MAX_MODELS]
        elif key == "usd_per_hour":
            price = _number(text)
            if price is None:
                invalid.append(f"the label usd_per_hour is {text!r}, which is no price")
            else:
                settings[key] = price
        elif key == "max_inflight":
            if text.isascii() and text.isdigit() and len(text) <= 7 and int(text) <= 1_000_000:
                settings[key] = int(text)
            else:
                invalid.append(f"the label max_inflight is {text!r}, which is no number of requests up to 1,000,000")
        elif key in _CHOICES and text not in _CHOICES[key]:
            invalid.append(f"the label {key} is {text!r}; possible values: {', '.join(_CHOICES[key])}")
        else:
            settings[key] = text
    return settings


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def split_host_port(text: str) -> tuple[str, int] | None:
    """Read `host:port`, `[v6]:port` or a host alone (then the port is 0). Return None for anything else."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    elif ":" in text:  # an IPv6 address without a port
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            return None
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        return None
    return host, int(port or 0)


# Shares the event loop with requests while many nodes are read or changed.

TURN_S: Final = 0.002
"""A fleet of 2,000 nodes takes tens of milliseconds to compare. Requests wait no longer than this for it."""


class Turn:
    """Call `share` after each piece of work: after TURN_S, other tasks get their turn."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def share(self) -> None:
        if time.perf_counter() - self._since_s > TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
