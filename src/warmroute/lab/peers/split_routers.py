"""How llm-d and Dynamo split requests between prefill and decode nodes.

llm-d picks the decode node first, by its scorers. A prefill node prefills, by the same scorers, if more than
`threshold` tokens of the prompt are not cached on the decode node.

Dynamo picks the decode node first, by its costs. The decode node prefills itself if at most `local_tokens` tokens are
new there, if at least `local_overlap` of the prompt is cached there, or while `max_queue` prompts for each prefill node
wait for one. Else the prefill node with the lowest cost prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.core.decision import Decision
from warmroute.core.node import Node
from warmroute.core.pairs import Pair
from warmroute.core.routing_context import Query
from warmroute.lab.peers import simulated
from warmroute.lab.peers.dynamo import Dynamo
from warmroute.lab.peers.llm_d import LlmDPrecise
from warmroute.lab.request_flow import SimulatedRequest


class LlmDSplit(LlmDPrecise):
    kind = "llm_d_split"

    def __init__(self, random: Random, *, threshold: int = 256) -> None:
        super().__init__(random)
        self._threshold = threshold

    def decide(self, query: Query) -> Decision:
        decision = super().decide(query)
        new = _new_tokens(self, query, decision.node, self._block_size)
        prefill_nodes = query.group.prefill_nodes
        if new > self._threshold and prefill_nodes.nodes:
            among = query.repeat(query.now_s)
            among.candidates = prefill_nodes
            decision.pair = Pair(super().decide(among).node, new)
        return decision


class DynamoSplit(Dynamo):
    def __init__(
        self, random: Random, *, local_tokens: int = 2048, local_overlap: float = 0.7, max_queue: int = 2
    ) -> None:
        super().__init__(random)
        self.name = "dynamo_split"
        self._local_tokens = local_tokens
        self._local_overlap = local_overlap
        self._max_queue = max_queue
        self._split: dict[int, Node] = {}
        """Requests that a prefill node prefills, and that node."""

    def decide(self, query: Query) -> Decision:
        decision = super().decide(query)
        request = simulated(query.request)
        new = _new_tokens(self, query, decision.node, self._block_size)
        nodes = query.group.prefill_nodes.nodes
        is_local = new <= self._local_tokens or new <= (1.0 - self._local_overlap) * request.prompt_tokens
        if is_local or not nodes or self._queued(nodes) >= self._max_queue * len(nodes):
            return decision
        among = query.repeat(query.now_s)
        among.candidates = query.group.prefill_nodes
        decision.pair = Pair(super().decide(among).node, new)
        self._split[request.number] = decision.pair.prefill_node
        return decision

    def _queued(self, nodes: Sequence[Node]) -> int:
        """Return how many prompts wait behind another one."""
        return sum(max(0, len(self._active[node.name].prefilling) - 1) for node in nodes)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        super().request_sent(request, node, now_s)
        if self._split.get(request.number, node) is not node:  # it only decodes here
            self.first_token(request, node, 0, now_s)

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        super().request_ended(request, node, now_s)
        if self._split.get(request.number, node) is not node:
            del self._split[request.number]


def _new_tokens(policy: LlmDPrecise | Dynamo, query: Query, node: Node, block_size: int) -> int:
    """Return how many tokens of the prompt the node does not have."""
    tokens = simulated(query.request).prompt_tokens
    return max(0, tokens - policy._depths(query.request, (node,))[1][0] * block_size)
