"""process: engines as processes on this machine.

They outlive the router, like machines of a cloud. A file for each token records the process: first the intent, before
the process starts, then its pid and start time. With both, the router never signals another process that got the same
pid. A router that crashed between the two finds the process by the token in its environment.
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
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offers import Offer, OfferValidator, configured_offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError, child_environment

T = TypeVar("T")

HOST = "127.0.0.1"
PORTS = 200
"""How many ports to try, from the configured one on."""
POLL_S = 0.05
"""How often a process that was told to end is looked at."""
FORGET_S = 600.0
"""How long the status reports a process that ended by itself, so that its last line of output can be read."""
TOKEN_VARIABLE = "WARMROUTE_TOKEN"
SIMULATED_ENGINE = (sys.executable, "-m", "warmroute", "engine", "--port", "{port}")


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of a process contains."""

    token: str
    offer: str
    port: int
    pid: int = 0
    """The process's id. 0: an intent, written before the process started."""
    start_id: str = ""
    """Boot id and clock ticks at which the process started: with the pid, its identity."""
    stop_s: float = 0.0
    """When the router told the process to end; 0 if it did not."""


class ProcessProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._validator = OfferValidator(config, free=True)
        self._folder = _folder(config)
        self._command = config.command or SIMULATED_ENGINE
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._thread = ThreadPoolExecutor(1, f"warmroute-{config.label}")  # one thread, so that calls do not overlap

    async def offers(self) -> list[Offer]:
        return self._validator.validate([configured_offer(self._config, self.name, "local")])

    async def provision(self, offer: Offer, token: str) -> None:
        await self._in_thread(lambda: self._provision(offer, token))

    async def status(self) -> list[Machine]:
        return await self._in_thread(self._status)

    async def terminate(self, machine: Machine) -> None:
        """Tell the process to end, and kill it `stop_grace_s` later. After a cancelled call, the next one continues."""
        while await self._in_thread(lambda: self._stop(machine.token)):  # noqa: ASYNC110 (a process has no event)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except OSError as error:
            raise ProvisionerError(f"{self.name}: {error.strerror}: {error.filename}") from None

    # The rest runs in the thread.

    def _provision(self, offer: Offer, token: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", token):
            raise ProvisionerError(f"{self.name}: token {token!r} is not a valid file name")
        records = self._records()
        before = records.get(token)
        if before is not None and (before.pid or _pid_with_mark(self._mark(token))):
            return
        alive = [record for record in records.values() if self._is_alive(record)]
        if self._config.max_nodes and len(alive) >= self._config.max_nodes:
            raise NoCapacity(f"{self.name}: {len(alive)} running, maximum is {self._config.max_nodes}")
        port = self._free_port({record.port for record in alive})
        record = ProcessRecord(token=token, offer=offer.name, port=port)
        self._write(record)
        values = {"{port}": str(port), "{token}": token, "{name}": f"{self._config.deployment}-{token}"}
        command = [_fill(word, values) for word in self._command]
        try:
            with self._log(token).open("wb") as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=child_environment(self._config, {TOKEN_VARIABLE: self._mark(token)}),
                )
        except OSError as error:
            self._forget(token)
            raise ProvisionerError(f"{self.name}: cannot run {command[0]!r}: {error.strerror}") from None
        self._children[child.pid] = child
        self._write(msgspec.structs.replace(record, pid=child.pid, start_id=_start_id(child.pid)))

    def _status(self) -> list[Machine]:
        machines = []
        for record in self._records().values():
            if not record.pid:
                record = self._recovered(record)
            if self._is_alive(record):
                state, reason = (MachineState.TERMINATING if record.stop_s else MachineState.RUNNING), ""
                if record.stop_s:  # the router that told it may have crashed since
                    self._stop(record.token)
            else:
                state, reason = MachineState.TERMINATED, self._last_output(record)
                if time.time() - self._file(record.token).stat().st_mtime > FORGET_S:
                    self._forget(record.token)
            machines.append(
                Machine(
                    id=f"pid {record.pid}",
                    token=record.token,
                    offer=record.offer,
                    state=state,
                    url=f"http://{HOST}:{record.port}",
                    reason=reason,
                )
            )
        return machines

    def _stop(self, token: str) -> bool:
        """Tell the process to end, or kill it when its time is over. Forget it once it has ended. Return whether it
        still runs."""
        record = self._records().get(token)
        if record is None:
            return False
        if not record.pid:
            record = self._recovered(record)
        if not self._is_alive(record):
            self._forget(token)
            return False
        now_s = time.time()
        if not record.stop_s:
            self._write(msgspec.structs.replace(record, stop_s=now_s))
            _signal_group(record.pid, signal.SIGTERM)
        elif now_s - record.stop_s >= self._config.stop_grace_s:
            _signal_group(record.pid, signal.SIGKILL)
        return True

    def _is_alive(self, record: ProcessRecord) -> bool:
        child = self._children.get(record.pid)
        if child is not None and child.poll() is not None:  # poll also reaps it
            del self._children[record.pid]
        if record.pid <= 0 or not record.start_id:  # it ended before its start time could be read
            return False
        return _start_id(record.pid) == record.start_id

    def _recovered(self, intent: ProcessRecord) -> ProcessRecord:
        """Return the intent with its pid, if the router crashed between starting the process and recording the pid."""
        pid = _pid_with_mark(self._mark(intent.token))
        if not pid:
            return intent
        record = msgspec.structs.replace(intent, pid=pid, start_id=_start_id(pid))
        self._write(record)
        return record

    def _mark(self, token: str) -> str:
        return f"{self._config.deployment}/{self.name}/{token}"

    def _last_output(self, record: ProcessRecord) -> str:
        if not record.pid:
            return "it was never started"
        try:
            lines = self._log(record.token).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it ended without output"

    def _free_port(self, taken: set[int]) -> int:
        first = self._config.port
        for port in range(first, min(first + PORTS, 65536)):
            if port in taken:
                continue
            with socket.socket() as probe:
                # Otherwise the port of an engine that has just ended looks taken for a minute (TIME_WAIT).
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OSError:
                    continue
                return port
        raise NoCapacity(f"{self.name}: all ports from {first} to {first + PORTS - 1} are taken")

    def _records(self) -> dict[str, ProcessRecord]:
        records = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                raise ProvisionerError(
                    f"{self.name}: {path} is invalid: end the process that it describes, then remove the file"
                ) from None
            records[record.token] = record
        return records

    def _write(self, record: ProcessRecord) -> None:
        """Write the whole file, or nothing if the router is killed meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._file(record.token).with_suffix(".part")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._file(record.token))

    def _forget(self, token: str) -> None:
        self._file(token).unlink(missing_ok=True)
        self._log(token).unlink(missing_ok=True)

    def _file(self, token: str) -> Path:
        return self._folder / f"{token}.json"

    def _log(self, token: str) -> Path:
        return self._folder / f"{token}.log"


def _folder(config: ProvisionerConfig) -> Path:
    """Return the provisioner's own folder, so that none adopts or ends the processes of another."""
    if config.state_dir:
        state = Path(config.state_dir).expanduser()
    else:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "warmroute"
    return state / config.deployment / quote(config.label, safe="").replace(".", "%2E")


def _fill(word: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)  # it leads its own session: its workers get the signal too


def _start_id(pid: int) -> str:
    """Return the boot id and the tick at which a process started; empty if it does not run (also for a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    after_name = stat[stat.rindex(b")") + 2 :].split()
    state, ticks = after_name[0], after_name[19]
    return "" if state in (b"Z", b"X") else f"{boot}/{ticks.decode()}"


def _pid_with_mark(mark: str) -> int:
    """Return the pid of the session leader that has this mark in its environment; 0 if there is none."""
    wanted = f"{TOKEN_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            if wanted in (folder / "environ").read_bytes().split(b"\0") and os.getsid(pid) == pid:
                return pid
        except (OSError, ValueError):
            continue  # it has ended, or belongs to another user
    return 0
