"""The world in virtual time: order, network, polls, failure, conservation."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from small_worlds import NEAR, books_are_closed, prompt, specs

from warmroute.config import Config, Health, PolicyName, Routing
from warmroute.fleet.health import Standing
from warmroute.replay import Setup, contender, replay
from warmroute.replay.workloads import choose
from warmroute.replay.world import Calendar, Conditions, Island, World


def test_things_happen_in_the_order_of_time_and_engines_last() -> None:
    calendar, seen = Calendar(), []
    calendar.at(5.0, seen.append, "b")
    calendar.at_end_of(1.0, seen.append, "engine at 1")
    calendar.at(1.0, seen.append, "a")
    calendar.at(5.0, seen.append, "c")
    calendar.at(0.0, lambda: calendar.after(1.0, seen.append, "entered later"))
    calendar.run_until(4.0)
    assert seen == ["a", "entered later", "engine at 1"]
    assert calendar.now_ms == 4.0
    calendar.run_until(10.0)
    assert seen[-2:] == ["b", "c"]
    with pytest.raises(ValueError, match="is over"):
        calendar.at(9.0, seen.append, "too late")


def test_a_first_token_takes_the_prefill_and_both_ways_of_the_network() -> None:
    world = World(specs(1, island="far"), Conditions(islands={"far": Island(40.0)}))
    world.run(iter([prompt("a", tokens=100, output=3)]))
    assert world.tally.ttft_ms[0] == pytest.approx(20 + 100 + 20)
    assert world.tally.latency_ms[0] == pytest.approx(20 + 100 + 2 * 10 + 20)
    assert world.tally.inter_token_ms[0] == pytest.approx(10)
    books_are_closed(world)


def test_a_request_that_arrives_as_a_step_ends_is_in_the_next_step() -> None:
    world = World(specs(1), NEAR)
    world.run(iter([prompt("a", tokens=100, output=50), prompt("b", tokens=30, at_ms=100.0)]))
    # b's step: its 30 tokens beside a's one decode
    assert world.tally.ttft_ms[1] == pytest.approx(31.0)


def test_the_open_loop_does_not_wait_and_the_closed_loop_does() -> None:
    def asked() -> list:  # type: ignore[type-arg]
        return [prompt(f"p{at}", tokens=100, output=1) for at in range(4)]

    open_loop = World(specs(1), NEAR)
    open_loop.run(iter(asked()))
    assert max(open_loop.tally.ttft_ms) == pytest.approx(400)  # all in one step
    closed = World(specs(1), NEAR)
    closed.run(iter(asked()), concurrency=1)
    assert list(closed.tally.ttft_ms) == pytest.approx([100, 100, 100, 100])
    two = World(specs(1), NEAR)
    two.run(iter(asked()), concurrency=2)
    assert two.tally.last_ms == pytest.approx(400)
    assert list(two.tally.ttft_ms) == pytest.approx([200, 200, 200, 200])


def test_a_conversation_goes_on_after_its_answer_and_the_time_to_think() -> None:
    sent: list[tuple[float, int]] = []
    world = World(specs(1), NEAR)
    arrive = world.arrive

    def watch(one):  # type: ignore[no-untyped-def]
        sent.append((world.calendar.now_ms, one.prompt_tokens))
        return arrive(one)

    world.arrive = watch  # type: ignore[method-assign]
    words = ["multi_turn_chat", "turns=3", "think_s=0", "spread=0", "system_tokens=160", "message_tokens=80"]
    chat = choose([*words, "output_tokens=32"])
    world.run(chat.arrive(1), concurrency=1, limit=3)
    assert [tokens for _, tokens in sent] == [240, 352, 464]  # each with the answer before it
    assert sent[1][0] == pytest.approx(240 + 31 * 10)
    # what was said before is found again: whole blocks of 16, the last token's KV is never computed
    assert world.tally.cached_tokens == (240 + 31) // 16 * 16 + (352 + 31) // 16 * 16
    books_are_closed(world)


def test_what_polls_say_is_old() -> None:
    calm = Health(slow_start_s=0)
    conditions = Conditions(seed=2, poll_lag_ms=3000.0, islands={"local": Island(0.0)})
    world = World(specs(1), conditions, health=calm)
    node = world.nodes["node-0"].node
    world.arrive(prompt("a", tokens=2000, output=1))
    world.calendar.run_until(2900.0)
    assert node.running == 0  # nothing that was seen has arrived yet
    assert node.inflight == 0  # it has even ended
    world.calendar.run_until(4900.0)
    assert node.running == 1  # now it is said to run, long after its end
    world.calendar.run_until(9000.0)
    assert node.running == 0


def test_metrics_that_stop_coming_are_forgotten() -> None:
    world = World(specs(1), Conditions(seed=2, islands={"local": Island(0.0)}))
    node = world.nodes["node-0"].node
    world.arrive(prompt("a", tokens=3000, output=1))
    world.calendar.run_until(2500.0)
    assert node.running == 1
    world.hang("node-0")
    world.calendar.run_until(4000.0)
    assert node.running == 1  # old, and not too old
    world.calendar.run_until(20_000.0)
    assert node.running == 0
    assert node.health.standing is Standing.OPEN


def test_polls_of_a_fleet_are_not_in_step() -> None:
    world = World(specs(20), NEAR)
    world.calendar.run_until(5000.0)
    heard = {sim.node.polled_s for sim in world.nodes.values()}
    assert len(heard) == 20
    assert all(3.5 < at <= 5.0 for at in heard)


def test_a_node_that_dies_hands_its_requests_to_others() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    waiting = [prompt(f"p{at}", tokens=500, output=5) for at in range(4)]
    world.calendar.at(300.0, world.fail, "node-0")
    world.run(iter(waiting))
    assert world.tally.total("finished") == 4
    assert world.tally.retries == 2
    assert world.nodes["node-0"].node.outcomes[3] == 2  # FAILED
    assert world.nodes["node-0"].node.health.standing is Standing.OPEN
    books_are_closed(world)


def test_an_answer_that_has_begun_breaks_with_its_node() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.calendar.at(300.0, world.fail, "node-0")
    world.run(iter([prompt("a", tokens=100, output=100), prompt("b", tokens=100, output=100)]))
    assert world.tally.total("failed") == 1
    assert world.tally.total("finished") == 1
    books_are_closed(world)


def test_a_node_comes_back_cold_by_way_of_a_trial() -> None:
    world = World(specs(2), NEAR, Config(routing=Routing(policy="round_robin", seed=1)))
    world.calendar.at(2000.0, world.fail, "node-0")
    world.calendar.at(8000.0, world.restart, "node-0")
    world.run(iter([prompt("same", f"q{at}", tokens=160, at_ms=at * 500.0) for at in range(80)]))
    node = world.nodes["node-0"]
    assert world.tally.total("finished") == 80
    assert node.incarnation == 2
    assert node.node.health.standing is Standing.UP
    assert 5 <= node.requests < 40
    assert len(node.past) == 2
    assert node.past[1].prefix_cache_hits < node.past[1].prefix_cache_queries / 2
    books_are_closed(world)


def test_a_hanging_node_is_given_up() -> None:
    conditions = Conditions(islands={"local": Island(0.0)}, first_byte_timeout_s=5.0)
    world = World(specs(2), conditions, Config(routing=Routing(policy="round_robin", seed=1)))
    world.hang("node-0")
    world.run(iter([prompt("a"), prompt("b")]))
    assert world.tally.total("finished") == 2
    assert sorted(world.tally.ttft_ms)[1] == pytest.approx(5000 + 64)
    books_are_closed(world)


def test_nodes_join_after_their_delay_and_drain_without_cutting_anyone() -> None:
    world = World(specs(1), NEAR, Config(routing=Routing(policy="least_loaded", seed=1)))
    new = specs(2)[1]
    gone: list[float] = []
    world.calendar.at(1000.0, world.provision, new, 5.0)
    world.calendar.at(12_000.0, world.drain, "node-0", lambda _sim: gone.append(world.calendar.now_ms))
    world.run(iter([prompt(f"p{at}", tokens=400, output=10, at_ms=at * 250.0) for at in range(80)]))
    assert world.tally.total("finished") == 80
    assert list(world.nodes) == ["node-1"]
    assert gone
    assert gone[0] > 12_000.0
    assert 6000 <= world.nodes["node-1"].joined_ms <= 6001
    assert world.gone[0].held_ms == gone[0]
    books_are_closed(world)


def test_with_all_nodes_dead_requests_are_refused_and_time_goes_on() -> None:
    world = World(specs(2), NEAR)
    world.fail("node-0")
    world.fail("node-1")
    world.run(iter([prompt(f"p{at}", at_ms=at * 100.0) for at in range(50)]))
    assert world.tally.total("finished") == 0
    assert world.tally.total("failed") + world.tally.total("rejected") == 50
    books_are_closed(world)


def test_a_request_too_long_for_the_engine_is_its_own_fault() -> None:
    world = World(specs(2, blocks=20), NEAR)
    world.run(iter([prompt("a", tokens=1000), prompt("b", tokens=100)]))
    assert world.tally.total("rejected") == 1
    assert world.tally.total("finished") == 1
    assert all(sim.node.health.standing is Standing.UP for sim in world.nodes.values())
    books_are_closed(world)


def test_a_client_that_leaves_frees_the_node() -> None:
    world = World(specs(1), NEAR)
    world.run(iter([prompt("a", tokens=1000, output=5), prompt("b", tokens=1000, patience_ms=300.0)]))
    assert world.tally.total("left") == 1
    assert world.tally.total("finished") == 1
    world.calendar.run_until(world.calendar.now_ms + 5000)
    books_are_closed(world)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_whatever_happens(seed: int) -> None:
    """Random arrivals, impatience, failures, restarts, joins and drains: nothing is lost, nothing is left open."""
    random = Random(seed)
    name = random.choice([*get_args(PolicyName), "price", "sglang", "dynamo", "llm_d_precise", "kubeai"])
    peer = contender(name).peer(seed)
    conditions = Conditions(seed=seed, kv_loss=0.2, poll_loss=0.2, first_byte_timeout_s=3.0)
    world = World(specs(4, blocks=60), conditions, contender(name).config(), policy=peer, listener=peer)
    for _ in range(12):
        verb = random.choice([world.fail, world.hang, world.restart])
        world.calendar.at(random.uniform(0, 20_000), verb, f"node-{random.randrange(4)}")
    world.calendar.at(5000.0, world.provision, specs(5)[4], 1.0)
    world.calendar.at(15_000.0, world.drain, "node-4")

    def asked():  # type: ignore[no-untyped-def]
        at_ms = 0.0
        for number in range(300):
            at_ms += random.expovariate(1 / 80.0)
            shared, tokens = random.randrange(6), random.choice([20, 100, 300, 2000])
            patience_ms = random.choice([None, None, 200.0, 2000.0])
            output = random.randrange(1, 40)
            yield prompt(f"s{shared}", number, tokens=tokens // 2, output=output, at_ms=at_ms, patience_ms=patience_ms)

    world.run(asked())
    assert world.tally.total("arrived") == 300
    for name in list(world.nodes):
        world.restart(name)
    world.calendar.run_until(world.calendar.now_ms + 10_000)
    books_are_closed(world)
    if name == "dynamo":
        for active in peer._active.values():
            assert not active.blocks
            assert active.prefilling_tokens == 0


def test_a_queue_gate_sheds_the_low_first_and_never_the_high() -> None:
    words = ["priority_mix", "rate=14", "output_tokens=50"]
    result = replay(
        Setup(
            workload=choose(words),
            nodes=tuple(specs(2)),
            contender=contender("least_loaded"),
            conditions=NEAR,
            limit=400,
            queue_threshold=8,
        )
    )
    high, normal, low = (result["by_priority"][name] for name in ("high", "normal", "low"))
    assert high["rejected"] == 0
    assert low["rejected"] / low["requests"] > normal["rejected"] / normal["requests"] > 0
    assert result["rejected"] == normal["rejected"] + low["rejected"]
