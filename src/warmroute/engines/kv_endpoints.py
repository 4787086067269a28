"""Parses where a node publishes its KV events, from its engine's HTTP responses or the configuration. No I/O."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from warmroute.config import is_loopback
from warmroute.fleet.reported_values import MAX_RANKS, ReportedValues, decode_json

_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?)\Z")
"""A name, an IPv4 address, or an IPv6 address without brackets."""
_ANY_ADDRESS: Final = frozenset({"", "*", "0.0.0.0", "::"})


class KvEndpoint(NamedTuple):
    """The ZMQ endpoints of one data-parallel rank."""

    rank: int
    endpoint: str
    replay: str
    """Empty if the engine replays nothing."""


class ServerInfo(NamedTuple):
    endpoints: list[KvEndpoint]
    block_size: int
    capacity_tokens: int


def reachable_endpoint(endpoint: Any, host: str, offset: int = 0) -> str:
    """Return an engine's endpoint as this router reaches it; empty if it cannot. Replace `*`, or an address that means
    the engine's own machine, by the node's host."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return ""
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    name = name.strip("[]")
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) + offset < 65536:
        return ""
    if name in _ANY_ADDRESS or is_loopback(name):
        name = host
    if not _HOST.match(name):
        return ""
    return f"tcp://{f'[{name}]' if ':' in name else name}:{int(port) + offset}"


def configured_endpoints(events: str, replay: str, host: str) -> list[KvEndpoint]:
    endpoint = reachable_endpoint(events, host)
    return [KvEndpoint(0, endpoint, reachable_endpoint(replay, host))] if endpoint else []


def parse_event_sources(body: bytes, host: str, reported: ReportedValues) -> list[KvEndpoint]:
    """Parse vLLM's /kv_event_sources: a map from rank to publisher settings, or a list of settings with their ranks.
    Raises ValueError."""
    sources = decode_json(body)
    if isinstance(sources, dict):
        entries = list(sources.items())
    elif isinstance(sources, list):
        entries = [(entry.get("data_parallel_rank", 0), entry) for entry in sources if isinstance(entry, dict)]
    else:
        raise ValueError("not a list of sources")
    found: dict[int, KvEndpoint] = {}
    for name, entry in entries[:MAX_RANKS]:
        if not isinstance(entry, dict) or entry.get("publisher", "zmq") != "zmq":
            continue
        is_text = isinstance(name, str) and name.isdecimal() and len(name) < 9
        rank = reported.whole("rank", int(name) if is_text else name)
        endpoint = reachable_endpoint(entry.get("endpoint"), host)
        if endpoint and rank is not None:
            found[rank] = KvEndpoint(rank, endpoint, reachable_endpoint(entry.get("replay_endpoint"), host))
    return list(found.values())


def parse_server_info(body: bytes, host: str, reported: ReportedValues) -> ServerInfo:
    """Parse SGLang's /server_info. `kv_events` has a base port, to which each rank adds its number, or an endpoint for
    each rank. The replay endpoint is in the flag that the engine was started with. Raises ValueError."""
    info = decode_json(body)
    if not isinstance(info, dict):
        raise ValueError("not an object")
    whole = reported.whole
    block_size = whole("block_size", info.get("page_size")) or 0
    capacity = whole("capacity_tokens", info.get("max_total_num_tokens")) or 0
    events = info.get("kv_events")
    if not isinstance(events, dict) or events.get("publisher", "zmq") != "zmq":
        return ServerInfo([], block_size, capacity)
    ranks = whole("ranks", events.get("dp_size")) or 1
    base = f"tcp://{events.get('endpoint_host') or '*'}:{whole('port', events.get('endpoint_port_base')) or 0}"
    by_rank = {rank: reachable_endpoint(base, host, rank) for rank in range(ranks)}
    publishers = events.get("publishers")
    for entry in publishers[:MAX_RANKS] if isinstance(publishers, list) else ():
        if isinstance(entry, dict) and (rank := whole("rank", entry.get("dp_rank"))) is not None:
            by_rank[rank] = reachable_endpoint(entry.get("endpoint"), host)
    replay = _replay_in_flag(info.get("kv_events_config"))
    endpoints = [
        KvEndpoint(rank, endpoint, reachable_endpoint(replay, urlsplit(endpoint).hostname or host, rank))
        for rank, endpoint in by_rank.items()
        if endpoint
    ]
    return ServerInfo(endpoints, whole("block_size", events.get("block_size")) or block_size, capacity)


def _replay_in_flag(flag: Any) -> Any:
    try:
        return decode_json(flag.encode()).get("replay_endpoint") if isinstance(flag, str) else None
    except (ValueError, AttributeError):
        return None
