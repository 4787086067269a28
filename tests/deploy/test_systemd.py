"""The router under systemd: notifications, the watchdog, socket activation, and what the unit says."""

from __future__ import annotations

import asyncio
import configparser
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.polling import until
from support.raw_client import RawConnection, get

from warmroute.app.main import create_parser
from warmroute.app.process import Systemd
from warmroute.config import Config, ConfigError, load

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"


class Notifications:
    """What systemd would receive."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.setblocking(False)
        self.received: list[list[str]] = []

    def read(self) -> list[list[str]]:
        while True:
            try:
                self.received.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return self.received

    def count(self, state: str) -> int:
        return sum(1 for one in self.read() if state in one)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def activated(
    folder: Path, *sockets: socket.socket, names: str = "", options: tuple[str, ...] = ()
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """`warmroute serve` as systemd would start it: the sockets are file descriptors 3 and following."""
    config = folder / "warmroute.toml"
    config.write_text("[admin]\nport = 0\n[shutdown]\ndelay_s = 0.0\n")
    serve = [sys.executable, "-m", "warmroute", "serve", "--config", str(config), "--port", "1"]
    command = shlex.join([*serve, *options])
    moves = " ".join(f"{3 + number}<&{one.fileno()}" for number, one in enumerate(sockets))
    environment = os.environ | {
        "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names, "NOTIFY_SOCKET": str(folder / "notify"),
        "WATCHDOG_USEC": "300000",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"export LISTEN_PID=$$; exec {command} {moves}", env=environment,
        pass_fds=[one.fileno() for one in sockets], stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    lines: list[str] = []

    async def read() -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            lines.append(line.decode())

    reading = asyncio.ensure_future(read())
    try:
        yield process, lines
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


def listening(host: str = "127.0.0.1") -> socket.socket:
    """A socket whose number does not collide with those that the process expects."""
    one = socket.create_server((host, 0))
    while one.fileno() < 10:
        one = socket.socket(fileno=os.dup(one.detach()))
    return one


async def ask(port: int) -> int:
    peer = RawConnection(*await asyncio.open_connection("127.0.0.1", port))
    peer.write(get("/health"))
    status = (await peer.response()).status
    peer.close()
    return status


async def test_a_service_of_systemd(tmp_path: Path) -> None:
    notifications = Notifications(str(tmp_path / "notify"))
    clients, admin = listening(), listening()
    async with activated(tmp_path, clients, admin, names="client:admin") as (process, lines):
        await until(lambda: notifications.count("READY=1") == 1 or process.returncode is not None, "ready", 20)
        assert process.returncode is None, lines
        assert await ask(clients.getsockname()[1]) == await ask(admin.getsockname()[1]) == 200
        await until(lambda: notifications.count("WATCHDOG=1") >= 2)
        process.send_signal(signal.SIGHUP)
        await until(lambda: notifications.count("READY=1") == 2)
        [reloading] = [one for one in notifications.received if "RELOADING=1" in one]
        assert reloading[1].startswith("MONOTONIC_USEC=")
        process.send_signal(signal.SIGTERM)
        await process.wait()
        assert notifications.count("STOPPING=1") == 1 and process.returncode == 0, lines
    # systemd holds the socket: who connects now waits for the next process
    waiting = asyncio.ensure_future(ask(clients.getsockname()[1]))
    async with activated(tmp_path, clients):
        assert await waiting == 200
    notifications.close()
    clients.close()
    admin.close()


@pytest.mark.parametrize("options", [(), ("--edges", "1")])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_an_inherited_public_socket_without_api_keys_is_logged(
    tmp_path: Path, host: str, options: tuple[str, ...]
) -> None:
    notifications = Notifications(str(tmp_path / "notify"))
    clients = listening(host)
    async with activated(tmp_path, clients, options=options) as (process, lines):
        await until(lambda: notifications.count("READY=1") == 1 or process.returncode is not None, "ready", 20)
        assert any("no_api_keys" in line for line in lines) == (host == "0.0.0.0"), lines
    notifications.close()
    clients.close()


async def test_edges_of_a_service_of_systemd(tmp_path: Path) -> None:
    """The parent takes the sockets and reports; brain and edges do neither."""
    notifications = Notifications(str(tmp_path / "notify"))
    clients, admin = listening(), listening()
    options = ("--edges", "2")
    async with activated(tmp_path, clients, admin, names="client:admin", options=options) as (process, lines):
        await until(lambda: notifications.count("READY=1") == 2 or process.returncode is not None, "ready", 30)
        assert process.returncode is None, lines
        assert any("STATUS=2 of 2 edges serve" in one for one in notifications.received)
        assert await ask(clients.getsockname()[1]) == await ask(admin.getsockname()[1]) == 200
        process.send_signal(signal.SIGHUP)
        await until(lambda: notifications.count("RELOADING=1") == 1 and notifications.count("READY=1") == 3)
        process.send_signal(signal.SIGTERM)
        await process.wait()
        assert notifications.count("STOPPING=1") == 1 and process.returncode == 0, lines
    notifications.close()
    clients.close()
    admin.close()


def test_variables_of_another_process_are_ignored_and_none_is_inherited(tmp_path: Path) -> None:
    environment = {
        "LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "WATCHDOG_PID": "1", "WATCHDOG_USEC": "5",
        "NOTIFY_SOCKET": str(tmp_path / "nobody"), "PATH": "/bin",
    }  # fmt: skip
    systemd = Systemd(environment)
    assert environment == {"PATH": "/bin"}
    assert systemd.take_socket() is None and systemd.watchdog_s == 0.0
    systemd.ready("nobody listens: no exception")
    Systemd({}).ready("no systemd")


def test_an_abstract_notify_socket() -> None:
    name = f"warmroute-test-{os.getpid()}"
    notifications = Notifications(f"\0{name}")
    Systemd({"NOTIFY_SOCKET": f"@{name}"}).ready("2 nodes")
    assert notifications.read() == [["READY=1", "STATUS=2 nodes"]]
    notifications.close()


def test_unusable_file_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inherit(number: int, count: int = 1) -> Systemd:
        monkeypatch.setattr("warmroute.app.process.FIRST_FD", number)
        return Systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count)})

    with pytest.raises(ConfigError, match="more than one socket"):
        inherit(3, 2)
    first, second = socket.socketpair()
    with pytest.raises(ConfigError, match="no listening stream socket"):
        inherit(first.detach()).take_socket()
    second.close()
    with open("/dev/null") as file, pytest.raises(ConfigError, match="unusable"):
        inherit(os.dup(file.fileno())).take_socket()


def test_the_unit_starts_commands_that_exist_and_waits_for_running_requests() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS / "warmroute.service")
    service = unit["Service"]
    for key in ("ExecStartPre", "ExecStart"):
        program, *arguments = shlex.split(service[key])
        assert program.endswith("/warmroute") and create_parser().parse_args(arguments)
    assert create_parser().parse_args(["check-config", str(UNITS / "warmroute.toml")])
    sample = load(UNITS / "warmroute.toml")
    assert sample.discovery[0].kind == "file"
    assert sample.state.directory == f"/var/lib/{service['StateDirectory']}"
    shutdown = Config().shutdown
    assert float(service["TimeoutStopSec"]) > shutdown.deadline_s + shutdown.delay_s
    assert service["Type"] == "notify" and service["DynamicUser"] == "yes"
