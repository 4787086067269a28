"""The controller loop with provisioners that are slow, full, unreliable or wrong."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgspec
import pytest
from scripted_provisioner import Harness, ScriptedProvisioner, running

from warmroute.app.service import log_health_change
from warmroute.config import Config, IslandLimits, NodeConfig, Scaling
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Outcome
from warmroute.core.node import Ticket
from warmroute.scaling import node_lifecycle
from warmroute.scaling.node_lifecycle import LifecycleState
from warmroute.scaling.provisioner import MachineState, NoCapacity, ProvisionerError

pytestmark = pytest.mark.usefixtures("no_retry_delay")


async def test_a_node_is_requested_checked_serves_and_is_removed() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1) as harness:
        await harness.tick()
        await harness.tick()
        assert len(provisioner.requested) == 1 and harness.states == ["booting"]
        await harness.tick()
        (managed,) = harness.managed
        assert managed.state is LifecycleState.LOADING and harness.fleet.node(managed.name).draining
        assert harness.fleet.node(managed.name).config.gpu == "L4" and harness.fleet.node(managed.name).island == "here"
        await harness.until(lambda: harness.states == ["serving"])
        assert harness.routable() == [managed.name] and harness.controller.added == 1
        await harness.want_serving(2)
        assert len(provisioner.requested) == 2 and len(harness.routable()) == 2
        await harness.want_serving(1)
        assert len(provisioner.terminated) == 1
        assert len(provisioner.running) == len(harness.fleet) == 1
        assert harness.controller.removed == 1
        await harness.ticks(100)
        assert len(provisioner.requested) == 2 and len(provisioner.terminated) == 1 and harness.controller.lost == 0


async def test_machines_of_two_provisioners_join_with_the_roles_of_their_offers() -> None:
    prefill, decode = ScriptedProvisioner("prefill"), ScriptedProvisioner("decode", usd_per_hour=5.0)
    prefill.on_offer = [msgspec.structs.replace(one, role="prefill", bootstrap_port=9001) for one in prefill.on_offer]
    decode.on_offer = [msgspec.structs.replace(one, role="decode") for one in decode.on_offer]
    decode._created = 100  # other addresses
    async with running(prefill, decode, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["serving", "serving"])
        await harness.ticks(20)
        roles = {node.role: node.config.bootstrap_port for node in harness.fleet}
        assert roles == {"prefill": 9001, "decode": 8998}
        assert len(prefill.requested) == len(decode.requested) == 1
        last = harness.autoscaler.last_decision
        assert last is not None and {pool: one.desired_nodes for pool, one in last.pools.items()} == dict.fromkeys(
            ("prefill", "decode"), 1
        )
        assert harness.autoscaler.desired_in_pool("prefill") == 1 and harness.autoscaler.desired_in_pool("") == 2


# Slow provisioners.


@pytest.mark.parametrize("call", ["offers", "status", "provision"])
async def test_no_turn_waits_for_a_provisioner_that_hangs(call: str) -> None:
    provisioner, other = ScriptedProvisioner("slow"), ScriptedProvisioner("quick", usd_per_hour=5.0)
    async with running(provisioner, other, cooldown_up_s=1.0) as harness:
        await harness.want_serving(1)
        provisioner.hangs.add(call)
        harness.want(3)
        calls = len(other.calls)
        await harness.ticks(100)  # each of them would hang here for good
        assert other.calls[calls:].count("status") == 100
        assert len(harness.serving()) == (1 if call == "status" else 3)


async def test_a_termination_that_hangs_blocks_nothing_and_is_retried_after_its_timeout() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, timeout_s=0.05) as harness:
        await harness.want_serving(2)
        provisioner.hangs.add("terminate")
        harness.want(1)
        await harness.until(lambda: "terminating" in harness.states)
        await harness.ticks(5)
        assert len(harness.routable()) == 1 and not provisioner.terminated
        provisioner.hangs.clear()
        await asyncio.sleep(0.1)
        await harness.tick()
        assert harness.states == ["serving"] and len(provisioner.terminated) == 1


async def test_a_request_that_timed_out_may_have_created_a_machine_which_is_used_once() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.hangs.add("provision")
    provisioner.reported = []
    async with running(provisioner, timeout_s=0.05, min_nodes=1) as harness:
        await harness.ticks(2)
        await asyncio.sleep(0.1)
        await harness.ticks(5)
        assert harness.states == ["requested"]
        provisioner.reported = None
        await harness.until(lambda: harness.states == ["serving"])
        await harness.ticks(50)
        assert len(provisioner.requested) == len(provisioner.machines) == len(harness.fleet) == 1
        assert not provisioner.terminated


async def test_a_request_that_timed_out_without_a_machine_ends_after_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_lifecycle, "REQUEST_TIMEOUT_S", 20.0)
    provisioner = ScriptedProvisioner("cloud", "a", "b")
    provisioner.hangs.add("provision")
    provisioner.reported = []
    async with running(provisioner, timeout_s=0.02, min_nodes=1) as harness:
        await harness.ticks(2)
        await asyncio.sleep(0.05)
        provisioner.hangs.clear()
        await harness.ticks(25)
        assert [name for name, _ in provisioner.requested] == ["a", "b"]
        provisioner.reported = None  # now both are reported: the one that serves, and the one that timed out
        await harness.until(lambda: harness.states == ["serving"] and len(provisioner.running) == 1)
        assert provisioner.terminated == [provisioner.requested[0][1]]


# Refusals and errors.


async def test_a_refused_offer_backs_off_and_the_next_is_used_without_a_cooldown() -> None:
    provisioner = ScriptedProvisioner("cloud", "a", "b", "c")
    provisioner.fails = {"a": NoCapacity("no a in this zone"), "b": NoCapacity("nor b")}
    async with running(provisioner, min_nodes=1, cooldown_up_s=600.0) as harness:
        await harness.until(lambda: harness.states == ["serving"], 10)
        assert [name for name, _ in provisioner.requested] == ["a", "b", "c"] and harness.controller.refused == 2
        backing_off = harness.autoscaler.offers.backing_off(harness.clock.now_s)
        assert {key[1]: why for key, (_, why) in backing_off.items()} == {"a": "no a in this zone", "b": "nor b"}


async def test_when_every_offer_backs_off_the_next_request_follows_the_backoff() -> None:
    provisioner = ScriptedProvisioner("cloud", "a")
    provisioner.fails = {"a": NoCapacity("none")}
    async with running(provisioner, min_nodes=1, offer_backoff_s=60.0, cooldown_up_s=1.0) as harness:
        await harness.ticks(60)
        assert len(provisioner.requested) == 1
        await harness.ticks(10)
        assert len(provisioner.requested) == 2
        await harness.ticks(100)
        assert len(provisioner.requested) == 2  # twice as long
        provisioner.fails.clear()
        await harness.until(lambda: harness.states == ["serving"])


@pytest.mark.parametrize("error", [ProvisionerError("500"), RuntimeError("a bug in a library")])
async def test_a_failed_request_may_have_created_a_machine_which_is_terminated(error: Exception) -> None:
    provisioner = ScriptedProvisioner("cloud", "a", "b")
    provisioner.fails = {"a": error}
    async with running(provisioner, min_nodes=1) as harness:
        await harness.ticks(3)
        stray = provisioner.create(provisioner.requested[0][1], "a")
        await harness.until(lambda: harness.states == ["serving"] and len(provisioner.running) == 1)
        assert provisioner.terminated == [stray.token] and [name for name, _ in provisioner.requested] == ["a", "b"]
        assert harness.controller.refused == 1


async def test_a_reported_machine_counts_more_than_an_error_of_its_request() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1, timeout_s=60.0) as harness:
        provisioner.hangs.add("provision")
        harness.unhealthy.add("http://10.0.0.1:8000")
        await harness.until(lambda: harness.states == ["loading"])
        (managed,) = harness.managed
        harness.unhealthy.clear()
        await harness.loop._provision(_refusing(harness), managed)
        await harness.until(lambda: harness.states == ["serving"])
        assert not provisioner.terminated and harness.controller.refused == 0


def _refusing(harness: Harness) -> Any:
    class Refusing:
        name = harness.clients[0].name

        @staticmethod
        async def provision(*_: object) -> None:
            raise NoCapacity("it is not there")

    return Refusing()


async def test_no_node_is_requested_before_every_provisioner_has_reported() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.create("old")
    provisioner.fails["offers"] = ProvisionerError("no prices today")
    provisioner.hangs.add("status")
    other = ScriptedProvisioner("other")
    async with running(provisioner, other, min_nodes=1) as harness:
        await harness.ticks(10)
        assert harness.autoscaler.last_decision is None
        provisioner.hangs.clear()
        await asyncio.sleep(0.01)
        await harness.until(lambda: harness.states == ["serving"])
        assert harness.managed[0].token == "old" and not other.requested


async def test_a_provisioner_whose_status_fails_does_not_block_scaling() -> None:
    provisioner, other = ScriptedProvisioner("mute"), ScriptedProvisioner("other", usd_per_hour=9.0)
    provisioner.fails = {"status": ProvisionerError("denied"), "offers": ProvisionerError("denied")}
    async with running(provisioner, other, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["serving"])
        assert other.requested and not provisioner.requested


async def test_a_failing_call_is_logged_once_and_its_recovery_once(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = ScriptedProvisioner()
    provisioner.fails["offers"] = ProvisionerError("no prices today")
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with running(provisioner, min_nodes=0) as harness:
        await harness.ticks(100)
        assert harness.clients[0].error == "no prices today" and provisioner.calls.count("offers") < 20
        provisioner.fails.clear()
        await harness.ticks(30)
        assert harness.clients[0].error == ""
    assert [record.message for record in caplog.records if record.message.startswith("provisioner_call")] == [
        'provisioner_call_failed provisioner=cloud call=offers reason="no prices today"',
        "provisioner_call_recovered provisioner=cloud call=offers",
    ]


async def test_errors_that_differ_only_in_an_address_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = ScriptedProvisioner()
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with running(provisioner, min_nodes=0) as harness:
        for at in range(20):
            provisioner.fails["status"] = RuntimeError(f"<Transport object at 0x{at:x}> is closed")
            await harness.tick()
            await harness.ticks(2)
        assert harness.clients[0].error.endswith("0x13> is closed")
        provisioner.fails["status"] = ValueError("something else")
        await harness.ticks(3)
    failures = [record for record in caplog.records if record.message.startswith("provisioner_call_failed")]
    assert [record.__dict__["fields"]["reason"] for record in failures] == [
        "RuntimeError: <Transport object at 0x0> is closed",
        "ValueError: something else",
    ]


async def test_a_new_obstacle_to_adding_nodes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = ScriptedProvisioner("cloud", "a")
    provisioner.fails = {"a": NoCapacity("none")}
    caplog.set_level(logging.INFO, "warmroute.scaling")

    def blocked() -> list[str]:
        return [record.message for record in caplog.records if record.message.startswith("scaling_blocked")]

    async with running(provisioner, min_nodes=1, max_nodes=1, offer_backoff_s=60.0) as harness:
        await harness.ticks(50)
        (first,) = blocked()
        assert 'nodes=0 desired_nodes=1 reason="0 nodes running, minimum is 1"' in first
        assert 'obstacle="no offer is available: 1 × backing off after a failure"' in first
        assert "The autoscaler cannot add the nodes needed." in first
        provisioner.fails.clear()
        await harness.until(lambda: harness.states == ["serving"], 300)
        assert len(blocked()) == 1
        islands = (IslandLimits("moon", min_nodes=2),)
        harness.autoscaler.reconfigure(Scaling(enabled=True, **{**harness.scaling, "islands": islands}))
        await harness.ticks(50)
        assert "island moon needs 2 nodes more, and no provisioner offers nodes there" in blocked()[1]
        assert len(blocked()) == 2


async def test_a_node_has_one_name_in_all_log_events(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = ScriptedProvisioner("cloud", "a")
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with running(provisioner, min_nodes=1, load_timeout_s=20.0, offer_backoff_s=3000.0) as harness:
        harness.unhealthy.add("http://10.0.0.1:8000")
        await harness.until(lambda: harness.controller.refused == 1)
        ((_, token),) = provisioner.requested
        await harness.ticks(3)
        provisioner.create("an-older-token-0", "a")
        await harness.until(lambda: harness.states == ["serving"])
    log = "\n".join(record.message for record in caplog.records)
    name = f"cloud-{token[-8:]}"
    assert f'node_requested node={name} reason="cloud/a: cheapest of 1' in log
    assert f"node_state_changed node={name} state=booting previous_state=requested" in log
    assert token not in log
    assert 'offer_failed offer=cloud/a reason="its node did not start: it was loading for too long"' in log
    assert "node_adopted node=cloud--token-0" in log
    assert "1 nodes" not in log


@pytest.mark.parametrize(("draining", "level"), [(True, logging.INFO), (False, logging.WARNING)])
def test_a_draining_node_that_goes_down_is_logged_as_info(
    draining: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that still loads, or that is terminating, is expected to be unreachable."""
    caplog.set_level(logging.INFO, "warmroute")
    fleet = Fleet(Config().health, log_health_change)
    node = fleet.add(NodeConfig(url="http://10.0.0.1:8000", name="one"))
    fleet.check_passed(node, 0.0)
    fleet.drain("one", draining)
    for at in range(10):
        fleet.check_failed(node, float(at), "connection refused")
    (down,) = [record for record in caplog.records if record.message.startswith("node_down")]
    assert down.levelno == level


