"""Whose turn it is when several processes have requests waiting for the same node.

Each process has its own admission queue. When a node has room, all of them see it at about the same time; if each sent
its first request, the node would get many at once. So a process leaves the room to a peer whose first request comes
before its own, unless both have the same priority and the node has room for both.
"""

from __future__ import annotations

from typing import Protocol

from warmroute.core.node import Node

Head = tuple[int, float, float]
"""The first of the requests that wait: its priority, its effective work and its prefill time, both in ms."""


class Turns(Protocol):
    @property
    def is_contended(self) -> bool:
        """Whether a peer has waiting requests. If none has, every turn is this process's."""

    def is_ours(self, node: Node, own: Head, limit_ms: float, now_s: float) -> bool:
        """Return whether a request may go to a node with room now. False: a peer has a request that comes before it,
        and has a higher priority, or with both the node would have more prefill work than `limit_ms`."""

    def work_left(self, node: Node, now_s: float) -> float:
        """Return the prefill work that may be left on the node, with what peers may have sent there that this process
        does not know of yet."""

    def no_room(self, node: Node) -> None:
        """The node has no room: its next room is another one."""

    def queued(self) -> None:
        """A request was queued: peers should know of it."""
