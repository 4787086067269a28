"""Placement and order are separate: every policy runs in replay with each order of the admission queue."""

from __future__ import annotations

import pytest
from small_worlds import specs

from warmroute.replay import BadPolicy, Run, Setup, parse_policy, replay
from warmroute.replay.policy_spec import QUEUES
from warmroute.replay.workloads.catalog import parse_workload


def overloaded(policy: str, limit: int = 120, rate: float = 40.0) -> Run:
    workload = parse_workload(["unique_batch", "prompt_tokens=4000", "output_tokens=4", "spread=0.95"])
    return replay(Setup(workload=workload, nodes=specs(2), policy=parse_policy(policy), rate=rate, limit=limit))


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("policy", ["price", "round_robin", "overlap", "dynamo", "sglang", "llm_d"])
def test_every_policy_serves_all_requests_with_every_queue(policy: str, queue: str) -> None:
    run = overloaded(f"{policy}:queue={queue}", limit=40)
    assert run["finished"] == 40 and run["policy"] == f"{policy}:queue={queue}"


def test_shortest_first_order_halves_the_median_of_the_same_placement() -> None:
    first, shortest = (overloaded(f"least_loaded:queue={queue}")["ttft_ms"] for queue in ("fcfs", "shortest"))
    assert shortest["p50"] < 0.6 * first["p50"]


def test_the_queue_of_price_is_its_own_and_none_is_queue_at_router() -> None:
    for one, other in (("price", "price:queue=warmroute"), ("price:queue=none", "price:queue_at_router=false")):
        assert overloaded(one)["ttft_ms"] == overloaded(other)["ttft_ms"]


def test_an_unknown_queue_is_reported() -> None:
    with pytest.raises(BadPolicy, match="queue is one of own, warmroute, fcfs, shortest, none; not 'lifo'"):
        parse_policy("dynamo:queue=lifo")
