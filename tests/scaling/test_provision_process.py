"""The `process` provisioner with real processes: recovery after a crash, reused pids, termination."""

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
from support.free_port import free_port

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError
from warmroute.scaling.provisioners.process import TOKEN_VARIABLE, ProcessProvisioner

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)", "{port}", "{token}", "{name}")
IGNORES_SIGTERM = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
)


def create(folder: Path, command: tuple[str, ...] = SLEEPER, **changes: Any) -> ProcessProvisioner:
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


def records(folder: Path) -> Path:
    """Return where such a provisioner keeps its records."""
    path = folder / "warmroute" / "process"
    path.mkdir(parents=True, exist_ok=True)
    return path


@asynccontextmanager
async def cleaned(provisioner: ProcessProvisioner) -> AsyncIterator[Offer]:
    """Kill all processes at the end."""
    try:
        (offer,) = await provisioner.offers()
        yield offer
    finally:
        for machine in await provisioner.status():
            pid = int(machine.id.partition(" ")[2])
            if machine.state in (MachineState.RUNNING, MachineState.TERMINATING):
                os.killpg(pid, signal.SIGKILL)
        await provisioner.close()


def pid_of(machine: Machine) -> int:
    return int(machine.id.removeprefix("pid "))


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def unrelated_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_a_simulated_engine_starts_serves_and_ends(tmp_path: Path) -> None:
    provisioner = create(tmp_path, command=())
    async with cleaned(provisioner) as offer:
        assert (offer.gpu, offer.usd_per_hour, offer.island) == ("sim", 0.0, "local")
        await provisioner.provision(offer, "t1")
        (machine,) = await provisioner.status()
        assert machine.state is MachineState.RUNNING and machine.token == "t1" and machine.offer == offer.name

        def serves() -> bool:
            try:
                with urllib.request.urlopen(f"{machine.url}/health", timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        await until(serves)
        await provisioner.terminate(machine)
        assert not is_running(pid_of(machine))
        assert await provisioner.status() == []
        await provisioner.terminate(machine)  # already gone: no error


async def test_a_token_starts_one_process_however_often_it_is_sent(tmp_path: Path) -> None:
    provisioner = create(tmp_path)
    async with cleaned(provisioner) as offer:
        await asyncio.gather(
            *(provisioner.provision(offer, "same") for _ in range(5)), provisioner.provision(offer, "other")
        )
        machines = {machine.token: machine for machine in await provisioner.status()}
        assert sorted(machines) == ["other", "same"]
        assert len({machine.url for machine in machines.values()}) == 2
        assert words_of(pid_of(machines["same"]))[3:6] == [
            machines["same"].url.rpartition(":")[2],
            "same",
            "warmroute-same",
        ]


async def test_processes_are_found_again_after_a_crash(tmp_path: Path) -> None:
    first = create(tmp_path)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        second = create(tmp_path)  # the next router
        (machine,) = await second.status()
        assert machine.state is MachineState.RUNNING and machine.token == "t1"
        await second.provision(offer, "t1")
        assert [one.id for one in await second.status()] == [machine.id]
        await second.terminate(machine)
        assert not is_running(pid_of(machine)) and await first.status() == []
        await second.close()


async def test_a_crash_between_start_and_record_leaves_no_orphan(tmp_path: Path) -> None:
    """The file has only the intent; the process has its token."""
    first = create(tmp_path)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        (machine,) = await first.status()
        environment = Path(f"/proc/{machine.id.removeprefix('pid ')}/environ")
        await until(lambda: TOKEN_VARIABLE.encode() in environment.read_bytes())
        file = records(tmp_path) / "t1.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 0, "start_id": ""}))
        second = create(tmp_path)
        await second.provision(offer, "t1")
        assert [one.id for one in await second.status()] == [machine.id]
        await second.terminate(machine)
        assert not is_running(pid_of(machine))
        await second.close()


async def test_an_intent_without_a_process_is_terminated_and_may_be_started(tmp_path: Path) -> None:
    provisioner = create(tmp_path)
    (records(tmp_path) / "t1.json").write_text(json.dumps({"token": "t1", "offer": "process", "port": 1}))
    async with cleaned(provisioner) as offer:
        (machine,) = await provisioner.status()
        assert machine.state is MachineState.TERMINATED and machine.reason == "it was never started"
        await provisioner.provision(offer, "t1")
        assert [one.state for one in await provisioner.status()] == [MachineState.RUNNING]


async def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    other = unrelated_process()
    try:
        provisioner = create(tmp_path)
        record = {
            "token": "t1",
            "offer": "o",
            "port": 1,
            "pid": other.pid,
            "start_id": "an earlier boot/1",
        }
        (records(tmp_path) / "t1.json").write_text(json.dumps(record))
        (machine,) = await provisioner.status()
        assert machine.state is MachineState.TERMINATED
        await provisioner.terminate(machine)
        assert other.poll() is None and await provisioner.status() == []
        await provisioner.close()
    finally:
        other.kill()
        other.wait()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    provisioner = create(tmp_path, command=IGNORES_SIGTERM, stop_grace_s=0.3)
    async with cleaned(provisioner) as offer:
        await provisioner.provision(offer, "t1")
        (machine,) = await provisioner.status()
        await until(lambda: b"ready" in (records(tmp_path) / "t1.log").read_bytes())
        cancelled = asyncio.create_task(provisioner.terminate(machine))
        await asyncio.sleep(0.1)
        cancelled.cancel()  # the caller timed out
        assert [one.state for one in await provisioner.status()] == [MachineState.TERMINATING]
        await provisioner.terminate(machine)
        assert not is_running(pid_of(machine)) and await provisioner.status() == []


async def test_the_next_router_finishes_a_termination(tmp_path: Path) -> None:
    provisioner = create(tmp_path, command=IGNORES_SIGTERM, stop_grace_s=0.3)
    async with cleaned(provisioner) as offer:
        await provisioner.provision(offer, "t1")
        (machine,) = await provisioner.status()
        await until(lambda: b"ready" in (records(tmp_path) / "t1.log").read_bytes())
        cancelled = asyncio.create_task(provisioner.terminate(machine))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        afterwards = create(tmp_path, stop_grace_s=0.3)  # only calls the status
        async with asyncio.timeout(30):
            while [one.state for one in await afterwards.status()] == [MachineState.TERMINATING]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not is_running(pid_of(machine))
        await afterwards.close()


async def test_a_process_that_ends_by_itself_reports_its_last_output(tmp_path: Path) -> None:
    provisioner = create(tmp_path, command=(sys.executable, "-c", "raise SystemExit('out of memory on GPU 0')"))
    async with cleaned(provisioner) as offer:
        await provisioner.provision(offer, "t1")
        pid = pid_of((await provisioner.status())[0])
        await until(lambda: not is_running(pid))
        (machine,) = await provisioner.status()
        assert machine.state is MachineState.TERMINATED and machine.reason == "out of memory on GPU 0"
        await provisioner.terminate(machine)
        assert await provisioner.status() == []


async def test_max_nodes_limits_the_processes(tmp_path: Path) -> None:
    provisioner = create(tmp_path, max_nodes=1)
    async with cleaned(provisioner) as offer:
        assert offer.max_nodes == 1
        await provisioner.provision(offer, "t1")
        with pytest.raises(NoCapacity, match="1 running, maximum is 1"):
            await provisioner.provision(offer, "t2")


async def test_a_missing_program_is_a_provisioner_error(tmp_path: Path) -> None:
    provisioner = create(tmp_path, command=("/no/such/engine",))
    async with cleaned(provisioner) as offer:
        with pytest.raises(ProvisionerError, match="process: cannot run '/no/such/engine': No such file or directory"):
            await provisioner.provision(offer, "t1")
        assert await provisioner.status() == []


async def test_a_process_that_ends_at_once_is_terminated(tmp_path: Path) -> None:
    """It may end before its start time can be read."""
    provisioner = create(tmp_path, command=("/bin/true",))
    async with cleaned(provisioner) as offer:
        for at in range(60):
            await provisioner.provision(offer, f"t{at}")
        async with asyncio.timeout(30):
            while {one.state for one in await provisioner.status()} != {MachineState.TERMINATED}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.gather(*(provisioner.terminate(machine) for machine in await provisioner.status()))
        assert await provisioner.status() == []


async def test_a_process_that_ended_before_its_start_was_read_is_terminated(tmp_path: Path) -> None:
    gone = unrelated_process()
    gone.kill()
    gone.wait()
    record = {"token": "t1", "offer": "o", "port": 1, "pid": gone.pid, "start_id": ""}
    (records(tmp_path) / "t1.json").write_text(json.dumps(record))
    provisioner = create(tmp_path)
    (machine,) = await provisioner.status()
    assert machine.state is MachineState.TERMINATED
    async with asyncio.timeout(30):
        await provisioner.terminate(machine)
    assert await provisioner.status() == []
    await provisioner.close()


@pytest.mark.parametrize("other", [{"name": "b"}, {"deployment": "another"}, {"name": "../process"}])
async def test_two_provisioners_with_one_folder_are_separate(tmp_path: Path, other: dict[str, Any]) -> None:
    first, second = create(tmp_path), create(tmp_path, **other)
    async with cleaned(first) as offer:
        await first.provision(offer, "t1")
        (machine,) = await first.status()
        assert await second.status() == []
        await second.terminate(machine)
        assert is_running(pid_of(machine)) and len(await first.status()) == 1
        await second.close()
