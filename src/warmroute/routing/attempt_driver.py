"""What does the I/O of a request's attempts: the HTTP edge over sockets, replay in virtual time."""

from __future__ import annotations

from typing import Protocol

from warmroute.fleet.node import Node
from warmroute.routing.routing_errors import RoutingError


class AttemptDriver(Protocol):
    def send(self, node: Node) -> None:
        """Send the request to this node. The ticket is open."""

    def withdraw(self) -> None:
        """Give up the attempt that `send` began: the node must stop, and nothing that it sends counts."""

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        """Let `prefill_node` prefill the prompt for `node`. `send` follows; its request names the KV cache then."""

    def withdraw_prefill(self) -> None: ...

    def send_hedge(self, node: Node) -> None:
        """Send the request to this node, too."""

    def withdraw_hedge(self) -> None: ...

    def promote_hedge(self) -> None:
        """The hedge takes the place of the attempt that `send` began, which has failed or was withdrawn."""

    def reject(self, why: RoutingError) -> int:
        """End the request with this error: the client has received nothing. Return the HTTP status."""

    def cut(self, why: RoutingError) -> bool:
        """End the request with this error: the client has received a part of the response. Return False, and end
        nothing, if only the end of the connection is missing."""

    def internal_error(self, error: Exception) -> None:
        """The router itself failed while it let the request out of the queue."""
