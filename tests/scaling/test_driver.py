"""The driver with clouds that are slow, full, forgetful or mad: what never happens, and what comes about."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from scripted_clouds import Clock, ScriptedCloud, World, serving, world

from warmroute.config import Config, IslandLimits, NodeConfig, Scaling
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.scaling.leader import FileLock
from warmroute.scaling.node_lifecycle import State
from warmroute.scaling.provisioner import CloudError, MachineState, NoCapacity
from warmroute.service import _say_standing

pytestmark = pytest.mark.usefixtures("impatient")


async def test_a_node_comes_is_watched_serves_and_goes() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1) as one:
        await one.tick()
        await one.tick()
        assert len(cloud.asked) == 1 and one.states == ["booting"]
        await one.tick()
        (life,) = one.lives
        assert life.state is State.LOADING and one.fleet.node(life.name).draining
        assert one.fleet.node(life.name).config.gpu == "L4" and one.fleet.node(life.name).island == "here"
        await one.until(lambda: one.states == ["serving"])
        assert one.takes_requests() == [life.name] and one.driver.added == 1
        await serving(one, 2)
        assert len(cloud.asked) == 2 and len(one.takes_requests()) == 2
        await serving(one, 1)
        assert len(cloud.ended) == 1 and len(cloud.running) == len(one.fleet) == 1 and one.driver.given_back == 1
        await one.ticks(100)
        assert len(cloud.asked) == 2 and len(cloud.ended) == 1 and one.driver.lost == 0


# Clouds that are slow.


@pytest.mark.parametrize("call", ["offers", "status", "provision"])
async def test_no_turn_waits_for_a_cloud_that_hangs(call: str) -> None:
    cloud, other = ScriptedCloud("slow"), ScriptedCloud("quick", usd_per_hour=5.0)
    async with world(cloud, other, cooldown_up_s=1.0) as one:
        await serving(one, 1)
        cloud.hangs.add(call)
        one.want(3)
        calls = len(other.calls)
        await one.ticks(100)  # each of them would hang here for good
        assert other.calls[calls:].count("status") == 100
        assert len(one.serving()) == (1 if call == "status" else 3)


async def test_a_hanging_end_keeps_no_other_waiting_and_is_tried_again_after_its_time_is_over() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, timeout_s=0.05) as one:
        await serving(one, 2)
        cloud.hangs.add("terminate")
        one.want(1)
        await one.until(lambda: "ending" in one.states)
        await one.ticks(5)
        assert len(one.takes_requests()) == 1 and not cloud.ended
        cloud.hangs.clear()
        await asyncio.sleep(0.1)
        await one.tick()
        assert one.states == ["serving"] and len(cloud.ended) == 1


async def test_a_request_that_timed_out_may_have_been_heard_and_its_node_is_taken_once() -> None:
    cloud = ScriptedCloud()
    cloud.hangs.add("provision")
    cloud.told = []
    async with world(cloud, timeout_s=0.05, min_nodes=1) as one:
        await one.ticks(2)
        await asyncio.sleep(0.1)
        await one.ticks(5)
        assert one.states == ["requested"]
        cloud.told = None
        await one.until(lambda: one.states == ["serving"])
        await one.ticks(50)
        assert len(cloud.asked) == len(cloud.machines) == len(one.fleet) == 1 and not cloud.ended


async def test_a_request_that_timed_out_and_was_never_heard_is_given_up() -> None:
    cloud = ScriptedCloud("cloud", "a", "b")
    cloud.hangs.add("provision")
    cloud.told = []
    async with world(cloud, timeout_s=0.02, min_nodes=1, request_limit_s=20.0) as one:
        await one.ticks(2)
        await asyncio.sleep(0.05)
        cloud.hangs.clear()
        await one.ticks(25)
        assert [name for name, _ in cloud.asked] == ["a", "b"]
        cloud.told = None  # now both are seen: one that is served by, and one whose time was over
        await one.until(lambda: one.states == ["serving"] and len(cloud.running) == 1)
        assert cloud.ended == [cloud.asked[0][1]]


# Clouds that say no.


async def test_a_refused_offer_rests_and_the_next_is_taken_without_waiting_for_the_cooldown() -> None:
    cloud = ScriptedCloud("cloud", "a", "b", "c")
    cloud.fails = {"a": NoCapacity("no a in this zone"), "b": NoCapacity("nor b")}
    async with world(cloud, min_nodes=1, cooldown_up_s=600.0) as one:
        await one.until(lambda: one.states == ["serving"], 10)
        assert [name for name, _ in cloud.asked] == ["a", "b", "c"] and one.driver.refusals == 2
        resting = one.core.market.resting(one.clock.now_s)
        assert {key[1]: why for key, (_, why) in resting.items()} == {"a": "no a in this zone", "b": "nor b"}


async def test_when_every_offer_rests_it_is_tried_again_after_the_rest_and_no_sooner() -> None:
    cloud = ScriptedCloud("cloud", "a")
    cloud.fails = {"a": NoCapacity("none")}
    async with world(cloud, min_nodes=1, rest_s=60.0, cooldown_up_s=1.0) as one:
        await one.ticks(60)
        assert len(cloud.asked) == 1
        await one.ticks(10)
        assert len(cloud.asked) == 2
        await one.ticks(100)
        assert len(cloud.asked) == 2  # twice as long
        cloud.fails.clear()
        await one.until(lambda: one.states == ["serving"])


@pytest.mark.parametrize("error", [CloudError("500"), RuntimeError("a bug in a library")])
async def test_what_failed_may_have_begun_and_is_ended_then(error: Exception) -> None:
    cloud = ScriptedCloud("cloud", "a", "b")
    cloud.fails = {"a": error}
    async with world(cloud, min_nodes=1) as one:
        await one.ticks(3)
        stray = cloud.make(cloud.asked[0][1], "a")
        await one.until(lambda: one.states == ["serving"] and len(cloud.running) == 1)
        assert cloud.ended == [stray.token] and [name for name, _ in cloud.asked] == ["a", "b"]
        assert one.driver.refusals == 1


async def test_an_error_counts_less_than_the_machine_that_its_cloud_tells_of() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1, timeout_s=60.0) as one:
        cloud.hangs.add("provision")
        one.ill.add("http://10.0.0.1:8000")
        await one.until(lambda: one.states == ["loading"])
        (life,) = one.lives
        one.ill.clear()
        await one.driver._provision(_refusing(one), life)
        await one.until(lambda: one.states == ["serving"])
        assert not cloud.ended and one.driver.refusals == 0


def _refusing(one: World) -> Any:
    class Refusing:
        name = one.clouds[0].name

        @staticmethod
        async def provision(*_: object) -> None:
            raise NoCapacity("it is not there")

    return Refusing()


async def test_nothing_is_asked_for_before_every_cloud_has_said_what_it_has() -> None:
    cloud = ScriptedCloud()
    cloud.make("old")
    cloud.fails["offers"] = CloudError("no prices today")
    cloud.hangs.add("status")
    other = ScriptedCloud("other")
    async with world(cloud, other, min_nodes=1) as one:
        await one.ticks(10)
        assert one.core.last is None
        cloud.hangs.clear()
        await asyncio.sleep(0.01)
        await one.until(lambda: one.states == ["serving"])
        assert one.lives[0].token == "old" and not other.asked


async def test_a_cloud_that_cannot_say_holds_nobody_for_ever() -> None:
    cloud, other = ScriptedCloud("mute"), ScriptedCloud("other", usd_per_hour=9.0)
    cloud.fails = {"status": CloudError("denied"), "offers": CloudError("denied")}
    async with world(cloud, other, min_nodes=1) as one:
        await one.until(lambda: one.states == ["serving"])
        assert other.asked and not cloud.asked


async def test_a_failure_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    cloud = ScriptedCloud()
    cloud.fails["offers"] = CloudError("no prices today")
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with world(cloud, min_nodes=0) as one:
        await one.ticks(100)
        assert one.clouds[0].problem == "no prices today" and cloud.calls.count("offers") < 20
        cloud.fails.clear()
        await one.ticks(30)
        assert one.clouds[0].problem == ""
    said = [record.message for record in caplog.records if "asking for" in record.message]
    assert said == [
        "cloud: asking for what it offers failed: no prices today",
        "cloud: asking for what it offers works again",
    ]


async def test_an_error_with_an_address_in_its_text_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cloud = ScriptedCloud()
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with world(cloud, min_nodes=0) as one:
        for at in range(20):
            cloud.fails["status"] = RuntimeError(f"<Transport object at 0x{at:x}> is closed")
            await one.tick()
            await one.ticks(2)
        assert one.clouds[0].problem.endswith("0x13> is closed")
        cloud.fails["status"] = ValueError("something else")
        await one.ticks(3)
    said = [record.message for record in caplog.records if "asking for" in record.message]
    assert [words.partition("failed: ")[2] for words in said] == [
        "RuntimeError: <Transport object at 0x0> is closed",
        "ValueError: something else",
    ]


async def test_what_keeps_nodes_from_coming_is_said_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    cloud = ScriptedCloud("cloud", "a")
    cloud.fails = {"a": NoCapacity("none")}
    caplog.set_level(logging.INFO, "warmroute.scaling")

    def said() -> list[str]:
        return [record.message for record in caplog.records if "nodes lack that cannot come" in record.message]

    async with world(cloud, min_nodes=1, max_nodes=1, rest_s=60.0) as one:
        await one.ticks(50)
        (first,) = said()
        assert "cannot come: no offer can be taken: 1 × resting" in first
        assert "(0 nodes, 1 desired; 0 nodes are fewer than the 1 there are to be)" in first
        cloud.fails.clear()
        await one.until(lambda: one.states == ["serving"], 300)
        assert len(said()) == 1
        one.core.reconfigure(Scaling(enabled=True, **{**one.scaling, "islands": (IslandLimits("moon", min_nodes=2),)}))
        await one.ticks(50)
        assert "moon is to have 2 nodes more, and nobody offers any there" in said()[1] and len(said()) == 2


async def test_a_node_has_one_name_in_the_log_and_what_came_of_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cloud = ScriptedCloud("cloud", "a")
    caplog.set_level(logging.INFO, "warmroute.scaling")
    async with world(cloud, min_nodes=1, load_limit_s=20.0, rest_s=3000.0) as one:
        one.ill.add("http://10.0.0.1:8000")
        await one.until(lambda: one.driver.refusals == 1)
        ((_, token),) = cloud.asked
        await one.ticks(3)
        cloud.make("an-older-token-0", "a")
        await one.until(lambda: one.states == ["serving"])
    said = "\n".join(record.message for record in caplog.records)
    name = f"cloud-{token[-8:]}"
    assert f"node {name} is asked for: cloud/a" in said and f"node {name}: requested → booting" in said
    assert token not in said
    assert "cloud/a is rested: its node never came up: it was loading for too long" in said
    assert "of an earlier router: taken over as node cloud--token-0" in said
    assert "1 nodes" not in said


@pytest.mark.parametrize(("draining", "level"), [(True, logging.INFO), (False, logging.WARNING)])
def test_a_node_that_takes_no_requests_is_no_cause_for_alarm(
    draining: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that still loads, or that was told to end, cannot be reached: so it is to be."""
    caplog.set_level(logging.INFO, "warmroute")
    fleet = Fleet(Config().health, _say_standing)
    node = fleet.add(NodeConfig(url="http://10.0.0.1:8000", name="one"))
    fleet.check_passed(node, 0.0)
    fleet.drain("one", draining)
    for at in range(10):
        fleet.check_refused(node, float(at), "it can't be reached")
    (said,) = [record for record in caplog.records if "is open" in record.message]
    assert said.levelno == level


