"""The engine core's cache, queue and preemption. Blocks have 4 tokens, and times can be computed by hand."""

from __future__ import annotations

import pytest
from chain_content import ChainContent
from support.engine_invariants import check_engine

from warmroute.lab.engine.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    TokenContent,
    seed64,
    wire_events,
)
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import EngineConfig, EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong

# A step with prefill takes 10 ms + 1 ms per token, a step that only decodes 5 ms.
TIMING = Timing(
    m=0, a=10, b=1, d=0, h=0, e=5, f=0, e2=0, f2=0, g=0, overhead_ms=0, reload_us_per_token=100
)  # fmt: skip


class Driver:
    """An engine, its outputs and its KV events so far."""

    def __init__(self, **settings: object) -> None:
        self.events: list[KvEvent] = []
        self.outputs: list[EngineOutput] = []
        defaults: dict[str, object] = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        self.engine = EngineCore(EngineConfig(**(defaults | settings)), TIMING, self.sink)  # type: ignore[arg-type]
        self.now_ms = 0.0

    def sink(self, at_ms: float, events: list[KvEvent]) -> None:
        self.events += wire_events(events)

    def submit(self, name: str, chain: list[int], prompt: int, output: int = 1, **fields: object) -> None:
        """`chain`: the hashes of the blocks of 4 tokens."""
        names = {key: fields.get(key) for key in ("lora_name", "cache_salt")}
        content = ChainContent(chain, seed=seed64(name), **names)  # type: ignore[arg-type]
        self.engine.submit(EngineRequest(name, prompt, output, content, **fields), self.now_ms)  # type: ignore[arg-type]

    def run_until_idle(self) -> None:
        while (at_ms := self.engine.next_event_at()) is not None:
            self.now_ms = max(self.now_ms, at_ms)
            self.outputs += self.engine.advance(self.now_ms)
            check_engine(self.engine)

    def serve(self, name: str, chain: list[int], prompt: int, output: int = 1, **fields: object) -> Finished:
        self.submit(name, chain, prompt, output, **fields)
        self.run_until_idle()
        return self.end(name)

    def end(self, name: str) -> Finished:
        return next(o for o in self.outputs if isinstance(o, Finished) and o.request_id == name)

    def stored(self) -> list[list[int]]:
        return [event.block_hashes for event in self.events if isinstance(event, BlockStored)]

    def removed(self) -> list[int]:
        return [event.block_hashes[0] for event in self.events if isinstance(event, BlockRemoved)]


def test_a_prefix_seen_before_is_not_computed_again() -> None:
    driver = Driver(num_blocks=20)
    assert driver.serve("a", [1, 2, 3], 14).cached_tokens == 0
    end = driver.serve("b", [1, 2, 7], 14)
    assert end.cached_tokens == 8
    assert end.first_token_ms is not None and end.first_token_ms - end.arrived_ms == 10 + 6
    assert driver.stored() == [[1, 2, 3], [7]]
    assert driver.engine.stats.prefix_cache_queries == 28 and driver.engine.stats.prefix_cache_hits == 8


def test_a_pure_hit_stores_nothing() -> None:
    driver = Driver(num_blocks=20)
    driver.serve("a", [1, 2, 3], 14)
    driver.serve("b", [1, 2, 3], 14)
    assert driver.stored() == [[1, 2, 3]]


def test_a_prompt_that_ends_on_a_block_boundary_stores_its_last_block_again_and_both_are_evicted() -> None:
    driver = Driver(num_blocks=12)
    driver.serve("a", [1, 2], 8)
    end = driver.serve("b", [1, 2], 8)
    assert end.cached_tokens == 4, "the engine computes at least one token, so it computes the whole last block"
    assert driver.stored() == [[1, 2], [2]]
    driver.serve("c", list(range(10, 20)), 43)
    assert sorted(driver.removed()) == [1, 2, 2]


