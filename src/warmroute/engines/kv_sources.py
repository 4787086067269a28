"""Where a node's KV events are to be had, as its engine describes it. Text in, plain values out; no I/O."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from warmroute.config import is_loopback

MAX_RANKS: Final = 1024
_ANYWHERE: Final = frozenset({"", "*", "0.0.0.0", "::"})


class Source(NamedTuple):
    """One data-parallel rank's events."""

    rank: int
    endpoint: str
    replay: str
    """Empty where nothing is replayed."""


class ServerInfo(NamedTuple):
    """What SGLang's /server_info says."""

    sources: list[Source]
    block_size: int
    capacity_tokens: int


def reachable(endpoint: Any, host: str, offset: int = 0) -> str:
    """An engine's own endpoint as this router reaches it; empty where it can't. `*`, or an address that means the
    engine's own machine, is the node's host."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return ""
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    name = name.strip("[]")
    if not port.isdecimal() or not 0 < int(port) + offset < 65536:
        return ""
    if name in _ANYWHERE or is_loopback(name):
        name = host
    return f"tcp://{f'[{name}]' if ':' in name else name}:{int(port) + offset}"


def configured(events: str, replay: str, host: str) -> list[Source]:
    """As the configuration says."""
    endpoint = reachable(events, host)
    return [Source(0, endpoint, reachable(replay, host))] if endpoint else []


def read_sources(body: bytes, host: str) -> list[Source]:
    """vLLM's /kv_event_sources: rank → what its publisher was told; or a list of the same, each with its rank.
    Raises ValueError."""
    told = msgspec.json.decode(body)
    if isinstance(told, dict):
        entries = list(told.items())
    elif isinstance(told, list):
        entries = [(entry.get("data_parallel_rank", 0), entry) for entry in told if isinstance(entry, dict)]
    else:
        raise ValueError("not a list of sources")
    found: dict[int, Source] = {}
    for name, entry in entries[:MAX_RANKS]:
        if not isinstance(entry, dict) or entry.get("publisher", "zmq") != "zmq" or not str(name).isdecimal():
            continue
        endpoint = reachable(entry.get("endpoint"), host)
        if endpoint:
            rank = int(name)
            found[rank] = Source(rank, endpoint, reachable(entry.get("replay_endpoint"), host))
    return list(found.values())


def read_server_info(body: bytes, host: str) -> ServerInfo:
    """SGLang's /server_info: `kv_events` has a base port that ranks count up from, or an endpoint for each rank; where
    to replay from stands in the flag it was started with. Raises ValueError."""
    info = msgspec.json.decode(body)
    if not isinstance(info, dict):
        raise ValueError("not an object")
    block_size, capacity = _whole(info.get("page_size")), _whole(info.get("max_total_num_tokens"))
    events = info.get("kv_events")
    if not isinstance(events, dict) or events.get("publisher", "zmq") != "zmq":
        return ServerInfo([], block_size, capacity)
    ranks = min(max(1, _whole(events.get("dp_size"))), MAX_RANKS)
    base = f"tcp://{events.get('endpoint_host') or '*'}:{_whole(events.get('endpoint_port_base'))}"
    endpoints = {rank: reachable(base, host, rank) for rank in range(ranks)}
    for entry in events.get("publishers") or ():
        if isinstance(entry, dict) and isinstance(entry.get("dp_rank"), int):
            endpoints[entry["dp_rank"]] = reachable(entry.get("endpoint"), host)
    replay = _replay_of_flag(info.get("kv_events_config"))
    sources = [
        Source(rank, endpoint, reachable(replay, urlsplit(endpoint).hostname or host, rank))
        for rank, endpoint in endpoints.items()
        if endpoint
    ]
    return ServerInfo(sources, _whole(events.get("block_size")) or block_size, capacity)


def _replay_of_flag(flag: Any) -> Any:
    try:
        return msgspec.json.decode(flag).get("replay_endpoint") if isinstance(flag, str) else None
    except (msgspec.DecodeError, AttributeError):
        return None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
