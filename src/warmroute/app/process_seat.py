"""What a brain or an edge gets from its parent: its number, sockets, and where the brain listens.

The parent passes it in an environment variable, and the sockets by inheritance.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final

import msgspec

ENVIRONMENT: Final = "WARMROUTE_PROCESS"
SIGN_S: Final = 0.25
"""Between two signs of life."""


class Seat(msgspec.Struct):
    kind: str
    """`brain` or `edge`."""
    number: int
    """Of an edge, from 1 on."""
    edges: int
    """How many edges there are."""
    brain_socket: str
    """Where the brain listens for edges."""
    sign_fd: int
    """A pipe for signs of life."""
    folder: str = ""
    """Of a brain: where it keeps what the next one needs, until the parent ends."""
    fence: int = 0
    """Of a brain: higher than those of all before it."""
    listening_fds: tuple[int, ...] = ()
    """Of an edge: sockets for clients."""
    keeps_waiting: bool = False
    """Of an edge: who waits in its sockets at the end is the next process's: they are systemd's."""
    memory_fd: int = -1
    """Of an edge: what edges tell each other of their connections (edge/balance.py)."""
    event_fds: tuple[int, ...] = ()
    """Of an edge: an event descriptor for each edge."""
    admin_fd: int = -1
    """Of a brain: the socket of the admin listener; -1: it opens it itself."""

    @property
    def name(self) -> str:
        """Of the process, in the log."""
        return self.kind if self.kind == "brain" else f"edge-{self.number}"

    @property
    def title(self) -> str:
        """What `ps` shows."""
        return f"warmroute: {self.kind}" + (f" {self.number}" if self.kind == "edge" else "")

    def environment(self) -> dict[str, str]:
        return {**os.environ, ENVIRONMENT: msgspec.json.encode(self).decode()}

    def fds(self) -> tuple[int, ...]:
        one = [fd for fd in (self.admin_fd, self.memory_fd) if fd >= 0]
        return (self.sign_fd, *self.listening_fds, *self.event_fds, *one)

    def take_admin_socket(self) -> socket.socket | None:
        fd, self.admin_fd = self.admin_fd, -1
        return socket.socket(fileno=fd) if fd >= 0 else None

    def serves(self) -> None:
        """Tell the parent that the process serves from now on."""
        with suppress(OSError):
            os.write(self.sign_fd, b"R")

    async def give_signs(self) -> None:
        """Tell the parent that the event loop runs, until the parent has ended."""
        os.set_blocking(self.sign_fd, False)
        while True:
            try:
                os.write(self.sign_fd, b".")
            except BlockingIOError:
                pass
            except OSError:
                os.kill(os.getpid(), 15)  # the parent has ended: finish the requests, and end
                return
            await asyncio.sleep(SIGN_S)


def take_seat() -> Seat | None:
    """Return the seat of this process; None if it has no parent. Its own child processes do not inherit it."""
    text = os.environ.pop(ENVIRONMENT, "")
    if not text:
        return None
    seat = msgspec.json.decode(text, type=Seat)
    for fd in seat.fds():
        os.set_inheritable(fd, False)
    return seat