def test_the_next_turn_hits_the_blocks_that_the_output_filled() -> None:
    driver = Driver(num_blocks=20)
    driver.serve("turn 1", [1, 2, 3, 4], 6, output=11)
    # 6 + 11 tokens. The KV of the last one is never computed, so four blocks are full.
    assert driver.stored() == [[1], [2], [3], [4]]
    assert driver.serve("turn 2", [1, 2, 3, 4, 5], 21).cached_tokens == 16


def test_eviction_takes_the_tail_before_the_head_and_the_oldest_request_first() -> None:
    driver = Driver(num_blocks=9)
    driver.serve("a", [1, 2, 3], 13)
    driver.serve("b", [4, 5], 9)
    driver.serve("again", [1, 9], 5)  # makes block 1 the most recently used
    driver.serve("c", [21, 22, 23, 24, 25, 26], 27)
    assert driver.removed() == [3, 2, 5, 4]


def test_blocks_without_content_are_allocated_before_cached_ones() -> None:
    driver = Driver(num_blocks=6)
    driver.serve("a", [1], 6)  # one full block and one that is never filled
    driver.serve("b", [2], 6)
    driver.serve("c", [3], 6)
    assert driver.removed() == []


def test_a_salt_and_a_lora_separate_caches_and_are_reported_as_extra_keys() -> None:
    driver = Driver(num_blocks=40)
    plain = driver.serve("plain", [1, 2], 9)
    salted = driver.serve("salted", [1, 2], 9, cache_salt="s")
    tuned = driver.serve("tuned", [1, 2], 9, lora_name="l")
    both = driver.serve("both", [1, 2], 9, lora_name="l", cache_salt="s")
    assert [end.cached_tokens for end in (plain, salted, tuned, both)] == [0, 0, 0, 0]
    assert driver.serve("both again", [1, 2], 9, lora_name="l", cache_salt="s").cached_tokens == 8
    stores = [event for event in driver.events if isinstance(event, BlockStored)]
    assert [event.extra_keys for event in stores] == [
        [None, None],
        [["s"], None],
        [["l"], ["l"]],
        [["l", "s"], ["l"]],
    ]


def test_long_prompts_are_prefilled_in_chunks_that_share_steps_with_decodes() -> None:
    driver = Driver(num_blocks=100, max_num_batched_tokens=16)
    driver.submit("a", [], 4, output=10)
    driver.outputs += driver.engine.advance(14.0)
    driver.now_ms = 14.0
    driver.submit("b", [], 40)
    driver.run_until_idle()
    # The decode takes one token of the budget in each step, so the chunks have 15 + 15 + 10 tokens.
    first = driver.end("b").first_token_ms
    # Step 2 has begun with a alone (5 ms). The next ones take 10 + (15 + 1), 10 + (15 + 1) and 10 + (10 + 1).
    assert first == 14 + 5 + 26 + 26 + 21
    assert driver.engine.stats.prompt_tokens_computed == 44


def test_when_blocks_run_out_the_last_request_is_preempted_and_resumes_from_the_cache() -> None:
    driver = Driver(num_blocks=8)
    driver.submit("a", [1], 7, output=16)
    driver.submit("b", [11], 7, output=16)
    driver.run_until_idle()
    assert driver.end("a").preemptions == 0 and driver.end("b").preemptions > 0
    assert driver.end("a").at_ms < driver.end("b").at_ms
    assert driver.end("b").output_tokens == 16
    assert driver.engine.stats.preemptions == driver.end("b").preemptions
    assert driver.engine.stats.prefix_cache_queries == 14, "a resumed request does not count as a query"


def test_priority_orders_the_queue_and_the_lowest_is_preempted() -> None:
    driver = Driver(num_blocks=9, by_priority=True, max_num_seqs=1)
    for name, priority in (("first", 5), ("low", 9), ("high", 1)):
        driver.submit(name, [], 8, output=2, priority=priority)
    driver.run_until_idle()
    done = [o.request_id for o in driver.outputs if isinstance(o, Finished)]
    assert done == ["high", "first", "low"]

    driver = Driver(num_blocks=8, by_priority=True)
    driver.submit("low", [], 7, output=16, priority=9)
    driver.submit("high", [], 7, output=16, priority=1)
    driver.run_until_idle()
    assert driver.end("high").preemptions == 0 and driver.end("low").preemptions > 0


