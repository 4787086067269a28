"""A worker: the service of one process, which gets its connections from its parent and shares its state through it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from warmroute.app.node_state import KEPT_S
from warmroute.app.workers.cluster_member import ClusterMember
from warmroute.app.workers.frames import APPLIED, COUNTS, GONE, KEPT, LINK, OPEN, READY, STATE, STORED, FrameLink
from warmroute.app.workers.passed_connections import PassedConnections
from warmroute.app.workers.seat import Seat
from warmroute.core.cluster.transport import LinkStatus
from warmroute.edge.sockets import LAST_CONNECTIONS_S, Server, listen_unix
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.app.service import Service


log = EventLog("warmroute.service")

PARENT_LATE_S: Final = 1.0
"""How much later than this worker the parent may begin to stop."""
REPORT_S: Final = 0.02
"""How long a worker waits before it tells the parent that connections were closed, so that it tells of many at once."""


class Worker:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._link = FrameLink(self._receive, self._parent_gone)
        self._connections: PassedConnections | None = None
        self._member: ClusterMember | None = None
        self._reported = (0, 0)
        self._reporting: asyncio.TimerHandle | None = None
        self._status: LinkStatus | None = None
        """The parent's link to other replicas."""
        self._stopping = False
        self._answered = 0
        """Changes of nodes of which the parent has said whether it keeps them."""
        self._kept = False
        """What it said of the last one."""

    async def changes_kept(self) -> bool:
        """Wait until the parent has kept the changes of nodes, but not for long. Return whether it has."""
        sent, started_s = self._link.stored, time.monotonic()
        while self._answered < sent and time.monotonic() < started_s + KEPT_S:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return self._kept and self._answered >= sent

    async def join(self, service: Service, tls: ssl.SSLContext | None) -> Server:
        """Join the cluster, and open the admin API for the parent. Return its server."""
        loop = asyncio.get_running_loop()
        link = socket.socket(fileno=self.seat.link_fd)
        link.setblocking(False)
        await loop.create_unix_connection(lambda: self._link, sock=link)
        name = f"{self.seat.origin}/worker-{self.seat.number}-{os.getpid()}-{time.monotonic_ns() & 0xFFFFFF:x}"
        service.member = self._member = ClusterMember(name, service, self._link)
        self._member.read_status = lambda: self._status
        self._member.link_changed()
        self._connections = PassedConnections(
            self.seat.passing_fd, service.listener, tls, self._report, self._report_soon, service.plain_sockets
        )
        return await listen_unix(service.admin_listener, self.seat.admin_socket)

    def report_ready(self) -> None:
        """Tell the parent that this worker serves."""
        assert self._member is not None
        self._link.send_frame(READY, self._member.state.sender.encode())
        self._report()

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _report(self) -> None:
        """Tell the parent how many connections have arrived and are open, if that has changed."""
        assert self._connections is not None
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        counts = (self._connections.received, self._connections.open)
        if counts != self._reported:
            if self._link.send_frame(OPEN, COUNTS.pack(*counts)):
                self._reported = counts
            elif not self._stopping:
                self._report_soon()

    def _receive(self, kind: bytes, payload: bytes) -> None:
        member = self._member
        if member is None:
            return
        if kind == STATE:
            member.receive(payload)
        elif kind == LINK:
            self._status = msgspec.msgpack.decode(payload, type=LinkStatus)
            member.link_changed()
        elif kind == KEPT:
            self._answered += 1
            self._kept = payload == b"1"
        elif kind == STORED:
            member.receive_stored(msgspec.msgpack.decode(payload, type=list[bytes]))
            self._link.send_frame(APPLIED)
        elif kind == GONE:
            member.state.forget(payload.decode("ascii", "replace"), time.monotonic())

    def _parent_gone(self) -> None:
        if not self._stopping:
            log.error("parent_gone", "The parent process has ended. The worker finishes its requests and ends.")
            os.kill(os.getpid(), signal.SIGTERM)

    async def stop_accepting(self) -> None:
        """Take the connections that the parent still passes, until it says that there are no more."""
        if self._connections is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_CONNECTIONS_S + PARENT_LATE_S):
                    await self._connections.ended.wait()
            self._connections.close()

    def close(self) -> None:
        self._stopping = True
        if self._reporting is not None:
            self._reporting.cancel()
        if self._member is not None:
            self._member.close()
        self._link.close()
