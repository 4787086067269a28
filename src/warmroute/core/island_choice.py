"""Chooses the island for a request of the policy `price`, if the model's nodes are on several islands.

    new conversation              any island, by price (which includes the distance)
    known conversation            its home island, unless that cannot serve it in time:
                                    down          no node of the home is up
                                    not_eligible  its nodes are up, but all are excluded: by the queue threshold, by
                                                  `X-Queue: no`, or by slow start
                                    slow          the first token would come over `max_delay_ms` later than elsewhere
                                    deadline      the home would miss the deadline, and another island would not
    conversation that has moved   its home or the island it moved to, whichever is cheaper now. So it returns home if
                                  enough of it is still cached there.

Deciding changes nothing here. `dispatched` remembers and counts where a request was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from warmroute.config import IslandAffinity
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision, max_ttft_ms
from warmroute.core.group import Candidates
from warmroute.core.islands import ConversationAffinity, ConversationIslands, IslandRegistry, stable_blocks
from warmroute.core.node import Node
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.policy import Policy
from warmroute.core.routing_context import Query

PROMPT_TOKEN_BYTES: Final = 4.5
OUTPUT_TOKEN_BYTES: Final = 220.0
"""Most responses are streamed, with one event per token."""
DOWN, SLOW, DEADLINE, NOT_ELIGIBLE, FALLBACK = "down", "slow", "deadline", "not_eligible", "fallback"
"""Why a conversation moved. `fallback`: the chosen node failed."""


class IslandChoice:
    def __init__(self, islands: IslandRegistry, cache_view: CacheView, output_lengths: OutputLengthEstimate) -> None:
        self._islands = islands
        self._cache_view = cache_view
        self._output_lengths = output_lengths
        self.affinity = ConversationAffinity()

    @property
    def tracks_queues(self) -> bool:
        """Whether `update_queues` has to be called: with several islands, and until their queue estimates are 0."""
        return self._islands.several or self._islands.has_queues

    def update_queues(self, decisions: Iterable[Decision]) -> None:
        """Take a sample of the admission queue: the decision that each queued request would get."""
        work_ms: defaultdict[str, float] = defaultdict(float)
        for decision in decisions:
            if decision.price is not None:
                work_ms[decision.node.island] += decision.price.prefill
        self._islands.update_queues(work_ms)

    # Before the request is sent.

    def decide(self, query: Query, policy: Policy) -> Decision:
        settings = self._islands.affinity
        if policy.name != "price" or not settings.enabled:
            return policy.decide(query)
        query.move_reason = ""
        conversation = query.conversation
        if conversation is None:
            conversation = query.conversation = self._conversation(query)
            if conversation is None:
                return policy.decide(query)
        all_candidates = query.candidates
        home, last = conversation
        islands = (home,) if last == home else tuple(sorted((home, last)))
        candidates = self._on_islands(query, *islands)
        if not candidates.nodes:
            decision = policy.decide(query)
            if query.group.on_islands(*islands).nodes:
                _move(query, decision, NOT_ELIGIBLE, f"no node of its island {home} is eligible")
            else:
                _move(query, decision, DOWN, f"no node of its island {home} is up")
            return decision
        if len(candidates) == len(all_candidates):
            return policy.decide(query)
        query.candidates = candidates
        try:
            decision = policy.decide(query)
        finally:
            query.candidates = all_candidates
        elsewhere = self._decide_elsewhere(query, policy, decision, settings)
        return elsewhere or decision.with_fallbacks(all_candidates.nodes)

    def _conversation(self, query: Query) -> ConversationIslands | None:
        request, lookup = query.request, query.lookup
        if request.session_header:
            return self.affinity.by_session(request.tenant, request.model, request.session_header)
        if lookup is None:
            return None
        chain, block_size = self._cache_view.chain(query.group.model, lookup)
        if not chain:
            return None
        return self.affinity.by_prompt(chain, stable_blocks(lookup.token_count, block_size), lookup.cache_group)

    def _on_islands(self, query: Query, *islands: str) -> Candidates:
        if query.candidates is query.group.up:
            return query.group.on_islands(*islands)
        if query.group.windows is not None:
            return query.candidates.subset(islands, lambda node: node.island in islands)
        nodes = query.candidates.nodes
        return Candidates([node for node in nodes if node.island in islands], len(nodes))

    def _decide_elsewhere(
        self, query: Query, policy: Policy, at_home: Decision, settings: IslandAffinity
    ) -> Decision | None:
        """Return a decision for another island if the home cannot serve the request in time, else None."""
        price, request = at_home.price, query.request
        if price is None:
            return None
        at_home.query = query
        late = bool(request.deadline_s or request.total_deadline_s) and price.own > max_ttft_ms(
            request, at_home, query.now_s
        )
        if price.own <= settings.max_delay_ms and not late:
            return None
        elsewhere = policy.decide(query)
        elsewhere.query = query
        best, home = elsewhere.price, at_home.node.island
        if best is None or elsewhere.node.island == home:
            return None
        if late and best.own <= max_ttft_ms(request, elsewhere, query.now_s):
            _move(query, elsewhere, DEADLINE, f"{home} would miss its deadline")
        elif price.own - best.own > settings.max_delay_ms:
            _move(query, elsewhere, SLOW, f"{home} would take {price.own - best.own:,.0f} ms longer")
        else:
            return None
        return elsewhere

    # After.

    def dispatched(self, query: Query, node: Node, now_s: float) -> None:
        """The request was sent to this node: the chosen one or a fallback."""
        conversation, island = query.conversation, node.island
        if conversation is None:
            home = island
            self._islands.conversations.started[island] += 1
        else:
            home = conversation.home
            self._count(conversation, island, query.move_reason)
        request, lookup, islands = query.request, query.lookup, (home, island)
        if request.session_header:
            self.affinity.remember_session(request.tenant, request.model, request.session_header, islands, now_s)
        elif lookup is not None:
            chain, block_size = self._cache_view.chain(query.group.model, lookup)
            if chain:
                blocks = stable_blocks(lookup.token_count, block_size)
                self.affinity.remember_prompt(chain, blocks, lookup.cache_group, islands, now_s)
        if lookup is not None:
            output = self._output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
            self._islands.record_request_size(PROMPT_TOKEN_BYTES * lookup.token_count + OUTPUT_TOKEN_BYTES * output)

    def _count(self, conversation: ConversationIslands, island: str, reason: str | None) -> None:
        counts, (home, last) = self._islands.conversations, conversation
        if island == home:
            counts.served_at_home[home] += 1
            if last != home:
                counts.returned[home] += 1
            return
        counts.served_away[home] += 1
        if island != last:
            counts.moved[home, island, reason or FALLBACK] += 1


def _move(query: Query, decision: Decision, reason: str, why: str) -> None:
    query.move_reason = reason
    decision.reason = f"moves to {decision.node.island}: {why}"
