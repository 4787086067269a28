"""The rules of SGLang's router, of its successor SMG, and of AIBrix' and KubeAI's routers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from random import Random
from statistics import fmean, stdev

from warmroute.core.decision import Decision
from warmroute.core.group import Candidates
from warmroute.core.node import Node
from warmroute.core.routing_context import Query
from warmroute.lab.engine.blocks import seed64
from warmroute.lab.peers import EventBlocks, PeerPolicy, RoutedBlocks, simulated
from warmroute.lab.request_flow import SimulatedRequest
from warmroute.lab.simulated_router import PolicyListener

# SGLang's cache_aware policy, as of SGLang 0.5.18 (sgl-model-gateway/src/policies/cache_aware.rs, August 2026).
#
#     if max − min > 64 and max > 1.5 × min, over requests in flight:  the least loaded
#     else if the longest match in its tree > 0.3 of the prompt:       a node with that match
#     else:                                                            the least loaded
#
# The thresholds are the defaults of its launcher; ties are broken at random since August 2026. Before 2026 a miss went
# to the node with the smallest tree, and vllm-router 0.1.16 still does that (`miss_by_tree=true`); its later versions
# take the least loaded, too. The tree is estimated from routed requests. It holds blocks here instead of characters,
# and evicts LRU over 2^26 characters a node (taken as 4 characters a token).


class Sglang(PeerPolicy):
    def __init__(
        self, random: Random, *, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5,
        tree_tokens: int = 2**26 // 4, miss_by_tree: bool = False,
    ) -> None:  # fmt: skip
        self._tree = RoutedBlocks()
        super().__init__("sglang", random, self._tree)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._tree_tokens = tree_tokens
        self._miss_by_tree = miss_by_tree

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            return self._pick_lowest(nodes, loads, "out of balance: least loaded")
        chain, depths = self._depths(query.request, nodes)
        if chain and max(depths) / len(chain) > self._cache_threshold:
            return self._pick_lowest(nodes, [-depth for depth in depths], "longest match")
        if self._miss_by_tree:
            return self._pick_lowest(nodes, [self._tree.size(node) for node in nodes], "smallest tree")
        return self._pick_lowest(nodes, loads, "least loaded")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        super().node_joined(node, block_size, num_blocks)
        self._tree.capacity = self._tree_tokens // block_size


# The cache_aware policy of SMG, SGLang's successor, as of SMG 1.9.0 (model_gateway/src/policies/cache_aware.rs, July
# 2026). With KV events (nodes behind gRPC):
#
#     if max − min > 64 and max > 1.5 × min, over requests in flight:  the least loaded
#     else if any node has a block of the prompt:                      the longest match, then the least loaded
#     else:                                                            the least loaded
#
# Without (`kv_events=false`) the match is SGLang's, and has to be more than 0.3 of the prompt. Of nodes with equal
# load, the one with the fewest requests so far is the least loaded. Its trigger by KV usage is off by default.


class Smg(PeerPolicy):
    def __init__(
        self, random: Random, *, kv_events: bool = True, cache_threshold: float = 0.3, balance_abs: int = 64,
        balance_rel: float = 1.5,
    ) -> None:  # fmt: skip
        super().__init__("smg", random, EventBlocks() if kv_events else RoutedBlocks())
        self._least_match = 0.0 if kv_events else cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._sent: Counter[str] = Counter()
        """All requests that each node has got."""

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        by_load = [load + self._sent[node.name] / 1e9 for node, load in zip(nodes, loads, strict=True)]
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            return self._pick_lowest(nodes, by_load, "out of balance: least loaded")
        chain, depths = self._depths(query.request, nodes)
        if chain and max(depths) / len(chain) > self._least_match:
            costs = [load - depth * 1e6 for depth, load in zip(depths, loads, strict=True)]
            return self._pick_lowest(nodes, costs, "longest match")
        return self._pick_lowest(nodes, by_load, "least loaded")

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        super().request_sent(request, node, now_s)
        self._sent[node.name] += 1


# AIBrix's prefix-cache policy, as of AIBrix 0.7.0 (pkg/plugins/gateway/algorithms/prefix_cache.go, August 2026).
#
#     candidates:                        if max − min > 16, over requests in flight: the least loaded nodes; else all
#     of these with load ≤ mean + 2 σ:   the longest match, then the least loaded
#     no match:                          the least loaded
#
# The code's own defaults are 8 and 1 σ; its manifests (config/gateway/gateway-plugin) ship 16 and 2 σ, as here. The
# match is approximate: it is estimated from routed requests, with as many blocks as the node has, evicted LRU.


class Aibrix(PeerPolicy):
    def __init__(self, random: Random, *, imbalance: int = 16, sigmas: float = 2.0) -> None:
        super().__init__("aibrix", random, RoutedBlocks())
        self._imbalance = imbalance
        self._sigmas = sigmas

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        least, most = min(loads), max(loads)
        bound = fmean(loads) + (self._sigmas * stdev(loads) if len(loads) > 1 else 0.0)
        if most - least > self._imbalance:
            bound = least
        _, depths = self._depths(query.request, nodes)
        if any(depth and load <= bound for depth, load in zip(depths, loads, strict=True)):
            # The longest match first, then the lowest load; nodes above the bound come last.
            costs = [
                (load - depth * 1e6) if load <= bound else 1e12 + load
                for depth, load in zip(depths, loads, strict=True)
            ]
            return self._pick_lowest(nodes, costs, "longest match")
        return self._pick_lowest(nodes, loads, "least loaded")


# KubeAI's PrefixHash, as of KubeAI 0.22.1 (internal/loadbalancer/balance_chwbl.go, October 2025): consistent hashing
# with bounded load.
#
# The hash of the first 100 characters of the first user message is a point on a ring with 256 virtual nodes for each
# node. From there on, the first node takes the request for which
#
#     load + 1 ≤ 1.25 × (total load + 1) / nodes
#
# or the first node of all if there is none, or if nothing is in flight. The load is the number of requests in flight.

KEY_CHARACTERS = 100


class Kubeai(PolicyListener):
    name = "kubeai"
    wants_tokens = False
    queues_at_router = False

    def __init__(self, random: Random, *, load_factor: float = 1.25, replication: int = 256) -> None:
        self._load_factor = load_factor
        self._replication = replication
        self._ring_of: Candidates | None = None
        self._points: list[int] = []
        self._owners: list[Node] = []

    def decide(self, query: Query) -> Decision:
        candidates = query.candidates
        nodes = candidates.nodes
        key = simulated(query.request).first_user_text()[:KEY_CHARACTERS]
        if candidates is not self._ring_of:
            self._make_ring(candidates)
        total = sum(node.inflight for node in nodes)
        room = self._load_factor * (total + 1) / len(nodes)
        first: Node | None = None
        for node in self._walk(key):
            first = first or node
            if not total or node.inflight + 1 <= room:
                reason = "first on the ring" if node is first else "first is full"
                return Decision(node, self.name, reason, lambda: list(self._walk(key)))
        assert first is not None
        return Decision(first, self.name, "all are full", lambda: list(self._walk(key)))

    def _make_ring(self, candidates: Candidates) -> None:
        ring = sorted(
            (seed64(f"{node.name}{replica}"), at)
            for at, node in enumerate(candidates.nodes)
            for replica in range(self._replication)
        )
        self._ring_of = candidates
        self._points = [point for point, _ in ring]
        self._owners = [candidates.nodes[at] for _, at in ring]

    def _walk(self, key: bytes) -> Iterator[Node]:
        """Return each node once, in the order of the ring from the key's point on."""
        start = bisect_left(self._points, seed64(key.hex()))
        seen: set[str] = set()
        for owners in (self._owners[start:], self._owners[:start]):
            for node in owners:
                if node.name not in seen:
                    seen.add(node.name)
                    yield node
