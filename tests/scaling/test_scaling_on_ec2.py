"""The whole of it on moto's EC2: a router, the loop, two regions, and instances whose engines are simulated ones here.

What moto cannot do is run something on an instance. So an engine is started on loopback for each one that runs, and its
address is put in place of the instance's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from engine_processes import Engine as SimulatedEngine
from moto_server import IMAGE, Moto
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router

from warmroute.config import ProvisionerConfig
from warmroute.demo.child_processes import Children
from warmroute.scaling import scaling_service as live
from warmroute.scaling.offer import Offer
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
    """The engines of instances, by id: started when an instance is first seen to run."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.engines: dict[str, SimulatedEngine] = {}

    def url_of(self, machine: Machine) -> str:
        engine = self.engines.get(machine.id)
        if engine is None:
            engine = self.engines[machine.id] = SimulatedEngine(self._children, speed=0.2)
        return engine.url


class OnLoopback(Ec2Provisioner):
    """Real in all but the addresses. `crashes`: what was started is never heard of."""

    instances: Instances
    crashes = False

    async def provision(self, offer: Offer, token: str) -> None:
        await super().provision(offer, token)
        if self.crashes:
            await asyncio.Event().wait()

    async def status(self) -> list[Machine]:
        told = await super().status()
        if self.crashes:
            return []
        return [
            msgspec.structs.replace(one, url=await asyncio.to_thread(self.instances.url_of, one))
            if one.state is MachineState.RUNNING
            else one
            for one in told
        ]


@asynccontextmanager
async def scaled(moto: Moto, instances: Instances, deployment: str, **scaling: Any) -> AsyncIterator[RunningRouter]:
    def made(config: ProvisionerConfig) -> OnLoopback:
        cloud = OnLoopback(msgspec.structs.replace(config, endpoint_url=moto.url), moto.session)
        cloud.instances = instances
        cloud.crashes = crashes
        return cloud

    crashes = scaling.pop("crashes", False)
    patch = pytest.MonkeyPatch()
    patch.setattr(live, "provisioner_named", made)
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
    """Those that are paid for."""
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
    return sorted(life.state.value for life in scaling.core.lives)


async def test_from_zero_to_the_region_with_capacity_and_back_to_zero(moto: Moto) -> None:
    moto.reset()
    moto.full(EAST)  # the cheaper one
    with Children() as children:
        instances = Instances(children)
        to_zero = {"min_nodes": 0, "max_nodes": 1, "scale_to_zero_after_s": 2.0}
        async with scaled(moto, instances, "full", **to_zero) as running:
            scaling = running.service.scaling
            assert scaling is not None
            # A request comes when there is no node: it is held until the first one serves.
            peer = await running.connect()
            peer.write(post(chat(model="sim", max_tokens=2)))
            answer = await peer.response(patience_s=PATIENCE_S)
            assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2
            (instance,) = await asyncio.to_thread(instances_of, moto, WEST, "full")
            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            (life,) = scaling.core.lives
            assert tags["warmroute:token"] == life.token and tags["warmroute:offer"] == f"{WEST}/g4dn.xlarge"
            assert running.service.fleet.node(life.name).island == f"aws/{WEST}"
            shown = scaling.describe()
            east = next(one for one in shown["offers"] if one["island"] == f"aws/{EAST}")
            assert east["rests_for_s"] > 0 and "InsufficientInstanceCapacity" in east["why"]
            assert ("us-east-1", "RunInstances") in moto.calls and scaling.driver.refusals == 1
            # The cloud takes it back while a long answer is under way: no new request goes there, and none is cut.
            peer.write(post(chat(model="sim", max_tokens=150, stream=True)))
            await peer.head()
            node, note = running.service.fleet.node(life.name), {"Key": "warmroute:reclaimed", "Value": "two minutes"}
            await asyncio.to_thread(moto.client(WEST).create_tags, Resources=[instance["InstanceId"]], Tags=[note])
            await until(lambda: node.draining, patience_s=PATIENCE_S)
            there = await asyncio.to_thread(instances_of, moto, WEST, "full")
            assert not node.inflight or instance["InstanceId"] in [one["InstanceId"] for one in there]
            body = b""
            while b"[DONE]" not in body:
                read = await peer.reader.read(65536)
                assert read, "it was cut"
                body += read
            # Nobody asks any more: what is left goes, too.
            await until(lambda: states(running) == [], patience_s=PATIENCE_S)
            assert not len(running.service.fleet) and scaling.driver.removed >= 1 and scaling.driver.lost == 0
            assert await counted(moto, "full") == {EAST: 0, WEST: 0}
            assert scaling.core.desired_nodes == 0


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
            driver = second.service.scaling.driver  # type: ignore[union-attr]
            await until(
                lambda: states(second) == ["serving"] * least and driver.removed == 2 - least,
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
