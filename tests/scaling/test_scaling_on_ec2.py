"""Scaling on moto's EC2: a router with two regions, and instances whose engines are simulated.

moto cannot run anything on an instance. So the tests start an engine on loopback for each running instance, and put its
address in place of the instance's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from moto_server import IMAGE, Moto
from support.engine_processes import FakeEngine as SimulatedEngine
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router

from warmroute.config import ProvisionerConfig
from warmroute.lab.demo.processes import Children
from warmroute.scaling import scaling_service
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import Machine, MachineState
from warmroute.scaling.provisioners.ec2 import Ec2Provisioner

EAST, WEST = "us-east-1", "us-west-2"
PATIENCE_S = 40.0


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


class Instances:
    """The engines of instances by id, started when the instance is first reported as running."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.engines: dict[str, SimulatedEngine] = {}

    def url_of(self, machine: Machine) -> str:
        engine = self.engines.get(machine.id)
        if engine is None:
            engine = self.engines[machine.id] = SimulatedEngine(self._children, speed=0.2)
        return engine.url


class OnLoopback(Ec2Provisioner):
    """Ec2Provisioner with other addresses. `crashes`: the router never learns of what it requested."""

    instances: Instances
    crashes = False

    async def provision(self, offer: Offer, token: str) -> None:
        await super().provision(offer, token)
        if self.crashes:
            await asyncio.Event().wait()

    async def status(self) -> list[Machine]:
        machines = await super().status()
        if self.crashes:
            return []
        return [
            msgspec.structs.replace(one, url=await asyncio.to_thread(self.instances.url_of, one))
            if one.state is MachineState.RUNNING
            else one
            for one in machines
        ]


@asynccontextmanager
async def scaled(moto: Moto, instances: Instances, deployment: str, **scaling: Any) -> AsyncIterator[RunningRouter]:
    def create(config: ProvisionerConfig) -> OnLoopback:
        cloud = OnLoopback(msgspec.structs.replace(config, endpoint_url=moto.url), moto.session)
        cloud.instances = instances
        cloud.crashes = crashes
        return cloud

    crashes = scaling.pop("crashes", False)
    patch = pytest.MonkeyPatch()
    patch.setattr(scaling_service, "create_provisioner", create)
    provisioner = {
        "kind": "ec2",
        "regions": [EAST, WEST],
        "instance_types": ["g4dn.xlarge"],
        "prices": {f"{EAST}/g4dn.xlarge": 0.5, f"{WEST}/g4dn.xlarge": 0.6},
        "images": {EAST: IMAGE, WEST: IMAGE},
        "deployment": deployment,
    }
    table = {
        "enabled": True,
        "interval_s": 0.2,
        "cooldown_down_s": 0.5,
        "stable_window_s": 1.0,
        "panic_window_s": 1.0,
        **scaling,
    }
    try:
        async with router(provisioners=[provisioner], scaling=table, wait=False) as running:
            yield running
    finally:
        patch.undo()


def instances_of(moto: Moto, region: str, deployment: str) -> list[dict[str, Any]]:
    """Return those that are paid for."""
    filters = [
        {"Name": "tag:warmroute:deployment", "Values": [deployment]},
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
    ]
    found = moto.client(region).describe_instances(Filters=filters)["Reservations"]
    return [one for reservation in found for one in reservation["Instances"]]


async def counted(moto: Moto, deployment: str) -> dict[str, int]:
    return {region: len(await asyncio.to_thread(instances_of, moto, region, deployment)) for region in (EAST, WEST)}


def states(running: RunningRouter) -> list[str]:
    scaling = running.service.scaling
    assert scaling is not None
    return sorted(managed.state.value for managed in scaling.autoscaler.managed)


