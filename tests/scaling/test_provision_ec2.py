"""The `ec2` provisioner against moto's server: two regions, tags, capacity, quota, spot, pages, and calls that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from moto_server import IMAGE, Moto
from scripted_provisioner import World

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError
from warmroute.scaling.provisioner_client import ProvisionerClient
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
    made = Moto()
    yield made
    made.close()
    patch.undo()


@pytest.fixture(autouse=True)
def clean(moto: Moto) -> None:
    moto.reset()
    for region in (EAST, WEST):
        client = moto.client(region)
        for reservation in client.describe_instances()["Reservations"]:
            client.terminate_instances(InstanceIds=[one["InstanceId"] for one in reservation["Instances"]])
    moto.reset()


def made(moto: Moto, **changes: Any) -> Ec2Provisioner:
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


async def offer_in(cloud: Ec2Provisioner, region: str, *, spot: bool = False) -> Offer:
    (found,) = [one for one in await cloud.offers() if one.name.startswith(region) and one.spot == spot]
    return found


async def test_offers_are_instance_types_in_regions_with_their_gpus(moto: Moto) -> None:
    cloud = made(
        moto, instance_types=("g4dn.xlarge", "g4dn.12xlarge", "no.such"), prices=PRICES | {"g4dn.12xlarge": 3.9}
    )
    offers = {offer.name: offer for offer in await cloud.offers()}
    assert sorted(offers) == [
        "us-east-1/g4dn.12xlarge",
        "us-east-1/g4dn.xlarge",
        "us-west-2/g4dn.12xlarge",
        "us-west-2/g4dn.xlarge",
    ]
    one = offers["us-east-1/g4dn.12xlarge"]
    assert (one.gpu, one.gpus, one.usd_per_hour, one.island, one.start_s) == ("T4", 4, 3.9, "aws/us-east-1", 240.0)
    assert offers["us-west-2/g4dn.xlarge"].usd_per_hour == 0.6
    await cloud.close()


async def test_spot_prices_come_from_the_history_and_invalid_ones_are_reported(moto: Moto) -> None:
    cloud = made(moto, regions=(EAST,), markets=("on_demand", "spot"), prices={})
    assert await cloud.offers() == []
    assert (
        cloud._sanity.said[0] == "ec2: the offer 'us-east-1/g4dn.xlarge' has no price: set provisioners.prices: dropped"
    )
    assert "/spot' costs $1e-05 an hour, below min_usd_per_gpu_hour" in cloud._sanity.said[1]  # moto's price for all
    await cloud.close()
    cloud = made(moto, regions=(EAST,), markets=("spot",), prices={}, min_usd_per_gpu_hour=0.0)
    assert [(offer.spot, offer.usd_per_hour) for offer in await cloud.offers()] == [(True, 1e-05)]
    await cloud.close()


async def test_a_configured_spot_price_replaces_the_history(moto: Moto) -> None:
    cloud = made(moto, regions=(EAST,), markets=("spot",))
    (offer,) = await cloud.offers()
    assert (offer.name, offer.usd_per_hour, offer.spot) == ("us-east-1/g4dn.xlarge/spot", 0.2, True)
    await cloud.close()


async def test_an_instance_is_requested_once_tagged_found_and_terminated(moto: Moto) -> None:
    cloud = made(moto)
    offer = await offer_in(cloud, EAST)
    await cloud.provision(offer, "t1")
    await cloud.provision(offer, "t1")  # moto does not honour client tokens: the tag is looked for
    (machine,) = await cloud.status()
    assert (machine.token, machine.offer, machine.state) == ("t1", offer.name, MachineState.RUNNING)
    assert machine.url.startswith("http://10.") and machine.url.endswith(":8000") and machine.island == "aws/us-east-1"
    assert machine.started_s == pytest.approx(time.time(), abs=300)
    (asked,) = [one for one in moto.asked if one.get("Action") == ["RunInstances"]]
    assert len(asked["ClientToken"][0]) == 64
    instance = machine.id.partition("/")[2]
    described = moto.client(EAST).describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in described["Tags"]}
    assert tags["warmroute:token"] == "t1" and tags["warmroute:offer"] == offer.name
    await cloud.terminate(machine)
    await cloud.terminate(machine)
    assert [one.state for one in await cloud.status()] == [MachineState.TERMINATED]
    await cloud.terminate(Machine(id=f"{EAST}/i-0123456789abcdef0", token="t", offer="", state=MachineState.RUNNING))
    await cloud.close()


async def test_only_instances_of_the_deployment_are_reported(moto: Moto) -> None:
    mine, other = made(moto), made(moto)
    await other.provision(await offer_in(other, EAST), "theirs")
    moto.client(EAST).run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1, InstanceType="t3.micro")
    assert await mine.status() == []
    assert [machine.token for machine in await other.status()] == ["theirs"]
    await mine.close()
    await other.close()


async def test_a_full_region_and_a_used_up_quota_are_no_capacity(moto: Moto) -> None:
    cloud = made(moto)
    east, west = await offer_in(cloud, EAST), await offer_in(cloud, WEST)
    moto.full(EAST)
    with pytest.raises(NoCapacity, match="us-east-1: run instances: InsufficientInstanceCapacity: We currently do not"):
        await cloud.provision(east, "t1")
    moto.refuse[EAST, "RunInstances"] = (400, "VcpuLimitExceeded", "You have requested more vCPU capacity")
    with pytest.raises(NoCapacity, match="VcpuLimitExceeded"):
        await cloud.provision(east, "t1")
    moto.refuse[EAST, "RunInstances"] = (403, "UnauthorizedOperation", "You are not authorized")
    with pytest.raises(ProvisionerError, match="UnauthorizedOperation") as error:
        await cloud.provision(east, "t1")
    assert not isinstance(error.value, NoCapacity)
    await cloud.provision(west, "t1")
    (machine,) = await cloud.status()
    assert machine.island == "aws/us-west-2"
    await cloud.close()


async def test_a_tagged_spot_instance_is_reclaimed(moto: Moto) -> None:
    cloud = made(moto, regions=(EAST,), markets=("spot",))
    (offer,) = await cloud.offers()
    await cloud.provision(offer, "t1")
    (asked,) = [one for one in moto.asked if one.get("Action") == ["RunInstances"]]
    assert asked["InstanceMarketOptions.MarketType"] == ["spot"]
    (machine,) = await cloud.status()
    assert not machine.reclaimed
    instance = machine.id.partition("/")[2]
    # What a rule on EventBridge's interruption warning would write, for those who want to know within seconds.
    moto.client(EAST).create_tags(Resources=[instance], Tags=[{"Key": "warmroute:reclaimed", "Value": "two minutes"}])
    (machine,) = await cloud.status()
    assert machine.reclaimed and machine.reason == "two minutes"
    await cloud.close()


def test_a_spot_instance_marked_for_termination_is_reclaimed(moto: Moto) -> None:
    """moto never marks a spot request, so that what AWS answers stands here."""
    cloud = made(moto)

    asked: list[list[str]] = []

    class Client:
        def get_paginator(self, name: str) -> Client:
            assert name == "describe_spot_instance_requests"
            return self

        def paginate(self, Filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            (values,) = [one["Values"] for one in Filters]
            asked.append(values)
            marked = {"Code": "marked-for-termination", "Message": "Your Spot instance is marked for termination"}
            for each in values:  # a page for each
                status = marked if each in ("sir-1", "sir-201") else {"Code": "fulfilled"}
                yield {"SpotInstanceRequests": [{"InstanceId": each.replace("sir", "i"), "Status": status}]}

    cloud._clients["r"] = Client()
    spots = [
        {"InstanceId": f"i-{number}", "SpotInstanceRequestId": f"sir-{number}", "State": {"Name": "running"}}
        for number in range(1, 203)
    ]
    ended = {"InstanceId": "i-e", "SpotInstanceRequestId": "sir-e", "State": {"Name": "terminated"}}
    said = "Your Spot instance is marked for termination"
    assert cloud._taken_back("r", [*spots, ended, {"InstanceId": "i-3"}]) == {"i-1": said, "i-201": said}
    assert [len(values) for values in asked] == [200, 2]  # AWS takes no more in one filter


async def test_a_stopped_instance_is_reclaimed(moto: Moto) -> None:
    """It serves nobody, and its disks are paid for."""
    cloud = made(moto)
    await cloud.provision(await offer_in(cloud, EAST), "t1")
    (machine,) = await cloud.status()
    moto.client(EAST).stop_instances(InstanceIds=[machine.id.partition("/")[2]])
    one = World(cloud, min_nodes=0, max_nodes=1)
    async with asyncio.timeout(30):
        while moto.state(EAST, machine.id.partition("/")[2]) != "terminated":
            await one.tick()
            await asyncio.sleep(0.05)
    await one.driver.close()


async def test_a_region_that_hangs_does_not_affect_others(moto: Moto) -> None:
    patient = made(moto)
    await patient.provision(await offer_in(patient, EAST), "east")
    await patient.provision(await offer_in(patient, WEST), "west")
    cloud = made(moto, timeout_s=1.5, deployment=patient._config.deployment)
    cloud._clients, cloud._gpus = patient._clients, patient._gpus  # they take a second to make
    seen = ProvisionerClient(cloud, 1.5, time.monotonic)
    assert await seen.look() and sorted(seen.machines) == ["east", "west"]
    east, west = seen.machines["east"], seen.machines["west"]
    moto.hang_s[WEST] = 6.0
    said = await asyncio.gather(*(cloud.terminate(west) for _ in range(12)), return_exceptions=True)
    assert all(isinstance(one, ProvisionerError) for one in said)
    assert await seen.look(), seen.problem
    assert seen.machines["east"].reason == east.reason
    assert (
        "not heard of since: ec2: us-west-2: describe instances took longer than 1.5 s" in seen.machines["west"].reason
    )
    await cloud.terminate(east)
    await cloud.close()
    await patient.close()


async def test_a_failing_region_keeps_its_machines_and_has_no_offers(moto: Moto) -> None:
    cloud = made(moto, timeout_s=20.0)
    await cloud.provision(await offer_in(cloud, EAST), "east")
    await cloud.provision(await offer_in(cloud, WEST), "west")
    assert len(await cloud.status()) == 2
    moto.refuse[WEST, "DescribeInstances"] = (400, "RequestLimitExceeded", "Slow down")
    machines = {machine.token: machine for machine in await cloud.status()}
    assert sorted(machines) == ["east", "west"]
    assert "not heard of since: ec2: us-west-2: describe instances: RequestLimitExceeded" in machines["west"].reason
    afresh = made(moto)  # after a crash it knows nothing of that region, and says so instead of guessing
    with pytest.raises(ProvisionerError, match="us-west-2: describe instances: RequestLimitExceeded: Slow down"):
        await afresh.status()
    moto.refuse[WEST, "DescribeInstanceTypeOfferings"] = (500, "InternalError", "An internal error has occurred")
    assert [offer.island for offer in await afresh.offers()] == ["aws/us-east-1"]
    assert "us-west-2 makes no offers" in afresh._sanity.said[0]
    moto.refuse[EAST, "DescribeInstanceTypeOfferings"] = (500, "InternalError", "An internal error has occurred")
    with pytest.raises(ProvisionerError, match="InternalError"):
        await made(moto).offers()
    await cloud.close()
    await afresh.close()


async def test_a_call_that_hangs_times_out(moto: Moto) -> None:
    cloud = made(moto, regions=(EAST,), timeout_s=0.5)
    moto.hang_s[EAST] = 1.5
    with pytest.raises(ProvisionerError, match=r"took longer than 0.5 s|Read timeout"):
        await cloud.status()
    await cloud.close()


async def test_machines_on_all_pages_are_reported(moto: Moto) -> None:
    cloud = made(moto, regions=(EAST,))
    tags = [{"Key": "warmroute:deployment", "Value": cloud._config.deployment}]
    moto.client(EAST).run_instances(
        ImageId=IMAGE,
        MinCount=60,
        MaxCount=60,
        InstanceType="t3.micro",
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    assert len(await cloud.status()) == 60
    await cloud.close()
