"""The `skypilot` provisioner with a fake `sky` command and catalog. The command's words and JSON are those of SkyPilot
0.14, which itself needs the account of a cloud.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_provisioner import Harness, ScriptedProvisioner

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import (
    TOKEN,
    Machine,
    MachineState,
    NoCapacity,
    ProvisionerClient,
    ProvisionerError,
    ProvisionerTimeout,
    new_token,
)
from warmroute.scaling.provisioners import skypilot
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
    if os.path.exists(state + "/leaves"):
        clusters = json.load(open(state + "/clusters")) + [{{"name": words[words.index("--cluster") + 1],
            "status": "INIT", "launched_at": 1700000000, "init_kind": "launching"}}]
        json.dump(clusters, open(state + "/clusters", "w"))
    if os.path.exists(state + "/full"):
        print("I 11-15 10:00:00 Trying other regions", file=sys.stderr)
        sys.exit("\\x1b[31msky.exceptions.ResourcesUnavailableError: Failed to provision all possible "
            "launchable resources.\\x1b[0m")
    clusters = json.load(open(state + "/clusters"))
    clusters.append({{"name": words[words.index("--cluster") + 1], "status": "UP", "launched_at": 1700000000,
        "cloud": "AWS", "region": words[words.index("--infra") + 1].split("/")[1], "init_kind": None,
        "last_creation_command": "sky " + " ".join(words), "last_event": "Cluster is up"}})
    json.dump(clusters, open(state + "/clusters", "w"))
elif words[0] == "status" and "--endpoint" in words:
    if os.path.exists(state + "/endpoint.slow"):
        time.sleep(float(open(state + "/endpoint.slow").read()))
    print("\\x1b[2mChecking\\x1b[0m")
    print("34.1.2.3:" + words[words.index("--endpoint") + 1])
elif words[0] == "status":
    assert words in (["status", "--refresh", "-o", "json"], ["status", "-o", "json"]), words
    print("Refreshing 1 cluster")
    noisy = os.path.exists(state + "/noisy")
    print("[INFO] one is not UP yet\\n" * noisy + json.dumps(clusters, indent=2) + "\\nTip: to see all, use -u" * noisy)
elif words[0] == "down":
    if os.path.exists(state + "/down.slow"):
        time.sleep(float(open(state + "/down.slow").read()))
        clusters = json.load(open(state + "/clusters"))
    if words[2] not in [one["name"] for one in clusters]:
        print("Cluster(s) not found (tip: see `sky status`).")
    json.dump([one for one in clusters if one["name"] != words[2]], open(state + "/clusters", "w"))
"""
OFFER = Offer(
    provisioner="skypilot", name="aws/us-east-1/g6.xlarge/spot", island="i", gpu="L4", usd_per_hour=0.3, spot=True
)
T1, T2 = "n0123456789abcdef", "nfedcba9876543210"


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

    def names(self) -> list[str]:
        try:
            return [one["name"] for one in json.loads((self.folder / "clusters").read_text())]
        except ValueError:
            return ["the file is being written"]

    def provisioner(self, **changes: Any) -> SkyPilotProvisioner:
        values: dict[str, Any] = {
            "kind": "skypilot",
            "sky_command": str(self.command),
            "task_file": "engine.yaml",
            "catalog_dir": str(self.folder / "catalogs"),
            "clouds": ("aws",),
            "gpu": "L4",
        }
        return SkyPilotProvisioner(ProvisionerConfig(**values | changes))


@pytest.fixture
def sky(tmp_path: Path) -> Sky:
    return Sky(tmp_path)


async def test_offers_come_from_the_newest_catalog_and_invalid_prices_are_dropped(sky: Sky) -> None:
    provisioner = sky.provisioner(markets=("on_demand", "spot"))
    offers = {offer.name: offer for offer in await provisioner.offers()}
    assert {name: (offer.usd_per_hour, offer.gpus, offer.spot) for name, offer in offers.items()} == {
        "aws/us-east-1/g6.xlarge": (0.8048, 1, False),
        "aws/us-east-1/g6.xlarge/spot": (0.31, 1, True),  # not the 0.0 of the other zone
        "aws/us-east-1/g6.12xlarge": (4.6016, 4, False),
        "aws/us-east-1/g6.12xlarge/spot": (1.5, 4, True),
    }
    problems = "\n".join(provisioner._validator.problems)
    assert "ignoring 1 rows whose prices or counts are not numbers" in problems
    assert "offer 'aws/eu-west-1/g6.xlarge' costs $0" in problems
    assert "offer 'aws/eu-west-1/g6.xlarge/spot' costs $0.0001/hour, below $0.02 per GPU" in problems
    assert "offer 'aws/ap-south-1/g6.xlarge' costs $-1/hour, which is below 0" in problems
    await provisioner.close()