# Machines that do not come, and those that go.


@pytest.mark.parametrize("stuck", [State.BOOTING, State.LOADING])
async def test_a_node_that_never_comes_up_is_given_back_and_its_offer_rests(stuck: State) -> None:
    cloud = ScriptedCloud("cloud", "a", "b")
    if stuck is State.BOOTING:
        cloud.begins = MachineState.PENDING
    async with world(cloud, min_nodes=1, boot_limit_s=50.0, load_limit_s=50.0, rest_s=3000.0) as one:
        one.ill.add("http://10.0.0.1:8000")
        await one.until(lambda: one.states == [stuck.value])
        cloud.begins = MachineState.RUNNING
        await one.ticks(45)
        assert one.states == [stuck.value] and len(cloud.asked) == 1
        await one.until(lambda: one.states == ["serving"])
        assert [name for name, _ in cloud.asked] == ["a", "b"] and cloud.ended == [cloud.asked[0][1]]
        resting = one.core.market.resting(one.clock.now_s)
        assert "never came up: it was" in resting["cloud", "a"][1] and one.driver.refusals == 1
        assert len(one.fleet) == 1


async def test_a_machine_that_ends_while_it_boots_has_its_offer_rest() -> None:
    cloud = ScriptedCloud("cloud", "a", "b")
    cloud.begins = MachineState.PENDING
    async with world(cloud, min_nodes=1) as one:
        await one.until(lambda: one.states == ["booting"])
        cloud.change(cloud.running[0], state=MachineState.ENDED, reason="its disk is full")
        cloud.begins = MachineState.RUNNING
        await one.until(lambda: one.states == ["serving"])
        assert [name for name, _ in cloud.asked] == ["a", "b"]
        assert "its disk is full" in one.core.market.resting(one.clock.now_s)["cloud", "a"][1]