# Dry run and reload.


async def test_a_dry_run_requests_and_adopts_nothing() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.create("old")
    async with running(provisioner, min_nodes=3, dry_run=True) as harness:
        await harness.ticks(60)
        assert set(provisioner.calls) == {"offers", "status"} and not harness.managed and not len(harness.fleet)
        assert harness.autoscaler.last_decision is not None
        assert harness.autoscaler.desired_nodes == 3
        assert len(harness.autoscaler.last_decision.reasons) > 0


async def test_a_dry_run_that_starts_later_lets_pending_nodes_finish() -> None:
    provisioner = ScriptedProvisioner()
    provisioner.first_state = MachineState.PENDING
    async with running(provisioner, min_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["booting"])
        harness.want(3, dry_run=True)
        provisioner.change(provisioner.running[0], state=MachineState.RUNNING, url="http://10.1.1.1:8000")
        await harness.until(lambda: harness.states == ["serving"])
        await harness.ticks(30)
        assert len(provisioner.requested) == 1
        harness.want(3, dry_run=False)
        provisioner.first_state = MachineState.RUNNING
        await harness.until(lambda: len(harness.serving()) == 3)


async def test_changed_limits_apply_from_the_next_decision() -> None:
    provisioner = ScriptedProvisioner()
    async with running(provisioner, min_nodes=1, max_nodes=1) as harness:
        await harness.until(lambda: harness.states == ["serving"])
        await harness.ticks(40)
        harness.want(4)
        await harness.tick()
        assert len(provisioner.requested) == 4
        await harness.until(lambda: len(harness.serving()) == 4)
        provisioner.first_state = MachineState.PENDING
        harness.want(5, boot_timeout_s=10.0, cooldown_up_s=1.0)
        await harness.until(lambda: len(provisioner.requested) == 5)
        await harness.ticks(15)
        assert len(provisioner.terminated) == 1


