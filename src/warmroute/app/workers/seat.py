"""What a worker gets from its parent: two sockets, its number, and where its admin API listens.

The parent passes it in an environment variable, and the sockets by inheritance.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

ENVIRONMENT: Final = "WARMROUTE_WORKER"


class Seat(msgspec.Struct, frozen=True):
    number: int
    link_fd: int
    """Frames from and to the parent."""
    passing_fd: int
    """Accepted connections from the parent."""
    admin_socket: str
    """Path of the Unix socket for its admin API."""
    origin: str
    """The parent's name among the replicas, which begins the worker's."""

    @property
    def folder(self) -> Path:
        """Where the parent keeps the files of its workers, until it ends."""
        return Path(self.admin_socket).parent

    def environment(self) -> dict[str, str]:
        return {**os.environ, ENVIRONMENT: msgspec.json.encode(self).decode()}


def take_seat() -> Seat | None:
    """Return the seat of this process; None if it is no worker. Child processes of the worker do not inherit it."""
    text = os.environ.pop(ENVIRONMENT, "")
    return msgspec.json.decode(text, type=Seat) if text else None
