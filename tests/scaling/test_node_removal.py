"""Removing nodes: draining, moving prefixes, spot notices, dead engines, removal by an operator, and their cost."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from scripted_provisioner import Harness, ScriptedProvisioner, running

from warmroute.config import NodeConfig, ProvisionerConfig
from warmroute.core.health import HealthState
from warmroute.core.messages import Lookup, Outcome
from warmroute.core.node import Node, Ticket
from warmroute.scaling.node_lifecycle import LifecycleState
from warmroute.scaling.provisioner import ProvisionerError

pytestmark = pytest.mark.usefixtures("no_retry_delay")


# Drain and terminate.


async def test_running_requests_finish_before_a_node_is_terminated_and_no_new_ones_arrive() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        tickets = {node.name: Ticket(node, harness.clock.now_s) for node in harness.fleet}
        harness.want(1)
        await harness.until(lambda: "draining" in harness.states)
        await harness.tick()
        (managed,) = [each for each in harness.managed if each.state is LifecycleState.DRAINING]
        assert managed.name not in harness.routable()
        await harness.ticks(100)
        assert managed.state is LifecycleState.DRAINING
        assert not provisioner.terminated
        assert "terminate" not in provisioner.calls
        harness.fleet.close_ticket(tickets[managed.name], Outcome.OK, harness.clock.now_s)
        await harness.until(lambda: harness.states == ["serving"], 3)
        assert provisioner.terminated == [managed.token] and len(harness.fleet) == 1


async def test_a_drain_waits_for_requests_of_other_routers() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        for node in harness.fleet:
            node.update_load(1, 0, 0.0, harness.clock.now_s)
        harness.want(1)
        await harness.ticks(20)
        assert "draining" in harness.states and not provisioner.terminated
        for node in harness.fleet:
            node.update_load(0, 0, 0.0, harness.clock.now_s)
        await harness.until(lambda: len(provisioner.terminated) == 1, 3)


async def test_a_drain_ends_after_its_time_limit() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, drain_timeout_s=60.0) as harness:
        await harness.want_serving(2)
        for node in harness.fleet:
            Ticket(node, harness.clock.now_s)
        harness.want(1)
        await harness.ticks(50)
        assert not provisioner.terminated
        await harness.until(lambda: len(provisioner.terminated) == 1, 30)


async def test_a_leaving_node_that_an_operator_undrains_gets_no_requests() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        tickets = {node.name: Ticket(node, harness.clock.now_s) for node in harness.fleet}
        harness.want(1)
        await harness.until(lambda: "draining" in harness.states)
        (managed,) = [each for each in harness.managed if each.state is LifecycleState.DRAINING]
        harness.fleet.drain(managed.name, False)
        await harness.tick()
        assert managed.name not in harness.routable()
        tickets[managed.name].close(Outcome.OK, harness.clock.now_s)
        await harness.until(lambda: len(provisioner.terminated) == 1, 3)


def _make_hot(harness: Harness, number: int, holder: str) -> None:
    """Make a prefix hot that only one node holds."""
    tokens = array("I", range(number * 1000, number * 1000 + 64))
    lookup = Lookup(tokens.tobytes(), 64, 64)
    for node in harness.fleet:
        cache = harness.cache_view.cache(node.name)
        assert cache is not None
        harness.cache_view.set_models(cache, "m")
        cache.set_size(16, 100_000)
    for _ in range(8):
        harness.hot.record(lookup.blocks("m", "", 16), 16, lookup, harness.clock.now_s)
    prediction = harness.cache_view.record_routed("m", lookup, holder, None, harness.clock.now_s)
    assert prediction is not None
    harness.cache_view.first_token(prediction, harness.clock.now_s)


async def test_prefixes_that_only_a_leaving_node_holds_are_moved_to_one_that_stays() -> None:
    put: list[str] = []

    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        put.append(node.name)
        return 200, b"{}"

    provisioner = ScriptedProvisioner()
    async with running(provisioner, post=post) as harness:
        nodes = await harness.want_serving(3)
        for number, node in enumerate(nodes):
            _make_hot(harness, number, node.name)
            assert harness.autoscaler.prefixes_to_move(node.name, harness.clock.now_s)
        harness.want(1, max_step_down=2)
        await harness.until(lambda: harness.states == ["serving"])
        assert set(put) == {harness.serving()[0].name} and len(put) == 2


@pytest.mark.parametrize(("engine", "alone"), [("sglang", False), ("vllm", True)])
async def test_prefill_nodes_that_cannot_serve_alone_get_no_prefixes(engine: str, alone: bool) -> None:
    async with running(ScriptedProvisioner()) as harness:
        staying, leaving = await harness.want_serving(2)
        _make_hot(harness, 1, leaving.name)
        for node in (staying, leaving):
            node.engine = engine
            harness.fleet.set_role(node.name, "prefill")
        managed = next(one for one in harness.managed if one.name == leaving.name)
        assert bool(list(harness.controller.drain_prefills(managed))) == alone
        managed.state = LifecycleState.WARMING
        assert bool(list(harness.controller.prewarm_prefills(managed))) == alone


async def test_a_reclaimed_node_drains_at_once_even_while_prefixes_are_moved() -> None:
    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    provisioner = ScriptedProvisioner()
    async with running(provisioner, post=post) as harness:
        nodes = await harness.want_serving(2)
        for number, node in enumerate(nodes):
            _make_hot(harness, number, node.name)
        harness.want(1)
        await harness.until(lambda: "draining" in harness.states)
        (managed,) = [each for each in harness.managed if each.state is LifecycleState.DRAINING]
        ticket = Ticket(harness.fleet.node(managed.name), harness.clock.now_s)
        await harness.ticks(3)
        assert managed.name in harness.routable()  # until its prefixes are moved
        machine = next(each for each in provisioner.running if each.token == managed.token)
        provisioner.change(machine, reclaimed=True, reason="two minutes")
        await harness.tick()
        assert managed.name not in harness.routable() and not provisioner.terminated
        ticket.close(Outcome.OK, harness.clock.now_s)
        await harness.until(lambda: len(provisioner.terminated) == 1, 3)


async def test_a_spot_notice_drains_the_node_at_once_and_requests_another() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, cooldown_up_s=1.0) as harness:
        first, _ = await harness.want_serving(2)
        ticket = Ticket(first, harness.clock.now_s)
        machine = next(each for each in provisioner.running if each.url == first.url)
        provisioner.change(machine, reclaimed=True, reason="two minutes")
        await harness.tick()
        assert first.name not in harness.routable()
        await harness.until(lambda: len(harness.serving()) == 2)
        assert not provisioner.terminated  # a request still runs there
        ticket.close(Outcome.OK, harness.clock.now_s)
        await harness.until(lambda: provisioner.terminated == [machine.token], 3)


async def test_a_failed_prefix_move_does_not_stop_the_drain() -> None:
    async def post(node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        raise ValueError("unexpected")

    provisioner = ScriptedProvisioner()
    async with running(provisioner, post=post) as harness:
        nodes = await harness.want_serving(2)
        for number, node in enumerate(nodes):
            _make_hot(harness, number, node.name)
        harness.want(1)
        await harness.until(lambda: harness.states == ["serving"])
        assert len(provisioner.terminated) == 1


async def test_termination_is_retried_until_it_succeeds() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        provisioner.fails["terminate"] = ProvisionerError("throttled")
        harness.want(1)
        await harness.until(lambda: "terminating" in harness.states)
        await harness.ticks(100)
        assert harness.states == ["serving", "terminating"] and provisioner.calls.count("terminate") > 10
        assert harness.clients[0].error == "throttled" and len(harness.routable()) == 1
        provisioner.fails.clear()
        await harness.until(lambda: harness.states == ["serving"], 3)
        assert len(provisioner.terminated) == 1 and len(harness.fleet) == 1 and harness.clients[0].error == ""


async def test_a_failed_termination_is_no_error_once_its_machine_is_gone() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        provisioner.fails["terminate"] = ProvisionerError("throttled")
        harness.want(1)
        await harness.until(lambda: harness.clients[0].error != "")
        leaving = next(managed for managed in harness.managed if managed.state is LifecycleState.TERMINATING)
        machine = next(each for each in provisioner.running if each.token == leaving.token)
        del provisioner.machines[machine.id]
        await harness.until(lambda: harness.states == ["serving"])
        assert harness.clients[0].error == ""


# By an operator.


async def test_a_node_that_an_operator_removes_is_terminated_when_its_requests_end() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        first, second = await harness.want_serving(2)
        harness.want(2, max_nodes=2, min_nodes=1)
        ticket = Ticket(first, harness.clock.now_s)
        harness.remove_node(first.name)
        await harness.ticks(20)
        assert harness.states == ["draining", "serving"] and not provisioner.terminated
        ticket.close(Outcome.OK, harness.clock.now_s)
        await harness.until(lambda: harness.states == ["serving"], 3)
        assert len(provisioner.terminated) == 1 and harness.serving() == [second] and len(provisioner.running) == 1


async def test_a_node_that_an_operator_removes_before_it_serves_is_terminated() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1) as harness:
        harness.unhealthy.add("http://10.0.0.1:8000")
        await harness.until(lambda: harness.states == ["loading"])
        harness.remove_node(harness.managed[0].name)
        await harness.until(lambda: len(provisioner.terminated) == 1, 3)
        assert harness.controller.refused == 0


async def test_nodes_that_an_operator_added_are_never_removed() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        harness.add_node(NodeConfig(url="http://192.168.0.1:8000", name="mine"))
        await harness.tick()
        harness.want(3)
        await harness.until(lambda: len(harness.serving()) == 2)
        harness.want(1)
        await harness.ticks(30)
        assert harness.routable() == ["mine"] and len(harness.fleet) == 1 and not provisioner.running


async def test_a_configured_node_with_the_name_of_a_managed_one_is_another_node() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        (node,) = await harness.want_serving(1)
        harness.remove_node(node.name)
        other = harness.add_node(NodeConfig(url="http://192.168.0.1:8000", name=node.name))
        await harness.until(lambda: len(provisioner.terminated) == 1)
        await harness.ticks(10)
        assert harness.fleet.node(node.name) is other and not other.draining and other.name in harness.routable()


async def test_a_node_that_stays_down_is_terminated_after_the_load_timeout() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, load_timeout_s=100.0) as harness:
        (node,) = await harness.want_serving(1)
        harness.want(1, dry_run=True)  # no replacement
        for lasts_s in (90, 90, 110):
            assert not provisioner.terminated
            harness.unhealthy = {node.name}
            harness.fleet.check_failed(node, harness.clock.now_s, "connection refused")
            await harness.ticks(lasts_s)
            harness.unhealthy = set()
            await harness.ticks(2)
        assert len(provisioner.terminated) == 1 and not len(harness.fleet)


async def test_an_engine_that_passes_checks_and_fails_every_request_is_terminated() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, load_timeout_s=150.0) as harness:
        (node,) = await harness.want_serving(1)
        harness.want(1, dry_run=True)
        seen = set()
        for at in range(400):
            for _ in range(6 if at % 7 == 0 else 0):
                if node.health.state in (HealthState.UP, HealthState.HALF_OPEN):
                    harness.fleet.close_ticket(
                        Ticket(node, harness.clock.now_s), Outcome.FAILED, harness.clock.now_s, "500"
                    )
            await harness.tick()
            seen.add(node.health.state)
        assert len(provisioner.terminated) == 1 and HealthState.HALF_OPEN in seen


async def test_a_half_open_node_is_kept_until_its_trial_request_fails() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, load_timeout_s=100.0) as harness:
        (node,) = await harness.want_serving(1)
        harness.want(1, dry_run=True)
        for _ in range(6):
            harness.fleet.close_ticket(Ticket(node, harness.clock.now_s), Outcome.FAILED, harness.clock.now_s, "500")
        assert node.health.state is HealthState.DOWN
        await harness.ticks(150)
        assert node.health.state is HealthState.HALF_OPEN and not provisioner.terminated  # type: ignore[comparison-overlap]
        harness.fleet.close_ticket(Ticket(node, harness.clock.now_s), Outcome.OK, harness.clock.now_s)
        await harness.ticks(5)
        for _ in range(6):
            harness.fleet.close_ticket(Ticket(node, harness.clock.now_s), Outcome.FAILED, harness.clock.now_s, "500")
        await harness.ticks(5)
        assert not provisioner.terminated


async def test_repeated_outages_never_exceed_the_maximum_of_machines() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, cooldown_up_s=3.0) as harness:
        await harness.want_serving(4)
        for _ in range(4):
            for node in list(harness.fleet):
                harness.unhealthy.add(node.name)
                harness.fleet.check_failed(node, harness.clock.now_s, "a partition")
            await harness.ticks(20)
            assert len(provisioner.running) == 4
            harness.unhealthy.clear()
            await harness.ticks(5)
        assert len(harness.routable()) == 4 and len(provisioner.requested) == 4


async def test_a_machine_counts_until_its_termination_succeeds() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, cooldown_up_s=1.0) as harness:
        first, _ = await harness.want_serving(2)
        provisioner.fails["terminate"] = ProvisionerError("throttled")
        harness.remove_node(first.name)
        await harness.ticks(30)
        assert (
            harness.states == ["serving", "terminating"] and len(provisioner.running) == len(provisioner.requested) == 2
        )
        provisioner.fails.clear()
        await harness.until(lambda: len(harness.serving()) == 2)
        assert len(provisioner.requested) == 3 and len(provisioner.running) == 2


async def test_idle_time_starts_with_the_router() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.create("old")
    async with running(provisioner, min_nodes=0, scale_to_zero_after_s=100.0) as harness:
        await harness.until(lambda: harness.states == ["serving"])
        await harness.ticks(80)
        assert harness.states == ["serving"] and not provisioner.terminated
        await harness.until(lambda: provisioner.terminated == ["old"], 40)


async def test_an_adopted_machine_gets_its_price_when_its_offer_is_known() -> None:
    provisioner = ScriptedProvisioner(usd_per_hour=1.5)
    for token in ("old", "older"):
        provisioner.create(token)
    provisioner.fails["offers"] = ProvisionerError("throttled")
    async with running(provisioner, min_nodes=4, max_nodes=8, budget_usd_per_hour=3.0) as harness:
        await harness.until(lambda: len(harness.serving()) == 2)
        assert sum(node.config.usd_per_hour for node in harness.fleet) == 0.0
        provisioner.fails.clear()
        await harness.ticks(60)
        assert [node.config.usd_per_hour for node in harness.fleet] == [1.5, 1.5]
        assert harness.updated == [node.config for node in harness.fleet], "other processes get it, too"
        assert {node.config.gpu for node in harness.fleet} == {"L4"} and {node.island for node in harness.fleet} == {
            "here"
        }
        assert not provisioner.requested and len(harness.routable()) == 2


async def test_a_fleet_scaled_to_zero_stays_there_until_a_request_arrives() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=0, scale_to_zero_after_s=10.0, stable_window_s=60.0) as harness:
        for round_number in (1, 2):
            harness.demand_meter.arrived += 1
            harness.waiting = 1
            await harness.until(lambda: len(harness.serving()) == 1)
            harness.waiting = 0
            await harness.until(lambda: not harness.managed)
            await harness.ticks(80)
            assert len(provisioner.requested) == len(provisioner.terminated) == round_number and not harness.managed


async def test_an_adopted_machine_has_the_configured_role_before_its_offer_is_known() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.create("old")
    provisioner.fails["offers"] = ProvisionerError("throttled")
    config = ProvisionerConfig(kind="kubernetes", role="prefill", bootstrap_port=9001, island="east", max_inflight=40)
    async with running(provisioner, configured=config) as harness:
        await harness.until(lambda: len(harness.serving()) == 1)
        (node,) = harness.fleet
        assert (node.role, node.config.bootstrap_port, node.island, node.max_inflight) == ("prefill", 9001, "east", 40)