async def test_closing_does_not_wait_for_a_provisioner_that_hangs() -> None:
    provisioners = [ScriptedProvisioner("a"), ScriptedProvisioner("b")]
    provisioners[0].hangs = {"provision", "close"}
    provisioners[1].fails = {"close": RuntimeError("already closed")}
    harness = Harness(*provisioners, min_nodes=2, timeout_s=0.1)
    await harness.ticks(3)
    async with asyncio.timeout(5):
        await harness.loop.close()
    assert all(provisioner.closed for provisioner in provisioners)


# Random failures.


@pytest.mark.parametrize("seed", range(8))
async def test_the_fleet_reaches_its_size_whatever_provisioners_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random errors, stale reports, deaths and spot notices. No node is terminated while it has requests."""
    dice = random.Random(seed)
    provisioners = [ScriptedProvisioner("a", "x", "y"), ScriptedProvisioner("b", "z")]
    cut: list[str] = []

    def machines() -> int:
        return sum(len(one.running) for one in provisioners)

    monkeypatch.setattr(node_lifecycle, "REQUEST_TIMEOUT_S", 15.0)
    async with running(*provisioners, timeout_s=0.02, boot_timeout_s=15.0, load_timeout_s=20.0) as harness:
        tickets: dict[str, list[Ticket]] = {}
        for at in range(300):
            for provisioner in provisioners:
                _stir(provisioner, dice)
            if dice.random() < 0.05:
                harness.want(dice.randint(1, 4), offer_backoff_s=5.0, cooldown_up_s=3.0)
            for name in harness.routable():
                if dice.random() < 0.3:
                    tickets.setdefault(name, []).append(Ticket(harness.fleet.node(name), harness.clock.now_s))
            for held in tickets.values():
                while held and dice.random() < 0.5:
                    held.pop().close(Outcome.OK, harness.clock.now_s)
            ours = {managed.token: managed.name for managed in harness.managed}
            ended = {provisioner.name: len(provisioner.terminated) for provisioner in provisioners}
            await harness.tick()
            for provisioner in provisioners:
                for token in provisioner.terminated[ended[provisioner.name] :]:
                    cut += [name for name in (ours.get(token, ""),) if tickets.get(name)]
            if at % 20 == 0:
                await asyncio.sleep(0.03)  # what hangs is given up
        for held in tickets.values():
            for ticket in held:
                ticket.close(Outcome.OK, harness.clock.now_s)
        for provisioner in provisioners:
            provisioner.fails.clear()
            provisioner.hangs.clear()
            provisioner.reported, provisioner.first_state = None, MachineState.RUNNING
            for machine in provisioner.running:
                if machine.reclaimed or machine.state is MachineState.PENDING:
                    provisioner.change(machine, state=MachineState.TERMINATED)
        await asyncio.sleep(0.05)
        harness.want(3, offer_backoff_s=5.0, cooldown_up_s=3.0)
        await harness.until(
            lambda: len(harness.serving()) == 3 and machines() == 3 == len(harness.fleet),
            400,
        )
        await harness.ticks(100)
        assert (
            len(harness.serving())
            == sum(len(provisioner.running) for provisioner in provisioners)
            == len(harness.fleet)
            == 3
        )
        assert harness.states == ["serving"] * 3
        assert not cut


def _stir(provisioner: ScriptedProvisioner, dice: random.Random) -> None:
    if dice.random() < 0.1:
        errors = [NoCapacity("none"), ProvisionerError("500"), RuntimeError("what?")]
        calls = ["offers", "status", "provision", "terminate"]
        provisioner.fails = {call: dice.choice(errors) for call in calls if dice.random() < 0.25}
        provisioner.hangs = {call for call in calls if dice.random() < 0.1}
        provisioner.first_state = dice.choice([MachineState.RUNNING, MachineState.RUNNING, MachineState.PENDING])
    if dice.random() < 0.05:
        provisioner.reported = (
            None
            if provisioner.reported is not None
            else [each for each in provisioner.machines.values() if dice.random() < 0.8]
        )
    for machine in provisioner.running:
        chance = dice.random()
        if chance < 0.005:
            provisioner.change(machine, state=MachineState.TERMINATED)
        elif chance < 0.01:
            provisioner.change(machine, reclaimed=True)
        elif machine.state is MachineState.PENDING and chance < 0.2:
            provisioner.change(machine, state=MachineState.RUNNING, url=f"http://10.1.0.{machine.id[1:]}:8000")
