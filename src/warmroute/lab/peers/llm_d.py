"""llm-d's rules, as of llm-d-router 0.10 (August 2026), in the configurations that its guides ship.

Weighted scorers; the node with the highest sum gets the request:

    3 × match + 2 × free KV memory + 2 × short queue + 2 × no-hit-lru

The guides had them until llm-d 0.8 (guides/optimized-baseline, guides/precise-prefix-cache-routing); those of January
2026, without no-hit-lru (`no_hit_lru=0`). The chart's default (config/charts/routerlib/templates/_config.yaml) still
has 3 : 2 : 2. `active` weighs one more scorer, which only the router's performance tests use. Each score is in 0…1:

- match: the matched fraction of the prompt. Approximate (`llm_d`: estimated from routed requests, LRU with as many
  blocks as the node has) or from KV events (`llm_d_precise`).
- free KV memory: 1 − KV usage, as last polled, every 50 ms as in its endpoint picker.
- short queue: (max − queue) / (max − min), of requests that wait in the engine, as last polled; 1 if all are equal.
- no-hit-lru: 0.5 for every node if any node has a part of the prompt. Else 1 for the node that got such a cold request
  the longest time ago, down to 0 for the last one; nodes that never got one come first.
- active: (max − n) / max, of requests in flight; 1 for an idle node.

Affinity and load (`llm_d_affinity`), in the guides since then:

1. Nodes with at least 0.8 of the prompt are the candidates. All nodes are if there is none, or if the least busy of
   them needs over 18 s longer for its prompts in flight, at 15,928 tokens/s, than the least busy other node.
2. The candidate with the fewest uncached prompt tokens in flight, its own of this request included, gets the request.

Ties are broken at random.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

from warmroute.core.decision import Decision
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.routing_context import Query
from warmroute.lab.peers import EventBlocks, PeerPolicy, RoutedBlocks, simulated
from warmroute.lab.request_flow import SimulatedRequest

SPECULATIVE_S = 2.0


class LlmD(PeerPolicy):
    kind = "llm_d"
    uses_kv_events = False

    def __init__(
        self, random: Random, *, prefix: float = 3.0, kv: float = 2.0, short_queue: float = 2.0, active: float = 0.0,
        no_hit_lru: float = 2.0, poll_s: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__(self.kind, random, EventBlocks() if self.uses_kv_events else RoutedBlocks())
        self.poll_interval_s = poll_s
        self._weights = prefix, kv, short_queue, active, no_hit_lru
        self._last_cold: dict[str, None] = {}
        """Nodes that got a cold request, the least recent first."""
        self._cold_requests: set[int] = set()
        """Requests without a match on any node that were decided and not yet sent."""

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prefix, kv, short_queue, active, no_hit_lru = self._weights
        chain, depths = self._depths(query.request, nodes)
        queues = [node.waiting for node in nodes]
        longest, shortest, most = max(queues), min(queues), max(node.inflight for node in nodes)
        between = longest - shortest
        if any(depths):
            turns = [0.5] * len(nodes)
        else:
            turns = self._cold_turns(nodes)
            self._cold_requests.add(simulated(query.request).number)
        costs = [
            -(
                prefix * (depth / len(chain) if chain else 0.0)
                + kv * (1.0 - node.kv_usage)
                + short_queue * ((longest - node.waiting) / between if between else 1.0)
                + active * ((most - node.inflight) / most if node.inflight else 1.0)
                + no_hit_lru * turn
            )
            for node, depth, turn in zip(nodes, depths, turns, strict=True)
        ]
        return self._pick_lowest(nodes, costs, "highest score")

    def _cold_turns(self, nodes: Sequence[Node]) -> list[float]:
        """Return the no-hit-lru score of each node for a request that no node has a match for."""
        if len(nodes) == 1:
            return [1.0]
        unused = [node.name for node in nodes if node.name not in self._last_cold]
        ranks = {name: rank for rank, name in enumerate([*unused, *self._last_cold])}
        return [max(0.0, 1.0 - ranks[node.name] / (len(nodes) - 1)) for node in nodes]

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        super().request_sent(request, node, now_s)
        if request.number in self._cold_requests:
            self._cold_requests.discard(request.number)
            self._last_cold.pop(node.name, None)
            self._last_cold[node.name] = None

    def node_left(self, node: Node) -> None:
        super().node_left(node)
        self._last_cold.pop(node.name, None)


class LlmDPrecise(LlmD):
    """With speculative entries: for 2 s after a request was sent, its node counts as one that holds its blocks."""

    kind = "llm_d_precise"
    uses_kv_events = True

    def __init__(
        self, random: Random, *, prefix: float = 3.0, kv: float = 2.0, short_queue: float = 2.0, active: float = 0.0,
        no_hit_lru: float = 2.0, poll_s: float = 0.05, speculative_s: float = SPECULATIVE_S,
    ) -> None:  # fmt: skip
        super().__init__(
            random, prefix=prefix, kv=kv, short_queue=short_queue, active=active, no_hit_lru=no_hit_lru, poll_s=poll_s
        )
        self._speculative_s = speculative_s
        self._sent: deque[tuple[float, str, list[int]]] = deque()
        self._expected: dict[str, Counter[int]] = {}
        """For each node, the blocks of the requests in `_sent`."""

    def decide(self, query: Query) -> Decision:
        self._forget_expired(query.now_s)
        return super().decide(query)

    def _forget_expired(self, now_s: float) -> None:
        while self._sent and self._sent[0][0] <= now_s:
            _, name, chain = self._sent.popleft()
            expected = self._expected[name]
            expected.subtract(chain)
            for block in chain:
                if not expected[block]:
                    del expected[block]

    def _depths(self, request: RoutingRequest, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        chain, depths = super()._depths(request, nodes)
        for at, node in enumerate(nodes):
            expected = self._expected.get(node.name)
            while expected and depths[at] < len(chain) and chain[depths[at]] in expected:
                depths[at] += 1
        return chain, depths

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        super().request_sent(request, node, now_s)
        chain = request.blocks(self._block_size)
        self._sent.append((now_s + self._speculative_s, node.name, chain))
        self._expected.setdefault(node.name, Counter()).update(chain)


class LlmDAffinity(LlmDPrecise):
    """Affinity and load. `kv_events=false` is the optimized baseline, whose match is approximate."""

    kind = "llm_d_affinity"

    def __init__(
        self, random: Random, *, kv_events: bool = True, threshold: float = 0.8, max_penalty_s: float = 18.0,
        prefill_tokens_per_s: float = 15928.0,
    ) -> None:  # fmt: skip
        self.uses_kv_events = kv_events
        super().__init__(random)
        self._threshold = threshold
        self._max_penalty_tokens = max_penalty_s * prefill_tokens_per_s
        self._uncached: dict[int, int] = {}
        """The uncached tokens of each request that was sent and has no first token."""
        self._inflight_tokens: Counter[str] = Counter()

    def decide(self, query: Query) -> Decision:
        self._forget_expired(query.now_s)
        nodes = query.candidates.nodes
        chain, depths = self._depths(query.request, nodes)
        inflight = [self._inflight_tokens[node.name] for node in nodes]
        is_sticky = [bool(chain) and depth >= self._threshold * len(chain) for depth in depths]
        sticky = [tokens for tokens, one in zip(inflight, is_sticky, strict=True) if one]
        others = [tokens for tokens, one in zip(inflight, is_sticky, strict=True) if not one]
        narrowed = bool(sticky) and (not others or min(sticky) - min(others) <= self._max_penalty_tokens)
        prompt_tokens = simulated(query.request).prompt_tokens
        costs = [
            # The fallbacks of a narrowed choice are the other nodes, after all of the candidates.
            tokens + max(0, prompt_tokens - depth * self._block_size) + (0.0 if one or not narrowed else 1e12)
            for tokens, depth, one in zip(inflight, depths, is_sticky, strict=True)
        ]
        return self._pick_lowest(nodes, costs, "fewest tokens in flight")

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        depth = self._depths(request, (node,))[1][0]
        self._uncached[request.number] = max(0, request.prompt_tokens - depth * self._block_size)
        self._inflight_tokens[node.name] += self._uncached[request.number]
        super().request_sent(request, node, now_s)

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        self._inflight_tokens[node.name] -= self._uncached.pop(request.number, 0)

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self.first_token(request, node, 0, now_s)