async def test_a_node_that_could_not_be_reached_while_it_booted_serves_when_it_answers() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1) as one:
        one.ill.add("http://10.0.0.1:8000")
        await one.until(lambda: one.states == ["loading"])
        for _ in range(10):  # its address drops packets: nobody says no
            for node in one.fleet:
                one.fleet.check_slow(node, one.clock.now_s)
            await one.tick()
        one.ill.clear()
        await one.until(lambda: one.states == ["serving"], 5)
        assert len(one.takes_requests()) == 1


async def test_a_machine_without_an_address_boots_until_it_has_one() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1) as one:
        machine = cloud.make("old", url="")
        await one.ticks(5)
        assert one.states == ["booting"] and not len(one.fleet)
        cloud.change(machine, url="http://10.1.1.1:8000")
        await one.until(lambda: one.states == ["serving"])
        assert not cloud.asked


@pytest.mark.parametrize("url", ["ftp://10.0.0.9", "http://", "http://10.0.0.9:99999", "http://u@10.0.0.9/path"])
async def test_a_node_with_an_address_that_is_none_is_given_back_and_its_offer_rests(url: str) -> None:
    cloud = ScriptedCloud("cloud", "a", "b")
    cloud.begins = MachineState.PENDING
    async with world(cloud, min_nodes=1) as one:
        await one.until(lambda: one.states == ["booting"])
        cloud.change(cloud.running[0], state=MachineState.RUNNING, url=url)
        cloud.begins = MachineState.RUNNING
        await one.until(lambda: one.states == ["serving"])
        assert [name for name, _ in cloud.asked] == ["a", "b"] and len(cloud.ended) == 1
        assert "it cannot be in the fleet" in one.core.market.resting(one.clock.now_s)["cloud", "a"][1]


