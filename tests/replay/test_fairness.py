"""Fairness on an overloaded fleet, in virtual time. bench/fairness.py runs the same at a larger scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from fairness import FairnessWorld, run_flood, run_priorities
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.config import Admission, from_table
from warmroute.lab.request_flow import SimulatedExchange
from warmroute.lab.workloads import poisson
from warmroute.lab.workloads.generators import SharedSystemPrompts
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World


def test_no_high_or_normal_request_is_rejected_while_a_low_one_waits_or_runs() -> None:
    result = run_priorities(rate=30, requests=800, max_waiting=120)
    assert result.rejected["high"] == 0 and result.served["high"] == result.arrived["high"]
    assert result.rejected["normal"] > 20, "the load should exceed the capacity"
    assert result.rejected_while_low_waits == result.rejected_while_low_runs == 0
    assert result.ttft_p90_ms["high"] < 0.2 * result.ttft_p90_ms["normal"]


def test_low_requests_get_the_spare_capacity() -> None:
    result = run_priorities(rate=14, requests=500, max_waiting=120)
    assert result.rejected["normal"] == 0 and result.served["low"] > 0.5 * result.arrived["low"]


@pytest.mark.parametrize("seed", [1, 2])
def test_tenants_get_equal_shares_although_one_floods(seed: int) -> None:
    served = run_flood(rate=6, factor=10, requests=900, seed=seed)
    mean = sum(served.values()) / len(served)
    assert mean > 5000.0
    for name, work_ms in served.items():
        assert work_ms == pytest.approx(mean, rel=0.1), name


def test_a_tenant_below_its_share_hardly_waits_while_another_floods() -> None:
    world = FairnessWorld(2, "l4-1.5b", Admission(), 1)
    random = Random(4)
    waits: dict[str, list[float]] = {"flood": [], "calm": []}
    requests = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40)

    def prompts() -> Iterator[WorkloadPrompt]:
        for one in poisson(requests.generate(random), 30, Random(5)):
            one.tenant = "calm" if random.random() < 0.1 else "flood"
            yield one

    request_ended = world.request_ended

    def record_wait(exchange: SimulatedExchange, answered: bool) -> None:
        request_ended(exchange, answered)
        if exchange.first_ms is not None:
            waits[exchange.request.tenant].append(exchange.first_ms - exchange.arrived_ms)

    world.request_ended = record_wait  # type: ignore[method-assign]
    world.run(prompts(), limit=600)
    middle = {name: sorted(found)[len(found) // 2] for name, found in waits.items()}
    assert middle["calm"] < 0.2 * middle["flood"], middle


def test_a_tenant_with_200_clients_does_not_keep_one_with_2_out_of_a_full_queue() -> None:
    """Each client sends its next request when the last one ends, after a rejection a second later."""
    world = FairnessWorld(1, "l4-1.5b", Admission(max_waiting=64), 1)
    answered_by: dict[str, Counter[bool]] = {"many": Counter(), "few": Counter()}
    request_ended, numbers = world.request_ended, count()

    def send(tenant: str) -> None:
        world.arrive(prompt(next(numbers), tokens=3000, tenant=tenant))

    def send_next(exchange: SimulatedExchange, answered: bool) -> None:
        request_ended(exchange, answered)
        tenant = exchange.request.tenant
        answered_by[tenant][answered] += 1
        world.calendar.after(10.0 if answered else 1000.0, send, tenant)

    world.request_ended = send_next  # type: ignore[method-assign]
    for client in range(202):
        world.calendar.after(float(client), send, "few" if client >= 200 else "many")
    world.calendar.run(lambda: world.calendar.now_ms < 60_000.0)
    few, many = answered_by["few"], answered_by["many"]
    assert many[True] > 50 and many[False] > 1000, "the queue should be full all the time"
    assert few[True] > 100 and not few[False], f"{few[True]} of {few.total()} served"
    assert few[True] > 0.5 * many[True], "turns are fair, too"


def test_no_admitted_request_starves() -> None:
    """Without a queue limit every request is served, and low ones do not have to wait for all others."""
    world = World(specs(1), NEAR, from_table({"admission": {"max_node_backlog_ms": 1}}, experiment=True))
    last: dict[str, float] = {}
    request_ended = world.request_ended

    def record_end(exchange: SimulatedExchange, answered: bool) -> None:
        request_ended(exchange, answered)
        last[exchange.prompt.priority] = world.calendar.now_ms

    world.request_ended = record_end  # type: ignore[method-assign]
    requests = [prompt("low", number, tokens=400, at_ms=0.0, priority="low", tenant="l") for number in range(5)] + [
        prompt("high", number, tokens=400, at_ms=number * 380.0, priority="high", tenant="h") for number in range(150)
    ]
    world.run(iter(requests))
    assert world.results.total("finished") == 155
    assert_all_requests_ended(world)
    assert last["low"] < 0.95 * last["high"]


def test_requests_meet_their_deadline_or_are_rejected() -> None:
    """On an overloaded fleet with a TTFT deadline, hardly any first token is late. Without it, most are."""
    requests = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40)

    def run(deadline_ms: float, on_deadline: str = "advise", slow: bool = False) -> tuple[int, int]:
        routes = [{"name": "all", "ttft_deadline_ms": deadline_ms, "on_deadline": on_deadline}]
        world = World(specs(2), NEAR, from_table({"routes": routes}, experiment=True))
        if slow:  # and the router does not know it yet
            world.calendar.at(20_000.0, world.slow, "node-0", 5.0)
        world.run(poisson(requests.generate(Random(1)), 1.5, Random(2)), limit=200)
        assert_all_requests_ended(world)
        seen = world.results.ttft_ms
        return sum(each <= 6000.0 for each in seen), sum(each > 6000.0 for each in seen)

    in_time, late = run(6000.0)
    in_time_without, late_without = run(1e9)
    assert late <= 0.1 * in_time and late_without > in_time_without
    assert in_time > in_time_without
    assert run(6000.0, "advise", slow=True)[1] > 0
    in_time, late = run(6000.0, "end", slow=True)
    assert late == 0 and in_time > 0, "what is late has ended before"
