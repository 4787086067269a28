"""Property tests: an engine stays consistent, and fast-forwarding gives the same results as single steps."""

from __future__ import annotations

from typing import Protocol

import msgspec
from engine_schedules import ACTIONS, TIMING, Abort, Action, Reset, Submit, Wait, configs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine
from support.engine_invariants import check_engine

from warmroute.lab.engine.blocks import KvEvent, wire_events
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.values import (
    EngineConfig,
    EngineOutput,
    EngineRequest,
    Finished,
    FirstToken,
    RequestTooLong,
    Token,
)

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FAR = 1e9


class Engine(Protocol):
    def submit(self, request: EngineRequest, now_ms: float) -> None: ...
    def abort(self, request_id: str, now_ms: float) -> bool: ...
    def reset_prefix_cache(self, now_ms: float) -> bool: ...
    def advance(self, now_ms: float) -> list[EngineOutput]: ...


class EngineRun:
    """An engine's outputs, KV events and return values."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.batches: list[tuple[float, list[KvEvent]]] = []
        self.results: list[bool] = []

    def sink(self, at_ms: float, events: list[KvEvent]) -> None:
        assert events
        self.batches.append((at_ms, list(wire_events(events))))


def run_schedule(
    engine: Engine, run: EngineRun, config: EngineConfig, actions: list[Action], advance_between: bool
) -> None:
    now_ms = 0.0
    for number, action in enumerate(actions):
        if isinstance(action, Submit):
            request = action.request(str(number), config.block_size)
            if request.prompt_tokens + request.output_tokens <= config.capacity_tokens:
                engine.submit(request, now_ms)
        elif isinstance(action, Abort):
            run.results.append(engine.abort(str(action.which), now_ms))
        elif isinstance(action, Reset):
            run.results.append(engine.reset_prefix_cache(now_ms))
        elif isinstance(action, Wait):
            now_ms += action.ms
            if advance_between:
                run.outputs += engine.advance(now_ms)
    run.outputs += engine.advance(FAR)


def without_ties(actions: list[Action]) -> list[Action]:
    """Change the times so that no action happens exactly at the end of a step, where the order of calls decides."""
    return [Wait(action.ms + 0.1234567) if isinstance(action, Wait) else action for action in actions]


@RELAXED
@given(configs(), ACTIONS, st.sampled_from([0, 0, 5, 20]), st.booleans())
def test_many_steps_at_once_equal_single_steps(
    config: EngineConfig, actions: list[Action], cpu_blocks: int, advance_between: bool
) -> None:
    config = msgspec.structs.replace(config, cpu_blocks=cpu_blocks)
    actions = without_ties(actions)
    fast, slow = EngineRun(), EngineRun()
    forwarded = EngineCore(config, TIMING, fast.sink)
    stepped = EngineCore(msgspec.structs.replace(config, fast_forward=False), TIMING, slow.sink)
    run_schedule(forwarded, fast, config, actions, advance_between)
    run_schedule(stepped, slow, config, actions, advance_between=True)
    assert fast.outputs == slow.outputs
    assert fast.batches == slow.batches
    assert fast.results == slow.results
    assert forwarded.stats.steps == stepped.stats.steps
    assert forwarded.stats.generation_tokens == stepped.stats.generation_tokens
    assert abs(forwarded.stats.busy_ms - stepped.stats.busy_ms) < 1e-6


def rounded(run: EngineRun) -> list[object]:
    """Round times: the naive engine adds up step durations, the engine core has a closed form."""
    outputs: list[object] = []
    for output in run.outputs:
        fields = msgspec.structs.asdict(output)
        outputs.append({key: round(v, 5) if isinstance(v, float) else v for key, v in fields.items()})
    return [outputs, [(round(at_ms, 5), events) for at_ms, events in run.batches], run.results]


@RELAXED
@given(configs(), ACTIONS)
def test_the_engine_equals_a_naive_implementation(config: EngineConfig, actions: list[Action]) -> None:
    actions = without_ties(actions)
    fast, naive = EngineRun(), EngineRun()
    run_schedule(EngineCore(config, TIMING, fast.sink), fast, config, actions, advance_between=True)
    run_schedule(NaiveEngine(config, TIMING, naive.sink), naive, config, actions, advance_between=True)
    assert rounded(fast) == rounded(naive)


@RELAXED
@given(configs(), ACTIONS, st.sampled_from([0, 0, 5, 20]), st.booleans())
def test_requests_and_blocks_are_consistent_after_every_step(
    config: EngineConfig, actions: list[Action], cpu_blocks: int, every_token: bool
) -> None:
    config = msgspec.structs.replace(config, cpu_blocks=cpu_blocks, every_token=every_token)
    engine = EngineCore(config, TIMING)
    outputs: list[EngineOutput] = []
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    now_ms = 0.0
    for number, action in enumerate(actions):
        if isinstance(action, Submit):
            request = action.request(str(number), config.block_size)
            try:
                engine.submit(request, now_ms)
                wanted[request.request_id] = request.output_tokens
            except RequestTooLong:
                assert request.prompt_tokens + request.output_tokens > config.capacity_tokens
        elif isinstance(action, Abort):
            if engine.abort(str(action.which), now_ms):
                aborted.add(str(action.which))
        elif isinstance(action, Reset):
            engine.reset_prefix_cache(now_ms)
        else:
            until_ms = now_ms + action.ms
            while (at_ms := engine.next_event_at()) is not None and at_ms <= until_ms:
                now_ms = max(now_ms, at_ms)
                outputs += engine.advance(now_ms)
                check_engine(engine)
            now_ms = until_ms
        check_engine(engine)
    rounds = 0
    while (at_ms := engine.next_event_at()) is not None:
        now_ms = max(now_ms, at_ms)
        outputs += engine.advance(now_ms)
        check_engine(engine)
        rounds += 1
        assert rounds < 100_000, "the engine does not become idle"

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
        tokens = sum(isinstance(output, FirstToken | Token) for output in outputs)
        assert tokens == engine.stats.generation_tokens
