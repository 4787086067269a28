"""The `skypilot` provisioner with a `sky` command that is played by a script (its words and its JSON are those of
SkyPilot 0.14; SkyPilot itself needs a cloud's account and is not run here), and catalogues with its columns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, MachineState, NoCapacity
from warmroute.scaling.provisioners.skypilot import SkyPilotProvisioner

AWS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
g6.xlarge,L4,1.0,4.0,16.0,"{'Gpus': [{'Name': 'L4'}]}",0.8048,0.0,us-east-1,us-east-1a,x86_64
g6.xlarge,L4,1.0,4.0,16.0,"{'Gpus': [{'Name': 'L4'}]}",0.8048,0.31,us-east-1,us-east-1b,x86_64
g6.xlarge,L4,1.0,4.0,16.0,,0.0,0.0001,eu-west-1,eu-west-1a,x86_64
g6.xlarge,L4,1.0,4.0,16.0,,-1.0,,ap-south-1,ap-south-1a,x86_64
g6.xlarge,L4,1.0,4.0,16.0,,cheap,,sa-east-1,sa-east-1a,x86_64
g6.12xlarge,L4,4.0,48.0,192.0,,4.6016,1.5,us-east-1,us-east-1a,x86_64
p5.48xlarge,H100,8.0,192.0,2048.0,,98.32,30.0,us-east-1,us-east-1a,x86_64
m7i.large,,,2.0,8.0,,0.1,0.03,us-east-1,us-east-1a,x86_64
"""
GCP = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone
,L4,1.0,,,L4,0.56,0.17,us-central1,us-central1-a
g2-standard-4,,,4.0,16.0,,0.15,0.05,us-central1,us-central1-a
"""
SKY = """\
#!{python}
import json, os, sys, time
state = {state!r}
with open(state + "/calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
clusters = json.load(open(state + "/clusters"))
words = sys.argv[1:]
if os.path.exists(state + "/" + words[0] + ".fails"):
    sys.exit(open(state + "/" + words[0] + ".fails").read())
if words[0] == "launch":
    if os.path.exists(state + "/slow"):
        time.sleep(float(open(state + "/slow").read()))
    if os.path.exists(state + "/full"):
        print("I 11-15 10:00:00 Trying other regions", file=sys.stderr)
        sys.exit("\\x1b[31msky.exceptions.ResourcesUnavailableError: Failed to provision all possible "
            "launchable resources.\\x1b[0m")
    clusters.append({{"name": words[words.index("--cluster") + 1], "status": "UP", "launched_at": 1700000000,
        "cloud": "AWS", "region": words[words.index("--infra") + 1].split("/")[1], "init_kind": None,
        "last_creation_command": "sky " + " ".join(words), "last_event": "Cluster is up"}})
    json.dump(clusters, open(state + "/clusters", "w"))
elif words[0] == "status" and "--endpoint" in words:
    print("\\x1b[2mChecking\\x1b[0m")
    print("34.1.2.3:" + words[words.index("--endpoint") + 1])
elif words[0] == "status":
    assert words == ["status", "--refresh", "-o", "json"], words
    print("Refreshing 1 cluster")
    print(json.dumps(clusters, indent=2))
elif words[0] == "down":
    if words[2] not in [one["name"] for one in clusters]:
        print("Cluster(s) not found (tip: see `sky status`).")
    json.dump([one for one in clusters if one["name"] != words[2]], open(state + "/clusters", "w"))
"""
OFFER = Offer(
    provisioner="skypilot", name="aws/us-east-1/g6.xlarge/spot", island="i", gpu="L4", usd_per_hour=0.3, spot=True
)


class Sky:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = folder / "sky"
        self.command.write_text(SKY.format(python=sys.executable, state=str(folder)))
        self.command.chmod(0o755)
        self.clusters([])
        for cloud, text in (("aws", AWS), ("gcp", GCP)):
            for version in ("v7", "v8"):
                path = folder / "catalogs" / version / cloud
                path.mkdir(parents=True)
                (path / "vms.csv").write_text(text if version == "v8" else "InstanceType\n")

    def clusters(self, found: list[dict[str, Any]]) -> None:
        (self.folder / "clusters").write_text(json.dumps(found))

    def tell(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [words for words in map(json.loads, lines) if words[0] == verb]

    def provisioner(self, **changes: Any) -> SkyPilotProvisioner:
        values: dict[str, Any] = {
            "kind": "skypilot",
            "sky": str(self.command),
            "task": "engine.yaml",
            "catalog_dir": str(self.folder / "catalogs"),
            "clouds": ("aws",),
            "gpu": "L4",
        }
        return SkyPilotProvisioner(ProvisionerConfig(**values | changes))


@pytest.fixture
def sky(tmp_path: Path) -> Sky:
    return Sky(tmp_path)


async def test_offers_come_from_the_newest_catalogue_and_bad_prices_are_dropped(sky: Sky) -> None:
    cloud = sky.provisioner(markets=("on_demand", "spot"))
    offers = {offer.name: offer for offer in await cloud.offers()}
    assert {name: (offer.usd_per_hour, offer.gpus, offer.spot) for name, offer in offers.items()} == {
        "aws/us-east-1/g6.xlarge": (0.8048, 1, False),
        "aws/us-east-1/g6.xlarge/spot": (0.31, 1, True),  # not the 0.0 of the other zone
        "aws/us-east-1/g6.12xlarge": (4.6016, 4, False),
        "aws/us-east-1/g6.12xlarge/spot": (1.5, 4, True),
    }
    said = "\n".join(cloud._sanity.said)
    assert "1 rows have prices or counts that are no numbers: dropped" in said
    assert "the offer 'aws/eu-west-1/g6.xlarge' costs $0" in said
    assert "the offer 'aws/eu-west-1/g6.xlarge/spot' costs $0.0001 an hour, below min_usd_per_gpu_hour" in said
    assert "the offer 'aws/ap-south-1/g6.xlarge' costs $-1 an hour, which is below 0" in said
    await cloud.close()


async def test_a_cloud_that_sells_gpus_apart_is_priced_by_the_operator(sky: Sky) -> None:
    cloud = sky.provisioner(clouds=("gcp", "azure"), prices={"gcp/us-central1/g2-standard-4": 0.71, "odd": 1.0})
    (offer,) = await cloud.offers()
    assert (offer.name, offer.gpu, offer.usd_per_hour) == ("gcp/us-central1/g2-standard-4", "L4", 0.71)
    said = "\n".join(cloud._sanity.said)
    assert "1 rows have no instance type" in said and "'odd' is not like CLOUD/REGION/TYPE" in said
    assert "azure/vms.csv is not there: `sky show-gpus --cloud azure` makes SkyPilot fetch it" in said
    await cloud.close()
    with pytest.raises(CloudError, match=r"vms.csv is not there"):
        await sky.provisioner(clouds=("azure",)).offers()


async def test_a_catalogue_is_read_again_when_it_changes(sky: Sky) -> None:
    cloud = sky.provisioner(instance_types=("g6.12xlarge",))
    assert [offer.usd_per_hour for offer in await cloud.offers()] == [4.6016]
    path = sky.folder / "catalogs" / "v8" / "aws" / "vms.csv"
    path.write_text(AWS.replace("4.6016", "5.5"))
    os.utime(path, (1, 1))
    assert [offer.usd_per_hour for offer in await cloud.offers()] == [5.5]
    await cloud.close()


async def test_a_cluster_is_launched_once_seen_and_ended(sky: Sky) -> None:
    cloud = sky.provisioner()
    await cloud.provision(OFFER, "t1")
    await cloud.provision(OFFER, "t1")
    (words,) = sky.calls("launch")
    assert words == [
        *(
            "launch",
            "-y",
            "-d",
            "--cluster",
            "warmroute-t1",
            "--infra",
            "aws/us-east-1",
            "--instance-type",
            "g6.xlarge",
        ),
        *("--use-spot", "--env", "WARMROUTE_TOKEN=t1", "engine.yaml"),
    ]
    sky.clusters([*json.loads((sky.folder / "clusters").read_text()), {"name": "somebody-elses", "status": "UP"}])
    afresh = sky.provisioner()  # after a crash
    (machine,) = await afresh.status()
    assert (machine.token, machine.offer, machine.state) == ("t1", OFFER.name, MachineState.RUNNING)
    assert (machine.url, machine.island) == ("http://34.1.2.3:8000", "aws/us-east-1")
    await afresh.provision(OFFER, "t1")
    assert len(sky.calls("launch")) == 1
    await afresh.terminate(machine)
    await afresh.terminate(machine)
    assert await afresh.status() == []
    await cloud.close()
    await afresh.close()


async def test_no_capacity_is_told_at_once_or_by_the_status(sky: Sky) -> None:
    sky.tell("full")
    cloud = sky.provisioner()
    with pytest.raises(
        NoCapacity, match=r"sky launch failed \(exit 1\): sky.exceptions.ResourcesUnavailableError: Failed"
    ):
        await cloud.provision(OFFER, "t1")
    assert await cloud.status() == []
    await cloud.close()
    sky.tell("slow", "1.5")
    cloud = sky.provisioner(timeout_s=1.0)
    await cloud.provision(OFFER, "t2")  # it has taken the request; how it ends is seen later
    pending = cloud._launching.get("t2")
    assert pending is not None
    await asyncio.wait([pending[1]])
    cloud._config = sky.provisioner()._config
    (machine,) = await cloud.status()
    assert (machine.token, machine.state) == ("t2", MachineState.ENDED) and "Failed to provision all" in machine.reason
    await cloud.terminate(machine)
    assert await cloud.status() == []
    await cloud.close()


async def test_states_are_read_as_skypilot_means_them(sky: Sky) -> None:
    said = [
        ("init", {"status": "INIT", "init_kind": "launching", "init_status_reason": "Provisioning"}),
        ("lost", {"status": "INIT", "init_kind": "unhealthy", "init_status_reason": "node terminated"}),
        ("stopped", {"status": "STOPPED"}),
        ("going", {"status": "AUTOSTOPPING"}),
        ("new", {"status": "SOMETHING"}),
    ]
    sky.clusters([{"name": f"warmroute-{token}", "launched_at": 1700000000} | one for token, one in said])
    cloud = sky.provisioner()
    machines = {machine.token: machine for machine in await cloud.status()}
    assert {token: machine.state.value for token, machine in machines.items()} == {
        "init": "pending",
        "lost": "ended",
        "stopped": "ended",
        "going": "ending",
        "new": "pending",
    }
    assert machines["lost"].reason == "node terminated" and machines["lost"].started_s == 1700000000.0
    await cloud.close()


async def test_what_fails_is_a_sentence(sky: Sky) -> None:
    cloud = sky.provisioner()
    sky.tell("status.fails", "Could not connect to SkyPilot API server at http://127.0.0.1:46580")
    with pytest.raises(CloudError, match=r"sky status failed \(exit 1\): Could not connect to SkyPilot API server"):
        await cloud.status()
    (sky.folder / "status.fails").unlink()
    sky.tell("launch.fails", "ValueError: Invalid task YAML")
    with pytest.raises(CloudError, match=r"sky launch failed .*Invalid task YAML") as error:
        await cloud.provision(OFFER, "t1")
    assert not isinstance(error.value, NoCapacity)
    sky.command.write_text(f"#!{sys.executable}\nprint('not json')\n")
    with pytest.raises(CloudError, match="sky status answered no JSON; it begins 'not json"):
        await cloud.status()
    sky.command.unlink()
    started_s = time.monotonic()
    with pytest.raises(CloudError, match="cannot be run: No such file"):
        await cloud.status()
    assert time.monotonic() - started_s < 20
    await cloud.close()
