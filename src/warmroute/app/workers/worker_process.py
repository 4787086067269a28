"""One worker, as its parent sees it: a child process, the link to it, and how many connections it has."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from warmroute.app.workers.frames import APPLIED, COUNTS, DIRECT, OPEN, READY, STATE, STORE, FrameLink
from warmroute.app.workers.seat import Seat

SILENT_S: Final = 0.8
"""A worker publishes its state every 250 ms. One of which the parent has heard nothing for this long hangs: it gets no
connections, and no answer of the admin API waits for it."""


class WorkerProcess:
    def __init__(
        self,
        number: int,
        folder: Path,
        origin: str,
        on_ready: Callable[[WorkerProcess], object],
        on_frame: Callable[[WorkerProcess, bytes, bytes], object],
    ) -> None:
        """`on_frame` gets the frames that are for other processes."""
        self.number = number
        self.admin_socket = str(folder / f"worker-{number}-{time.monotonic_ns()}.sock")
        self._on_ready = on_ready
        self._on_frame = on_frame
        self._origin = origin
        self.cluster_id = b""
        """Its id in the cluster; empty until it serves."""
        self.serves = False
        self.silent_s = 0.0
        """For how long the parent has heard nothing of it, while the parent itself ran."""
        self._heard = False
        self.started_s = time.monotonic()
        self.link = FrameLink(self._receive, lambda: None)
        self.knows_changes = asyncio.Event()
        """It has applied the changes of nodes that were made before it started."""
        self.ended = asyncio.Event()
        self._passing: socket.socket | None = None
        self._passed = self._received = self._open = 0
        self._unconfirmed: deque[socket.socket] = deque()
        """Connections that were passed, and that the worker has not confirmed. They outlive it."""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Raises OSError."""
        link, its_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        passing, its_passing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_link, its_passing:
            seat = Seat(self.number, its_link.fileno(), its_passing.fileno(), self.admin_socket, self._origin)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, env=seat.environment(), pass_fds=(seat.link_fd, seat.passing_fd), start_new_session=True
                )
            except OSError:
                link.close()
                passing.close()
                raise
        for one in (link, passing):
            one.setblocking(False)
        self._passing = passing
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, sock=link)

    def check_silence(self, passed_s: float) -> None:
        """Count the time since the last check as silence, unless the worker has sent anything. A worker that has closed
        its link is about to end."""
        self.silent_s = 0.0 if self._heard or not self.link.is_open else round(self.silent_s + passed_s, 3)
        self._heard = False

    @property
    def answers(self) -> bool:
        return self.serves and self.silent_s < SILENT_S

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def wait(self) -> int:
        """Wait until the process has ended. Return its exit status; negative for a signal."""
        assert self._process is not None
        status = await self._process.wait()
        self.serves = False
        self.link.close()
        self.pass_no_more()
        with suppress(OSError):
            os.unlink(self.admin_socket)
        self.ended.set()
        return status

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    # Connections.

    @property
    def open_connections(self) -> int:
        return self._open + self._passed - self._received

    def give(self, connection: socket.socket) -> bool:
        """Pass a connection, which is the worker's then. Return False if the worker does not take it now."""
        if self._passing is None or not self.answers:
            return False
        try:
            socket.send_fds(self._passing, [b"c"], [connection.fileno()])
        except OSError:  # it does not read at the moment, or has just ended
            return False
        self._passed += 1
        self._unconfirmed.append(connection)
        return True

    def pass_no_more(self) -> None:
        """Tell the worker that it gets no further connections."""
        if self._passing is not None:
            self._passing.close()
            self._passing = None

    def take_unconfirmed(self) -> list[socket.socket]:
        """Return the connections that the worker, which has ended, never received."""
        connections = list(self._unconfirmed)
        self._unconfirmed.clear()
        return connections

    def _receive(self, kind: bytes, payload: bytes) -> None:
        self._heard, self.silent_s = True, 0.0
        if kind in (STATE, DIRECT, STORE):
            self._on_frame(self, kind, payload)
        elif kind == OPEN:
            with suppress(struct.error):
                self._received, self._open = COUNTS.unpack(payload)
                while len(self._unconfirmed) > self._passed - self._received:
                    self._unconfirmed.popleft().close()
        elif kind == APPLIED:
            self.knows_changes.set()
        elif kind == READY:
            self.cluster_id = payload
            self._on_ready(self)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a worker with the arguments of this process."""
    return [sys.executable, "-m", "warmroute", *arguments]