async def test_configured_prices_replace_missing_instance_types(sky: Sky) -> None:
    provisioner = sky.provisioner(clouds=("gcp", "azure"), prices={"gcp/us-central1/g2-standard-4": 0.71, "odd": 1.0})
    (offer,) = await provisioner.offers()
    assert (offer.name, offer.gpu, offer.usd_per_hour) == ("gcp/us-central1/g2-standard-4", "L4", 0.71)
    problems = "\n".join(provisioner._validator.problems)
    assert "ignoring 1 rows without an instance type" in problems
    assert "ignoring 'odd': it is not like CLOUD/REGION/TYPE" in problems
    assert "azure/vms.csv does not exist: download it with `sky show-gpus --cloud azure`" in problems
    await provisioner.close()
    with pytest.raises(ProvisionerError, match=r"vms.csv does not exist"):
        await sky.provisioner(clouds=("azure",)).offers()


async def test_a_changed_catalog_is_read_again(sky: Sky) -> None:
    provisioner = sky.provisioner(instance_types=("g6.12xlarge",))
    assert [offer.usd_per_hour for offer in await provisioner.offers()] == [4.6016]
    path = sky.folder / "catalogs" / "v8" / "aws" / "vms.csv"
    path.write_text(AWS.replace("4.6016", "5.5"))
    os.utime(path, (1, 1))
    assert [offer.usd_per_hour for offer in await provisioner.offers()] == [5.5]
    await provisioner.close()


async def test_a_cluster_is_launched_once_reported_and_terminated(sky: Sky) -> None:
    provisioner = sky.provisioner()
    await provisioner.provision(OFFER, T1)
    await provisioner.provision(OFFER, T1)
    (words,) = sky.calls("launch")
    assert words == [
        *(
            "launch",
            "-y",
            "-d",
            "--cluster",
            f"warmroute-{T1}",
            "--infra",
            "aws/us-east-1",
            "--instance-type",
            "g6.xlarge",
        ),
        *("--use-spot", "--env", f"WARMROUTE_TOKEN={T1}", "engine.yaml"),
    ]
    sky.clusters([*json.loads((sky.folder / "clusters").read_text()), {"name": "not-ours", "status": "UP"}])
    afresh = sky.provisioner()  # after a crash
    (machine,) = await afresh.status()
    assert (machine.token, machine.offer, machine.state) == (T1, OFFER.name, MachineState.RUNNING)
    assert (machine.url, machine.island) == ("http://34.1.2.3:8000", "aws/us-east-1")
    await afresh.provision(OFFER, T1)
    assert len(sky.calls("launch")) == 1
    await afresh.terminate(machine)
    await afresh.terminate(machine)
    assert await afresh.status() == []
    await provisioner.close()
    await afresh.close()


async def test_no_capacity_is_an_error_at_once_or_in_the_status(sky: Sky) -> None:
    sky.tell("full")
    provisioner = sky.provisioner()
    with pytest.raises(
        NoCapacity, match=r"sky launch failed \(exit code 1\): sky.exceptions.ResourcesUnavailableError: Failed"
    ):
        await provisioner.provision(OFFER, T1)
    assert [(one.token, one.state) for one in await provisioner.status()] == [(T1, MachineState.TERMINATED)]
    await provisioner.close()
    sky.tell("slow", "1.5")
    provisioner = sky.provisioner(timeout_s=1.0)
    await provisioner.provision(OFFER, T2)  # the launch runs on
    pending = provisioner._launching.get(T2)
    assert pending is not None
    await asyncio.wait([pending[1]])
    provisioner._config = sky.provisioner()._config
    (machine,) = await provisioner.status()
    assert (machine.token, machine.state) == (
        T2,
        MachineState.TERMINATED,
    ) and "Failed to provision all" in machine.reason
    await provisioner.terminate(machine)
    assert await provisioner.status() == []
    await provisioner.close()


