"""The seam between the cluster's state and what carries its messages: the parent process of `--workers`, or
replay's virtual network.

A transport calls `ClusterMember.receive` in the event loop with each message of another process. It may lose, delay,
repeat and reorder messages.
"""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    def publish(self, message: bytes) -> None:
        """Send a message to all other processes. Returns at once and never raises: if the way is blocked, the message
        is lost."""