async def test_a_machine_that_is_lost_leaves_the_fleet_and_is_replaced() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        first, _ = await serving(one, 2)
        machine = next(each for each in cloud.running if each.url == first.url)
        cloud.change(machine, state=MachineState.ENDED, reason="the host failed")
        await one.tick()
        await one.tick()
        assert first.name not in one.takes_requests() and one.driver.lost == 1
        await one.until(lambda: len(one.serving()) == 2)
        assert len(cloud.asked) == 3


async def test_a_machine_that_is_overlooked_once_is_not_lost_but_one_that_vanishes_is() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, cooldown_up_s=1.0) as one:
        await serving(one, 2)
        before = one.takes_requests()
        there = list(cloud.machines.values())
        for told in ([], there[:1], there, there[1:], there):
            cloud.told = told
            await one.ticks(3)
        assert one.takes_requests() == before and len(cloud.asked) == 2 and one.driver.lost == 0
        del cloud.machines[there[0].id]
        cloud.told = None
        await one.ticks(40)
        assert one.driver.lost == 1 and len(cloud.asked) == 3
        await one.until(lambda: len(one.serving()) == 2)


async def test_a_new_machine_that_its_cloud_does_not_list_yet_is_waited_for() -> None:
    cloud = ScriptedCloud()
    cloud.told = []
    async with world(cloud, min_nodes=1) as one:
        await one.until(lambda: one.states == ["booting"])
        await one.ticks(25)
        cloud.told = None
        await one.until(lambda: one.states == ["serving"])
        assert len(cloud.asked) == 1


