"""The `process` provisioner with real processes: found again after a crash, never another's pid, ended for certain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from real_kubernetes import free_port

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError
from warmroute.scaling.provisioners.process import ProcessProvisioner

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)", "{port}", "{token}", "{name}")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
)


def made(folder: Path, command: tuple[str, ...] = SLEEPER, **changes: Any) -> ProcessProvisioner:
    return ProcessProvisioner(
        ProvisionerConfig(
            kind="process",
            gpu="sim",
            port=free_port(),
            state_dir=str(folder),
            command=command,
            **{"stop_grace_s": 5.0, **changes},
        )
    )


def kept(folder: Path) -> Path:
    """Where such a provisioner keeps its notes."""
    notes = folder / "warmroute" / "process"
    notes.mkdir(parents=True, exist_ok=True)
    return notes


@asynccontextmanager
async def cleaned(cloud: ProcessProvisioner) -> AsyncIterator[Offer]:
    """Whatever a test does, no process is left."""
    try:
        (offer,) = await cloud.offers()
        yield offer
    finally:
        for machine in await cloud.status():
            pid = int(machine.id.partition(" ")[2])
            if machine.state in (MachineState.RUNNING, MachineState.TERMINATING):
                os.killpg(pid, signal.SIGKILL)
        await cloud.close()


def pid_of(machine: Machine) -> int:
    return int(machine.id.removeprefix("pid "))


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def a_bystander() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


async def until(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not await asyncio.to_thread(what):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.02)


async def test_a_simulated_engine_starts_serves_and_ends(tmp_path: Path) -> None:
    cloud = made(tmp_path, command=())
    async with cleaned(cloud) as offer:
        assert (offer.gpu, offer.usd_per_hour, offer.island) == ("sim", 0.0, "local")
        await cloud.provision(offer, "t1")
        (machine,) = await cloud.status()
        assert machine.state is MachineState.RUNNING and machine.token == "t1" and machine.offer == offer.name

        def serves() -> bool:
            try:
                with urllib.request.urlopen(f"{machine.url}/health", timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        await until(serves)
        await cloud.terminate(machine)
        assert not is_there(pid_of(machine))
        assert await cloud.status() == []
        await cloud.terminate(machine)  # gone already: no error


async def test_a_token_starts_one_process_however_often_it_is_sent(tmp_path: Path) -> None:
    cloud = made(tmp_path)
    async with cleaned(cloud) as offer:
        await asyncio.gather(*(cloud.provision(offer, "same") for _ in range(5)), cloud.provision(offer, "other"))
        machines = {machine.token: machine for machine in await cloud.status()}
        assert sorted(machines) == ["other", "same"]
        assert len({machine.url for machine in machines.values()}) == 2
        assert words_of(pid_of(machines["same"]))[3:6] == [
            machines["same"].url.rpartition(":")[2],
            "same",
            "warmroute-same",
        ]


async def test_processes_are_found_again_after_a_crash(tmp_path: Path) -> None:
    first = made(tmp_path)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        second = made(tmp_path)  # the router that comes after it
        (machine,) = await second.status()
        assert machine.state is MachineState.RUNNING and machine.token == "t1"
        await second.provision(offer, "t1")
        assert [one.id for one in await second.status()] == [machine.id]
        await second.terminate(machine)
        assert not is_there(pid_of(machine)) and await first.status() == []
        await second.close()


async def test_a_crash_between_start_and_record_leaves_no_orphan(tmp_path: Path) -> None:
    """The file says only that it was about to be started; the process carries its token."""
    first = made(tmp_path)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        (machine,) = await first.status()
        file = kept(tmp_path) / "t1.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 0, "began": ""}))
        second = made(tmp_path)
        await second.provision(offer, "t1")
        assert [one.id for one in await second.status()] == [machine.id]
        await second.terminate(machine)
        assert not is_there(pid_of(machine))
        await second.close()


async def test_an_intent_without_a_process_is_terminated_and_may_be_started(tmp_path: Path) -> None:
    cloud = made(tmp_path)
    (kept(tmp_path) / "t1.json").write_text(json.dumps({"token": "t1", "offer": "process", "port": 1, "asked_s": 1.0}))
    async with cleaned(cloud) as offer:
        (machine,) = await cloud.status()
        assert machine.state is MachineState.TERMINATED and machine.reason == "it was never started"
        await cloud.provision(offer, "t1")
        assert [one.state for one in await cloud.status()] == [MachineState.RUNNING]


async def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    bystander = a_bystander()
    try:
        cloud = made(tmp_path)
        note = {
            "token": "t1",
            "offer": "o",
            "port": 1,
            "asked_s": 1.0,
            "pid": bystander.pid,
            "began": "an earlier boot/1",
        }
        (kept(tmp_path) / "t1.json").write_text(json.dumps(note))
        (machine,) = await cloud.status()
        assert machine.state is MachineState.TERMINATED
        await cloud.terminate(machine)
        assert bystander.poll() is None and await cloud.status() == []
        await cloud.close()
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    cloud = made(tmp_path, command=STUBBORN, stop_grace_s=0.3)
    async with cleaned(cloud) as offer:
        await cloud.provision(offer, "t1")
        (machine,) = await cloud.status()
        await until(lambda: b"deaf" in (kept(tmp_path) / "t1.log").read_bytes())
        given_up = asyncio.create_task(cloud.terminate(machine))
        await asyncio.sleep(0.1)
        given_up.cancel()  # whoever called had no more time
        assert [one.state for one in await cloud.status()] == [MachineState.TERMINATING]
        await cloud.terminate(machine)
        assert not is_there(pid_of(machine)) and await cloud.status() == []


async def test_the_next_router_finishes_a_termination(tmp_path: Path) -> None:
    cloud = made(tmp_path, command=STUBBORN, stop_grace_s=0.3)
    async with cleaned(cloud) as offer:
        await cloud.provision(offer, "t1")
        (machine,) = await cloud.status()
        await until(lambda: b"deaf" in (kept(tmp_path) / "t1.log").read_bytes())
        given_up = asyncio.create_task(cloud.terminate(machine))
        await asyncio.sleep(0.1)
        given_up.cancel()
        afterwards = made(tmp_path, stop_grace_s=0.3)  # looks, and ends nothing by itself
        async with asyncio.timeout(30):
            while [one.state for one in await afterwards.status()] == [MachineState.TERMINATING]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not is_there(pid_of(machine))
        await afterwards.close()


async def test_a_process_that_ends_by_itself_reports_its_last_output(tmp_path: Path) -> None:
    cloud = made(tmp_path, command=(sys.executable, "-c", "raise SystemExit('out of memory on GPU 0')"))
    async with cleaned(cloud) as offer:
        await cloud.provision(offer, "t1")
        pid = pid_of((await cloud.status())[0])
        await until(lambda: not is_there(pid))
        (machine,) = await cloud.status()
        assert machine.state is MachineState.TERMINATED and machine.reason == "out of memory on GPU 0"
        await cloud.terminate(machine)
        assert await cloud.status() == []


async def test_max_nodes_limits_the_processes(tmp_path: Path) -> None:
    cloud = made(tmp_path, max_nodes=1)
    async with cleaned(cloud) as offer:
        assert offer.most == 1
        await cloud.provision(offer, "t1")
        with pytest.raises(NoCapacity, match="1 process runs, which is the most"):
            await cloud.provision(offer, "t2")


async def test_a_missing_program_is_a_provisioner_error(tmp_path: Path) -> None:
    cloud = made(tmp_path, command=("/no/such/engine",))
    async with cleaned(cloud) as offer:
        with pytest.raises(
            ProvisionerError, match="process: '/no/such/engine' cannot be run: No such file or directory"
        ):
            await cloud.provision(offer, "t1")
        assert await cloud.status() == []


async def test_a_process_that_ends_at_once_is_terminated(tmp_path: Path) -> None:
    """It may be gone before the moment of its beginning can be read."""
    cloud = made(tmp_path, command=("/bin/true",))
    async with cleaned(cloud) as offer:
        for at in range(60):
            await cloud.provision(offer, f"t{at}")
        async with asyncio.timeout(30):
            while {one.state for one in await cloud.status()} != {MachineState.TERMINATED}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.gather(*(cloud.terminate(machine) for machine in await cloud.status()))
        assert await cloud.status() == []


async def test_a_process_that_ended_before_its_start_was_read_is_terminated(tmp_path: Path) -> None:
    gone = a_bystander()
    gone.kill()
    gone.wait()
    note = {"token": "t1", "offer": "o", "port": 1, "asked_s": 1.0, "pid": gone.pid, "began": ""}
    (kept(tmp_path) / "t1.json").write_text(json.dumps(note))
    cloud = made(tmp_path)
    (machine,) = await cloud.status()
    assert machine.state is MachineState.TERMINATED
    async with asyncio.timeout(30):
        await cloud.terminate(machine)
    assert await cloud.status() == []
    await cloud.close()


@pytest.mark.parametrize("other", [{"name": "b"}, {"deployment": "another"}, {"name": "../process"}])
async def test_two_provisioners_with_one_folder_are_separate(tmp_path: Path, other: dict[str, str]) -> None:
    first, second = made(tmp_path), made(tmp_path, **other)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        (machine,) = await first.status()
        assert await second.status() == []
        await second.terminate(machine)
        assert is_there(pid_of(machine)) and len(await first.status()) == 1
        await second.close()