def test_with_fcfs_a_small_request_does_not_pass_a_blocked_one() -> None:
    driver = Driver(num_blocks=9)
    driver.submit("a", [], 16, output=8)
    driver.submit("large", [], 20)
    driver.submit("small", [], 2)
    driver.run_until_idle()
    assert driver.end("large").admitted_ms == driver.end("a").at_ms
    assert driver.end("small").admitted_ms == driver.end("large").admitted_ms


def test_a_running_request_is_aborted_at_the_end_of_the_step_and_frees_its_blocks() -> None:
    driver = Driver(num_blocks=20)
    driver.submit("a", [], 20, output=100 - 80)
    driver.engine.advance(50.0)  # 30 ms of prefill, then steps of 5
    assert driver.engine.abort("a", 52.0)
    assert not driver.engine.abort("a", 52.0) and not driver.engine.abort("unknown", 52.0)
    assert driver.engine.num_running == 1
    driver.outputs += driver.engine.advance(55.0)
    end = driver.end("a")
    assert (end.reason, end.at_ms, end.output_tokens) == ("abort", 55.0, 5)
    assert driver.engine.num_running == 0 and driver.engine.kv_usage == 0
    assert driver.engine.next_event_at() is None


def test_a_waiting_request_is_aborted_at_once() -> None:
    driver = Driver(num_blocks=20, max_num_seqs=1)
    driver.submit("a", [], 4, output=10)
    driver.submit("b", [], 4)
    driver.engine.advance(20.0)
    assert driver.engine.abort("b", 21.0)
    assert [o.request_id for o in driver.engine.advance(21.0)] == ["b"]
    driver.run_until_idle()
    assert driver.end("a").output_tokens == 10


def test_aborting_the_only_request_before_its_step_begins_leaves_an_idle_engine() -> None:
    driver = Driver(num_blocks=20)
    driver.submit("a", [], 4)
    assert driver.engine.abort("a", 0.0)
    driver.run_until_idle()
    assert driver.end("a").admitted_ms is None and driver.engine.stats.steps == 0


def test_a_reset_fails_while_requests_run_and_is_reported_with_the_next_step() -> None:
    driver = Driver(num_blocks=20)
    driver.submit("a", [1, 2], 9, output=3)
    driver.engine.advance(5.0)
    assert not driver.engine.reset_prefix_cache(6.0)
    driver.run_until_idle()
    assert driver.engine.reset_prefix_cache(driver.now_ms)
    assert not any(isinstance(event, AllBlocksCleared) for event in driver.events)
    assert driver.serve("b", [1, 2], 9).cached_tokens == 0
    assert [type(event).__name__ for event in driver.events][-2:] == ["AllBlocksCleared", "BlockStored"]


def test_a_sleeping_engine_aborts_requests_clears_its_cache_and_queues_new_ones() -> None:
    driver = Driver(num_blocks=20)
    driver.submit("a", [1, 2], 9, output=30)
    driver.engine.advance(30.0)
    driver.engine.sleep(31.0)
    driver.now_ms = 40.0
    driver.submit("b", [1, 2], 9)
    driver.run_until_idle()
    assert driver.end("a").reason == "abort" and driver.engine.is_asleep
    assert driver.engine.num_waiting == 1 and driver.engine.next_event_at() is None
    driver.engine.wake_up(100.0)
    driver.run_until_idle()
    assert driver.end("b").admitted_ms == 100.0 and driver.end("b").cached_tokens == 0


