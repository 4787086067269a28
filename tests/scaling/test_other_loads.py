"""More or less load for a replay: other conversations, not faster ones."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from recorded_loads import NODE, plan_request

from warmroute.lab.planning.fleet_replay import FleetReplay, OtherLoads
from warmroute.lab.planning.recorded_traffic import RecordedRequest, Sample, thinned
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.scaling.fleet_plan import NodeFigures

TURNS, TURN_TOKENS, SYSTEM_TOKENS, BLOCK = 4, 640, 1280, 64
TURN_S = 90.0


def chats(count: int = 60, window_s: float = 1800.0, turn_s: float = TURN_S, cut: bool = False) -> Sample:
    requests = []
    for number in range(count):
        history = Segments().followed_by(segment_id("system"), SYSTEM_TOKENS)
        for turn in range(TURNS):
            history = history.followed_by(segment_id(number, turn), TURN_TOKENS)
            prompt = WorkloadPrompt(history.tokens, 4, history, session=b"chat %d" % number)
            at_s = (number * 37) % (window_s - TURNS * turn_s) + turn_s * turn
            if cut:  # conversations that began before the recorded time, and some that end after it
                at_s = (number * 37) % (window_s + TURNS * turn_s) + turn_s * (turn - TURNS)
            if 0.0 <= at_s <= window_s:
                requests.append(RecordedRequest(prompt, 1000.0 * at_s, number))
    requests.sort(key=lambda one: one.at_ms)
    return thinned(requests, 1000.0 * window_s, nodes=2, share=1.0, most=10_000)


def hashes(prompt: WorkloadPrompt) -> list[int]:
    return prompt.blocks.content(BLOCK).hashes(0, prompt.prompt_tokens // BLOCK)


@pytest.mark.parametrize("load", [0.3, 1.0, 1.4, 2.6])
def test_as_many_requests_as_wanted_arrive_in_order(load: float) -> None:
    sample = chats()
    prompts, warm_up = OtherLoads(sample, BLOCK).prompts(load)
    assert len(prompts) == round(load * len(sample.requests))
    times_ms = [one.at_ms for one in prompts]
    assert times_ms == sorted(times_ms)
    assert times_ms[0] >= 0.0 and times_ms[-1] <= 1_800_000.0
    assert warm_up / len(prompts) == pytest.approx(sample.warm_up / len(sample.requests), abs=0.12)


def test_conversations_take_as_long_as_they_took() -> None:
    prompts, _ = OtherLoads(chats(), BLOCK).prompts(2.0)
    by_session: dict[bytes, list[float]] = {}
    for one in prompts:
        by_session.setdefault(one.session, []).append(one.at_ms)
    assert 120 <= len(by_session) < 135, "a few are cut by the end of the recorded time"
    steps_s = [(after - before) / 1000.0 for times_ms in by_session.values() for before, after in pairwise(times_ms)]
    assert sum(step_s == pytest.approx(TURN_S) for step_s in steps_s) > 350
    assert sum(len(times_ms) == TURNS for times_ms in by_session.values()) > 110


@pytest.mark.parametrize("long", [False, True])
def test_no_part_of_the_recorded_time_gets_more_than_its_share(long: bool) -> None:
    """Neither the last minute, nor the first one: requests there would wait for each other."""
    sample = chats(count=900, turn_s=400.0 if long else TURN_S, cut=True)
    prompts, _ = OtherLoads(sample, BLOCK).prompts(2.0)
    for start_s in (0, 60, 1680, 1740):
        now, twice = (
            sum(start_s <= at_ms / 1000.0 <= start_s + 60 for at_ms in times)
            for times in ([one.at_ms for one in sample.requests], [one.at_ms for one in prompts])
        )
        assert twice < 2.0 * now + 60


def test_a_session_that_began_long_ago_is_cold_only_at_the_beginning() -> None:
    """Its copies, too: a prompt of thousands of tokens that nobody has cached would make the fleet look too small."""
    sample = chats(count=80, turn_s=200.0, cut=True)
    prompts, warm_up = OtherLoads(sample, BLOCK).prompts(3.0)
    cold = 0
    seen: set[int] = set()
    for at, one in enumerate(prompts):
        blocks = hashes(one)
        own = blocks[SYSTEM_TOKENS // BLOCK :]
        is_first_turn = one.prompt_tokens == SYSTEM_TOKENS + TURN_TOKENS
        cold += at >= warm_up and not is_first_turn and own[0] not in seen
        seen.update(blocks)
    assert cold == 0


def test_requests_are_sent_at_their_times_whatever_has_been_answered() -> None:
    sample = chats()
    for number, one in enumerate(sample.requests):
        one.prompt.number, one.prompt.follows, one.prompt.think_ms = number, number - 1, 1000.0
    prompts, _ = OtherLoads(sample, BLOCK).prompts(1.5)
    assert {(one.number, one.follows, one.think_ms) for one in prompts} == {(-1, -1, 0.0)}


def test_less_load_has_whole_conversations() -> None:
    prompts, _ = OtherLoads(chats(), BLOCK).prompts(0.5)
    turns = Counter(one.session for one in prompts)
    assert sum(count == TURNS for count in turns.values()) == 30


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_another_variant_has_as_many_requests_of_other_conversations(load: float) -> None:
    loads = OtherLoads(chats(), BLOCK)
    one, other = ([prompt.session for prompt in loads.prompts(load, variant)[0]] for variant in (0, 1))
    assert len(one) == len(other)
    assert Counter(one) != Counter(other)


def test_copies_share_only_what_conversations_share() -> None:
    prompts, _ = OtherLoads(chats(), BLOCK).prompts(2.6)
    first = {one.session: hashes(one) for one in prompts if one.prompt_tokens == SYSTEM_TOKENS + TURN_TOKENS}
    assert len(first) > 140
    assert len({tuple(one[: SYSTEM_TOKENS // BLOCK]) for one in first.values()}) == 1
    own = [block for one in first.values() for block in one[SYSTEM_TOKENS // BLOCK :]]
    assert len(set(own)) == len(own)
    last = {one.session: hashes(one) for one in prompts if one.prompt_tokens == SYSTEM_TOKENS + TURNS * TURN_TOKENS}
    assert all(last[session][: len(blocks)] == blocks for session, blocks in first.items() if session in last)


def test_more_load_fills_the_caches() -> None:
    """About twelve conversations are open at a time. Their caches fit into a node, twice as many do not."""
    figures = NodeFigures(ms_per_token=0.05, step_ms=5.0, slope_ms=0.0, kv_tokens=44_000)
    replay = FleetReplay(plan_request(1, figures={"plain": figures}), chats())
    now, twice = replay.run((NODE,), 1.0), replay.run((NODE,), 2.5)
    assert twice.hit_ratio < now.hit_ratio - 0.1
