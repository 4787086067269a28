"""On a fleet that is full, in virtual time: no high or normal request is refused for the sake of a low one, tenants get
the same whatever one of them sends, and nobody who was admitted waits for ever. bench/admission.py has it larger."""

from __future__ import annotations

from random import Random

import pytest
from fairness import Noting, flood, priorities
from small_worlds import NEAR, books_are_closed, prompt, specs

from warmroute.config import Admission, from_table
from warmroute.replay.workloads.arrivals import poisson
from warmroute.replay.workloads.shared_system_prompts import SharedSystemPrompts
from warmroute.replay.world import World


def test_no_high_or_normal_one_is_refused_while_a_low_one_is_served() -> None:
    mixed = priorities(rate=30, requests=800, max_waiting=120)
    assert mixed.refused["high"] == 0 and mixed.served["high"] == mixed.asked["high"]
    assert mixed.refused["normal"] > 20, "there was more than the fleet can do"
    assert mixed.beside_waiting_low == mixed.beside_served_low == 0
    assert mixed.ttft_p90_ms["high"] < 0.2 * mixed.ttft_p90_ms["normal"]


def test_what_the_fleet_can_do_beside_is_done_for_the_low_ones() -> None:
    mixed = priorities(rate=14, requests=500, max_waiting=120)
    assert mixed.refused["normal"] == 0 and mixed.served["low"] > 0.5 * mixed.asked["low"]


@pytest.mark.parametrize("seed", [1, 2])
def test_tenants_get_the_same_though_one_of_them_floods(seed: int) -> None:
    got = flood(rate=6, times=10, requests=900, seed=seed)
    mean = sum(got.values()) / len(got)
    assert mean > 20_000
    for name, tokens in got.items():
        assert tokens == pytest.approx(mean, rel=0.1), name


def test_a_tenant_that_asks_for_less_than_its_share_hardly_waits_in_anothers_flood() -> None:
    world = Noting(2, "l4-1.5b", Admission(), 1)
    random = Random(4)
    waits: dict[str, list[float]] = {"flood": [], "calm": []}
    requests = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40)

    def asked():  # type: ignore[no-untyped-def]
        for one in poisson(requests.generate(random), 30, Random(5)):
            one.tenant = "calm" if random.random() < 0.1 else "flood"
            yield one

    first_token = world._first_token

    def noted(flight, *more):  # type: ignore[no-untyped-def]
        first_token(flight, *more)
        waits[flight.request.tenant].append(world.calendar.now_ms - flight.arrived_ms)

    world._first_token = noted  # type: ignore[method-assign]
    world.run(asked(), limit=600)
    middle = {name: sorted(found)[len(found) // 2] for name, found in waits.items()}
    assert middle["calm"] < 0.2 * middle["flood"], middle


def test_nobody_who_was_admitted_starves() -> None:
    """Without a limit, everybody who waits is served in the end, a low one not only when all others are."""
    world = World(specs(1), NEAR, from_table({"admission": {"ahead_ms": 1}}))
    last: dict[str, float] = {}
    first_token = world._first_token

    def noted(flight, *more):  # type: ignore[no-untyped-def]
        first_token(flight, *more)
        last[flight.prompt.priority] = world.calendar.now_ms

    world._first_token = noted  # type: ignore[method-assign]
    requests = [prompt("low", number, tokens=400, at_ms=0.0, priority="low", tenant="l") for number in range(5)] + [
        prompt("high", number, tokens=400, at_ms=number * 380.0, priority="high", tenant="h") for number in range(150)
    ]
    world.run(iter(requests))
    assert world.tally.total("finished") == 155
    books_are_closed(world)
    assert last["low"] < 0.95 * last["high"]


def test_deadlines_are_kept_or_refused() -> None:
    """A flood of requests that are due within 3 s, by their route: hardly any first token comes late, few would have
    come in time without."""
    requests = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40)

    def run(ttft_ms: float) -> tuple[int, int]:
        routes = [{"name": "all", "ttft_ms": ttft_ms}]
        world = World(specs(2), NEAR, from_table({"routes": routes}))
        world.run(poisson(requests.generate(Random(1)), 1.5, Random(2)), limit=200)
        books_are_closed(world)
        ttft_ms_seen = world.tally.ttft_ms
        return sum(each <= 6000.0 for each in ttft_ms_seen), sum(each > 6000.0 for each in ttft_ms_seen)

    in_time, late = run(6000.0)
    in_time_without, late_without = run(1e9)
    assert late <= 0.1 * in_time and late_without > in_time_without
    assert in_time > in_time_without
