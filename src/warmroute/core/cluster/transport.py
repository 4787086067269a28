"""The seam between the cluster's state and what carries its messages: the parent process of `--workers`, Redis, or
replay's virtual network.

A transport calls `ClusterMember.receive` in the event loop with each message of another process. It may lose, delay,
repeat and reorder messages.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Transport(Protocol):
    def publish(self, message: bytes) -> None:
        """Send a message to all other processes. Returns at once and never raises: if the way is blocked, the message
        is lost."""


class ReplicaTransport(Transport, Protocol):
    """A transport that also reaches other machines. Its methods return at once and never raise, too."""

    def send(self, to: str, message: bytes) -> None:
        """Send a message to one process."""

    def store(self, name: str, value: bytes) -> None:
        """Keep a change of a node where processes find it that start later."""


class LinkStatus(msgspec.Struct, frozen=True):
    """The link to other replicas, for metrics, alerts and the admin API."""

    address: str
    connected: bool
    """Whether messages of all replicas can arrive."""
    writable: bool
    """Whether changes of nodes and the lease of the autoscaler can be stored."""
    reason: str
    """Why it is not connected or not writable; empty if all is well."""
    changed_s: float
    """When one of them last changed, on the monotonic clock of this machine."""
    delay_s: float
    """How long a message takes to all replicas."""
    lost: int
    """Messages that could not be sent."""
    disconnects: int
