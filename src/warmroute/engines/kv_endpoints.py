"""Parses where a node publishes its KV events, from its engine's HTTP responses or the configuration. No I/O."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from warmroute.config import is_loopback

MAX_RANKS: Final = 1024
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
    if not port.isdecimal() or not 0 < int(port) + offset < 65536:
        return ""
    if name in _ANY_ADDRESS or is_loopback(name):
        name = host
    return f"tcp://{f'[{name}]' if ':' in name else name}:{int(port) + offset}"


def configured_endpoints(events: str, replay: str, host: str) -> list[KvEndpoint]:
    endpoint = reachable_endpoint(events, host)
    return [KvEndpoint(0, endpoint, reachable_endpoint(replay, host))] if endpoint else []


def parse_event_sources(body: bytes, host: str) -> list[KvEndpoint]:
    """Parse vLLM's /kv_event_sources: a map from rank to publisher settings, or a list of settings with their ranks.
    Raises ValueError."""
    sources = msgspec.json.decode(body)
    if isinstance(sources, dict):
        entries = list(sources.items())
    elif isinstance(sources, list):
        entries = [(entry.get("data_parallel_rank", 0), entry) for entry in sources if isinstance(entry, dict)]
    else:
        raise ValueError("not a list of sources")
    found: dict[int, KvEndpoint] = {}
    for name, entry in entries[:MAX_RANKS]:
        if not isinstance(entry, dict) or entry.get("publisher", "zmq") != "zmq" or not str(name).isdecimal():
            continue
        endpoint = reachable_endpoint(entry.get("endpoint"), host)
        if endpoint:
            rank = int(name)
            found[rank] = KvEndpoint(rank, endpoint, reachable_endpoint(entry.get("replay_endpoint"), host))
    return list(found.values())


def parse_server_info(body: bytes, host: str) -> ServerInfo:
    """Parse SGLang's /server_info. `kv_events` has a base port, to which each rank adds its number, or an endpoint for
    each rank. The replay endpoint is in the flag that the engine was started with. Raises ValueError."""
    info = msgspec.json.decode(body)
    if not isinstance(info, dict):
        raise ValueError("not an object")
    block_size, capacity = _whole(info.get("page_size")), _whole(info.get("max_total_num_tokens"))
    events = info.get("kv_events")
    if not isinstance(events, dict) or events.get("publisher", "zmq") != "zmq":
        return ServerInfo([], block_size, capacity)
    ranks = min(max(1, _whole(events.get("dp_size"))), MAX_RANKS)
    base = f"tcp://{events.get('endpoint_host') or '*'}:{_whole(events.get('endpoint_port_base'))}"
    by_rank = {rank: reachable_endpoint(base, host, rank) for rank in range(ranks)}
    for entry in events.get("publishers") or ():
        if isinstance(entry, dict) and isinstance(entry.get("dp_rank"), int):
            by_rank[entry["dp_rank"]] = reachable_endpoint(entry.get("endpoint"), host)
    replay = _replay_in_flag(info.get("kv_events_config"))
    endpoints = [
        KvEndpoint(rank, endpoint, reachable_endpoint(replay, urlsplit(endpoint).hostname or host, rank))
        for rank, endpoint in by_rank.items()
        if endpoint
    ]
    return ServerInfo(endpoints, _whole(events.get("block_size")) or block_size, capacity)


def _replay_in_flag(flag: Any) -> Any:
    try:
        return msgspec.json.decode(flag).get("replay_endpoint") if isinstance(flag, str) else None
    except (msgspec.DecodeError, AttributeError):
        return None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
