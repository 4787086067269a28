"""The simulation: order of events, network, polls, failures, and that every request ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import get_args

import pytest
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.config import Config, Health, Hedging, PolicyName, Routing
from warmroute.core.health import HealthState
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Calendar, Conditions, Island
from warmroute.lab.workloads import parse_workload
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World


def test_callbacks_run_in_the_order_of_time_and_engines_last() -> None:
    calendar = Calendar()
    seen: list[str] = []
    calendar.at(5.0, seen.append, "b")
    calendar.at_end_of(1.0, seen.append, "engine at 1")
    calendar.at(1.0, seen.append, "a")
    calendar.at(5.0, seen.append, "c")
    calendar.at(0.0, lambda: calendar.after(1.0, seen.append, "scheduled later"))
    calendar.run(until_ms=4.0)
    assert seen == ["a", "scheduled later", "engine at 1"]
    assert calendar.now_ms == 4.0
    calendar.run(until_ms=10.0)
    assert seen[-2:] == ["b", "c"]
    with pytest.raises(ValueError, match="cannot schedule"):
        calendar.at(9.0, seen.append, "too late")


def test_ttft_is_the_prefill_and_the_network_round_trip() -> None:
    world = World(specs(1, island="far"), Conditions(islands={"far": Island(40.0)}))
    world.run(iter([prompt("a", tokens=100, output=3)]))
    assert world.results.ttft_ms[0] == pytest.approx(20 + 100 + 20)
    assert world.results.latency_ms[0] == pytest.approx(20 + 100 + 2 * 10 + 20)
    assert world.results.inter_token_ms[0] == pytest.approx(10)
    assert_all_requests_ended(world)


def test_a_request_that_arrives_when_a_step_ends_is_in_the_next_step() -> None:
    world = World(specs(1), NEAR)
    world.run(iter([prompt("a", tokens=100, output=50), prompt("b", tokens=30, at_ms=100.0)]))
    # b's step: its 30 tokens and one decode of a
    assert world.results.ttft_ms[1] == pytest.approx(31.0)


def test_the_open_loop_does_not_wait_and_the_closed_loop_does() -> None:
    def prompts() -> list:  # type: ignore[type-arg]
        return [prompt(f"p{at}", tokens=100, output=1) for at in range(4)]

    open_loop = World(specs(1), NEAR)
    open_loop.run(iter(prompts()))
    assert max(open_loop.results.ttft_ms) == pytest.approx(400)  # all in one step
    closed = World(specs(1), NEAR)
    closed.run(iter(prompts()), concurrency=1)
    assert list(closed.results.ttft_ms) == pytest.approx([100, 100, 100, 100])
    two = World(specs(1), NEAR)
    two.run(iter(prompts()), concurrency=2)
    assert two.results.last_ms == pytest.approx(400)
    assert list(two.results.ttft_ms) == pytest.approx([200, 200, 200, 200])


def test_the_next_turn_follows_the_answer_and_the_think_time() -> None:
    sent: list[tuple[float, int]] = []
    world = World(specs(1), NEAR)
    arrive = world.arrive

    def watch(one):  # type: ignore[no-untyped-def]
        sent.append((world.calendar.now_ms, one.prompt_tokens))
        return arrive(one)

    world.arrive = watch  # type: ignore[method-assign]
    words = ["multi_turn_chat", "turns=3", "think_s=0", "spread=0", "system_tokens=160", "message_tokens=80"]
    chat = parse_workload([*words, "output_tokens=32"])
    world.run(chat.arrivals(1), concurrency=1, limit=3)
    assert [tokens for _, tokens in sent] == [240, 352, 464]  # each includes the previous answer
    assert sent[1][0] == pytest.approx(240 + 31 * 10)
    # The history hits in whole blocks of 16. The KV of the last token is never computed.
    assert world.results.cached_tokens == (240 + 31) // 16 * 16 + (352 + 31) // 16 * 16
    assert_all_requests_ended(world)


def test_polled_metrics_are_as_old_as_the_lag() -> None:
    calm = Health(slow_start_s=0)
    conditions = Conditions(seed=2, poll_lag_ms=3000.0, islands={"local": Island(0.0)})
    world = World(specs(1), conditions, health=calm)
    node = world.nodes["node-0"].node
    world.arrive(prompt("a", tokens=2000, output=1))
    world.calendar.run(until_ms=2900.0)
    assert node.running == 0  # no metrics have arrived yet
    assert node.inflight == 0  # the request has already ended
    world.calendar.run(until_ms=4900.0)
    assert node.running == 1  # the metrics report it long after its end
    world.calendar.run(until_ms=9000.0)
    assert node.running == 0


def test_stale_metrics_are_ignored() -> None:
    world = World(specs(1), Conditions(seed=2, islands={"local": Island(0.0)}))
    node = world.nodes["node-0"].node
    world.arrive(prompt("a", tokens=3000, output=1))
    world.calendar.run(until_ms=2500.0)
    assert node.running == 1
    world.hang("node-0")
    world.calendar.run(until_ms=4000.0)
    assert node.running == 1  # old, but not stale yet
    world.calendar.run(until_ms=20_000.0)
    assert node.running == 0
    assert node.health.state is HealthState.DOWN


def test_nodes_are_polled_at_different_times() -> None:
    world = World(specs(20), NEAR)
    world.calendar.run(until_ms=5000.0)
    polled = {sim.node.polled_s for sim in world.nodes.values()}
    assert len(polled) == 20
    assert all(3.5 < at <= 5.0 for at in polled)


def test_requests_of_a_dead_node_are_retried_on_others() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    waiting = [prompt(f"p{at}", tokens=500, output=5) for at in range(4)]
    world.calendar.at(300.0, world.fail, "node-0")
    world.run(iter(waiting))
    assert world.results.total("finished") == 4
    assert world.results.retries == 2
    assert world.nodes["node-0"].node.outcomes[3] == 2  # FAILED
    assert world.nodes["node-0"].node.health.state is HealthState.DOWN
    assert_all_requests_ended(world)


def test_an_answer_that_has_begun_fails_with_its_node() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.calendar.at(300.0, world.fail, "node-0")
    world.run(iter([prompt("a", tokens=100, output=100), prompt("b", tokens=100, output=100)]))
    assert world.results.total("failed") == 1
    assert world.results.total("finished") == 1
    assert_all_requests_ended(world)


def test_a_restarted_node_is_tried_again_with_an_empty_cache() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.calendar.at(2000.0, world.fail, "node-0")
    world.calendar.at(8000.0, world.restart, "node-0")
    world.run(iter([prompt("same", f"q{at}", tokens=160, at_ms=at * 500.0) for at in range(80)]))
    node = world.nodes["node-0"]
    assert world.results.total("finished") == 80
    assert node.incarnation == 2
    assert node.node.health.state is HealthState.UP
    assert 5 <= node.requests < 40
    assert len(node.incarnation_stats) == 2
    assert node.incarnation_stats[1].prefix_cache_hits < node.incarnation_stats[1].prefix_cache_queries / 2
    assert_all_requests_ended(world)


def test_a_hanging_node_times_out() -> None:
    conditions = Conditions(islands={"local": Island(0.0)}, first_byte_timeout_s=5.0)
    config = Config(routing=Routing(policy="round_robin", seed=1), hedging=Hedging(max_ratio=0.0))
    world = World(specs(2), conditions, config)
    world.hang("node-0")
    world.run(iter([prompt("a"), prompt("b")]))
    assert world.results.total("finished") == 2
    assert sorted(world.results.ttft_ms)[1] == pytest.approx(5000 + 64)
    assert_all_requests_ended(world)


def test_a_request_on_a_hanging_node_is_hedged() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.run(iter([prompt(f"warm up {at}") for at in range(4)]))
    world.hang("node-0")
    world.run(iter([prompt("a", at_ms=5000.0), prompt("b", at_ms=5000.0)]))
    assert world.results.total("finished") == 6
    assert 2000.0 < max(world.results.ttft_ms) < 2400.0, "long before the breaker opens"
    assert world.requests.counters.hedges == world.requests.counters.hedges_won == 1
    assert_all_requests_ended(world)


def test_requests_leave_a_node_when_its_breaker_opens() -> None:
    config = Config(routing=Routing(policy="round_robin", seed=1), hedging=Hedging(max_ratio=0.0))
    world = World(specs(2), NEAR, config)
    world.hang("node-0")
    world.run(iter([prompt(f"p{at}") for at in range(8)]))
    assert world.results.total("finished") == 8
    assert 3000.0 < max(world.results.ttft_ms) < 20_000.0, "long before the timeout of 600 s"
    assert_all_requests_ended(world)


def test_requests_without_a_first_token_leave_a_node_that_is_removed() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.calendar.at(300.0, world.remove, "node-0")
    world.run(iter([prompt(f"p{at}", tokens=500) for at in range(4)]))
    assert world.results.total("finished") == 4 and world.results.retries == 2
    assert_all_requests_ended(world)


def test_nodes_join_after_their_delay_and_drain_without_aborting_requests() -> None:
    world = World(specs(1), NEAR, Config(routing=Routing(policy="least_loaded", seed=1)))
    new = specs(2)[1]
    world.calendar.at(1000.0, world.provision, new, 5.0)
    world.calendar.at(12_000.0, world.drain, "node-0")
    world.run(iter([prompt(f"p{at}", tokens=400, output=10, at_ms=at * 250.0) for at in range(80)]))
    assert world.results.total("finished") == 80
    assert list(world.nodes) == ["node-1"]
    assert 6000 <= world.nodes["node-1"].joined_ms <= 6001
    assert world.departed[0].held_ms > 12_000.0
    assert_all_requests_ended(world)


def test_with_all_nodes_dead_every_request_is_rejected_or_fails() -> None:
    world = World(specs(2), NEAR)
    world.fail("node-0")
    world.fail("node-1")
    world.run(iter([prompt(f"p{at}", at_ms=at * 100.0) for at in range(50)]))
    assert world.results.total("finished") == 0
    assert world.results.total("failed") + world.results.total("rejected") == 50
    assert_all_requests_ended(world)


def test_a_too_long_request_is_rejected_and_its_node_stays_up() -> None:
    world = World(specs(2, blocks=20), NEAR)
    world.run(iter([prompt("a", tokens=1000), prompt("b", tokens=100)]))
    assert world.results.total("rejected") == 1
    assert world.results.total("finished") == 1
    assert all(sim.node.health.state is HealthState.UP for sim in world.nodes.values())
    assert_all_requests_ended(world)


def test_a_client_that_leaves_frees_the_node() -> None:
    world = World(specs(1), NEAR)
    world.run(iter([prompt("a", tokens=1000, output=5), prompt("b", tokens=1000, patience_ms=300.0)]))
    assert world.results.total("left") == 1
    assert world.results.total("finished") == 1
    world.calendar.run(until_ms=world.calendar.now_ms + 5000)
    assert_all_requests_ended(world)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_exactly_once_under_random_faults(seed: int) -> None:
    """Random arrivals, disconnects, failures, restarts, joins and drains: no request is lost or left open."""
    random = Random(seed)
    name = random.choice([*get_args(PolicyName), "price", "sglang", "dynamo", "llm_d_precise", "kubeai"])
    peer = parse_policy(name).peer(seed)
    conditions = Conditions(seed=seed, kv_loss=0.2, poll_loss=0.2, first_byte_timeout_s=3.0)
    world = World(specs(4, blocks=60), conditions, parse_policy(name).config(), policy=peer, listener=peer)
    for _ in range(12):
        action = random.choice([world.fail, world.hang, world.restart])
        world.calendar.at(random.uniform(0, 20_000), action, f"node-{random.randrange(4)}")
    world.calendar.at(5000.0, world.provision, specs(5)[4], 1.0)
    world.calendar.at(15_000.0, world.drain, "node-4")

    def prompts() -> Iterator[WorkloadPrompt]:
        at_ms = 0.0
        for number in range(300):
            at_ms += random.expovariate(1 / 80.0)
            shared, tokens = random.randrange(6), random.choice([20, 100, 300, 2000])
            patience_ms = random.choice([None, None, 200.0, 2000.0])
            output = random.randrange(1, 40)
            yield prompt(f"s{shared}", number, tokens=tokens // 2, output=output, at_ms=at_ms, patience_ms=patience_ms)

    world.run(prompts())
    assert world.results.total("arrived") == 300
    for name in list(world.nodes):
        world.restart(name)
    world.calendar.run(until_ms=world.calendar.now_ms + 10_000)
    assert_all_requests_ended(world)
    if name == "dynamo":
        for active in peer._active.values():
            assert not active.blocks
            assert active.prefilling_tokens == 0


def test_a_queue_threshold_rejects_low_priority_first_and_high_never() -> None:
    words = ["priority_mix", "rate=14", "output_tokens=50"]
    result = replay(
        Setup(
            workload=parse_workload(words),
            nodes=tuple(specs(2)),
            policy=parse_policy("least_loaded"),
            conditions=NEAR,
            limit=400,
            queue_threshold=8,
        )
    )
    high, normal, low = (result["by_priority"][name] for name in ("high", "normal", "low"))
    assert high["rejected"] == 0
    assert low["rejected"] / low["requests"] > normal["rejected"] / normal["requests"] > 0
    assert result["rejected"] == normal["rejected"] + low["rejected"]
