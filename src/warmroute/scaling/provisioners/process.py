"""process: engines as processes on this machine.

They outlive the router, as machines of a cloud do. What was started is written down, one file for each token, before it
is started: `intent` first, then the pid with the time at which the process began, so that a pid that another process
has by now is never signalled. A router that crashed between the two finds the process by the token in its environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, NoCapacity
from warmroute.scaling.provisioners.configured import configured_offer, sanity_of

T = TypeVar("T")

HOST = "127.0.0.1"
PORTS = 200
"""How many ports are tried, from the first on."""
POLL_S = 0.05
FORGET_S = 600.0
"""How long a process that ended by itself is still told of."""
TOKEN_VARIABLE = "WARMROUTE_TOKEN"
SIMULATED = (sys.executable, "-m", "warmroute.cli.main", "engine", "--port", "{port}")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down of a process."""

    token: str
    offer: str
    port: int
    asked_s: float
    pid: int = 0
    """0: an intent, written before the process was started."""
    began: str = ""
    """Boot and clock ticks at which the process began: with the pid, its identity."""
    told_s: float = 0.0
    """When it was told to end."""


class ProcessProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config, free=True)
        self._folder = _folder(config)
        self._command = config.command or SIMULATED
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._thread = ThreadPoolExecutor(1, f"warmroute-{config.label}")  # one: its calls never cross

    async def offers(self) -> list[Offer]:
        return self._sanity.check([configured_offer(self._config, self.name, "local")])

    async def provision(self, offer: Offer, token: str) -> None:
        await self._in_thread(lambda: self._provision(offer, token))

    async def status(self) -> list[Machine]:
        return await self._in_thread(self._status)

    async def terminate(self, machine: Machine) -> None:
        """Asks it to end, and makes it `grace_s` later. Given up in between, the next call goes on where this was."""
        while await self._in_thread(lambda: self._end(machine.token)):  # noqa: ASYNC110 (a process has no event)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except OSError as error:
            raise CloudError(f"{self.name}: {error.strerror}: {error.filename}") from None

    # The rest runs in the thread.

    def _provision(self, offer: Offer, token: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", token):
            raise CloudError(f"{self.name}: {token!r} cannot name a file")
        known = self._known()
        before = known.get(token)
        if before is not None and (before.pid or _carrier_of(self._mark(token))):
            return
        alive = [one for one in known.values() if self._is_alive(one)]
        if self._config.most and len(alive) >= self._config.most:
            run = "1 process runs" if len(alive) == 1 else f"{len(alive)} processes run"
            raise NoCapacity(f"{self.name}: {run}, which is the most")
        port = self._free_port({one.port for one in alive})
        started = Started(token=token, offer=offer.name, port=port, asked_s=time.time())
        self._write(started)
        filled = {"{port}": str(port), "{token}": token, "{name}": f"{self._config.deployment}-{token}"}
        command = [_fill(word, filled) for word in self._command]
        try:
            with self._log(token).open("wb") as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=os.environ | {TOKEN_VARIABLE: self._mark(token)},
                )
        except OSError as error:
            self._forget(token)
            raise CloudError(f"{self.name}: {command[0]!r} cannot be run: {error.strerror}") from None
        self._children[child.pid] = child
        self._write(msgspec.structs.replace(started, pid=child.pid, began=_began(child.pid)))

    def _status(self) -> list[Machine]:
        machines = []
        for one in self._known().values():
            if not one.pid:
                one = self._found_again(one)
            if self._is_alive(one):
                state, reason = (MachineState.ENDING if one.told_s else MachineState.RUNNING), ""
                if one.told_s:  # whoever told it may have crashed meanwhile
                    self._end(one.token)
            else:
                state, reason = MachineState.ENDED, self._last_words(one)
                if time.time() - self._file(one.token).stat().st_mtime > FORGET_S:
                    self._forget(one.token)
            machines.append(
                Machine(
                    id=f"pid {one.pid}",
                    token=one.token,
                    offer=one.offer,
                    state=state,
                    url=f"http://{HOST}:{one.port}",
                    started_s=one.asked_s,
                    reason=reason,
                )
            )
        return machines

    def _end(self, token: str) -> bool:
        """Whether there is still somebody to wait for; tells it to end, as is due, and forgets one that has."""
        one = self._known().get(token)
        if one is None:
            return False
        if not one.pid:
            one = self._found_again(one)
        if not self._is_alive(one):
            self._forget(token)
            return False
        now_s = time.time()
        if not one.told_s:
            self._write(msgspec.structs.replace(one, told_s=now_s))
            self._signal(one.pid, signal.SIGTERM)
        elif now_s - one.told_s >= self._config.grace_s:
            self._signal(one.pid, signal.SIGKILL)
        return True

    @staticmethod
    def _signal(pid: int, what: signal.Signals) -> None:
        try:
            os.killpg(pid, what)  # it leads a session of its own: its workers end with it
        except ProcessLookupError:
            pass

    def _is_alive(self, one: Started) -> bool:
        child = self._children.get(one.pid)
        if child is not None and child.poll() is not None:  # also takes it off the system's list
            del self._children[one.pid]
        if one.pid <= 0 or not one.began:  # it had gone before its beginning could be read
            return False
        return _began(one.pid) == one.began

    def _found_again(self, intent: Started) -> Started:
        """The process that a crash left between its start and its pid being written down, or the intent as it is."""
        pid = _carrier_of(self._mark(intent.token))
        if not pid:
            return intent
        found = msgspec.structs.replace(intent, pid=pid, began=_began(pid))
        self._write(found)
        return found

    def _mark(self, token: str) -> str:
        return f"{self._config.deployment}/{self.name}/{token}"

    def _last_words(self, one: Started) -> str:
        if not one.pid:
            return "it was never started"
        try:
            lines = self._log(one.token).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it ended and said nothing"

    def _free_port(self, taken: set[int]) -> int:
        first = self._config.port
        for port in range(first, min(first + PORTS, 65536)):
            if port in taken:
                continue
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OSError:
                    continue
                return port
        raise NoCapacity(f"{self.name}: the ports {first} to {first + PORTS - 1} are all taken")

    def _known(self) -> dict[str, Started]:
        known = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                one = msgspec.json.decode(path.read_bytes(), type=Started)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                raise CloudError(f"{self.name}: {path} cannot be read: end what it tells of, then remove it") from None
            known[one.token] = one
        return known

    def _write(self, one: Started) -> None:
        """Whole or not at all, whenever the router is killed."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._file(one.token).with_suffix(".part")
        part.write_bytes(msgspec.json.encode(one))
        part.replace(self._file(one.token))

    def _forget(self, token: str) -> None:
        self._file(token).unlink(missing_ok=True)
        self._log(token).unlink(missing_ok=True)

    def _file(self, token: str) -> Path:
        return self._folder / f"{token}.json"

    def _log(self, token: str) -> Path:
        return self._folder / f"{token}.log"


def _folder(config: ProvisionerConfig) -> Path:
    """Each provisioner of each deployment has its own: nobody takes over, or ends, what is another's."""
    if config.state_dir:
        state = Path(config.state_dir).expanduser()
    else:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "warmroute"
    return state / config.deployment / quote(config.label, safe="").replace(".", "%2E")


def _fill(word: str, filled: dict[str, str]) -> str:
    for placeholder, value in filled.items():
        word = word.replace(placeholder, value)
    return word


def _began(pid: int) -> str:
    """Boot and tick at which this process began; empty where there is none, or it has ended and waits to be buried."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    after_name = stat[stat.rindex(b")") + 2 :].split()
    state, ticks = after_name[0], after_name[19]
    return "" if state in (b"Z", b"X") else f"{boot}/{ticks.decode()}"


def _carrier_of(mark: str) -> int:
    """The pid of the session's leader that has this mark in its environment; 0 where there is none."""
    wanted = f"{TOKEN_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            if wanted in (folder / "environ").read_bytes().split(b"\0") and os.getsid(pid) == pid:
                return pid
        except (OSError, ValueError):
            continue  # gone meanwhile, or another user's
    return 0