async def test_another_machine_with_the_same_token_is_another_node() -> None:
    """A controller may replace a machine by itself: it has another address then."""
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        (node,) = await serving(one, 1)
        cloud.change(cloud.running[0], url="http://10.9.9.9:8000")
        await one.until(lambda: bool(one.serving()) and one.serving()[0] is not node)
        assert (
            [each.url for each in one.fleet] == ["http://10.9.9.9:8000"] and len(cloud.asked) == 1 and not cloud.ended
        )


async def test_an_address_that_had_another_node_before_is_taken_when_that_one_is_gone() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        (node,) = await serving(one, 1)
        old = cloud.running[0]
        cloud.begins = MachineState.PENDING
        cloud.make("a-new-one", url=old.url, state=MachineState.RUNNING)  # sorts before or after, it must not matter
        cloud.change(old, state=MachineState.ENDED)
        cloud.machines = dict(reversed(cloud.machines.items()))
        await one.until(lambda: len(one.serving()) == 1 and one.serving()[0] is not node, 10)
        assert one.lives[0].token == "a-new-one" and len(one.fleet) == 1


async def test_two_machines_at_one_address_are_one_node() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 1)
        cloud.make("mad", url=cloud.running[0].url)
        await one.ticks(10)
        assert len(one.fleet) == 1 and one.states == ["booting", "serving"]


# Machines that nobody asked for.


async def test_the_next_router_takes_over_what_the_last_one_left_and_asks_for_nothing() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 3)
    assert cloud.closed and len(cloud.running) == 3 and not cloud.ended
    async with world(cloud) as two:
        await serving(two, 3)
        await two.ticks(30)
        assert len(cloud.asked) == 3 and len(two.fleet) == 3 and not cloud.ended
        assert two.core.market.start_s(cloud.on_offer[0]) == 60.0  # how long they took to start is not known
        await serving(two, 1)
        assert len(cloud.running) == 1


async def test_a_crash_while_a_request_was_under_way_leaves_no_orphan() -> None:
    cloud = ScriptedCloud()
    cloud.hangs.add("provision")
    async with world(cloud, min_nodes=2) as one:
        await one.ticks(2)
        assert len(cloud.asked) == 2
    cloud.hangs.clear()
    async with world(cloud, min_nodes=1, max_nodes=1) as two:  # and this one wants only one
        await two.until(lambda: len(cloud.running) == 1)
        await two.until(lambda: two.states == ["serving"])
        assert len(cloud.asked) == 2 and len(cloud.ended) == 1


async def test_a_second_machine_with_the_same_token_is_ended() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        (node,) = await serving(one, 1)
        token = one.lives[0].token
        for _ in range(2):
            second = cloud.make(token)
            cloud.machines = dict(reversed(cloud.machines.items()))
            await one.ticks(3)
            assert cloud.machines[second.id].state is MachineState.ENDED
        assert one.serving() == [node] and len(cloud.running) == 1 and len(one.fleet) == 1
        assert one.states == ["serving"] and one.driver.lost == 0


async def test_what_ended_before_is_nobodys_and_twice_is_once() -> None:
    cloud = ScriptedCloud()
    for number in range(3):
        cloud.make(f"old{number}", state=MachineState.ENDED if number else MachineState.ENDING)
    async with world(cloud) as one:
        await serving(one, 1)
        assert len(one.fleet) == 1 and len(cloud.asked) == 1
        machine = cloud.running[0]
        ended = cloud.change(machine, state=MachineState.ENDED)
        cloud.told = [ended, ended]
        await one.ticks(3)
        cloud.told = None
        assert one.driver.lost == 1
        await one.until(lambda: len(one.serving()) == 1)


