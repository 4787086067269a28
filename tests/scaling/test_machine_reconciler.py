"""Reconciling reported machines with managed nodes: machines that fail to start, vanish, or were never requested."""

from __future__ import annotations

import pytest
from scripted_provisioner import ScriptedProvisioner, running

from warmroute.scaling.node_lifecycle import LifecycleState
from warmroute.scaling.provisioner import MachineState

pytestmark = pytest.mark.usefixtures("no_retry_delay")


@pytest.mark.parametrize("stuck", [LifecycleState.BOOTING, LifecycleState.LOADING])
async def test_a_node_that_does_not_start_is_removed_and_its_offer_backs_off(stuck: LifecycleState) -> None:
    provisioner = ScriptedProvisioner("cloud", "a", "b")
    if stuck is LifecycleState.BOOTING:
        provisioner.first_state = MachineState.PENDING
    async with running(
        provisioner, min_nodes=1, boot_timeout_s=50.0, load_timeout_s=50.0, offer_backoff_s=3000.0
    ) as harness:
        harness.unhealthy.add("http://10.0.0.1:8000")
        await harness.until(lambda: harness.states == [stuck.value])
        provisioner.first_state = MachineState.RUNNING
        await harness.ticks(45)
        assert harness.states == [stuck.value] and len(provisioner.requested) == 1
        await harness.until(lambda: harness.states == ["serving"])
        assert [name for name, _ in provisioner.requested] == ["a", "b"] and provisioner.terminated == [
            provisioner.requested[0][1]
        ]
        backing_off = harness.autoscaler.offers.backing_off(harness.clock.now_s)
        assert "did not start: it was" in backing_off["cloud", "a"][1] and harness.controller.refused == 1
        assert len(harness.fleet) == 1


async def test_the_offer_of_a_machine_that_ends_while_it_boots_backs_off() -> None:
    provisioner = ScriptedProvisioner("cloud", "a", "b")
    provisioner.first_state = MachineState.PENDING
    async with running(provisioner, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["booting"])
        provisioner.change(provisioner.running[0], state=MachineState.TERMINATED, reason="its disk is full")
        provisioner.first_state = MachineState.RUNNING
        await harness.until(lambda: harness.states == ["serving"])
        assert [name for name, _ in provisioner.requested] == ["a", "b"]
        assert "its disk is full" in harness.autoscaler.offers.backing_off(harness.clock.now_s)["cloud", "a"][1]


async def test_a_node_that_timed_out_while_it_booted_serves_when_it_answers() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1) as harness:
        harness.unhealthy.add("http://10.0.0.1:8000")
        await harness.until(lambda: harness.states == ["loading"])
        for _ in range(10):  # its address drops packets
            for node in harness.fleet:
                harness.fleet.check_timed_out(node, harness.clock.now_s)
            await harness.tick()
        harness.unhealthy.clear()
        await harness.until(lambda: harness.states == ["serving"], 5)
        assert len(harness.routable()) == 1


async def test_a_machine_without_an_address_is_booting() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1) as harness:
        machine = provisioner.create("old", url="")
        await harness.ticks(5)
        assert harness.states == ["booting"] and not len(harness.fleet)
        provisioner.change(machine, url="http://10.1.1.1:8000")
        await harness.until(lambda: harness.states == ["serving"])
        assert not provisioner.requested


@pytest.mark.parametrize("url", ["ftp://10.0.0.9", "http://", "http://10.0.0.9:99999", "http://u@10.0.0.9/path"])
async def test_a_node_with_an_invalid_address_is_removed_and_its_offer_backs_off(url: str) -> None:
    provisioner = ScriptedProvisioner("cloud", "a", "b")
    provisioner.first_state = MachineState.PENDING
    async with running(provisioner, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["booting"])
        provisioner.change(provisioner.running[0], state=MachineState.RUNNING, url=url)
        provisioner.first_state = MachineState.RUNNING
        await harness.until(lambda: harness.states == ["serving"])
        assert [name for name, _ in provisioner.requested] == ["a", "b"] and len(provisioner.terminated) == 1
        assert "it cannot join the fleet" in harness.autoscaler.offers.backing_off(harness.clock.now_s)["cloud", "a"][1]


async def test_a_lost_machine_leaves_the_fleet_and_is_replaced() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        first, _ = await harness.want_serving(2)
        machine = next(each for each in provisioner.running if each.url == first.url)
        provisioner.change(machine, state=MachineState.TERMINATED, reason="the host failed")
        await harness.tick()
        await harness.tick()
        assert first.name not in harness.routable() and harness.controller.lost == 1
        await harness.until(lambda: len(harness.serving()) == 2)
        assert len(provisioner.requested) == 3


async def test_a_machine_missing_from_one_report_is_kept_but_one_missing_for_long_is_lost() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, cooldown_up_s=1.0) as harness:
        await harness.want_serving(2)
        before = harness.routable()
        there = list(provisioner.machines.values())
        for reported in ([], there[:1], there, there[1:], there):
            provisioner.reported = reported
            await harness.ticks(3)
        assert harness.routable() == before and len(provisioner.requested) == 2 and harness.controller.lost == 0
        del provisioner.machines[there[0].id]
        provisioner.reported = None
        await harness.ticks(40)
        assert harness.controller.lost == 1 and len(provisioner.requested) == 3
        await harness.until(lambda: len(harness.serving()) == 2)


