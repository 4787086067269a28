"""Whatever a node sends, the parsers return bounded values or raise their documented error, and the router's lookups
work afterwards."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_factory import hit, lookup, one_node, payload, prompt, stored

from warmroute._kernel import MAX_BLOCK_TOKENS
from warmroute.core.messages import Lookup
from warmroute.core.node import LoadReport
from warmroute.core.node_cache import NodeCache
from warmroute.core.reported_values import LIMITS, MAX_RANKS, ReportedValues, decode_json
from warmroute.engines import parse_model_cards, read_cards, sglang, trtllm, vllm
from warmroute.engines.kv_events import (
    MAX_HELD,
    BadPayload,
    ByteBudget,
    EventSequence,
    NodeKvEvents,
    RankEvents,
    decode_batch,
    sent_time_s,
)
from warmroute.engines.kv_subscription import apply_polled, parse_event_sources, parse_server_info, reachable_endpoint

ABSURD_INTEGERS = [-1, 0, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), MAX_BLOCK_TOKENS + 1]
absurd_integers = st.sampled_from(ABSURD_INTEGERS) | st.integers(-(2**63), 2**64 - 1)
huge_integers = absurd_integers | st.integers(10**30, 10**40) | st.just(10**4000)
scalars = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.binary(max_size=80) | absurd_integers
)  # fmt: skip
json_scalars = st.none() | st.booleans() | st.text(max_size=8) | huge_integers | st.floats(allow_nan=False)
anything = st.recursive(
    json_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=8
)


def reported() -> ReportedValues:
    return ReportedValues("node")


def as_json(value: Any) -> bytes:
    return json.dumps(value).replace("Infinity", "1e999").encode("utf-8", "replace")


def rank_events(cache: NodeCache) -> RankEvents[bytes]:
    return RankEvents(cache, 0, lambda: lambda message: decode_batch(message).events, sent_time_s)


def receive(rank: RankEvents[bytes], number: int, message: bytes) -> None:
    rank.receive(number, message)
    rank.sequence.skip_missing()
    while rank.work(time.monotonic() + 1):
        pass
    rank.sequence.skip_missing()


# KV events.

events = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("BlockStored")},
        optional={
            "block_hashes": st.lists(scalars, max_size=4),
            "parent_block_hash": scalars,
            "token_ids": st.lists(absurd_integers, max_size=40) | st.just(prompt(0, 1)),
            "block_size": absurd_integers | st.just(16),
            "lora_id": scalars,
            "medium": scalars,
            "lora_name": scalars,
            "extra_keys": st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
            "group_idx": scalars,
            "cache_salt": scalars,
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("BlockRemoved")}, optional={"block_hashes": st.lists(scalars, max_size=4), "medium": scalars}
    ),
    st.just({"type": "AllBlocksCleared"}),
    scalars,
)


@given(st.binary(max_size=200))
def test_bytes_are_a_batch_or_a_bad_payload(data: bytes) -> None:
    try:
        decode_batch(data)
    except BadPayload:
        pass
    sent_s = sent_time_s(data)
    assert sent_s is None or 0 < sent_s < 1e12


@settings(deadline=None)
@given(st.lists(st.lists(events, max_size=4), max_size=6), st.floats())
def test_no_event_breaks_a_later_lookup(batches: list[list[Any]], sent_s: float) -> None:
    cache_view, cache = one_node()
    rank = rank_events(cache)
    messages = [msgspec.msgpack.encode([sent_s, batch, 0]) for batch in batches]
    for number, message in enumerate(messages):
        receive(rank, number, message)
    assert 1 <= cache.block_size <= MAX_BLOCK_TOKENS and math.isfinite(cache.event_lag_s)
    cache_view.hits("m", lookup_of_a_long_prompt(), 1.0)
    receive(rank, len(batches), payload({"type": "AllBlocksCleared"}, stored([1], prompt(7, 1))))
    assert rank.sequence.next_number == len(batches) + 1, "the feed goes on"


def lookup_of_a_long_prompt() -> Lookup:
    return lookup(prompt(3, 64))


def test_a_block_size_that_cannot_be_hashed_does_not_reach_the_cache() -> None:
    cache_view, cache = one_node()
    rank = rank_events(cache)
    for number, size in enumerate((MAX_BLOCK_TOKENS + 1, 2**31, 0)):
        rank.receive(number, payload(stored([1], prompt(0, 1), size=size)))
        rank.work(time.monotonic() + 1)
    cache.set_size(MAX_BLOCK_TOKENS + 1, 0)
    cache.set_size(2**62, 0)
    assert cache.block_size == 16 and hit(cache_view, prompt(0, 8)) == 0


def test_deeply_nested_extra_keys_are_lost_events_not_an_exception() -> None:
    _, cache = one_node()
    rank = rank_events(cache)
    nested = b"\x91" * 5000 + b"\xc0"
    message = msgspec.msgpack.encode([1.0, [stored([1], prompt(0, 1), extra_keys=["here"])], 0])
    rank.receive(0, message.replace(msgspec.msgpack.encode(["here"]), nested))
    rank.work(time.monotonic() + 1)
    assert not cache.complete
    rank.receive(1, b"\x93\xcb" + b"\0" * 8 + b"\x91" * 100_000)
    rank.work(time.monotonic() + 1)
    assert cache.gaps


def test_one_message_from_the_future_makes_later_ones_late_for_two_minutes_at_most() -> None:
    _, cache = one_node()
    now_s = 0.0
    rank = RankEvents[bytes](
        cache, 0, lambda: lambda message: decode_batch(message).events, sent_time_s, lambda: now_s, lambda: 5000 + now_s
    )
    rank.receive(0, payload(sent_s=9e9))
    for number in range(1, 200):
        now_s += 1.0
        rank.receive(number, payload(sent_s=5000 + now_s))
    assert cache.event_lag_s == 0


# Sequence numbers.


def test_messages_held_during_a_replay_stay_within_the_byte_budget() -> None:
    applied: list[bytes] = []
    budget = ByteBudget(limit_bytes=1000)
    sequence = EventSequence[bytes](applied.append, applied.clear, budget, len)
    sequence.receive(0, b"first")
    for number in range(5, 200):
        sequence.receive(number, b"x" * 100)
    assert 0 < budget.used_bytes <= 1000
    sequence.skip_missing()
    assert budget.used_bytes == 0 and len(applied) == 10 and sequence.incomplete


def test_an_endless_replay_takes_no_more_memory_than_a_long_one() -> None:
    sequence = EventSequence[bytes](lambda _payload: None, lambda: None)
    sequence.start_replay()
    for number in range(MAX_HELD + 5000):
        sequence.receive_replayed(number, b"%d" % number)
    assert len(sequence._replayed) == MAX_HELD


def test_ten_thousand_gaps_are_skipped_in_a_moment() -> None:
    applied: list[bytes] = []
    sequence = EventSequence[bytes](applied.append, lambda: None)
    sequence.receive(0, b"first")
    for number in range(2, 2 * MAX_HELD, 2):
        sequence.receive(number, b"%d" % number)
    before_s = time.process_time()
    sequence.skip_missing()
    assert len(applied) == MAX_HELD and time.process_time() - before_s < 1.0, "not quadratic"


# TensorRT-LLM.

polled = st.fixed_dictionaries(
    {},
    optional={
        "event_id": huge_integers,
        "attention_dp_rank": huge_integers,
        "window_size": huge_integers,
        "data": st.fixed_dictionaries(
            {"type": st.sampled_from(["stored", "removed", "updated", "created", "other"])},
            optional={
                "block_hashes": st.lists(json_scalars, max_size=3),
                "block_hash": json_scalars,
                "parent_hash": json_scalars,
                "cache_level": st.fixed_dictionaries({"old_value": huge_integers, "new_value": huge_integers}),
                "blocks": st.lists(
                    st.fixed_dictionaries(
                        {
                            "block_hash": json_scalars,
                            "tokens": st.lists(st.fixed_dictionaries({"token_id": huge_integers}), max_size=3),
                        }
                    ),
                    max_size=3,
                ),
            },
        ),
    },
)


@settings(deadline=None)
@given(st.lists(polled, max_size=6))
def test_polled_events_open_a_bounded_number_of_ranks(batch: list[Any]) -> None:
    cache_view, cache = one_node()
    polled_events = trtllm.split_events(as_json(batch))
    asyncio.run(apply_polled(NodeKvEvents(cache), polled_events, reported(), lambda: 1.0))
    assert all(0 <= rank < MAX_RANKS for rank in cache.ranks)
    cache_view.hits("m", lookup_of_a_long_prompt(), 1.0)


@given(st.binary(max_size=100) | st.just(b"[" * 100_000))
def test_a_polled_body_is_a_list_or_a_bad_payload(body: bytes) -> None:
    try:
        for event in trtllm.split_events(body):
            try:
                trtllm.decode_event(event)
            except BadPayload:
                pass
    except BadPayload:
        pass


# Metrics.

METRICS = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "process_start_time_seconds",
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:max_total_num_tokens",
    "trtllm_num_requests_running", "trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks",
    'vllm:cache_config_info{block_size="99999999999999",kv_cache_size_tokens="999999999999999"}',
    'vllm:lora_requests_info{max_lora="999999999999999",running_lora_adapters="' + "a," * 5000 + '"}',
    'sglang:cache_config_info{page_size="18446744073709551615"}',
]  # fmt: skip
values = (
    st.floats().map(repr) | huge_integers.map(lambda n: "9" * 5000 if n == 10**4000 else str(n)) | st.text(max_size=9)
)


def is_bounded(report: LoadReport) -> bool:
    numbers = {name: getattr(report, name) for name in report.__struct_fields__ if name in LIMITS}
    return all(not value or LIMITS[name][0] <= value <= LIMITS[name][1] for name, value in numbers.items())


@given(st.lists(st.tuples(st.sampled_from(METRICS), values), max_size=30))
def test_a_load_report_is_bounded_whatever_the_page_says(lines: list[tuple[str, str]]) -> None:
    page = "\n".join(f"{name} {value}" for name, value in [("", ""), *lines]).encode("utf-8", "replace")
    for engine in (vllm, sglang, trtllm):
        report = engine.parse_load(page)
        assert report is not None and is_bounded(reported().check(report))


@given(anything | st.lists(st.fixed_dictionaries({"numActiveRequests": json_scalars, "kvCacheStats": anything})))
def test_iteration_statistics_are_bounded(statistics: Any) -> None:
    report = trtllm.parse_load(as_json(statistics))
    assert report is None or is_bounded(reported().check(report))


def test_every_number_of_a_load_report_has_limits() -> None:
    numbers = {name for name, kind in LoadReport.__annotations__.items() if kind in ("int", "float")}
    assert numbers and numbers <= LIMITS.keys()


def test_an_ignored_value_is_logged_once_for_each_node(caplog: pytest.LogCaptureFixture) -> None:
    node = ReportedValues("gpu-a")
    for running in (10**9, 10**12):
        report = node.check(LoadReport(running, 3, 0.5, 1.7e9, block_size=10**6))
        assert (report.running, report.waiting, report.block_size) == (0, 3, 0)
    node.ignore("rank", 10**4000)
    assert {record.__dict__["event"] for record in caplog.records} == {"node_value_ignored"}
    fields = [record.__dict__["fields"] for record in caplog.records]
    limits = "not between 0 and 1,000,000"
    assert fields[0] == {"node": "gpu-a", "name": "running", "value": "1000000000", "reason": limits}
    assert [one["name"] for one in fields] == ["running", "block_size", "rank"]
    assert fields[-1]["value"] == "an integer of 13,288 bits"


def test_a_page_of_a_million_samples_is_read_in_a_moment() -> None:
    page = b"\nvllm:num_requests_running 1" * 250_000 + b"\nvllm:num_requests_waiting" + b" 1" * 1_000_000
    before_s = time.process_time()
    report = vllm.parse_load(page)
    assert report.running <= 1024 and report.waiting == 0 and time.process_time() - before_s < 0.5


# Start times.


def test_a_start_time_that_comes_back_is_no_restart() -> None:
    node = reported()
    assert node.start_time(0.0, 0.0) == 0.0 and node.start_time(100.0, 1.0) == 100.0
    assert node.start_time(200.0, 2.0) == 200.0, "a restart"
    assert node.start_time(100.0, 3.0) == 200.0, "two processes behind one address"
    assert node.start_time(200.0, 4.0) == 200.0


def test_a_new_start_time_with_every_poll_is_no_restart() -> None:
    node = reported()
    accepted = {node.start_time(1000.0 + second, float(second)) for second in range(50)}
    assert len(accepted) == 8
    assert node.start_time(5000.0, 500.0) == 5000.0, "a restart much later"


# Endpoints and models.


@given(anything, st.text(max_size=20))
def test_event_sources_are_endpoints_of_bounded_ranks(body: Any, host: str) -> None:
    for source in (body, {"0": body}, [{"data_parallel_rank": body, "endpoint": "tcp://*:5557"}]):
        try:
            found = parse_event_sources(as_json(source), host, reported())
        except ValueError:
            continue
        assert all(0 <= one.rank < MAX_RANKS and one.endpoint.startswith("tcp://") for one in found)


@given(anything, anything, anything, st.sampled_from(["h", "fd00::1", "[", "a b", ""]))
def test_server_info_gives_bounded_numbers(size: Any, tokens: Any, events: Any, host: str) -> None:
    publishers = [{"dp_rank": size, "endpoint": "tcp://*:5557"}, {"dp_rank": 1, "endpoint": events}]
    for feed in (events, {"dp_size": size, "endpoint_port_base": tokens, "block_size": size, "publishers": publishers}):
        body = {"page_size": size, "max_total_num_tokens": tokens, "kv_events": feed, "kv_events_config": str(events)}
        try:
            info = parse_server_info(as_json(body), host, reported())
        except ValueError:
            continue
        assert 0 <= info.block_size <= MAX_BLOCK_TOKENS and 0 <= info.capacity_tokens <= LIMITS["capacity_tokens"][1]
        assert len(info.endpoints) <= MAX_RANKS and all(0 <= one.rank < MAX_RANKS for one in info.endpoints)


@given(st.text(max_size=40), st.text(max_size=20), st.integers(-(10**6), 10**6))
def test_an_endpoint_is_empty_or_a_url_that_can_be_parsed(name: str, host: str, offset: int) -> None:
    for endpoint in (f"tcp://{name}:5557", f"tcp://*:{name}", name):
        reached = reachable_endpoint(endpoint, host, offset)
        assert not reached or (urlsplit(reached).port and urlsplit(reached).hostname)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": json_scalars}, optional=dict.fromkeys(("root", "parent", "max_model_len", "owned_by"), anything)
        )
    )
    | anything
)
def test_model_cards_are_usable(cards: Any) -> None:
    try:
        found = read_cards(as_json({"data": cards}), reported())
    except ValueError:
        return
    for card in found:
        assert isinstance(card["id"], str) and card["id"]
        assert card.get("max_model_len") is None or 1 <= card["max_model_len"] <= 10**9
    parse_model_cards(found)


@given(st.binary(max_size=60) | st.just(b"[" * 200_000) | st.just(b'"' + b"x" * (3 << 20) + b'"'))
def test_json_is_a_value_or_a_value_error(body: bytes) -> None:
    try:
        decode_json(body)
    except ValueError:
        pass


# Usage.


@given(st.none() | st.integers(0, 10**10), st.none() | st.integers(0, 10**10), st.none() | st.integers(0, 10**10))
def test_reported_usage_is_bounded_and_consistent(prompt: int | None, cached: int | None, output: int | None) -> None:
    prompt, cached, output = reported().usage(prompt, cached, output)
    assert (prompt or 0) <= 10**8 and (output or 0) <= 10**6
    assert cached is None or cached <= (prompt if prompt is not None else 10**8)
