"""Placement and order are separate: every policy runs in replay with each order of the admission queue."""

from __future__ import annotations

import pytest
from small_worlds import specs

from warmroute.lab.html_report import page
from warmroute.lab.replay_setup import QUEUES, BadPolicy, parse_policy
from warmroute.lab.report import columns
from warmroute.lab.run import Setup, replay
from warmroute.lab.summary import Run
from warmroute.lab.workloads import parse_workload


def overloaded(policy: str, limit: int = 120, rate: float = 40.0) -> Run:
    workload = parse_workload(["unique_batch", "prompt_tokens=4000", "output_tokens=4", "spread=0.95"])
    return replay(Setup(workload=workload, nodes=tuple(specs(2)), policy=parse_policy(policy), rate=rate, limit=limit))


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


def test_no_request_waits_longer_than_its_guarantee_and_the_report_shows_it() -> None:
    """Prompts of very different lengths, at several times the load that the nodes can serve."""
    run = overloaded("price", limit=200, rate=20.0)
    queue, by_work = run["queue"], run["ttft_ms_by_work"]
    assert queue["over_guarantee"] == 0 and 0.0 < queue["longest_wait_ratio"] <= 1.0
    assert queue["admitted_by_guarantee"] > 0
    assert queue["admitted_by_guarantee"] + queue["admitted_by_work"] == queue["queued"]
    assert by_work["longest_10_percent"]["p50"] > by_work["others"]["p50"]
    heads = [column.head for column in columns([run])]
    assert {"long 1% p99", "long 10% p99", "others p99", "wait / guarantee"} <= {*heads}
    assert "long 10% p99" in page([run], "title") and "wait / guarantee" in page([run], "title")


def test_long_prompts_wait_hardly_longer_than_first_come_first_served() -> None:
    """Without a guarantee they wait until all others are served."""
    tail = {
        queue: overloaded(f"price:queue={queue}", limit=300, rate=6.0)["ttft_ms_by_work"]["longest_1_percent"]["p99"]
        for queue in ("warmroute", "fcfs", "shortest")
    }
    assert tail["warmroute"] < 1.4 * tail["fcfs"] and tail["warmroute"] < tail["shortest"], tail


def test_an_unknown_queue_is_reported() -> None:
    with pytest.raises(BadPolicy, match="queue is one of own, warmroute, fcfs, shortest, none; not 'lifo'"):
        parse_policy("dynamo:queue=lifo")
