"""Whatever is thrown at an engine, its books add up, and the fast way of living equals the slow one."""

from __future__ import annotations

from typing import Protocol

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine
from schedules import ACTS, TIMING, Abort, Act, Reset, Submit, Wait, configs

from warmroute.fake_engine.core import (
    EngineConfig,
    EngineCore,
    EngineOutput,
    EngineRequest,
    Finished,
    FirstToken,
    KvEvent,
    RequestTooLong,
    Token,
    wire_events,
)

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FAR = 1e9


class Engine(Protocol):
    def submit(self, request: EngineRequest, now_ms: float) -> None: ...
    def abort(self, request_id: str, now_ms: float) -> bool: ...
    def reset_prefix_cache(self, now_ms: float) -> bool: ...
    def advance(self, now_ms: float) -> list[EngineOutput]: ...


class Life:
    """An engine's outputs and its KV events, with their times."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.batches: list[tuple[float, list[KvEvent]]] = []
        self.answers: list[bool] = []

    def sink(self, at_ms: float, events: list[KvEvent]) -> None:
        assert events
        self.batches.append((at_ms, list(wire_events(events))))


def live(engine: Engine, life: Life, config: EngineConfig, acts: list[Act], advance_between: bool) -> None:
    now_ms = 0.0
    for number, act in enumerate(acts):
        if isinstance(act, Submit):
            request = act.request(str(number), config.block_size)
            if request.prompt_tokens + request.output_tokens <= config.capacity_tokens:
                engine.submit(request, now_ms)
        elif isinstance(act, Abort):
            life.answers.append(engine.abort(str(act.which), now_ms))
        elif isinstance(act, Reset):
            life.answers.append(engine.reset_prefix_cache(now_ms))
        elif isinstance(act, Wait):
            now_ms += act.ms
            if advance_between:
                life.outputs += engine.advance(now_ms)
    life.outputs += engine.advance(FAR)


def off_the_beat(acts: list[Act]) -> list[Act]:
    """Times that no step's end hits: at a tie, who calls first decides."""
    return [Wait(act.ms + 0.1234567) if isinstance(act, Wait) else act for act in acts]


@RELAXED
@given(configs(), ACTS, st.sampled_from([0, 0, 5, 20]), st.booleans())
def test_many_steps_at_once_equal_single_steps(
    config: EngineConfig, acts: list[Act], cpu_blocks: int, advance_between: bool
) -> None:
    config = msgspec.structs.replace(config, cpu_blocks=cpu_blocks)
    acts = off_the_beat(acts)
    fast, slow = Life(), Life()
    one = EngineCore(config, TIMING, fast.sink)
    other = EngineCore(msgspec.structs.replace(config, fast_forward=False), TIMING, slow.sink)
    live(one, fast, config, acts, advance_between)
    live(other, slow, config, acts, advance_between=True)
    assert fast.outputs == slow.outputs
    assert fast.batches == slow.batches
    assert fast.answers == slow.answers
    assert one.stats.steps == other.stats.steps
    assert one.stats.generation_tokens == other.stats.generation_tokens
    assert abs(one.stats.busy_ms - other.stats.busy_ms) < 1e-6


def rounded(life: Life) -> list[object]:
    """Without the last digits of times: the naive engine adds up what the other one has in closed form."""
    outputs: list[object] = []
    for output in life.outputs:
        fields = msgspec.structs.asdict(output)
        outputs.append({key: round(v, 5) if isinstance(v, float) else v for key, v in fields.items()})
    return [outputs, [(round(at_ms, 5), events) for at_ms, events in life.batches], life.answers]


@RELAXED
@given(configs(), ACTS)
def test_the_engine_equals_one_written_the_obvious_way(config: EngineConfig, acts: list[Act]) -> None:
    acts = off_the_beat(acts)
    fast, naive = Life(), Life()
    live(EngineCore(config, TIMING, fast.sink), fast, config, acts, advance_between=True)
    live(NaiveEngine(config, TIMING, naive.sink), naive, config, acts, advance_between=True)
    assert rounded(fast) == rounded(naive)


@RELAXED
@given(configs(), ACTS, st.sampled_from([0, 0, 5, 20]), st.booleans())
def test_the_books_add_up_at_every_moment(
    config: EngineConfig, acts: list[Act], cpu_blocks: int, every_token: bool
) -> None:
    config = msgspec.structs.replace(config, cpu_blocks=cpu_blocks, every_token=every_token)
    engine = EngineCore(config, TIMING)
    outputs: list[EngineOutput] = []
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    now_ms = 0.0
    for number, act in enumerate(acts):
        if isinstance(act, Submit):
            request = act.request(str(number), config.block_size)
            try:
                engine.submit(request, now_ms)
                wanted[request.request_id] = request.output_tokens
            except RequestTooLong:
                assert request.prompt_tokens + request.output_tokens > config.capacity_tokens
        elif isinstance(act, Abort):
            if engine.abort(str(act.which), now_ms):
                aborted.add(str(act.which))
        elif isinstance(act, Reset):
            engine.reset_prefix_cache(now_ms)
        else:
            until_ms = now_ms + act.ms
            while (at_ms := engine.next_event_at()) is not None and at_ms <= until_ms:
                now_ms = max(now_ms, at_ms)
                outputs += engine.advance(now_ms)
                engine.check()
            now_ms = until_ms
        engine.check()
    rounds = 0
    while (at_ms := engine.next_event_at()) is not None:
        now_ms = max(now_ms, at_ms)
        outputs += engine.advance(now_ms)
        engine.check()
        rounds += 1
        assert rounds < 100_000, "the engine does not come to rest"

    assert engine.num_running == 0 and engine.num_waiting == 0 and engine.kv_usage == 0.0
    assert engine.reset_prefix_cache(now_ms), "a block is still in use"
    ends = [output for output in outputs if isinstance(output, Finished)]
    assert {end.request_id for end in ends} == set(wanted) and len(ends) == len(wanted)
    for end in ends:
        assert end.reason == ("abort" if end.request_id in aborted else "length")
        assert end.output_tokens <= wanted[end.request_id]
        if end.reason == "length":
            assert end.output_tokens == wanted[end.request_id]
            assert end.first_token_ms is not None and end.arrived_ms < end.first_token_ms <= end.at_ms
    assert engine.stats.generation_tokens == sum(end.output_tokens for end in ends)
    assert engine.stats.requests_finished + engine.stats.requests_aborted == len(wanted)
    times = [output.at_ms for output in outputs]
    assert times == sorted(times)
    if every_token:
        told = sum(isinstance(output, FirstToken | Token) for output in outputs)
        assert told == engine.stats.generation_tokens
