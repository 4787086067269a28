"""What the other processes of a cluster have on a node, merged into the node's own figures.

A node's figures (`inflight`, `pending_work`, …) are sums over all processes, so prices, admission and policies need not
know of peers:

    figure = own + sum over peers of what each published last

A peer publishes gauges and running totals, not changes: the next message makes up for a lost one. `change_peer_load`
replaces what one peer published before by what it published now. `node.peer_load` is the sum over peers, so that a
process can publish its own part.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import msgspec

from warmroute._kernel import ARRIVAL_DECAY_S

if TYPE_CHECKING:
    from warmroute.fleet.node import Node


class PeerLoad(msgspec.Struct, eq=False):
    """Figures of one peer on one node, or the sum over peers. fleet/node.py describes them."""

    inflight: int = 0
    pending_work: float = 0.0
    context_tokens: int = 0
    kv_new: int = 0


def own_load(node: Node) -> PeerLoad:
    """Return this process's part of the node's figures."""
    peers = node.peer_load
    inflight = node.inflight - peers.inflight
    return PeerLoad(
        inflight,
        max(0.0, node.pending_work - peers.pending_work) if inflight else 0.0,
        node.context_tokens - peers.context_tokens,
        node.kv_new - peers.kv_new,
    )


def change_peer_load(node: Node, before: PeerLoad, now: PeerLoad) -> None:
    """Replace what one peer has on the node."""
    peers = node.peer_load
    requests = now.inflight - before.inflight
    node.inflight += requests
    peers.inflight += requests
    for group in node.groups:
        group.inflight += requests
    work = now.pending_work - before.pending_work
    peers.pending_work = peers.pending_work + work if peers.inflight else 0.0
    node.pending_work = max(0.0, node.pending_work + work) if node.inflight else 0.0
    tokens = now.context_tokens - before.context_tokens
    node.context_tokens += tokens
    peers.context_tokens += tokens
    new = now.kv_new - before.kv_new
    node.kv_new += new
    peers.kv_new += new


def record_peer_arrivals(node: Node, arrivals: int, now_s: float) -> None:
    """Count requests that peers sent to the node since their last message."""
    rate = node.arrival_rate * exp(min(0.0, node.arrival_s - now_s) / ARRIVAL_DECAY_S)
    node.arrival_rate = rate + arrivals * 0.001 / ARRIVAL_DECAY_S
    node.arrival_s = now_s
