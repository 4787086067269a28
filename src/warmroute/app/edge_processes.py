"""The parent of `warmroute serve --edges N`: it starts a brain and N edges, watches them, and starts them again.

All edges accept connections from the same listening sockets, which the parent opened: an edge that hangs accepts none.
Each process writes a byte to the parent every SIGN_S. One that is silent for HUNG_S is ended: SIGABRT lets it print its
stacks, SIGCONT lets a stopped one do so, and SIGKILL ends it KILL_S later.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from warmroute import build, build_advice
from warmroute.app.process import ADMIN_SOCKET, EXIT_GRACE_S, Systemd
from warmroute.app.process_seat import Seat
from warmroute.app.startup import url_host, warn_without_keys
from warmroute.config import Config, ConfigError
from warmroute.edge.balance import memory_for
from warmroute.edge.sockets import drop_handshakes, open_tcp_socket, open_unix_socket, server_tls
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

HUNG_S: Final = 2.0
KILL_S: Final = 0.5
CHECK_S: Final = 0.1
START_S: Final = 60.0
"""A process that does not serve so long after its start hangs."""
ALL_SILENT_S: Final = 6.0
"""If all are silent at once, the machine is likely to be at fault: they have this long."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 15.0
"""Longest time between two starts of a process that keeps ending."""
STEADY_S: Final = 30.0
"""A process that served for this long is started again without delay."""


