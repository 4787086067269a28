"""What a cloud that is slow, half there or wrong does to what the driver sees of it (`scaling/provisioner_client.py`)."""

from __future__ import annotations

import time

import msgspec
import pytest
from scripted_provisioner import ScriptedProvisioner, World

from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import Machine, MachineState, ProvisionerError, ProvisionerTimeout
from warmroute.scaling.provisioner_client import ProvisionerClient


async def test_a_machine_listed_twice_is_one_machine() -> None:
    """Pages that move while they are read tell of one twice."""
    cloud = ScriptedProvisioner()
    one = World(cloud, min_nodes=1)
    await one.until(lambda: one.states == ["serving"])
    (machine,) = cloud.running
    cloud.told = [machine, msgspec.structs.replace(machine)]
    await one.ticks(20)
    assert one.states == ["serving"] and not cloud.ended
    await one.driver.close()


async def test_of_two_entries_for_a_machine_the_later_counts() -> None:
    cloud = ScriptedProvisioner()
    before = Machine(id="m", token="t", offer="small", state=MachineState.PENDING)
    after = Machine(id="m", token="t", offer="small", state=MachineState.RUNNING, url="http://10.0.0.1:8000")
    cloud.told = [before, after]
    seen = ProvisionerClient(cloud, 30.0, time.monotonic)
    assert await seen.look()
    assert seen.machines == {"t": after} and seen.surplus == ()


async def test_machines_are_reported_while_offers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spot machine's notice is told by the status."""
    monkeypatch.setattr("warmroute.scaling.provisioner_client.OFFERS_PATIENCE_S", 0.05)
    cloud = ScriptedProvisioner()
    cloud.hangs.add("offers")
    machine = cloud.make("t")
    seen = ProvisionerClient(cloud, 30.0, time.monotonic)
    assert await seen.look() and seen.machines == {"t": machine} and not seen.offers
    reclaimed = cloud.change(machine, reclaimed=True)
    assert await seen.look() and seen.machines == {"t": reclaimed}
    assert cloud.calls.count("offers") == 1, "the first is still under way"
    cloud.hangs.clear()
    assert await seen.look() and [offer.name for offer in seen.offers] == ["small"]
    await seen.close()


class Slow(ScriptedProvisioner):
    """Gives up by itself when its own time is over, and says so."""

    async def provision(self, offer: Offer, token: str) -> None:
        raise ProvisionerTimeout("slow: provision took longer than 30 s")


async def test_a_call_that_timed_out_in_the_provisioner_may_have_created_a_machine() -> None:
    cloud = Slow()
    with pytest.raises(TimeoutError) as error:
        await ProvisionerClient(cloud, 30.0, time.monotonic).provision(cloud.on_offer[0], "t")
    assert isinstance(error.value, ProvisionerError)
    one = World(cloud, min_nodes=1)
    await one.ticks(3)
    (life,) = one.lives
    assert one.states == ["requested"]
    cloud.make(life.token)
    await one.until(lambda: one.states == ["serving"])
    await one.driver.close()
