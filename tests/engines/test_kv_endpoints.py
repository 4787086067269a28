"""KV event endpoints and model cards from vLLM's and SGLang's HTTP responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warmroute.config import ConfigError, from_table
from warmroute.core.reported_values import ReportedValues
from warmroute.engines import ServedModels, parse_model_cards
from warmroute.engines.kv_subscription import (
    KvEndpoint,
    configured_endpoints,
    parse_event_sources,
    parse_server_info,
    reachable_endpoint,
)

RECORDED = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://*:5557", "tcp://gpu7:5557"),
        ("tcp://0.0.0.0:5557", "tcp://gpu7:5557"),
        ("tcp://[::]:5557", "tcp://gpu7:5557"),
        ("tcp://localhost:5557", "tcp://gpu7:5557"),
        ("tcp://127.0.0.1:5557", "tcp://gpu7:5557"),
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5557"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5557"),
        ("ipc:///tmp/events", ""),
        ("inproc://events", ""),
        ("tcp://*:0", ""),
        ("tcp://*:x", ""),
        ("tcp://nowhere", ""),
        (None, ""),
    ],
)
def test_wildcard_and_loopback_endpoints_become_the_nodes_host(endpoint: str | None, reached: str) -> None:
    assert reachable_endpoint(endpoint, "gpu7") == reached


def test_an_ipv6_host_gets_brackets() -> None:
    assert reachable_endpoint("tcp://*:5557", "fd00::7", 2) == "tcp://[fd00::7]:5559"


def test_a_recorded_vllm_list_is_parsed() -> None:
    [endpoint] = parse_event_sources((RECORDED / "kv_event_sources.json").read_bytes(), "gpu7", ReportedValues("node"))
    assert endpoint == KvEndpoint(0, "tcp://gpu7:5557", "tcp://gpu7:5558")


def test_vllm_ranks_are_parsed_from_a_map_and_a_list() -> None:
    entry = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    other = {**entry, "endpoint": "tcp://*:5558"}
    expected = [KvEndpoint(0, "tcp://h:5557", ""), KvEndpoint(1, "tcp://h:5558", "")]
    as_map: Any = {"0": entry, "1": other, "2": {"publisher": "null"}, "x": entry, "3": 7}
    as_list = [{"data_parallel_rank": 0, **entry}, {"data_parallel_rank": 1, **other}, 5]
    assert parse_event_sources(json.dumps(as_map).encode(), "h", ReportedValues("node")) == expected
    assert parse_event_sources(json.dumps(as_list).encode(), "h", ReportedValues("node")) == expected
    assert parse_event_sources(b"{}", "h", ReportedValues("node")) == []


SGLANG: dict[str, Any] = {
    "page_size": 64,
    "max_total_num_tokens": 400_000,
    "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6557"}',
    "kv_events": {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
        "topic": "kv", "block_size": 64, "dp_size": 2,
    },
}  # fmt: skip


def test_sglang_server_info_is_parsed() -> None:
    info = parse_server_info(json.dumps(SGLANG).encode(), "h", ReportedValues("node"))
    assert info.endpoints == [
        KvEndpoint(0, "tcp://h:5557", "tcp://h:6557"),
        KvEndpoint(1, "tcp://h:5558", "tcp://h:6558"),
    ]
    assert (info.block_size, info.capacity_tokens) == (64, 400_000)


def test_sglang_ranks_on_other_machines_keep_their_endpoints() -> None:
    events = {**SGLANG["kv_events"], "publishers": [{"dp_rank": 1, "endpoint": "tcp://10.0.0.2:5561"}]}
    info = parse_server_info(json.dumps({**SGLANG, "kv_events": events}).encode(), "h", ReportedValues("node"))
    assert info.endpoints[1] == KvEndpoint(1, "tcp://10.0.0.2:5561", "tcp://10.0.0.2:6558")


@pytest.mark.parametrize(
    "events", [None, 5, {}, {"publisher": "null"}, {"publisher": "zmq", "endpoint_port_base": "x"}]
)
def test_sglang_without_events_still_reports_its_block_size(events: Any) -> None:
    info = parse_server_info(json.dumps({**SGLANG, "kv_events": events}).encode(), "h", ReportedValues("node"))
    assert (info.endpoints, info.block_size) == ([], 64)


@pytest.mark.parametrize("body", [b"", b"7", b'"x"', b"{", b"\xff"])
@pytest.mark.parametrize("read", [parse_event_sources, parse_server_info])
def test_an_invalid_response_raises(read: Any, body: bytes) -> None:
    with pytest.raises(ValueError):
        read(body, "h", ReportedValues("node"))


def test_endpoints_can_be_configured() -> None:
    assert configured_endpoints("tcp://*:5557", "tcp://*:5558", "h") == [KvEndpoint(0, "tcp://h:5557", "tcp://h:5558")]
    assert configured_endpoints("tcp://e:5557", "", "h") == [KvEndpoint(0, "tcp://e:5557", "")]


@pytest.mark.parametrize("value", ["on", "ipc:///x", "tcp://host", "tcp://:x"])
def test_an_invalid_configured_endpoint_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        from_table({"nodes": [{"url": "http://h:1", "kv_events": value}]}, experiment=True)


# Models.


def test_recorded_vllm_cards_are_parsed() -> None:
    cards = json.loads((RECORDED / "v1_models.json").read_bytes())["data"]
    assert parse_model_cards(cards) == ServedModels("tiny", (), ())


def test_adapters_have_a_parent_and_aliases_share_the_root() -> None:
    cards: list[dict[str, Any]] = [
        {"id": "a", "root": "/models/a", "parent": None},
        {"id": "b", "root": "/models/a", "parent": None},
        {"id": "ad1", "root": "adapters/ad1", "parent": "a"},
        {"id": "other", "root": "/models/other"},
    ]
    assert parse_model_cards(cards) == ServedModels("a", ("b",), ("ad1",))
    assert parse_model_cards([]) is None and parse_model_cards(cards[2:3]) is None
    assert parse_model_cards([{"id": "plain"}, {"id": "second"}]) == ServedModels("plain", (), ())