async def test_a_machine_without_a_token_is_left_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cloud = ScriptedCloud()
    cloud.make("")
    async with world(cloud) as one:
        await serving(one, 1)
        assert len(one.fleet) == 1 and not cloud.ended
    assert sum("has no token" in record.message for record in caplog.records) == 1


async def test_a_status_that_lags_brings_nobody_back_from_the_dead() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        cloud.told = list(cloud.machines.values())  # as of now, for a while
        one.want(1)
        await one.until(lambda: len(cloud.ended) == 1)
        await one.ticks(20)
        assert one.states == ["serving"] and len(one.fleet) == 1 and len(cloud.ended) == 1
        cloud.told = None
        await one.ticks(60)
        assert one.states == ["serving"] and len(cloud.asked) == 2 and one.driver.refusals == 0


async def test_a_machine_that_runs_on_after_its_end_is_ended_again() -> None:
    cloud = ScriptedCloud()
    async with world(cloud) as one:
        await serving(one, 2)
        one.want(1)
        await one.until(lambda: len(cloud.ended) == 1)
        risen = next(each for each in cloud.machines.values() if each.state is MachineState.ENDED)
        cloud.change(risen, state=MachineState.RUNNING)
        await one.ticks(40)
        assert cloud.ended == [risen.token] * 2 and one.states == ["serving"]


# Dry run, reload, lock.


async def test_a_dry_run_touches_nothing() -> None:
    cloud = ScriptedCloud()
    cloud.make("old")
    async with world(cloud, min_nodes=3, dry_run=True) as one:
        await one.ticks(60)
        assert set(cloud.calls) == {"offers", "status"} and not one.lives and not len(one.fleet)
        assert one.core.last is not None and one.core.desired_nodes == 3 and len(one.core.last.reasons) > 0


async def test_a_dry_run_that_begins_later_lets_what_had_begun_go_on() -> None:
    cloud = ScriptedCloud()
    cloud.begins = MachineState.PENDING
    async with world(cloud, min_nodes=1) as one:
        await one.until(lambda: one.states == ["booting"])
        one.want(3, dry_run=True)
        cloud.change(cloud.running[0], state=MachineState.RUNNING, url="http://10.1.1.1:8000")
        await one.until(lambda: one.states == ["serving"])
        await one.ticks(30)
        assert len(cloud.asked) == 1
        one.want(3, dry_run=False)
        cloud.begins = MachineState.RUNNING
        await one.until(lambda: len(one.serving()) == 3)


async def test_changed_limits_count_from_the_next_decision_on() -> None:
    cloud = ScriptedCloud()
    async with world(cloud, min_nodes=1, max_nodes=1) as one:
        await one.until(lambda: one.states == ["serving"])
        await one.ticks(40)
        one.want(4)
        await one.tick()
        assert len(cloud.asked) == 4
        await one.until(lambda: len(one.serving()) == 4)
        cloud.begins = MachineState.PENDING
        one.want(5, boot_limit_s=10.0, cooldown_up_s=1.0)
        await one.until(lambda: len(cloud.asked) == 5)
        await one.ticks(15)
        assert len(cloud.ended) == 1


async def test_only_one_of_two_scales_and_the_other_takes_over(tmp_path: Path) -> None:
    cloud, clock = ScriptedCloud(), Clock()
    first, second = FileLock(tmp_path / "deep" / "lock"), FileLock(tmp_path / "deep" / "lock")
    async with (
        world(cloud, clock=clock, leads=first.leads, min_nodes=2) as one,
        world(cloud, clock=clock, leads=second.leads, min_nodes=2) as two,
    ):
        for _ in range(10):
            await one.tick()
            await two.tick()
        assert one.driver.leading and not two.driver.leading
        assert len(one.serving()) == 2 and not two.lives and len(cloud.asked) == 2
        first.release()
        for _ in range(10):
            await two.tick()
        assert two.driver.leading and len(two.serving()) == 2 and len(cloud.asked) == 2 and not cloud.ended
        await one.tick()
        assert not one.driver.leading


