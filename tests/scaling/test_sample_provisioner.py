"""The sample program examples/provisioner.py, run by the `command` provisioner, and what its processes can see."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.polling import until

from warmroute.config import ConfigError, ProvisionerConfig, from_table
from warmroute.lab.demo.processes import free_port
from warmroute.scaling.provisioner import MachineState, NoCapacity, Provisioner, child_environment
from warmroute.scaling.provisioners import create_provisioner

SAMPLE = Path(__file__).parents[2] / "examples" / "provisioner.py"
ENGINE = f"{shlex.quote(sys.executable)} -m http.server {{port}} --bind 127.0.0.1"


@asynccontextmanager
async def sample(tmp_path: Path) -> AsyncIterator[Provisioner]:
    command = (str(SAMPLE), "--state", str(tmp_path), "--engine", ENGINE, "--first-port", str(free_port(24_000)))
    made = create_provisioner(ProvisionerConfig(kind="command", command=command, deployment="prod"))
    try:
        yield made
    finally:
        for machine in await made.status():
            await made.terminate(machine)


async def test_the_sample_offers_provisions_reports_and_terminates(tmp_path: Path) -> None:
    async with sample(tmp_path) as provisioner:
        [offer] = await provisioner.offers()
        assert (offer.name, offer.island, offer.usd_per_hour, offer.round_trip_ms) == ("local/cpu", "local", 0.05, 0.1)
        assert await provisioner.status() == []
        for _ in range(2):
            await provisioner.provision(offer, "t1")
        await provisioner.provision(offer, "t2")
        first, second = await provisioner.status()
        assert (first.token, first.state, first.offer) == ("t1", MachineState.RUNNING, "local/cpu")
        assert first.url.startswith("http://127.0.0.1:") and first.url != second.url
        await until(lambda: _answers(first.url), "the engine listens")
        for _ in range(2):
            await provisioner.terminate(first)
        [left] = await provisioner.status()
        assert left.token == "t2"
        await until(lambda: not _answers(first.url), "the engine has ended")
        assert not list((tmp_path / "prod").glob("t1.json"))


async def test_the_sample_reports_that_its_capacity_is_used_up(tmp_path: Path) -> None:
    async with sample(tmp_path) as provisioner:
        [offer] = await provisioner.offers()
        for number in range(2):
            await provisioner.provision(offer, f"t{number}")
        with pytest.raises(NoCapacity, match="2 machines run, maximum is 2"):
            await provisioner.provision(offer, "t5")


async def test_a_machine_of_the_sample_that_died_is_terminated(tmp_path: Path) -> None:
    async with sample(tmp_path) as provisioner:
        [offer] = await provisioner.offers()
        await provisioner.provision(offer, "t1")
        pid = json.loads((tmp_path / "prod" / "t1.json").read_text())["my_pid"]
        os.killpg(pid, signal.SIGKILL)

        await until(lambda: _is_gone(pid), "the process is gone")
        [machine] = await provisioner.status()
        assert machine.state is MachineState.TERMINATED and machine.reason == "the process has ended"


def _answers(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# The environment of child processes.


def _environment(monkeypatch: pytest.MonkeyPatch, kind: str, pass_env: tuple[str, ...] = ()) -> dict[str, str]:
    set_by_operator = "ENGINE_KEY AWS_SECRET_ACCESS_KEY AWS_PROFILE CUDA_VISIBLE_DEVICES SKYPILOT_DEBUG LC_ALL"
    for name in set_by_operator.split():
        monkeypatch.setenv(name, "value")
    return child_environment(ProvisionerConfig(kind=kind, command=("x",), pass_env=pass_env))  # type: ignore[arg-type]


def test_child_processes_see_no_secret_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _environment(monkeypatch, "command")
    assert found["PATH"] == os.environ["PATH"] and found["LC_ALL"] == "value"
    assert not {"ENGINE_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "CUDA_VISIBLE_DEVICES"} & found.keys()
    assert "CUDA_VISIBLE_DEVICES" in _environment(monkeypatch, "process")
    assert "SKYPILOT_DEBUG" in _environment(monkeypatch, "skypilot")


def test_variables_are_passed_by_name_or_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _environment(monkeypatch, "command", ("AWS_*", "ENGINE_KEY", "NO_SUCH_VARIABLE"))
    assert {"ENGINE_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"} <= found.keys()
    assert "NO_SUCH_VARIABLE" not in found


async def test_a_program_of_a_provisioner_receives_the_minimal_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    monkeypatch.setenv("MY_ZONE", "z1")
    program = tmp_path / "show"
    program.write_text(
        f"#!{sys.executable}\nimport json, os\n"
        "name = ' '.join(sorted(name for name in os.environ if name in ('ENGINE_KEY', 'MY_ZONE', 'PATH')))\n"
        "print(json.dumps({'offers': [{'name': name, 'gpu': 'L4', 'usd_per_hour': 1}]}))\n"
    )
    program.chmod(0o755)
    config = ProvisionerConfig(kind="command", command=(str(program),), pass_env=("MY_ZONE",))
    [offer] = await create_provisioner(config).offers()
    assert offer.name == "MY_ZONE PATH"


@pytest.mark.parametrize("name", ["", "A B", "*", "1A", "A=B", "A*B"])
def test_what_is_no_variable_is_rejected(name: str) -> None:
    table: dict[str, Any] = {"kind": "command", "command": ["x"], "pass_env": [name]}
    with pytest.raises(ConfigError, match=r"provisioners\.pass_env"):
        from_table({"provisioners": [table]})


# The protocol.


async def test_offers_and_machines_come_back_as_they_were_reported(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    reported = {"name": "a", "gpu": "L4", "usd_per_hour": 1, "my_zone": {"rack": 7}}
    machine = {"id": "m", "token": "t", "offer": "a", "state": "running", "url": "http://h:1", "my_disk": [1]}
    program = tmp_path / "own"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nsent = json.load(sys.stdin)\n"
        f"open({str(calls)!r}, 'a').write(json.dumps(sent) + '\\n')\n"
        f"print(json.dumps({{'offers': [{reported!r}], 'machines': [{machine!r}]}}))\n"
    )
    program.chmod(0o755)
    own = create_provisioner(ProvisionerConfig(kind="command", command=(str(program),), deployment="d"))
    [offer] = await own.offers()
    await own.provision(offer, "t")
    [found] = await own.status()
    await own.terminate(found)
    sent = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [(one["protocol"], one["call"], one["deployment"]) for one in sent] == [
        (1, call, "d") for call in ("offers", "provision", "status", "terminate")
    ]
    assert sent[1]["offer"] == reported and sent[1]["token"] == "t" and sent[3]["machine"] == machine
