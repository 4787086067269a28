"""Rendezvous hashing with bounded load: a key has a home and an order of stand-ins that only the nodes' names decide,
so that a node that joins or leaves moves only its own share, and traffic flows home when a node recovers.

A node is passed over while it has more than load_factor × (requests in flight + 1) / nodes of them.
"""

from __future__ import annotations

import math

from warmroute._kernel._hash import key_hash, rendezvous_home, rendezvous_order
from warmroute.fleet.group import Candidates, Group
from warmroute.routing.decision import Decision


def place(key: bytes, candidates: Candidates, group: Group, load_factor: float, policy: str) -> Decision:
    hashed = key_hash(key)
    nodes, seeds = candidates.nodes, candidates.seeds
    home = nodes[rendezvous_home(hashed, seeds)]
    whole = len(nodes) == len(group.members)
    inflight = group.inflight if whole else sum(node.inflight for node in nodes)
    room = math.ceil(load_factor * (inflight + 1) / len(nodes))
    if home.inflight < room:
        return Decision(home, policy, "home", lambda: [nodes[at] for at in rendezvous_order(hashed, seeds)])
    order = [nodes[at] for at in rendezvous_order(hashed, seeds)]
    stand_in = next((node for node in order if node.inflight < room), home)
    return Decision(stand_in, policy, "home is full", lambda: order)
