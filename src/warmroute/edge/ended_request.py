"""Takes the place of an exchange when its request has ended, so that nothing leads from the attempts back to it."""

from __future__ import annotations

from collections.abc import Callable

from warmroute.core.node import Node
from warmroute.core.rejections import RoutingError


class EndedRequest:
    """The attempt driver of requests that have ended. Only a bug calls it."""

    def __init__(self, internal_error: Callable[[Exception], object]) -> None:
        self._internal_error = internal_error

    def send(self, node: Node) -> None:
        raise AssertionError("the request has ended")

    send_hedge = send

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        raise AssertionError("the request has ended")

    def withdraw(self) -> None:
        """There is nothing to withdraw."""

    withdraw_hedge = promote_hedge = withdraw_prefill = withdraw

    def cut(self, why: RoutingError) -> bool:
        return True

    def reject(self, why: RoutingError) -> int:
        return 0

    def internal_error(self, error: Exception) -> None:
        self._internal_error(error)
