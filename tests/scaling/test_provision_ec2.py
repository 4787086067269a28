"""The `ec2` provisioner against moto's server: two regions, tags, capacity, quota, spot, pages, and calls that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from moto_server import IMAGE, Moto
from scripted_provisioner import Harness

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerClient, ProvisionerError
from warmroute.scaling.provisioners.ec2 import Ec2Provisioner

EAST, WEST = "us-east-1", "us-west-2"
PRICES = {f"{EAST}/g4dn.xlarge": 0.526, f"{WEST}/g4dn.xlarge": 0.6, f"{EAST}/g4dn.xlarge/spot": 0.2}


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    patch = pytest.MonkeyPatch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        patch.setenv(name, "testing")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", "/dev/null")
    server = Moto()
    yield server
    server.close()
    patch.undo()


@pytest.fixture(autouse=True)
def clean(moto: Moto) -> None:
    moto.reset()
    for region in (EAST, WEST):
        client = moto.client(region)
        for reservation in client.describe_instances()["Reservations"]:
            client.terminate_instances(InstanceIds=[one["InstanceId"] for one in reservation["Instances"]])
    moto.reset()


def create(moto: Moto, **changes: Any) -> Ec2Provisioner:
    values: dict[str, Any] = {
        "kind": "ec2",
        "regions": (EAST, WEST),
        "instance_types": ("g4dn.xlarge",),
        "prices": PRICES,
        "images": {EAST: IMAGE, WEST: IMAGE},
        "endpoint_url": moto.url,
        "deployment": f"test-{time.time_ns()}",
        "expected_start_s": 240.0,
    }
    return Ec2Provisioner(ProvisionerConfig(**values | changes), moto.session)


async def offer_in(provisioner: Ec2Provisioner, region: str, *, spot: bool = False) -> Offer:
    (found,) = [one for one in await provisioner.offers() if one.name.startswith(region) and one.spot == spot]
    return found


async def test_offers_are_instance_types_in_regions_with_their_gpus(moto: Moto) -> None:
    provisioner = create(
        moto, instance_types=("g4dn.xlarge", "g4dn.12xlarge", "no.such"), prices=PRICES | {"g4dn.12xlarge": 3.9}
    )
    offers = {offer.name: offer for offer in await provisioner.offers()}
    assert sorted(offers) == [
        "us-east-1/g4dn.12xlarge",
        "us-east-1/g4dn.xlarge",
        "us-west-2/g4dn.12xlarge",
        "us-west-2/g4dn.xlarge",
    ]
    one = offers["us-east-1/g4dn.12xlarge"]
    assert (one.gpu, one.gpus, one.usd_per_hour, one.island, one.start_s) == ("T4", 4, 3.9, "aws/us-east-1", 240.0)
    assert offers["us-west-2/g4dn.xlarge"].usd_per_hour == 0.6
    await provisioner.close()


async def test_spot_prices_come_from_the_history_and_invalid_ones_are_reported(moto: Moto) -> None:
    provisioner = create(moto, regions=(EAST,), markets=("on_demand", "spot"), prices={})
    assert await provisioner.offers() == []
    assert (
        provisioner._validator.problems[0]
        == "offer 'us-east-1/g4dn.xlarge' has no price: dropped (set provisioners.prices)"
    )
    assert "/spot' costs $1e-05/hour, below $0.02 per GPU" in provisioner._validator.problems[1]  # moto's price for all
    await provisioner.close()
    provisioner = create(moto, regions=(EAST,), markets=("spot",), prices={}, min_usd_per_gpu_hour=0.0)
    assert [(offer.spot, offer.usd_per_hour) for offer in await provisioner.offers()] == [(True, 1e-05)]
    await provisioner.close()


async def test_a_configured_spot_price_replaces_the_history(moto: Moto) -> None:
    provisioner = create(moto, regions=(EAST,), markets=("spot",))
    (offer,) = await provisioner.offers()
    assert (offer.name, offer.usd_per_hour, offer.spot) == ("us-east-1/g4dn.xlarge/spot", 0.2, True)
    await provisioner.close()


async def test_an_instance_is_requested_once_tagged_found_and_terminated(moto: Moto) -> None:
    provisioner = create(moto)
    offer = await offer_in(provisioner, EAST)
    await provisioner.provision(offer, "t1")
    await provisioner.provision(offer, "t1")  # moto ignores client tokens, so the tag prevents a second one
    (machine,) = await provisioner.status()
    assert (machine.token, machine.offer, machine.state) == ("t1", offer.name, MachineState.RUNNING)
    assert machine.url.startswith("http://10.") and machine.url.endswith(":8000") and machine.island == "aws/us-east-1"
    (request,) = [one for one in moto.requests if one.get("Action") == ["RunInstances"]]
    assert len(request["ClientToken"][0]) == 64
    instance = machine.id.partition("/")[2]
    described = moto.client(EAST).describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in described["Tags"]}
    assert tags["warmroute:token"] == "t1" and tags["warmroute:offer"] == offer.name
    await provisioner.terminate(machine)
    await provisioner.terminate(machine)
    assert [one.state for one in await provisioner.status()] == [MachineState.TERMINATED]
    await provisioner.terminate(
        Machine(id=f"{EAST}/i-0123456789abcdef0", token="t", offer="", state=MachineState.RUNNING)
    )
    await provisioner.close()


async def test_only_instances_of_the_deployment_are_reported(moto: Moto) -> None:
    mine, other = create(moto), create(moto)
    await other.provision(await offer_in(other, EAST), "theirs")
    moto.client(EAST).run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1, InstanceType="t3.micro")
    assert await mine.status() == []
    assert [machine.token for machine in await other.status()] == ["theirs"]
    await mine.close()
    await other.close()


async def test_a_full_region_and_a_used_up_quota_are_no_capacity(moto: Moto) -> None:
    provisioner = create(moto)
    east, west = await offer_in(provisioner, EAST), await offer_in(provisioner, WEST)
    moto.full(EAST)
    with pytest.raises(NoCapacity, match="us-east-1: run instances: InsufficientInstanceCapacity: We currently do not"):
        await provisioner.provision(east, "t1")
    moto.refuse[EAST, "RunInstances"] = (400, "VcpuLimitExceeded", "You have requested more vCPU capacity")
    with pytest.raises(NoCapacity, match="VcpuLimitExceeded"):
        await provisioner.provision(east, "t1")
    moto.refuse[EAST, "RunInstances"] = (403, "UnauthorizedOperation", "You are not authorized")
    with pytest.raises(ProvisionerError, match="UnauthorizedOperation") as error:
        await provisioner.provision(east, "t1")
    assert not isinstance(error.value, NoCapacity)
    await provisioner.provision(west, "t1")
    (machine,) = await provisioner.status()
    assert machine.island == "aws/us-west-2"
    await provisioner.close()


async def test_a_tagged_spot_instance_is_reclaimed(moto: Moto) -> None:
    provisioner = create(moto, regions=(EAST,), markets=("spot",))
    (offer,) = await provisioner.offers()
    await provisioner.provision(offer, "t1")
    (request,) = [one for one in moto.requests if one.get("Action") == ["RunInstances"]]
    assert request["InstanceMarketOptions.MarketType"] == ["spot"]
    (machine,) = await provisioner.status()
    assert not machine.reclaimed
    instance = machine.id.partition("/")[2]
    # A rule on EventBridge's interruption warning would write this tag.
    moto.client(EAST).create_tags(Resources=[instance], Tags=[{"Key": "warmroute:reclaimed", "Value": "two minutes"}])
    (machine,) = await provisioner.status()
    assert machine.reclaimed and machine.reason == "two minutes"
    await provisioner.close()


def test_a_spot_instance_marked_for_termination_is_reclaimed(moto: Moto) -> None:
    """moto never marks a spot request, so this test has AWS's answer."""
    provisioner = create(moto)

    filters: list[list[str]] = []

    class Client:
        def get_paginator(self, name: str) -> Client:
            assert name == "describe_spot_instance_requests"
            return self

        def paginate(self, Filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            (values,) = [one["Values"] for one in Filters]
            filters.append(values)
            marked = {"Code": "marked-for-termination", "Message": "Your Spot instance is marked for termination"}
            for each in values:  # a page for each
                status = marked if each in ("sir-1", "sir-201") else {"Code": "fulfilled"}
                yield {"SpotInstanceRequests": [{"InstanceId": each.replace("sir", "i"), "Status": status}]}

    provisioner._clients["r"] = Client()
    spots = [
        {"InstanceId": f"i-{number}", "SpotInstanceRequestId": f"sir-{number}", "State": {"Name": "running"}}
        for number in range(1, 203)
    ]
    ended = {"InstanceId": "i-e", "SpotInstanceRequestId": "sir-e", "State": {"Name": "terminated"}}
    reason = "Your Spot instance is marked for termination"
    assert provisioner._reclaim_reasons("r", [*spots, ended, {"InstanceId": "i-3"}]) == {
        "i-1": reason,
        "i-201": reason,
    }
    assert [len(values) for values in filters] == [200, 2]  # AWS's limit for one filter


async def test_a_stopped_instance_is_reclaimed(moto: Moto) -> None:
    """It serves no requests, and its disks are paid for."""
    provisioner = create(moto)
    await provisioner.provision(await offer_in(provisioner, EAST), "t1")
    (machine,) = await provisioner.status()
    moto.client(EAST).stop_instances(InstanceIds=[machine.id.partition("/")[2]])
    harness = Harness(provisioner, min_nodes=0, max_nodes=1)
    async with asyncio.timeout(30):
        while moto.state(EAST, machine.id.partition("/")[2]) != "terminated":
            await harness.tick()
            await asyncio.sleep(0.05)
    await harness.loop.close()


async def test_a_region_that_hangs_does_not_affect_others(moto: Moto) -> None:
    patient = create(moto)
    await patient.provision(await offer_in(patient, EAST), "east")
    await patient.provision(await offer_in(patient, WEST), "west")
    provisioner = create(moto, timeout_s=1.5, deployment=patient._config.deployment)
    provisioner._clients, provisioner._gpus = patient._clients, patient._gpus  # creating them takes a second
    client = ProvisionerClient(provisioner, 1.5, time.monotonic)
    assert await client.refresh() and sorted(client.machines) == ["east", "west"]
    east, west = client.machines["east"], client.machines["west"]
    moto.hang_s[WEST] = 6.0
    results = await asyncio.gather(*(provisioner.terminate(west) for _ in range(12)), return_exceptions=True)
    assert all(isinstance(one, ProvisionerError) for one in results)
    assert await client.refresh(), client.error
    assert client.machines["east"].reason == east.reason
    assert (
        "last known state: ec2: us-west-2: describe instances took longer than 1.5 s" in client.machines["west"].reason
    )
    await provisioner.terminate(east)
    await provisioner.close()
    await patient.close()


async def test_a_failing_region_keeps_its_machines_and_has_no_offers(moto: Moto) -> None:
    provisioner = create(moto, timeout_s=20.0)
    await provisioner.provision(await offer_in(provisioner, EAST), "east")
    await provisioner.provision(await offer_in(provisioner, WEST), "west")
    assert len(await provisioner.status()) == 2
    moto.refuse[WEST, "DescribeInstances"] = (400, "RequestLimitExceeded", "Slow down")
    machines = {machine.token: machine for machine in await provisioner.status()}
    assert sorted(machines) == ["east", "west"]
    assert "last known state: ec2: us-west-2: describe instances: RequestLimitExceeded" in machines["west"].reason
    afresh = create(moto)  # after a crash it has no last known state
    with pytest.raises(ProvisionerError, match="us-west-2: describe instances: RequestLimitExceeded: Slow down"):
        await afresh.status()
    moto.refuse[WEST, "DescribeInstanceTypeOfferings"] = (500, "InternalError", "An internal error has occurred")
    assert [offer.island for offer in await afresh.offers()] == ["aws/us-east-1"]
    assert "region us-west-2 has no offers" in afresh._validator.problems[0]
    moto.refuse[EAST, "DescribeInstanceTypeOfferings"] = (500, "InternalError", "An internal error has occurred")
    with pytest.raises(ProvisionerError, match="InternalError"):
        await create(moto).offers()
    await provisioner.close()
    await afresh.close()


async def test_a_call_that_hangs_times_out(moto: Moto) -> None:
    provisioner = create(moto, regions=(EAST,), timeout_s=0.5)
    moto.hang_s[EAST] = 1.5
    with pytest.raises(ProvisionerError, match=r"took longer than 0.5 s|Read timeout"):
        await provisioner.status()
    await provisioner.close()


async def test_machines_on_all_pages_are_reported(moto: Moto) -> None:
    provisioner = create(moto, regions=(EAST,))
    tags = [{"Key": "warmroute:deployment", "Value": provisioner._config.deployment}]
    moto.client(EAST).run_instances(
        ImageId=IMAGE,
        MinCount=60,
        MaxCount=60,
        InstanceType="t3.micro",
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    assert len(await provisioner.status()) == 60
    await provisioner.close()
