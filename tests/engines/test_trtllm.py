"""TensorRT-LLM's polled events, in the form that its documentation and tests show (none were recorded here)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kv_event_factory import hit, one_node, prompt
from support.engine_scripts import http_response, script
from support.polling import until
from support.running_router import router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.core.reported_values import ReportedValues
from warmroute.engines import trtllm
from warmroute.engines.kv_events import BadPayload, NodeKvEvents
from warmroute.engines.kv_subscription import apply_polled

SIZE = 32


def block(name: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "stored_block", "block_hash": name, "cache_level": 0, "priority": 35, **more,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
    }  # fmt: skip


def chain(first: int, tokens: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    parts = [tokens[at : at + SIZE] for at in range(0, len(tokens), SIZE)]
    blocks = [block(first + number, part, **more) for number, part in enumerate(parts)]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 0]}


class Engine:
    def __init__(self) -> None:
        self.cache_view, self.cache = one_node()
        self.events = NodeKvEvents(self.cache)
        self.next = 0

    async def publish(self, *data: dict[str, Any], **more: Any) -> None:
        events = [{"event_id": self.next + number, "data": each, **more} for number, each in enumerate(data)]
        self.next += len(data)
        await apply_polled(
            self.events, trtllm.split_events(json.dumps(events).encode()), ReportedValues("node"), lambda: 3.0
        )

    def hit(self, tokens: list[int], salt: str = "") -> int:
        return hit(self.cache_view, tokens, salt=salt)


async def test_full_blocks_are_hits_and_a_partial_last_block_is_not() -> None:
    engine = Engine()
    tokens = prompt(1, 3, SIZE)
    await engine.publish(CREATED, chain(1, [*tokens, 5, 6]))
    assert engine.hit([*tokens, 5, 6]) == 96
    assert engine.cache.complete and engine.cache.block_size == SIZE and engine.cache.last_contact_s == 3.0
    await engine.publish(chain(50, prompt(2, 1, SIZE), parent=3))
    assert engine.hit(tokens + prompt(2, 1, SIZE)) == 128
    await engine.publish({"type": "removed", "block_hashes": [2]})
    assert engine.hit(tokens) == 32


async def test_a_block_moved_to_host_memory_stays_a_hit() -> None:
    engine = Engine()
    tokens = prompt(1, 1, SIZE)
    await engine.publish(CREATED, chain(1, tokens))
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    await engine.publish({"type": "updated", "block_hash": 1, "cache_level": level, "priority": None})
    [row] = engine.cache_view.index.holdings(engine.cache.ranks[0])
    assert row[1:] == (0, 1, 0, 0)
    await engine.publish({"type": "removed", "block_hashes": [1]})
    assert engine.hit(tokens) == 0


async def test_a_gap_forgets_the_blocks_and_a_lower_number_means_a_restart() -> None:
    engine = Engine()
    tokens, others = prompt(1, 2, SIZE), prompt(2, 2, SIZE)
    await engine.publish(CREATED, chain(1, tokens))
    engine.next += 1
    await engine.publish(chain(11, others))
    assert (engine.hit(tokens), engine.hit(others)) == (0, 64)
    assert not engine.cache.complete and engine.cache.gaps == 1
    engine.next = 0
    await engine.publish(CREATED, chain(21, tokens))
    assert (engine.hit(tokens), engine.hit(others)) == (64, 0)
    assert engine.cache.complete


async def test_an_unknown_parent_forgets_the_blocks() -> None:
    engine = Engine()
    tokens = prompt(1, 2, SIZE)
    await engine.publish(CREATED, chain(1, tokens), chain(11, tokens, parent=99))
    assert engine.hit(tokens) == 0 and not engine.cache.complete


async def test_salts_adapters_and_images_share_no_blocks() -> None:
    engine = Engine()
    tokens = prompt(1, 2, SIZE)
    await engine.publish(CREATED, chain(1, tokens, cache_salt="s"), chain(11, tokens, lora_id=3))
    await engine.publish(chain(21, tokens, mm_keys=[["ab", 0]]))
    assert (engine.hit(tokens), engine.hit(tokens, "s")) == (0, 64)


async def test_ranks_are_separate_and_only_the_widest_window_counts() -> None:
    engine = Engine()
    tokens, others = prompt(1, 2, SIZE), prompt(2, 2, SIZE)
    await engine.publish(CREATED, chain(1, tokens), attention_dp_rank=0, window_size=4096)
    await engine.publish(chain(11, others), attention_dp_rank=0, window_size=512)
    assert (engine.hit(tokens), engine.hit(others)) == (64, 0)
    engine.next = 0
    await engine.publish(CREATED, chain(1, others), attention_dp_rank=1)
    assert sorted(engine.cache.ranks) == [0, 1] and engine.hit(others) == 64
    for rank in (0, 1):
        engine.events.remove_rank(rank)
    assert engine.cache.ranks == {}


async def test_a_tensorrt_llm_node_is_detected_and_its_load_and_events_are_read() -> None:
    """trtllm-serve: JSON at /metrics, which is empty while the engine is idle, and a Prometheus page elsewhere."""
    tokens = prompt(1, 3, SIZE)
    polls = iter([json.dumps([{"event_id": 0, "data": CREATED}, {"event_id": 1, "data": chain(1, tokens)}]).encode()])

    async def events(engine: ScriptedEngine, received: Any, writer: Any) -> None:
        writer.write(http_response(next(polls, b"[]")))

    page = b"trtllm_num_requests_running 3.0\ntrtllm_num_requests_waiting 1.0\ntrtllm_kv_cache_utilization 0.5\n"
    async with engines(1) as [engine]:
        engine.metrics = script(http_response(b"[]"))
        engine.own_paths[b"/prometheus/metrics"] = script(http_response(page, content_type=b"text/plain"))
        engine.own_paths[b"/kv_cache_events"] = events
        async with router(engine, routing={"policy": "price"}) as r:
            node, cache_view = r.node(0), r.service.cache_view
            await until(lambda: node.engine == "trtllm", "the engine is detected")
            await until(lambda: (node.running, node.waiting, node.kv_usage) == (3, 1, 0.5), "its load is read")
            await until(lambda: hit(cache_view, tokens, name="node0") == 96, "its events are polled")


async def test_an_unreadable_event_is_lost_and_later_ones_count() -> None:
    engine = Engine()
    await engine.publish(CREATED, chain(1, prompt(1, 1, SIZE)))
    engine.next += 1
    bad = [{"event_id": -1, "data": CREATED}, {"event_id": 2, "data": {"type": "stored", "blocks": 7}}]
    await apply_polled(
        engine.events, trtllm.split_events(json.dumps(bad).encode()), ReportedValues("node"), lambda: 3.0
    )
    await engine.publish(chain(50, prompt(2, 1, SIZE)))
    assert engine.hit(prompt(1, 1, SIZE)) == 0 and engine.hit(prompt(2, 1, SIZE)) == 32
    assert not engine.cache.complete and engine.cache.gaps == 1


async def test_many_unreadable_events_leave_time_for_other_work() -> None:
    events = trtllm.split_events(b"[" + b'{"event_id":-1},' * 100_000 + b'{"event_id":-1}]')
    applying = asyncio.create_task(
        apply_polled(Engine().events, events, ReportedValues("node"), lambda: 3.0)
    )  # fmt: skip
    turns = 0
    while not applying.done():
        await asyncio.sleep(0)
        turns += 1
    await applying
    assert turns > 3


def test_a_large_response_is_split_only_as_far_as_it_is_read() -> None:
    events = iter(trtllm.split_events(b'[{"event_id":1}, ' + b'{"event_id":2},' * 2_000_000 + b'{"event_id":3}]'))
    assert [bytes(next(events)) for _ in range(2)] == [b'{"event_id":1}', b'{"event_id":2}']
    with pytest.raises(BadPayload):
        trtllm.split_events(b"[" + b"0," * 1_000_000 + b"0]")


def test_events_are_split_where_they_start() -> None:
    listed = [
        {"event_id": number, "data": {"salt": 'a{"event_id":1},', "deep": [{"event": 1}]}, "more": number}
        for number in range(3)
    ]
    for body in (json.dumps(listed), json.dumps(listed, separators=(",", ":")), json.dumps(listed, indent=1) + "\n"):
        assert [json.loads(bytes(event)) for event in trtllm.split_events(body.encode())] == listed
    assert list(trtllm.split_events(b"[]")) == []


def test_an_event_that_is_too_long_is_lost_and_later_ones_count() -> None:
    long = b'{"event_id":1,"data":"%b"}' % (b"x" * trtllm.MAX_EVENT_BYTES)
    found = trtllm.split_events(b'[{"event_id":0},%b,{"event_id":2}]' % long)
    assert [json.loads(bytes(event))["event_id"] for event in found] == [0, 2]
