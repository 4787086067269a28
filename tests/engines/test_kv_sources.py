"""Where events are to be had: what vLLM and SGLang say, as this router reaches it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from warmroute.config import ConfigError, from_table
from warmroute.engines.kv_sources import Source, configured, reachable, read_server_info, read_sources
from warmroute.engines.served import Served, read_cards

SHARED = Path(os.environ.get("WARMROUTE_SHARED", Path(__file__).parents[3] / "shared"))
RECORDED = SHARED / "data" / "vllm-0.32"
recorded = pytest.mark.skipif(not RECORDED.exists(), reason=f"nothing recorded from vLLM at {RECORDED}")


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
def test_an_engines_endpoint_is_that_of_its_host(endpoint: str | None, reached: str) -> None:
    assert reachable(endpoint, "gpu7") == reached


def test_a_host_that_is_an_ipv6_address_gets_its_brackets() -> None:
    assert reachable("tcp://*:5557", "fd00::7", 2) == "tcp://[fd00::7]:5559"


@recorded
def test_vllms_own_list_is_read() -> None:
    [source] = read_sources((RECORDED / "kv_event_sources.json").read_bytes(), "gpu7")
    assert source == Source(0, "tcp://gpu7:5557", "tcp://gpu7:5558")


def test_ranks_of_vllm_are_read_in_both_forms() -> None:
    entry = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    other = {**entry, "endpoint": "tcp://*:5558"}
    expected = [Source(0, "tcp://h:5557", ""), Source(1, "tcp://h:5558", "")]
    as_map: Any = {"0": entry, "1": other, "2": {"publisher": "null"}, "x": entry, "3": 7}
    as_list = [{"data_parallel_rank": 0, **entry}, {"data_parallel_rank": 1, **other}, 5]
    assert read_sources(json.dumps(as_map).encode(), "h") == expected
    assert read_sources(json.dumps(as_list).encode(), "h") == expected
    assert read_sources(b"{}", "h") == []


SGLANG: dict[str, Any] = {
    "page_size": 64,
    "max_total_num_tokens": 400_000,
    "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6557"}',
    "kv_events": {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
        "topic": "kv", "block_size": 64, "dp_size": 2,
    },
}  # fmt: skip


def test_sglangs_description_is_read() -> None:
    info = read_server_info(json.dumps(SGLANG).encode(), "h")
    assert info.sources == [Source(0, "tcp://h:5557", "tcp://h:6557"), Source(1, "tcp://h:5558", "tcp://h:6558")]
    assert (info.block_size, info.capacity_tokens) == (64, 400_000)


def test_sglangs_ranks_on_other_machines_are_where_it_says() -> None:
    events = {**SGLANG["kv_events"], "publishers": [{"dp_rank": 1, "endpoint": "tcp://10.0.0.2:5561"}]}
    info = read_server_info(json.dumps({**SGLANG, "kv_events": events}).encode(), "h")
    assert info.sources[1] == Source(1, "tcp://10.0.0.2:5561", "tcp://10.0.0.2:6558")


@pytest.mark.parametrize(
    "events", [None, 5, {}, {"publisher": "null"}, {"publisher": "zmq", "endpoint_port_base": "x"}]
)
def test_sglang_without_events_still_says_its_sizes(events: Any) -> None:
    info = read_server_info(json.dumps({**SGLANG, "kv_events": events}).encode(), "h")
    assert (info.sources, info.block_size) == ([], 64)


@pytest.mark.parametrize("body", [b"", b"7", b'"x"', b"{", b"\xff"])
@pytest.mark.parametrize("read", [read_sources, read_server_info])
def test_what_is_no_description_is_told(read: Any, body: bytes) -> None:
    with pytest.raises(ValueError):
        read(body, "h")


def test_the_configuration_can_say_it_all() -> None:
    assert configured("tcp://*:5557", "tcp://*:5558", "h") == [Source(0, "tcp://h:5557", "tcp://h:5558")]
    assert configured("tcp://e:5557", "", "h") == [Source(0, "tcp://e:5557", "")]


@pytest.mark.parametrize("value", ["on", "ipc:///x", "tcp://host", "tcp://:x"])
def test_a_configuration_that_says_something_else_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        from_table({"nodes": [{"url": "http://h:1", "kv_events": value}]})


# Models.


@recorded
def test_vllms_own_cards_are_read() -> None:
    cards = json.loads((RECORDED / "v1_models.json").read_bytes())["data"]
    assert read_cards(cards) == Served("tiny", (), ())


def test_adapters_have_parents_and_aliases_the_same_root() -> None:
    cards = [
        {"id": "a", "root": "/models/a", "parent": None},
        {"id": "b", "root": "/models/a", "parent": None},
        {"id": "ad1", "root": "adapters/ad1", "parent": "a"},
        {"id": "other", "root": "/models/other"},
    ]
    assert read_cards(cards) == Served("a", ("b",), ("ad1",))
    assert read_cards([]) is None and read_cards(cards[2:3]) is None
    assert read_cards([{"id": "plain"}, {"id": "second"}]) == Served("plain", (), ())
