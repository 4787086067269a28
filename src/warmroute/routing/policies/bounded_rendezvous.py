"""Rendezvous hashing with bounded load.

The hash of a key orders the nodes by their names. A node that joins or leaves moves only its own share of the keys, and
a key returns to its home node when that recovers. A node is skipped while it has at least
load_factor × (requests in flight + 1) / nodes requests.
"""

from __future__ import annotations

import math

from warmroute._kernel import key_hash, rendezvous_home, rendezvous_order
from warmroute.fleet.group import Candidates, Group
from warmroute.routing.decision import Decision


def choose_by_hash(key: bytes, candidates: Candidates, group: Group, load_factor: float, policy: str) -> Decision:
    hashed = key_hash(key)
    nodes, seeds = candidates.nodes, candidates.seeds
    home = nodes[rendezvous_home(hashed, seeds)]
    all_members = len(nodes) == len(group.members)
    inflight = group.inflight if all_members else sum(node.inflight for node in nodes)
    limit = math.ceil(load_factor * (inflight + 1) / len(nodes))
    if home.inflight < limit:
        return Decision(home, policy, "home", lambda: [nodes[index] for index in rendezvous_order(hashed, seeds)])
    order = [nodes[index] for index in rendezvous_order(hashed, seeds)]
    next_node = next((node for node in order if node.inflight < limit), home)
    return Decision(next_node, policy, "home overloaded", lambda: order)
