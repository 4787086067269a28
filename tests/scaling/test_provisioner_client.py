"""The provisioner client with provisioners that are slow, unreliable or wrong."""

from __future__ import annotations

import time

import msgspec
import pytest
from scripted_provisioner import Harness, ScriptedProvisioner

from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import Machine, MachineState, ProvisionerClient, ProvisionerError, ProvisionerTimeout


async def test_a_machine_listed_twice_is_one_machine() -> None:
    """Pages that change between two calls may list a machine twice."""
    provisioner = ScriptedProvisioner()
    harness = Harness(provisioner, min_nodes=1)
    await harness.until(lambda: harness.states == ["serving"])
    (machine,) = provisioner.running
    provisioner.reported = [machine, msgspec.structs.replace(machine)]
    await harness.ticks(20)
    assert harness.states == ["serving"] and not provisioner.terminated
    await harness.loop.close()


async def test_of_two_entries_for_a_machine_the_later_counts() -> None:
    provisioner = ScriptedProvisioner()
    before = Machine(id="m", token="t", offer="small", state=MachineState.PENDING)
    after = Machine(id="m", token="t", offer="small", state=MachineState.RUNNING, url="http://10.0.0.1:8000")
    provisioner.reported = [before, after]
    client = ProvisionerClient(provisioner, 30.0, time.monotonic)
    assert await client.refresh()
    assert client.machines == {"t": after} and client.duplicates == ()


async def test_machines_are_reported_while_offers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status reports spot notices."""
    monkeypatch.setattr("warmroute.scaling.provisioner.OFFERS_WAIT_S", 0.05)
    provisioner = ScriptedProvisioner()
    provisioner.hangs.add("offers")
    machine = provisioner.create("t")
    client = ProvisionerClient(provisioner, 30.0, time.monotonic)
    assert await client.refresh() and client.machines == {"t": machine} and not client.offers
    reclaimed = provisioner.change(machine, reclaimed=True)
    assert await client.refresh() and client.machines == {"t": reclaimed}
    assert provisioner.calls.count("offers") == 1, "the first call is still running"
    provisioner.hangs.clear()
    assert await client.refresh() and [offer.name for offer in client.offers] == ["small"]
    await client.close()


class Slow(ScriptedProvisioner):
    """Times out by itself."""

    async def provision(self, offer: Offer, token: str) -> None:
        raise ProvisionerTimeout("slow: provision took longer than 30 s")


async def test_a_call_that_timed_out_in_the_provisioner_may_have_created_a_machine() -> None:
    provisioner = Slow()
    with pytest.raises(TimeoutError) as error:
        await ProvisionerClient(provisioner, 30.0, time.monotonic).provision(provisioner.on_offer[0], "t")
    assert isinstance(error.value, ProvisionerError)
    harness = Harness(provisioner, min_nodes=1)
    await harness.ticks(3)
    (managed,) = harness.managed
    assert harness.states == ["requested"]
    provisioner.create(managed.token)
    await harness.until(lambda: harness.states == ["serving"])
    await harness.loop.close()
