"""How the driver gives nodes back: drained, moved, interrupted, died, taken out by hand; what they cost until then."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from scripted_clouds import ScriptedCloud, World, serving, world

from warmroute.config import NodeConfig
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.lookup import Lookup
from warmroute.scaling.node_lifecycle import State
from warmroute.scaling.provisioner import CloudError

pytestmark = pytest.mark.usefixtures("impatient")


# Drain and end.


async def test_running_requests_finish_before_a_node_is_ended_and_no_new_one_goes_there() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        tickets = {node.name: Ticket(node, one.clock.now_s) for node in one.fleet}
        one.want(1)
        await one.until(lambda: "draining" in one.states)
        await one.tick()
        (life,) = [each for each in one.lives if each.state is State.DRAINING]
        assert life.name not in one.takes_requests()
        await one.ticks(100)
        assert life.state is State.DRAINING and not cloud.ended and "terminate" not in cloud.calls
        one.fleet.close_ticket(tickets[life.name], Outcome.OK, one.clock.now_s)
        await one.until(lambda: one.states == ["serving"], 3)
        assert cloud.ended == [life.token] and len(one.fleet) == 1


async def test_requests_that_others_have_there_count_too() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        for node in one.fleet:
            node.saw_load(1, 0, 0.0, one.clock.now_s)
        one.want(1)
        await one.ticks(20)
        assert "draining" in one.states and not cloud.ended
        for node in one.fleet:
            node.saw_load(0, 0, 0.0, one.clock.now_s)
        await one.until(lambda: len(cloud.ended) == 1, 3)


async def test_a_drain_that_takes_too_long_ends_all_the_same() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, drain_limit_s=60.0) as one:
        await serving(one, 2)
        for node in one.fleet:
            Ticket(node, one.clock.now_s)
        one.want(1)
        await one.ticks(50)
        assert not cloud.ended
        await one.until(lambda: len(cloud.ended) == 1, 30)


async def test_a_node_that_is_undrained_by_hand_while_it_goes_takes_nobody_in() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        tickets = {node.name: Ticket(node, one.clock.now_s) for node in one.fleet}
        one.want(1)
        await one.until(lambda: "draining" in one.states)
        (life,) = [each for each in one.lives if each.state is State.DRAINING]
        one.fleet.drain(life.name, False)
        await one.tick()
        assert life.name not in one.takes_requests()
        tickets[life.name].close(Outcome.OK, one.clock.now_s)
        await one.until(lambda: len(cloud.ended) == 1, 3)


def _make_hot(one: World, number: int, holder: str) -> None:
    """A beginning that many prompts share and only one node holds."""
    tokens = array("I", range(number * 1000, number * 1000 + 64))
    lookup = Lookup(tokens.tobytes(), 64, 64)
    for node in one.fleet:
        cache = one.cache_view.cache(node.name)
        assert cache is not None
        one.cache_view.serves(cache, "m")
        cache.describe(16, 100_000)
    for _ in range(8):
        one.hot.saw(lookup.blocks("m", "", 16), 16, lookup, one.clock.now_s)
    prediction = one.cache_view.sent("m", lookup, holder, None, one.clock.now_s)
    assert prediction is not None
    one.cache_view.first_token(prediction, one.clock.now_s)


async def test_what_only_a_going_node_holds_is_put_on_one_that_stays() -> None:
    put: list[str] = []

    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        put.append(node.name)
        return 200, b"{}"

    cloud = ScriptedCloud()
    async with world(cloud, post=post) as one:
        nodes = await serving(one, 3)
        for number, node in enumerate(nodes):
            _make_hot(one, number, node.name)
            assert one.core.to_move(node.name, one.clock.now_s)
        one.want(1, max_step_down=2)
        await one.until(lambda: one.states == ["serving"])
        assert set(put) == {one.serving()[0].name} and len(put) == 2


async def test_a_node_that_its_cloud_takes_back_drains_at_once_whatever_is_still_being_moved() -> None:
    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    cloud = ScriptedCloud()
    async with world(cloud, post=post) as one:
        nodes = await serving(one, 2)
        for number, node in enumerate(nodes):
            _make_hot(one, number, node.name)
        one.want(1)
        await one.until(lambda: "draining" in one.states)
        (life,) = [each for each in one.lives if each.state is State.DRAINING]
        ticket = Ticket(one.fleet.node(life.name), one.clock.now_s)
        await one.ticks(3)
        assert life.name in one.takes_requests()  # until what it holds is elsewhere
        machine = next(each for each in cloud.running if each.token == life.token)
        cloud.change(machine, reclaimed=True, reason="two minutes")
        await one.tick()
        assert life.name not in one.takes_requests() and not cloud.ended
        ticket.close(Outcome.OK, one.clock.now_s)
        await one.until(lambda: len(cloud.ended) == 1, 3)


async def test_a_spot_notice_drains_at_once_and_another_node_is_asked_for() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, cooldown_up_s=1.0) as one:
        first, _ = await serving(one, 2)
        ticket = Ticket(first, one.clock.now_s)
        machine = next(each for each in cloud.running if each.url == first.url)
        cloud.change(machine, reclaimed=True, reason="two minutes")
        await one.tick()
        assert first.name not in one.takes_requests()
        await one.until(lambda: len(one.serving()) == 2)
        assert not cloud.ended  # a request still runs there
        ticket.close(Outcome.OK, one.clock.now_s)
        await one.until(lambda: cloud.ended == [machine.token], 3)


async def test_a_move_that_fails_keeps_no_node_from_draining() -> None:
    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        raise ValueError("not what one expects")

    cloud = ScriptedCloud()
    async with world(cloud, post=post) as one:
        nodes = await serving(one, 2)
        for number, node in enumerate(nodes):
            _make_hot(one, number, node.name)
        one.want(1)
        await one.until(lambda: one.states == ["serving"])
        assert len(cloud.ended) == 1


async def test_ending_is_tried_until_it_succeeds() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        cloud.fails["terminate"] = CloudError("throttled")
        one.want(1)
        await one.until(lambda: "ending" in one.states)
        await one.ticks(100)
        assert one.states == ["ending", "serving"] and cloud.calls.count("terminate") > 10
        assert one.clouds[0].problem == "throttled" and len(one.takes_requests()) == 1
        cloud.fails.clear()
        await one.until(lambda: one.states == ["serving"], 3)
        assert len(cloud.ended) == 1 and len(one.fleet) == 1 and one.clouds[0].problem == ""


async def test_an_end_that_failed_is_no_problem_any_more_when_its_machine_is_gone() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        cloud.fails["terminate"] = CloudError("throttled")
        one.want(1)
        await one.until(lambda: one.clouds[0].problem != "")
        going = next(life for life in one.lives if life.state is State.ENDING)
        machine = next(each for each in cloud.running if each.token == going.token)
        del cloud.machines[machine.id]
        await one.until(lambda: one.states == ["serving"])
        assert one.clouds[0].problem == ""


# By hand.


async def test_a_node_that_somebody_takes_out_of_the_fleet_is_given_back_when_it_is_empty() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        first, second = await serving(one, 2)
        one.want(2, max_nodes=2, min_nodes=1)
        ticket = Ticket(first, one.clock.now_s)
        one.remove_node(first.name)
        await one.ticks(20)
        assert one.states == ["draining", "serving"] and not cloud.ended
        ticket.close(Outcome.OK, one.clock.now_s)
        await one.until(lambda: one.states == ["serving"], 3)
        assert len(cloud.ended) == 1 and one.serving() == [second] and len(cloud.running) == 1


async def test_a_node_that_is_taken_out_before_it_served_is_given_back() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1) as one:
        one.ill.add("http://10.0.0.1:8000")
        await one.until(lambda: one.states == ["loading"])
        one.remove_node(one.lives[0].name)
        await one.until(lambda: len(cloud.ended) == 1, 3)
        assert one.driver.refusals == 0


async def test_nodes_that_somebody_else_put_there_are_left_alone() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        one.add_node(NodeConfig(url="http://192.168.0.1:8000", name="mine"))
        await one.tick()
        one.want(3)
        await one.until(lambda: len(one.serving()) == 2)
        one.want(1)
        await one.ticks(30)
        assert one.takes_requests() == ["mine"] and len(one.fleet) == 1 and not cloud.running


async def test_a_node_of_the_configuration_that_takes_the_name_of_another_is_not_taken_for_it() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        (node,) = await serving(one, 1)
        one.remove_node(node.name)
        other = one.add_node(NodeConfig(url="http://192.168.0.1:8000", name=node.name))
        await one.until(lambda: len(cloud.ended) == 1)
        await one.ticks(10)
        assert one.fleet.node(node.name) is other and not other.draining and other.name in one.takes_requests()


async def test_a_node_whose_engine_has_died_is_given_back_when_it_had_time_to_come_back() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, load_limit_s=100.0) as one:
        (node,) = await serving(one, 1)
        one.want(1, dry_run=True)  # nobody stands in for it
        for lasts_s in (90, 90, 110):
            assert not cloud.ended
            one.ill = {node.name}
            one.fleet.check_refused(node, one.clock.now_s, "nobody listens")
            await one.ticks(lasts_s)
            one.ill = set()
            await one.ticks(2)
        assert len(cloud.ended) == 1 and not len(one.fleet)


async def test_an_engine_that_passes_checks_and_fails_every_request_is_given_back() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, load_limit_s=150.0) as one:
        (node,) = await serving(one, 1)
        one.want(1, dry_run=True)
        seen = set()
        for at in range(400):
            for _ in range(6 if at % 7 == 0 else 0):
                if node.health.standing in (Standing.UP, Standing.HALF_OPEN):
                    one.fleet.close_ticket(Ticket(node, one.clock.now_s), Outcome.FAILED, one.clock.now_s, "500")
            await one.tick()
            seen.add(node.health.standing)
        assert len(cloud.ended) == 1 and Standing.HALF_OPEN in seen


async def test_a_node_on_trial_is_not_given_back_before_it_fails_again_and_is_well_when_it_passes() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, load_limit_s=100.0) as one:
        (node,) = await serving(one, 1)
        one.want(1, dry_run=True)
        for _ in range(6):
            one.fleet.close_ticket(Ticket(node, one.clock.now_s), Outcome.FAILED, one.clock.now_s, "500")
        assert node.health.standing is Standing.OPEN
        await one.ticks(150)
        assert node.health.standing is Standing.HALF_OPEN and not cloud.ended
        one.fleet.close_ticket(Ticket(node, one.clock.now_s), Outcome.OK, one.clock.now_s)
        await one.ticks(5)
        for _ in range(6):
            one.fleet.close_ticket(Ticket(node, one.clock.now_s), Outcome.FAILED, one.clock.now_s, "500")
        await one.ticks(5)
        assert not cloud.ended


async def test_outages_one_after_the_other_bring_no_more_machines_than_there_may_be() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, cooldown_up_s=3.0) as one:
        await serving(one, 4)
        for _ in range(4):
            for node in list(one.fleet):
                one.ill.add(node.name)
                one.fleet.check_refused(node, one.clock.now_s, "a partition")
            await one.ticks(20)
            assert len(cloud.running) == 4
            one.ill.clear()
            await one.ticks(5)
        assert len(one.takes_requests()) == 4 and len(cloud.asked) == 4


async def test_a_machine_that_cannot_be_ended_counts_until_it_is() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, cooldown_up_s=1.0) as one:
        first, _ = await serving(one, 2)
        cloud.fails["terminate"] = CloudError("throttled")
        one.remove_node(first.name)
        await one.ticks(30)
        assert one.states == ["ending", "serving"] and len(cloud.running) == len(cloud.asked) == 2
        cloud.fails.clear()
        await one.until(lambda: len(one.serving()) == 2)
        assert len(cloud.asked) == 3 and len(cloud.running) == 2


async def test_a_router_that_starts_with_nobody_asking_counts_idle_time_from_then_on() -> None:
    cloud = ScriptedCloud()
    cloud.make("old")
    async with world(cloud, min_nodes=0, to_zero_after_s=100.0) as one:
        await one.until(lambda: one.states == ["serving"])
        await one.ticks(80)
        assert one.states == ["serving"] and not cloud.ended
        await one.until(lambda: cloud.ended == ["old"], 40)


async def test_what_is_taken_over_before_its_price_is_known_costs_it_later() -> None:
    cloud = ScriptedCloud(usd_per_hour=1.5)
    for token in ("old", "older"):
        cloud.make(token)
    cloud.fails["offers"] = CloudError("throttled")
    async with world(cloud, min_nodes=4, max_nodes=8, budget_usd_per_hour=3.0) as one:
        await one.until(lambda: len(one.serving()) == 2)
        assert sum(node.config.usd_per_hour for node in one.fleet) == 0.0
        cloud.fails.clear()
        await one.ticks(60)
        assert [node.config.usd_per_hour for node in one.fleet] == [1.5, 1.5]
        assert {node.config.gpu for node in one.fleet} == {"L4"} and {node.island for node in one.fleet} == {"here"}
        assert not cloud.asked and len(one.takes_requests()) == 2


async def test_a_fleet_that_went_to_zero_stays_there_until_somebody_asks() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=0, to_zero_after_s=10.0, stable_window_s=60.0) as one:
        for round_number in (1, 2):
            one.demand_meter.arrived += 1
            one.waiting = 1
            await one.until(lambda: len(one.serving()) == 1)
            one.waiting = 0
            await one.until(lambda: not one.lives)
            await one.ticks(80)
            assert len(cloud.asked) == len(cloud.ended) == round_number and not one.lives
