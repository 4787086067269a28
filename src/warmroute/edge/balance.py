"""Edges that share a listening socket share its connections, too: one that has more than the others lets them go first.

Each edge writes how many connections it has, and when it last did so, into memory that all of them share. One with more
than SLACK above the least stops accepting, and tells the others, so that somebody always accepts. An edge that has
written nothing for SILENT_S counts no more: it hangs, or has ended.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

SLACK: Final = 1
WRITE_S: Final = 0.1
SILENT_S: Final = 0.5
_SLOT: Final = struct.Struct("<dQ")
"""When it was written, on the clock of this machine, and how many connections the edge has."""


class Accepting(Protocol):
    def pause_accepting(self) -> None: ...
    def resume_accepting(self) -> None: ...


def memory_for(edges: int) -> int:
    """Return a file that edges can inherit."""
    fd = os.memfd_create("warmroute-edges")
    os.ftruncate(fd, _SLOT.size * edges)
    return fd


class Balance:
    def __init__(self, memory_fd: int, events: Sequence[int], number: int, servers: Sequence[Accepting]) -> None:
        """`events`: an event descriptor for each edge. `number`: of this edge, from 0 on."""
        self._memory = mmap.mmap(memory_fd, _SLOT.size * len(events))
        self._events = tuple(events)
        self._number = number
        self._servers = servers
        self._connections = 0
        self.pauses = False

    def start(self) -> None:
        self._write()
        asyncio.get_running_loop().add_reader(self._events[self._number], self._told)

    async def run(self) -> None:
        while True:
            self._write()
            self._look()
            await asyncio.sleep(WRITE_S)

    def changed(self, connections: int) -> None:
        """`connections`: how many this edge has now."""
        self._connections = connections
        self._write()
        self._look()

    def _write(self) -> None:
        _SLOT.pack_into(self._memory, _SLOT.size * self._number, time.monotonic(), self._connections)

    def _look(self) -> None:
        now_s = time.monotonic()
        least = min(
            [count for at_s, count in _SLOT.iter_unpack(self._memory[:]) if at_s > now_s - SILENT_S],
            default=self._connections,
        )
        pauses = self._connections > least + SLACK
        if pauses == self.pauses:
            return
        self.pauses = pauses
        for server in self._servers:
            if pauses:
                server.pause_accepting()
            else:
                server.resume_accepting()
        if pauses:
            for number, event in enumerate(self._events):
                if number != self._number:
                    with suppress(OSError):
                        os.eventfd_write(event, 1)

    def _told(self) -> None:
        with suppress(OSError):
            os.eventfd_read(self._events[self._number])
        self._look()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._events[self._number])
        self._connections = 1 << 40  # the others do not wait for this one
        self._write()