class Child:
    """One process."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number
        self.silent_s = 0.0
        self.serves = False
        """It has said that it serves."""
        self.served = False
        """It has ended, and had said so."""
        self.started_s = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._signs = -1
        self.ending = False

    @property
    def name(self) -> str:
        return self.kind if self.kind == "brain" else f"edge-{self.number}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, command: Sequence[str], seat: Callable[[int], Seat]) -> None:
        """Raises OSError."""
        self._signs, its_end = os.pipe()
        os.set_blocking(self._signs, False)
        try:
            given = seat(its_end)
            self._process = await asyncio.create_subprocess_exec(
                *command, env=given.environment(), pass_fds=given.fds(), start_new_session=True
            )
        except OSError:
            self._close()
            raise
        finally:
            os.close(its_end)

    async def wait(self) -> int:
        """Return the exit status; negative for a signal."""
        assert self._process is not None
        status = await self._process.wait()
        self.listen(0.0)
        self.served, self.serves = self.serves, False
        self._close()
        return status

    def _close(self) -> None:
        signs, self._signs = self._signs, -1
        if signs >= 0:
            os.close(signs)

    def listen(self, passed_s: float) -> bool:
        """Note the signs of life since the last look. Return whether it serves from now on."""
        signs = b""
        with suppress(OSError):
            signs = os.read(self._signs, 65_536) if self._signs >= 0 else b""
        self.silent_s = 0.0 if signs else self.silent_s + passed_s
        if b"R" in signs and not self.serves:
            self.serves = True
            return True
        return False

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self) -> None:
        """End a process that hangs."""
        self.ending = True
        self.signal(signal.SIGABRT)
        self.signal(signal.SIGCONT)
        await asyncio.sleep(KILL_S)
        self.signal(signal.SIGKILL)


class EdgeProcesses:
    def __init__(self, read_config: Callable[[], Config], edges: int, command: Sequence[str]) -> None:
        """`command` starts a brain or an edge, as the seat in its environment says. Raises ConfigError."""
        self._read_config = read_config
        self.config = read_config()
        self._count = edges
        self._command = command
        self._systemd = Systemd(os.environ)
        self._folder = Path(tempfile.mkdtemp(prefix="warmroute-"))
        self._brain_socket = self._folder / "brain"
        self._children: dict[tuple[str, int], Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._memory = memory_for(edges)
        self._events = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(edges)]
        self._inherited = False
        """The clients' socket is systemd's."""
        self._admin: socket.socket | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._failed = 0
        self._fence = 0
        self.restarts = 0

    # Start.

    async def run_until_signal(self) -> int:
        """Serve until SIGTERM or SIGINT. Return the exit status. Raises ConfigError if an address cannot be used."""
        loop = asyncio.get_running_loop()
        try:
            address = self._open_sockets()
            for stop in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(stop, self._stopping.set)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            self._spawn(self._keep_running("brain", 0))
            for number in range(1, self._count + 1):
                self._spawn(self._keep_running("edge", number))
            self._spawn(self._watch())
            admin = self.config.admin
            admin_port = self._admin.getsockname()[1] if self._admin is not None else 0
            log.info(
                "service_started", build_advice(), address=address,
                admin=f"http://{url_host(admin.host)}:{admin_port}" if admin.enabled else "off",
                nodes=len(self.config.nodes), policy=self.config.routing.policy, build=build(), edges=self._count,
            )  # fmt: skip
            warn_without_keys(self.config, address)
            await self._stopping.wait()
            if not self._failed:
                await self._stop()
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            self._close_sockets()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._failed

    def _open_sockets(self) -> str:
        """Return the address for clients. Raises ConfigError."""
        listen, admin = self.config.listen, self.config.admin
        scheme = "https" if server_tls(listen.tls_cert, listen.tls_key) is not None else "http"
        if (inherited := self._systemd.take_socket()) is not None:
            self._inherited = True
            self._sockets, name = [inherited], inherited.getsockname()
            address = f"{scheme}://{url_host(name[0])}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}"
        elif listen.unix_socket:
            self._sockets, address = [open_unix_socket(listen.unix_socket)], f"unix:{listen.unix_socket}"
        else:
            self._sockets = [open_tcp_socket(listen.host, listen.port)]
            address = f"{scheme}://{url_host(listen.host)}:{self._sockets[0].getsockname()[1]}"
        if admin.enabled:
            self._admin = self._systemd.take_socket(ADMIN_SOCKET) or open_tcp_socket(admin.host, admin.port)
        for one in (*self._sockets, *([self._admin] if self._admin is not None else [])):
            one.setblocking(False)
        return address

    def _close_sockets(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            one.close()
        if sockets and self.config.listen.unix_socket and not self._inherited:
            with suppress(OSError):
                os.unlink(self.config.listen.unix_socket)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _seat(self, child: Child, sign_fd: int) -> Seat:
        if child.kind == "brain":
            self._fence += 1
            admin_fd = self._admin.fileno() if self._admin is not None else -1
            folder = str(self._folder)
            return Seat(
                "brain", 0, self._count, str(self._brain_socket), sign_fd, folder, self._fence, admin_fd=admin_fd
            )
        listening = tuple([one.fileno() for one in self._sockets])
        return Seat(
            "edge", child.number, self._count, str(self._brain_socket), sign_fd, listening_fds=listening,
            keeps_waiting=self._inherited, memory_fd=self._memory, event_fds=tuple(self._events),
        )  # fmt: skip

    async def _keep_running(self, kind: str, number: int) -> None:
        """Start a process, and start it again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while not (self._stopped if kind == "brain" else self._stopping).is_set():
            child = self._children[kind, number] = Child(kind, number)
            status, served = 1, False
            try:
                await child.start(self._command, lambda sign_fd, child=child: self._seat(child, sign_fd))  # type: ignore[misc]
                status = await child.wait()
            except OSError as error:  # the system has no memory, processes or file descriptors left
                log.error("process_not_started", "The parent tries again.", process=child.name, reason=error)
            served_s = time.monotonic() - child.started_s
            served = child.served or self._has_served
            if (self._stopped if kind == "brain" else self._stopping).is_set():
                return
            if not served:
                self._failed = status if status > 0 else 1
                self._stopping.set()
                self._stopped.set()
                return
            self.restarts += 1
            pause_s = 0.0 if served_s > STEADY_S else min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2.0 * pause_s))
            if kind == "brain" and served_s > STEADY_S / 10.0:
                pause_s = 0.0  # all edges wait for it
            meaning = (
                "Responses go on; new requests wait for the next brain." if kind == "brain" else
                "Its connections are lost."
            )  # fmt: skip
            log.error(
                "process_ended", f"{meaning} The parent starts it again.", process=child.name, status=status,
                served_s=round(served_s, 1), pause_s=pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)

    _has_served = False
    """Whether a brain and an edge have served together."""

    # While it runs.

    async def _watch(self) -> None:
        """Notice processes that hang. The time counts in turns of this loop, so that a parent that was held up itself
        does not take its children for hung."""
        alive_s = 0.0
        while True:
            await asyncio.sleep(CHECK_S)
            for child in self._children.values():
                if child.listen(CHECK_S):
                    self._note_ready()
            serving = [child for child in self._children.values() if child.serves]
            for child in self._children.values():
                hangs = self._has_served and not (child.serves or child.served or child.ending)
                if hangs and time.monotonic() > child.started_s + START_S:
                    log.error(
                        "process_hung", "It does not serve. The parent ends it.", process=child.name, pid=child.pid
                    )
                    self._spawn(child.end())
            limit_s = HUNG_S if any(child.silent_s < HUNG_S for child in serving) else ALL_SILENT_S
            for child in serving:
                if child.silent_s >= limit_s and not child.ending:
                    log.error(
                        "process_hung", "The parent ends it, and starts it again.", process=child.name, pid=child.pid,
                        silent_s=round(child.silent_s, 1),
                    )  # fmt: skip
                    child.serves = False
                    self._spawn(child.end())
            now_s = time.monotonic()
            if (
                self._systemd.watchdog_s
                and now_s >= alive_s
                and any(child.kind == "edge" and child.silent_s < HUNG_S for child in serving)
            ):
                alive_s = now_s + self._systemd.watchdog_s / 3.0
                self._systemd.notify("WATCHDOG=1")

    def _note_ready(self) -> None:
        edges = [child for child in self._children.values() if child.kind == "edge" and child.serves]
        if edges:
            self._has_served = True
            self._systemd.ready(f"{len(edges)} of {self._count} edges serve")

    def _reload(self) -> None:
        self._systemd.reloading()
        brain = self._children.get(("brain", 0))
        if brain is not None and brain.serves:  # one that starts reads the file anyway
            brain.signal(signal.SIGHUP)
        self._note_ready()

    # Stop.

    async def _stop(self) -> None:
        """Let the edges finish their requests, then end the brain. A second signal cuts running requests off."""
        with suppress(ConfigError):  # else it goes by the last one that could be read
            self.config = self._read_config()
        loop, shutdown = asyncio.get_running_loop(), self.config.shutdown
        self._systemd.stopping()
        if not self._inherited:
            for one in self._sockets:
                if one.family != socket.AF_UNIX:
                    drop_handshakes(one.fileno())
        self._close_sockets()  # the edges have them, and accept who waits there
        log.info("service_stopping", "Running requests finish first.", deadline_s=shutdown.deadline_s)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, "edge", signal.SIGTERM)
        self._signal("edge", signal.SIGTERM)
        await self._until_ended("edge", shutdown.delay_s + shutdown.deadline_s + EXIT_GRACE_S)
        self._stopped.set()
        self._signal("brain", signal.SIGTERM)
        await self._until_ended("brain", EXIT_GRACE_S + shutdown.delay_s)

    def _signal(self, kind: str, number: signal.Signals) -> None:
        for child in self._children.values():
            if child.kind == kind:
                child.signal(number)

    async def _until_ended(self, kind: str, within_s: float) -> None:
        children = [child for child in self._children.values() if child.kind == kind and child._process is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for child in children:
                    assert child._process is not None
                    await child._process.wait()
