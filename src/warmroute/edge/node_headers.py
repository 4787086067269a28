"""Response headers that name the node, the prefill node and the predicted cache hit, for clients that may know."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from warmroute.fleet.node import Node
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.pair_dispatch import DecodeDispatch

_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Characters of a node's name that need no escape in a header, beside letters and digits."""


def node_lines(attempts: Attempts) -> bytes:
    ticket, split = attempts.ticket, attempts.split
    lines = b"X-Warmroute-Node: %b\r\n" % _name(ticket.node)
    if not isinstance(ticket, Dispatch):
        return lines
    cached = ticket.cached
    if split is not None and isinstance(ticket, DecodeDispatch):
        lines += b"X-Warmroute-Prefill-Node: %b\r\n" % _name(split.pair.prefill_node)
        if isinstance(split.prefill_ticket, Dispatch):
            cached = split.prefill_ticket.cached
    return lines + b"X-Warmroute-Hit: %d/%d\r\n" % (cached, ticket.tokens)


def _name(node: Node) -> bytes:
    return quote(node.name, safe=_NAME_CHARACTERS).encode("ascii")