def test_a_lock_whose_file_somebody_removed_leads_only_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.leads() and not second.leads()
    path.unlink()
    assert second.leads() and not first.leads()
    second.release()
    assert first.leads()


async def test_closing_waits_for_no_cloud() -> None:
    clouds = [ScriptedCloud("a"), ScriptedCloud("b")]
    clouds[0].hangs = {"provision", "close"}
    clouds[1].fails = {"close": RuntimeError("already closed")}
    one = World(*clouds, min_nodes=2, timeout_s=0.1)
    await one.ticks(3)
    async with asyncio.timeout(5):
        await one.driver.close()
    assert all(cloud.closed for cloud in clouds)


# All at once.


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_clouds_do_in_the_end_there_is_what_is_wanted_and_nothing_else(seed: int) -> None:
    """Errors, lags, deaths and notices at random; no node is ended while a request of ours runs on it."""
    dice = random.Random(seed)
    clouds = [ScriptedCloud("a", "x", "y"), ScriptedCloud("b", "z")]
    cut: list[str] = []
    async with world(*clouds, timeout_s=0.02, request_limit_s=15.0, boot_limit_s=15.0, load_limit_s=20.0) as one:
        tickets: dict[str, list[Ticket]] = {}
        for at in range(300):
            for cloud in clouds:
                _stir(cloud, dice)
            if dice.random() < 0.05:
                one.want(dice.randint(1, 4), rest_s=5.0, cooldown_up_s=3.0)
            for name in one.takes_requests():
                if dice.random() < 0.3:
                    tickets.setdefault(name, []).append(Ticket(one.fleet.node(name), one.clock.now_s))
            for held in tickets.values():
                while held and dice.random() < 0.5:
                    held.pop().close(Outcome.OK, one.clock.now_s)
            ours = {life.token: life.name for life in one.lives}
            ended = {cloud.name: len(cloud.ended) for cloud in clouds}
            await one.tick()
            for cloud in clouds:
                for token in cloud.ended[ended[cloud.name] :]:
                    cut += [name for name in (ours.get(token, ""),) if tickets.get(name)]
            if at % 20 == 0:
                await asyncio.sleep(0.03)  # what hangs is given up
        for held in tickets.values():
            for ticket in held:
                ticket.close(Outcome.OK, one.clock.now_s)
        for cloud in clouds:
            cloud.fails.clear()
            cloud.hangs.clear()
            cloud.told, cloud.begins = None, MachineState.RUNNING
            for machine in cloud.running:
                if machine.reclaimed or machine.state is MachineState.PENDING:
                    cloud.change(machine, state=MachineState.ENDED)
        await asyncio.sleep(0.05)
        one.want(3, rest_s=5.0, cooldown_up_s=3.0)
        await one.until(
            lambda: len(one.serving()) == 3 and sum(len(cloud.running) for cloud in clouds) == 3 == len(one.fleet),
            400,
        )
        await one.ticks(100)
        assert len(one.serving()) == sum(len(cloud.running) for cloud in clouds) == len(one.fleet) == 3
        assert one.states == ["serving"] * 3
        assert not cut


def _stir(cloud: ScriptedCloud, dice: random.Random) -> None:
    if dice.random() < 0.1:
        errors = [NoCapacity("none"), CloudError("500"), RuntimeError("what?")]
        calls = ["offers", "status", "provision", "terminate"]
        cloud.fails = {call: dice.choice(errors) for call in calls if dice.random() < 0.25}
        cloud.hangs = {call for call in calls if dice.random() < 0.1}
        cloud.begins = dice.choice([MachineState.RUNNING, MachineState.RUNNING, MachineState.PENDING])
    if dice.random() < 0.05:
        cloud.told = (
            None if cloud.told is not None else [each for each in cloud.machines.values() if dice.random() < 0.8]
        )
    for machine in cloud.running:
        chance = dice.random()
        if chance < 0.005:
            cloud.change(machine, state=MachineState.ENDED)
        elif chance < 0.01:
            cloud.change(machine, reclaimed=True)
        elif machine.state is MachineState.PENDING and chance < 0.2:
            cloud.change(machine, state=MachineState.RUNNING, url=f"http://10.1.0.{machine.id[1:]}:8000")