def test_adapters_in_a_batch_are_limited_and_other_requests_pass_the_waiting_one() -> None:
    driver = Driver(num_blocks=60, max_loras=1, lora_load_ms=100.0)
    driver.submit("x", [], 4, output=4, lora_name="x")
    driver.submit("y", [], 4, output=1, lora_name="y")
    driver.submit("plain", [], 4, output=1)
    driver.submit("x too", [], 4, output=1, lora_name="x")
    driver.run_until_idle()
    assert driver.end("plain").admitted_ms == driver.end("x too").admitted_ms == 0.0
    assert driver.end("x").first_token_ms == 10 + 12 + 100, "one adapter was loaded"
    assert driver.end("y").admitted_ms == driver.end("x").at_ms
    assert driver.engine.stats.lora_loads == 2


def test_evicted_blocks_are_reloaded_from_the_cpu_tier_faster_than_computed() -> None:
    driver = Driver(num_blocks=8, cpu_blocks=10)
    driver.serve("a", [1, 2, 3, 4], 17)
    driver.serve("b", [11, 12, 13, 14, 15, 16], 25)
    # b first takes the blocks without content, then evicts those of a.
    assert driver.removed() == [4, 3, 2, 1][: len(driver.removed())]
    assert len(driver.removed()) == 4
    end = driver.serve("again", [1, 2, 3, 4], 17)
    assert (end.cached_tokens, end.reloaded_tokens) == (16, 16)
    assert end.first_token_ms is not None
    assert end.first_token_ms - end.arrived_ms == pytest.approx(10 + 1 + 16 * 0.1)
    media = [(event.medium, event.block_hashes) for event in driver.events if isinstance(event, BlockStored)]
    assert ("CPU", [4]) in media and ("CPU", [1]) in media


def test_the_cpu_tier_evicts_its_oldest_block() -> None:
    driver = Driver(num_blocks=4, cpu_blocks=2)
    for number in range(1, 5):
        driver.serve(str(number), [number * 10, number * 10 + 1], 9)
    evicted = [
        event.block_hashes for event in driver.events if isinstance(event, BlockRemoved) and event.medium == "CPU"
    ]
    assert evicted[:2] == [[11], [10]]


def test_a_request_that_cannot_fit_is_refused() -> None:
    driver = Driver(num_blocks=4)
    with pytest.raises(RequestTooLong):
        driver.submit("a", [], 10, output=3)
    driver.serve("b", [], 10, output=2)


def test_a_block_that_another_request_fills_can_unblock_admission() -> None:
    ends: list[tuple[Finished, Finished, list[KvEvent]]] = []
    for fast_forward in (True, False):
        driver = Driver(num_blocks=5, fast_forward=fast_forward)
        driver.submit("a", [1, 2, 3, 4], 4, output=12)
        driver.engine.advance(20.0)  # 14 ms of prefill, then step 3, of 5 ms; 2 of 4 blocks are free
        driver.now_ms = 20.0
        driver.submit("b", [1, 2, 3, 4], 13)  # needs 4 blocks, of which a's first is cached
        driver.run_until_idle()
        ends.append((driver.end("a"), driver.end("b"), driver.events))
    assert ends[0] == ends[1]
    # a's fourth decode step stores its second block. Then b needs only 2, and that step admits it.
    assert ends[0][1].admitted_ms == 14 + 3 * 5


def test_the_same_requests_give_the_same_outputs_and_events() -> None:
    def run() -> tuple[list[EngineOutput], list[KvEvent]]:
        driver = Driver(num_blocks=30, max_num_batched_tokens=32)
        for number in range(20):
            content = TokenContent([number % 3] * 60, 4)
            driver.engine.submit(EngineRequest(str(number), 20 + number, 10, content), number * 7.0)
        driver.run_until_idle()
        return driver.outputs, driver.events

    assert run() == run()


def test_the_first_token_reports_the_cached_tokens() -> None:
    driver = Driver(num_blocks=20)
    driver.serve("a", [1, 2], 9)
    driver.serve("b", [1, 2], 9)
    firsts = [output for output in driver.outputs if isinstance(output, FirstToken)]
    assert [(first.request_id, first.cached_tokens) for first in firsts] == [("a", 0), ("b", 8)]
