"""Response headers that name the node, the prefill node and the predicted cache hit, for clients that may know."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from warmroute.edge.http1 import RequestHead
from warmroute.fleet.node import Node
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.pair_dispatch import DecodeDispatch

EXPLAIN_HEADER: Final = b"x-warmroute-explain"
_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Characters of a node's name that need no escape in a header, beside letters and digits."""


def names_node(setting: str, head: RequestHead) -> bool:
    """Return whether the response to this request names its node. `setting`: journal.response_headers, empty if off."""
    return bool(setting) and (setting == "always" or head.get(EXPLAIN_HEADER) == b"1")


def node_headers(attempts: Attempts) -> list[tuple[bytes, bytes]]:
    ticket, split = attempts.ticket, attempts.split
    found = [(b"X-Warmroute-Node", _name(ticket.node))]
    if not isinstance(ticket, Dispatch):
        return found
    cached = ticket.cached
    if split is not None and isinstance(ticket, DecodeDispatch):
        found.append((b"X-Warmroute-Prefill-Node", _name(split.pair.prefill_node)))
        if isinstance(split.prefill_ticket, Dispatch):
            cached = split.prefill_ticket.cached
    found.append((b"X-Warmroute-Hit", b"%d/%d" % (cached, ticket.tokens)))
    return found


def node_lines(attempts: Attempts) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in node_headers(attempts)])


def _name(node: Node) -> bytes:
    return quote(node.name, safe=_NAME_CHARACTERS).encode("ascii")
