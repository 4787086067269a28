"""`max_inflight` of a node: the router never sends it more requests at a time, on no way and with no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from routing_harness import FakeRequest, RoutingHarness, explained, prompt
from split_harness import SplitHarness

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Hedging, Routing
from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.messages import CLOSED, AnswerNow
from warmroute.core.node import Node
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, build_world
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import parse_fault


def limit(node: Node, max_inflight: int) -> None:
    node.update_config(msgspec.structs.replace(node.config, max_inflight=max_inflight))


def limited(count: int, *limits: int, **more: Any) -> RoutingHarness:
    harness = RoutingHarness(count, **more)
    for node, most in zip(harness.nodes, limits, strict=True):
        limit(node, most)
    return harness


def test_requests_beyond_the_limit_wait_at_the_router() -> None:
    harness = limited(1, 2)
    first, second, third = (harness.submit(tokens=20) for _ in range(3))
    assert not first.queued and not second.queued and third.queued
    for _ in range(20):
        harness.advance(0.05)
        harness.tick()
    assert third.queued, "time makes no room, only the end of a request does"
    first.finish()
    assert not third.queued and harness.nodes[0].inflight == 2
    second.finish()
    third.finish()
    harness.assert_all_counters_are_zero()


def test_a_request_takes_a_node_that_is_not_full_and_says_so() -> None:
    harness = limited(2, 1, 0)
    full, other = harness.nodes
    warm = prompt(4000)
    harness.warm(full, warm)
    harness.busy(full, tokens=100)
    decision, queued = harness.admission.dry_run(FakeRequest(harness, warm).request, warm, harness.now_s)
    assert decision.node is other and not queued
    assert "other nodes are at max_inflight" in explained(decision)


def test_a_full_fleet_is_the_reason_of_a_request_that_waits() -> None:
    harness = limited(2, 1, 1)
    for node in harness.nodes:
        harness.busy(node, tokens=100)
    decision, queued = harness.admission.dry_run(FakeRequest(harness, None).request, prompt(50), harness.now_s)
    assert queued and "every node is at max_inflight" in explained(decision)


@pytest.mark.parametrize("other", ["tenant", "priority"])
def test_a_place_goes_to_tenants_in_turn_and_to_the_higher_priority(other: str) -> None:
    harness = limited(1, 1)
    running = harness.submit(tokens=20, tenant="flood")
    flood = [harness.submit(tokens=20, tenant="flood") for _ in range(20)]
    about = {"tenant": "calm"} if other == "tenant" else {"tenant": "flood", "priority": HIGH}
    late = harness.submit(tokens=20, **about)
    running.finish()
    served = [one for one in flood if not one.queued]
    for one in served:
        one.finish()
    assert not late.queued and len(served) <= 1


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "random", "prefix_hash", "price"])
def test_a_request_that_may_not_wait_at_the_router_gets_429(policy: Any) -> None:
    """A policy that does not queue, or the price with `queue_at_router` off."""
    harness = limited(2, 2, 1, admission=AdmissionConfig(queue_at_router=False))
    harness.router.reconfigure(Routing(policy=policy, seed=3), harness.router._pricing)
    admitted = [harness.submit(tokens=20) for _ in range(3)]
    assert sorted(node.inflight for node in harness.nodes) == [1, 2]
    rejected = harness.submit(tokens=20)
    assert rejected.why == "max_inflight" and rejected.retry_after_s >= 1
    admitted[0].finish()
    assert not harness.submit(tokens=20).queued


def test_a_client_that_does_not_queue_gets_429() -> None:
    harness = limited(1, 1)
    harness.submit(tokens=20)
    assert harness.submit(tokens=20, may_queue=False).why == "would_queue"


def test_a_failed_request_goes_to_no_full_node() -> None:
    harness = RoutingHarness(2)
    first, second = harness.nodes
    request = harness.submit(20)
    other = second if request.node is first else first
    limit(other, 1)
    harness.busy(other, tokens=20)
    request.fail(CLOSED)
    assert len(request.sent) == 1 and request.why == "nodes_busy" and other.inflight == 1


def test_a_hedge_goes_to_no_full_node() -> None:
    harness = RoutingHarness(2, hedging=Hedging(max_ratio=1.0, min_delay_s=1.0))
    request = harness.submit(20)
    for node in harness.nodes:
        if node is not request.node:
            limit(node, 1)
            harness.busy(node, tokens=20)
    for _ in range(50):
        harness.advance(1.0)
        harness.look()
    assert not request.events and request.call.hedge is None


def test_a_lower_limit_counts_at_once_and_stops_nobody() -> None:
    harness = limited(1, 0)
    running = [harness.submit(tokens=20) for _ in range(5)]
    node = harness.nodes[0]
    limit(node, 2)
    waiting = harness.submit(tokens=20)
    for one in running[:3]:
        one.finish()
        assert waiting.queued
    running[3].finish()
    assert not waiting.queued and node.inflight == 2


def test_low_requests_keep_their_rank() -> None:
    harness = limited(1, 1)
    running = harness.submit(tokens=20)
    low, normal = harness.submit(tokens=20, priority=LOW), harness.submit(tokens=20, priority=NORMAL)
    running.finish()
    assert low.queued and not normal.queued


LIMIT = 3
FLEETS = {
    "mixed": ("mixed",) * 4,
    "roles": ("prefill", "prefill", "decode", "decode", "mixed"),
}


def nodes(roles: tuple[Any, ...]) -> Iterator[NodeSpec]:
    for at, role in enumerate(roles):
        yield NodeSpec(
            f"node-{at}",
            profile("h200-8b"),
            role=role,
            max_inflight=LIMIT,
            kv_connector=role == "mixed" and len(roles) > 4,
        )


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("policy", ["price", "round_robin", "overlap"])
def test_no_node_ever_has_more_requests_whatever_fails(policy: str, fleet: str, seed: int) -> None:
    """Retries, moves, hedges, pairs and requests that fall back to one node, on an overloaded fleet."""
    specs = tuple(nodes(FLEETS[fleet]))
    faults = ("2 fail node-1", "4 hang node-2", "6 restart node-1", "9 restart node-2", "12 fail node-0")
    setup = Setup(
        workload=parse_workload(["mixed_lengths"]), nodes=specs, policy=parse_policy(policy), rate=25.0, limit=250,
        faults=tuple(parse_fault(line) for line in faults),
    )  # fmt: skip
    setup = msgspec.structs.replace(setup, conditions=msgspec.structs.replace(setup.conditions, seed=seed))
    world = build_world(setup)
    dispatch, most = world.router.open_ticket, Counter[str]()

    def watch(decision: Any, node: Any, *more: Any, **others: Any) -> Any:
        ticket = dispatch(decision, node, *more, **others)
        most[node.name] = max(most[node.name], node.inflight)
        return ticket

    world.router.open_ticket = watch  # type: ignore[method-assign]
    world.run(setup.arrivals(), limit=250)
    assert max(most.values()) == LIMIT, most
    assert world.inflight == 0 and not any(sim.inflight for sim in world.nodes.values())
    assert world.results.total("finished") > 20


def test_requests_that_envoy_cannot_hold_longer_respect_the_limit() -> None:
    harness = limited(2, 1, 1)
    requests = [harness.submit(1000, envoy=True) for _ in range(4)]
    for request in requests[2:]:
        harness.tell(AnswerNow(request.id))
    assert [node.inflight for node in harness.nodes] == [1, 1]
    assert [request.why for request in requests] == ["", "", "max_inflight", "max_inflight"]


def test_a_node_that_was_full_and_failed_later_is_no_busy_node() -> None:
    harness = RoutingHarness(2, hedging=Hedging(max_ratio=1.0))
    first, second = harness.nodes
    limit(second, 1)
    other, request = harness.submit_to(second), harness.submit_to(first)
    harness.advance(100.0)
    harness.look()
    assert not request.events, "the second one is full"
    other.answer()
    request.fail(CLOSED)
    request.fail(CLOSED)
    assert request.sent == [first.name, second.name] and request.why == "upstream_failed"


def test_the_place_of_a_pair_whose_prefill_fails_stays_its_own() -> None:
    harness = SplitHarness(prefill=1, decode=1)
    decode = harness.node("d0")
    limit(decode, 1)
    request = harness.submit_split()
    waiting = harness.submit(may_split=True)
    assert waiting.queued
    request.prefill_fails(503)
    assert decode.inflight == 1 and request.sent[-1] == "d0" and waiting.queued