async def test_skypilot_states_are_translated(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters: dict[str, dict[str, Any]] = {
        "init": {"status": "INIT", "init_kind": "launching", "init_status_reason": "Provisioning"},
        "lost": {"status": "INIT", "init_kind": "unhealthy", "init_status_reason": "node terminated"},
        "stopped": {"status": "STOPPED"},
        "going": {"status": "AUTOSTOPPING", "launched_at": "yesterday"},
        "new": {"status": "SOMETHING", "last_creation_command": ["odd"]},
    }
    tokens = {name: f"n{at:016x}" for at, name in enumerate(clusters)}
    sky.clusters(
        [{"name": f"warmroute-{tokens[name]}", "launched_at": 1700000000} | one for name, one in clusters.items()]
    )
    provisioner = sky.provisioner()

    async def status() -> dict[str, Machine]:
        machines = {machine.token: machine for machine in await provisioner.status()}
        return {name: machines[token] for name, token in tokens.items()}

    machines = await status()
    assert {machine.state for machine in machines.values()} == {MachineState.PENDING}
    reclaimed = {name for name, machine in machines.items() if machine.reclaimed}
    assert reclaimed == {"stopped", "going"}  # SkyPilot may reach the other one again
    monkeypatch.setattr(skypilot, "UNHEALTHY_S", 0.0)
    machines = await status()
    assert {name for name, machine in machines.items() if machine.reclaimed} == {"stopped", "going", "lost"}
    assert machines["lost"].reason == "node terminated"
    assert machines["stopped"].reason == "it is stopped"
    await provisioner.close()


async def turns(harness: Harness, done: Callable[[], bool]) -> None:
    """Run turns until a condition is true, with real time in between."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(done):
            await harness.tick()
            await asyncio.sleep(0.02)


async def test_stopped_and_unhealthy_clusters_are_reclaimed(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cluster that SkyPilot still has is paid for."""
    monkeypatch.setattr(skypilot, "UNHEALTHY_S", 0.2)
    up = {"status": "UP", "launched_at": 1, "last_creation_command": "sky launch"}
    sky.clusters([{"name": f"warmroute-{token}", **up} for token in (T1, T2)])
    harness = Harness(sky.provisioner(), min_nodes=0, max_nodes=2)
    await turns(harness, lambda: "serving" in harness.states)
    unhealthy = {**up, "status": "INIT", "init_kind": "unhealthy"}
    sky.clusters([{"name": f"warmroute-{T1}", **unhealthy}, {"name": f"warmroute-{T2}", **up, "status": "STOPPED"}])
    await turns(harness, lambda: sky.names() == [])
    await turns(harness, lambda: harness.states == [])
    await harness.loop.close()


async def test_only_clusters_of_the_deployment_are_reported(sky: Sky) -> None:
    theirs = [f"prod-eu-{T1}", "prod-notebook", f"prod-{T1}-copy", f"prod-x{T1}", "prod-", f"other-{T1}", "prod-*"]
    sky.clusters([{"name": name, "status": "UP", "launched_at": 1} for name in (*theirs, f"prod-{T2}")])
    provisioner = sky.provisioner(deployment="prod")
    assert [machine.id for machine in await provisioner.status()] == [f"prod-{T2}"]
    for name in theirs:
        machine = Machine(id=name, token=name.removeprefix("prod-"), offer="", state=MachineState.RUNNING)
        with pytest.raises(ProvisionerError, match="is not a cluster of deployment 'prod'"):
            await provisioner.terminate(machine)
    with pytest.raises(ProvisionerError, match="the status would not find its cluster"):
        await provisioner.provision(OFFER, "eu-1")
    assert not sky.calls("down") and not sky.calls("launch")
    await provisioner.close()


def test_clusters_with_new_tokens_are_found_again() -> None:
    assert TOKEN.fullmatch(new_token()) and new_token() != new_token()
    provisioner = ScriptedProvisioner()

    async def requested_token() -> str:
        harness = Harness(provisioner, min_nodes=1)
        await harness.until(lambda: provisioner.requested)
        await harness.loop.close()
        return provisioner.requested[0][1]

    assert TOKEN.fullmatch(asyncio.run(requested_token()))


def test_a_deployment_name_that_is_no_cluster_name_is_rejected(sky: Sky) -> None:
    with pytest.raises(ConfigError, match="start with a letter"):
        sky.provisioner(deployment="7up")


async def test_a_slow_launch_is_pending(sky: Sky) -> None:
    sky.tell("slow", "6")
    client = ProvisionerClient(provisioner := sky.provisioner(timeout_s=4.0), 4.0, time.monotonic)
    await client.provision(OFFER, T1)
    (machine,) = await provisioner.status()
    assert (machine.token, machine.state, machine.offer) == (T1, MachineState.PENDING, OFFER.name)
    await asyncio.wait([provisioner._launching[T1][1]])
    (machine,) = await provisioner.status()
    assert (machine.token, machine.state) == (T1, MachineState.RUNNING)
    assert len(sky.calls("launch")) == 1
    await provisioner.close()


async def test_the_remains_of_a_failed_launch_are_reclaimed(sky: Sky) -> None:
    """SkyPilot keeps what it had begun as INIT, as if it were still coming."""
    for name in ("full", "leaves"):
        sky.tell(name)
    provisioner = sky.provisioner()
    with pytest.raises(NoCapacity):
        await provisioner.provision(OFFER, T1)
    (machine,) = await provisioner.status()
    assert machine.reclaimed and "Failed to provision all" in machine.reason
    await provisioner.close()
    sky.clusters([])
    harness = Harness(sky.provisioner(), min_nodes=1, max_nodes=1)
    await turns(harness, lambda: bool(sky.calls("down")) and sky.names() == [])
    await harness.loop.close()


async def test_a_slow_termination_continues_in_the_next_call(sky: Sky) -> None:
    sky.clusters([{"name": f"warmroute-{T1}", "status": "UP", "launched_at": 1}])
    provisioner = sky.provisioner()
    (machine,) = await provisioner.status()
    sky.tell("down.slow", "2")
    provisioner._config = sky.provisioner(timeout_s=0.3)._config
    with pytest.raises(ProvisionerTimeout, match=r"sky down of warmroute-n0123456789abcdef took longer than 0.3 s"):
        await provisioner.terminate(machine)
    provisioner._config = sky.provisioner()._config
    assert [one.state for one in await provisioner.status()] == [MachineState.TERMINATING]
    await provisioner.terminate(machine)
    assert len(sky.calls("down")) == 1 and await provisioner.status() == []
    await provisioner.close()


async def test_a_launch_without_a_cluster_is_terminated_later(sky: Sky) -> None:
    sky.tell("slow", "8")
    provisioner = sky.provisioner(timeout_s=4.0)
    await provisioner.provision(OFFER, T1)
    (machine,) = await provisioner.status()
    with pytest.raises(ProvisionerError, match="cannot be terminated yet"):
        await provisioner.terminate(machine)
    await asyncio.wait([provisioner._launching[T1][1]])
    await provisioner.terminate(machine)
    assert sky.names() == [] and await provisioner.status() == []
    await provisioner.close()


async def test_a_failed_termination_is_an_error(sky: Sky) -> None:
    sky.clusters([{"name": f"warmroute-{T1}", "status": "STOPPED", "launched_at": 1}])
    provisioner = sky.provisioner()
    (machine,) = await provisioner.status()
    sky.tell("down.fails", "FileNotFoundError: ~/.aws/credentials not found")
    with pytest.raises(ProvisionerError, match=r"sky down failed .*credentials not found"):
        await provisioner.terminate(machine)
    await provisioner.close()


async def test_output_around_the_json_is_ignored(sky: Sky) -> None:
    sky.clusters([{"name": f"warmroute-{T1}", "status": "UP", "launched_at": 1}])
    sky.tell("noisy")
    provisioner = sky.provisioner()
    assert [machine.token for machine in await provisioner.status()] == [T1]
    await provisioner.close()


async def test_slow_endpoint_lookups_do_not_delay_the_status(sky: Sky) -> None:
    tokens = [f"n{at:016x}" for at in range(6)]
    sky.clusters([{"name": f"warmroute-{token}", "status": "UP", "launched_at": 1} for token in tokens])
    sky.tell("endpoint.slow", "4")
    provisioner = sky.provisioner(timeout_s=3.0)
    client = ProvisionerClient(provisioner, 3.0, time.monotonic)
    assert await client.refresh(), client.error
    assert [machine.state for machine in client.machines.values()] == [MachineState.PENDING] * 6
    assert len([words for words in sky.calls("status") if "--endpoint" in words]) == 4  # at once
    (sky.folder / "endpoint.slow").unlink()
    provisioner._config = sky.provisioner()._config
    async with asyncio.timeout(60):
        while {machine.url for machine in await provisioner.status()} != {"http://34.1.2.3:8000"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await provisioner.close()


async def test_a_failing_sky_command_is_a_provisioner_error(sky: Sky) -> None:
    provisioner = sky.provisioner()
    sky.tell("status.fails", "Could not connect to SkyPilot API server at http://127.0.0.1:46580")
    with pytest.raises(
        ProvisionerError, match=r"sky status failed \(exit code 1\): Could not connect to SkyPilot API server"
    ):
        await provisioner.status()
    (sky.folder / "status.fails").unlink()
    sky.tell("launch.fails", "ValueError: Invalid task YAML")
    with pytest.raises(ProvisionerError, match=r"sky launch failed .*Invalid task YAML") as error:
        await provisioner.provision(OFFER, T1)
    assert not isinstance(error.value, NoCapacity)
    sky.command.write_text(f"#!{sys.executable}\nprint('not json')\n")
    with pytest.raises(ProvisionerError, match="the output of sky status is not JSON: 'not json"):
        await provisioner.status()
    sky.command.unlink()
    started_s = time.monotonic()
    with pytest.raises(ProvisionerError, match=r"cannot run .*: No such file"):
        await provisioner.status()
    assert time.monotonic() - started_s < 20
    await provisioner.close()