async def test_from_zero_to_the_region_with_capacity_and_back_to_zero(moto: Moto) -> None:
    moto.reset()
    moto.full(EAST)  # the cheaper region
    with Children() as children:
        instances = Instances(children)
        to_zero = {"min_nodes": 0, "max_nodes": 1, "scale_to_zero_after_s": 2.0}
        async with scaled(moto, instances, "full", **to_zero) as running:
            scaling = running.service.scaling
            assert scaling is not None
            # A request that arrives without a node waits until the first one serves.
            peer = await running.connect()
            peer.write(post(chat(model="sim", max_tokens=2)))
            answer = await peer.response(patience_s=PATIENCE_S)
            assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2
            (instance,) = await asyncio.to_thread(instances_of, moto, WEST, "full")
            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            (managed,) = scaling.autoscaler.managed
            assert tags["warmroute:token"] == managed.token and tags["warmroute:offer"] == f"{WEST}/g4dn.xlarge"
            assert running.service.fleet.node(managed.name).island == f"aws/{WEST}"
            described = scaling.describe()
            east = next(one for one in described["offers"] if one["island"] == f"aws/{EAST}")
            assert east["backoff_s"] > 0 and "InsufficientInstanceCapacity" in east["reason"]
            assert ("us-east-1", "RunInstances") in moto.calls and scaling.loop.controller.refused == 1
            # The cloud reclaims it during a long response: no new request goes there, and the response is complete.
            peer.write(post(chat(model="sim", max_tokens=150, stream=True)))
            await peer.head()
            node, note = (
                running.service.fleet.node(managed.name),
                {"Key": "warmroute:reclaimed", "Value": "two minutes"},
            )
            await asyncio.to_thread(moto.client(WEST).create_tags, Resources=[instance["InstanceId"]], Tags=[note])
            await until(lambda: node.draining, patience_s=PATIENCE_S)
            running_instances = await asyncio.to_thread(instances_of, moto, WEST, "full")
            assert not node.inflight or instance["InstanceId"] in [one["InstanceId"] for one in running_instances]
            body = b""
            while b"[DONE]" not in body:
                read = await peer.reader.read(65536)
                assert read, "the response was cut"
                body += read
            # Without requests the fleet scales to zero.
            await until(lambda: states(running) == [], patience_s=PATIENCE_S)
            assert not len(running.service.fleet)
            assert scaling.loop.controller.removed >= 1
            assert scaling.loop.controller.lost == 0
            assert await counted(moto, "full") == {EAST: 0, WEST: 0}
            assert scaling.autoscaler.desired_nodes == 0


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_crash_between_request_and_registration_leaves_no_orphan(moto: Moto, wanted: bool) -> None:
    moto.reset()
    deployment = f"crash-{'wanted' if wanted else 'not'}"
    with Children() as children:
        instances = Instances(children)
        async with scaled(moto, instances, deployment, crashes=True, min_nodes=2, max_nodes=2) as first:
            for _ in range(2000):
                if await counted(moto, deployment) == {EAST: 2, WEST: 0}:
                    break
                await asyncio.sleep(0.01)
            assert states(first) == ["requested"] * 2 and not len(first.service.fleet)
        assert await counted(moto, deployment) == {EAST: 2, WEST: 0}
        least = 1 if wanted else 0
        async with scaled(
            moto, instances, deployment, min_nodes=least, max_nodes=1, scale_to_zero_after_s=0.5
        ) as second:
            controller = second.service.scaling.loop.controller  # type: ignore[union-attr]
            await until(
                lambda: states(second) == ["serving"] * least and controller.removed == 2 - least,
                patience_s=PATIENCE_S,
            )
            assert await counted(moto, deployment) == {EAST: least, WEST: 0}
            assert sum(action == "RunInstances" for _, action in moto.calls) == 2
            assert len(second.service.fleet) == least
            if wanted:
                answer = await second.request(
                    post(json.dumps({"model": "sim", "prompt": "x", "max_tokens": 1}).encode(), "/v1/completions")
                )
                assert answer.status == 200