async def test_a_new_machine_may_be_missing_from_the_first_reports() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.reported = []
    async with running(provisioner, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["booting"])
        await harness.ticks(25)
        provisioner.reported = None
        await harness.until(lambda: harness.states == ["serving"])
        assert len(provisioner.requested) == 1


async def test_a_replaced_machine_becomes_a_new_node() -> None:
    """A controller may replace a machine by itself; then it has another address."""
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        (node,) = await harness.want_serving(1)
        provisioner.change(provisioner.running[0], url="http://10.9.9.9:8000")
        await harness.until(lambda: bool(harness.serving()) and harness.serving()[0] is not node)
        assert [each.url for each in harness.fleet] == ["http://10.9.9.9:8000"]
        assert len(provisioner.requested) == 1
        assert not provisioner.terminated


async def test_an_address_can_be_reused_when_its_last_node_is_gone() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        (node,) = await harness.want_serving(1)
        old = provisioner.running[0]
        provisioner.first_state = MachineState.PENDING
        provisioner.create("a-new-one", url=old.url, state=MachineState.RUNNING)
        provisioner.change(old, state=MachineState.TERMINATED)
        provisioner.machines = dict(reversed(provisioner.machines.items()))
        await harness.until(lambda: len(harness.serving()) == 1 and harness.serving()[0] is not node, 10)
        assert harness.managed[0].token == "a-new-one" and len(harness.fleet) == 1


async def test_two_machines_with_one_address_are_one_node() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(1)
        provisioner.create("other", url=provisioner.running[0].url)
        await harness.ticks(10)
        assert len(harness.fleet) == 1 and harness.states == ["booting", "serving"]


# Machines that this process did not request.


async def test_the_next_router_adopts_all_machines_and_requests_none() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(3)
    assert provisioner.closed and len(provisioner.running) == 3 and not provisioner.terminated
    async with running(provisioner) as two:
        await two.want_serving(3)
        await two.ticks(30)
        assert len(provisioner.requested) == 3 and len(two.fleet) == 3 and not provisioner.terminated
        assert two.autoscaler.offers.start_s(provisioner.on_offer[0]) == 60.0  # their start time is unknown
        await two.want_serving(1)
        assert len(provisioner.running) == 1


async def test_a_crash_during_a_request_leaves_no_orphan() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.hangs.add("provision")
    async with running(provisioner, min_nodes=2) as harness:
        await harness.ticks(2)
        assert len(provisioner.requested) == 2
    provisioner.hangs.clear()
    async with running(provisioner, min_nodes=1, max_nodes=1) as two:
        await two.until(lambda: len(provisioner.running) == 1)
        await two.until(lambda: two.states == ["serving"])
        assert len(provisioner.requested) == 2 and len(provisioner.terminated) == 1


async def test_a_second_machine_with_the_same_token_is_terminated() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        (node,) = await harness.want_serving(1)
        token = harness.managed[0].token
        for _ in range(2):
            second = provisioner.create(token)
            provisioner.machines = dict(reversed(provisioner.machines.items()))
            await harness.ticks(3)
            assert provisioner.machines[second.id].state is MachineState.TERMINATED
        assert harness.serving() == [node] and len(provisioner.running) == 1 and len(harness.fleet) == 1
        assert harness.states == ["serving"] and harness.controller.lost == 0


async def test_terminated_machines_are_not_adopted_and_counted_once() -> None:
    provisioner = ScriptedProvisioner()
    for number in range(3):
        provisioner.create(f"old{number}", state=MachineState.TERMINATED if number else MachineState.TERMINATING)
    async with running(provisioner) as harness:
        await harness.want_serving(1)
        assert len(harness.fleet) == 1 and len(provisioner.requested) == 1
        machine = provisioner.running[0]
        ended = provisioner.change(machine, state=MachineState.TERMINATED)
        provisioner.reported = [ended, ended]
        await harness.ticks(3)
        provisioner.reported = None
        assert harness.controller.lost == 1
        await harness.until(lambda: len(harness.serving()) == 1)


async def test_a_machine_without_a_token_is_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = ScriptedProvisioner()
    provisioner.create("")
    async with running(provisioner) as harness:
        await harness.want_serving(1)
        assert len(harness.fleet) == 1 and not provisioner.terminated
    assert sum("machine_without_token" in record.message for record in caplog.records) == 1


async def test_a_stale_report_does_not_bring_back_a_terminated_machine() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        provisioner.reported = list(provisioner.machines.values())  # stale from now on
        harness.want(1)
        await harness.until(lambda: len(provisioner.terminated) == 1)
        await harness.ticks(20)
        assert harness.states == ["serving"] and len(harness.fleet) == 1 and len(provisioner.terminated) == 1
        provisioner.reported = None
        await harness.ticks(60)
        assert harness.states == ["serving"] and len(provisioner.requested) == 2 and harness.controller.refused == 0


async def test_a_machine_that_still_runs_after_its_termination_is_terminated_again() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner) as harness:
        await harness.want_serving(2)
        harness.want(1)
        await harness.until(lambda: len(provisioner.terminated) == 1)
        risen = next(each for each in provisioner.machines.values() if each.state is MachineState.TERMINATED)
        provisioner.change(risen, state=MachineState.RUNNING)
        await harness.ticks(40)
        assert provisioner.terminated == [risen.token] * 2 and harness.states == ["serving"]
